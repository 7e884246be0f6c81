"""The case reproduced: tables of measured, predicted and published figures, and their checks."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd
import torch

from shadowkv_lab import machine
from shadowkv_lab.errors import LabError, WrongResult
from shadowkv_lab.glm5 import case, hypotheses, verdict
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.steps import fit, records
from shadowkv_lab.steps import measure as decode
from shadowkv_lab.steps import trace as profiled
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.strategies import STRATEGIES, parse, parse_list
from shadowkv_lab.strategies.step import DecodeStep

CPU_POOL_TOKENS = 4096  # all layers of GLM-5, four strategies: 41 s on two shared cores
ASKED = ("full_cast", "bf16_pool", "shadow", "gather_cast")
ON_A_GPU = ("vector_cast", "fused_fp8", "shadow(layers=26)")
PHASES = {"cast_ms": "cast_bytes", "attention_ms": "attention_bytes", "write_ms": "write_bytes"}

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Check:
    """One thing that must hold, and what was found."""

    what: str
    ok: bool
    found: str


@dataclass(frozen=True)
class Reproduction:
    """Tables by name, the text that belongs to them, what was checked, and the files written."""

    device: str
    tables: dict[str, pd.DataFrame]
    notes: dict[str, str]
    checks: tuple[Check, ...]
    files: tuple[Path, ...] = ()

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def measured(
    runs: pd.DataFrame, rest: Rest, *, model: str | None = None, context: int | None = None
) -> pd.DataFrame:
    """Table 2: measured or recorded steps at the case's pool, and TPOT = rest + step.

    Runs at a smaller pool are scaled to the case's by each phase's bytes and say so. The rest is
    the case's, the step another machine's: every TPOT here is a replay.
    """
    published = case.published("case")
    shape = load_model(model or published["model"])
    P, context = published["pool_tokens"], context or published["default_context"]
    rows = []
    for run in runs.itertuples():
        strategy = parse(run.strategy)
        at = strategy.step_moves(shape, run.pool_tokens, run.live_tokens, run.new_tokens)
        there = strategy.step_moves(shape, P, run.live_tokens, run.new_tokens)
        factors = {
            ms: getattr(there, b) / getattr(at, b) if getattr(at, b) else 1.0
            for ms, b in PHASES.items()
        }
        grown = sum(getattr(run, ms) * (factor - 1) for ms, factor in factors.items())
        step = run.step_ms + grown
        scaled = f"cast x {factors['cast_ms']:.1f}, by bytes" if grown else ""
        rows.append(
            dict(
                strategy=run.strategy,
                device=getattr(run, "device", ""),
                pool_tokens=run.pool_tokens,
                context=run.context,
                measured_ms=run.step_ms,
                cast_ms=run.cast_ms,
                attention_ms=run.attention_ms,
                write_ms=run.write_ms,
                step_ms=step,
                scaled=scaled,
                tpot_ms=rest(run.concurrency) + step,
                tokens_per_s=1000 * run.concurrency / (rest(run.concurrency) + step),
                error=run.error,
                provenance="calibrated" if scaled else run.provenance,
                label="replay",
            )
        )
    return pd.DataFrame(rows)


def recorded_runs(
    gpu: str = "h200",
    *,
    pool_tokens: int | None = None,
    concurrency: int = 1,
    context: int | None = None,
    runs: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """The newest recorded runs of the case's model at its pool, one load, on one GPU."""
    published = case.published("case")
    runs = fit.latest(fit.recorded() if runs is None else runs)
    keep = dict(
        gpu=gpu,
        model=load_model(published["model"]).name,
        pool_tokens=pool_tokens or published["pool_tokens"],
        concurrency=concurrency,
        context=context or published["default_context"],
    )
    for name, value in keep.items():
        runs = runs[runs[name] == value]
    runs = runs.assign(provenance="recorded", device=runs.get("origin.device", ""))
    # What a user of flashinfer's "auto" gets, where several attention kernels were recorded.
    runs = runs.sort_values("backend").drop_duplicates("strategy", keep="last")
    order = {name: i for i, name in enumerate(STRATEGIES)}
    return runs.sort_values("strategy", key=lambda s: s.str.split("(").str[0].map(order))


def bench_here(
    device: "str | torch.device | None" = None,
    model: Model | None = None,
    progress: Progress = lambda text, done: None,
) -> decode.Bench:
    """A bench for the case's model and heads on this machine."""
    model = model or load_model(case.published("case")["model"])
    heads = model.heads_per_gpu(case.published("case")["tensor_parallel"])
    return decode.Bench(
        model, heads, machine.as_device(device), modes=("graph",), progress=progress
    )


def pool_here(bench: decode.Bench) -> int:
    """The case's pool, or the largest of whole pages that a shadow beside FP8 leaves room for."""
    P = case.published("case")["pool_tokens"]
    if bench.device.type == "cpu":
        return CPU_POOL_TOKENS
    a_token = parse("shadow").token_bytes(bench.model)
    fits = int(0.95 * machine.memory(bench.device).free_bytes) // a_token // case.PAGE * case.PAGE
    return min(P, fits)


def measure_here(
    bench: decode.Bench, pool_tokens: int, context: int, strategies: Sequence[str] | None = None
) -> tuple[list[records.Run], list[Check]]:
    """Measure each strategy here; one that fails its correctness check becomes a failed check."""
    if strategies is None:
        more = (
            ("vector_cast", "fused_fp8", "shadow(layers=26)") if bench.device.type == "cuda" else ()
        )
        strategies = [*ASKED, *more]
    runs, checks = [], []
    for strategy in parse_list(list(strategies)):
        what = f"{strategy.label}: output within {decode.TOLERANCE:.0e} of float64"
        try:
            run = list(decode.measure(bench, [strategy], [pool_tokens], [(1, context)]))[-1]
        except WrongResult as error:
            checks.append(Check(what, False, error.what))
            continue
        except LabError as error:  # a kernel that this machine cannot run is not a wrong result
            bench.progress(f"{strategy.label} left out: {error.what}", 0.0)
            continue
        runs.append(run)
        checks.append(Check(what, run.error <= decode.TOLERANCE, f"{run.error:.1e}"))
    return runs, checks


def as_runs(runs: Sequence[records.Run]) -> pd.DataFrame:
    """Runs measured now, as rows for `measured`."""
    rows = [dict(asdict(r), device=r.origin.device, provenance="measured") for r in runs]
    return pd.DataFrame(rows)


def same_bits(bench: decode.Bench, layers: int = 2, pool_tokens: int = 1024) -> Check:
    """The shadow's output is full cast's, bit for bit, on rows of this machine."""
    small = replace(bench, model=replace(bench.model, layers=layers))
    outputs = []
    for strategy in parse_list("full_cast,shadow"):
        pool = decode.make_pool(small, strategy, pool_tokens)
        batch = pool.batch(2, pool_tokens // 4)
        step = DecodeStep(
            strategy, pool, batch, small.heads, backend=small.backend, seed=small.seed
        )
        step.step()
        outputs.append(step.out.clone())
    same = torch.equal(*(out.view(torch.int16) for out in outputs))
    return Check(
        "shadow's output is full cast's, bit for bit", same, "equal" if same else "differs"
    )


def checks_of(lines: Sequence[case.Line]) -> list[Check]:
    """One check for each derived figure that was published."""
    return [
        Check(
            f"{line.what} = {line.formula}",
            bool(line.agrees),
            f"{line.value:.4g} {line.unit}, published {line.published:g}",
        )
        for line in lines
        if line.agrees is not None
    ]


def tables_of(
    runs: pd.DataFrame, card: str, context: int, fitted: "fit.Fit | None" = None
) -> tuple[dict[str, pd.DataFrame], dict[str, str]]:
    """Tables 1, 2, 4, 5 and 6 with their texts; `runs` are those of table 2."""
    seen = fit.latest(fit.recorded())
    of = case.server()
    rest = verdict.case_rest(card, context, fitted)
    found = {
        "arithmetic": pd.DataFrame([{**asdict(x), "agrees": x.agrees} for x in case.arithmetic()]),
        "measured": measured(runs, rest, context=context),
        "does_not_add_up": hypotheses.recorded_hypotheses(of),
        "same_class": hypotheses.same_class(),
        "sglang_35291": case.check_deepseek(fitted or fit.fit(), seen),
        "verdict": verdict.verdict(card, context, rest=rest, fitted=fitted),
    }
    published = case.published("case")
    notes = {
        "measured": f"TPOT = rest + step: a replay of the case's rest, {rest(1):.1f} ms "
        f"({rest.how}; {rest.provenance}), with the step of the machine named. Context {context:,} "
        "is assumed.",
        "does_not_add_up": hypotheses.in_words(of, found["does_not_add_up"]),
        "verdict": f"On {machine.card(card).title}, {published['pool_gib']} GiB of KV, one "
        f"request of {context:,} tokens. Cast: calibrated by the case's {published['cast_ms']} ms.",
    }
    return found, notes


def run(
    device: "str | None" = None,
    out: "str | Path" = "out/reproduce",
    *,
    card: str | None = None,
    context: int | None = None,
    pool_tokens: int | None = None,
    profile: bool = True,
    progress: Progress = lambda text, done: None,
) -> Reproduction:
    """Reproduce the case on this machine beside the recorded H200 run; writes under `out`.

    Never raises for a strategy that is wrong: that is a failed check, and `ok` is False.
    """
    published = case.published("case")
    context, card = context or published["default_context"], card or published["gpu"][-1]
    bench, out = bench_here(device, progress=progress), Path(out)
    pool_tokens = pool_tokens or pool_here(bench)
    out.mkdir(parents=True, exist_ok=True)
    files = [out / "measured.jsonl"]
    files[0].unlink(missing_ok=True)
    runs, checks = measure_here(bench, pool_tokens, context)
    for each in runs:
        records.append(files[0], each)
    checks = [*checks_of(case.arithmetic()), same_bits(bench), *checks]
    title = machine.device_title(bench.device)
    here, there = as_runs(runs), recorded_runs(context=context)
    tables, notes = tables_of(pd.concat([here, there]) if len(there) else here, card, context)
    if disturbed := records.noisy(here):
        notes["measured"] += f" Noisy: {', '.join(disturbed)}; {records.NOISY}."
    if profile:
        traces = [out / f"trace_{name}.json.gz" for name in ("full_cast", "shadow")]
        seen = [
            profiled.profile_step(bench, name, pool_tokens, 1, context, trace)
            for name, trace in zip(("full_cast", "shadow"), traces, strict=True)
        ]
        tables["profile"] = pd.concat([p.table() for p in seen])
        files += traces
    for name, table in tables.items():
        files.append(out / f"{name}.csv")
        table.to_csv(files[-1], index=False)
    return Reproduction(title, tables, notes, tuple(checks), tuple(files))

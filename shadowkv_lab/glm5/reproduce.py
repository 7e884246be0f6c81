"""The GLM-5 report reproduced: measured, predicted and published figures, and their checks."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import pandas as pd
import torch

from shadowkv_lab import machine
from shadowkv_lab.errors import LabError, WrongResult
from shadowkv_lab.files import ready, write
from shadowkv_lab.glm5 import hypotheses, reported, verdict
from shadowkv_lab.load import Load
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.pool import check_load, check_size
from shadowkv_lab.steps import fit
from shadowkv_lab.steps import measure as decode
from shadowkv_lab.steps import trace as profiled
from shadowkv_lab.steps.predict import resized
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.steps.step import NOISY, PHASES, Step, append, recorded, replays
from shadowkv_lab.strategies import parse, parse_list
from shadowkv_lab.strategies.step import DecodeStep

CPU_POOL_TOKENS = 4096  # all layers of GLM-5, four strategies: 41 s on two shared cores
ASKED = ("full_cast", "bf16_pool", "shadow", "gather_cast")
ON_A_GPU = ("vector_cast", "fused_fp8", "shadow(layers=26)")  # measured only there

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


def measured(steps: Sequence[Step], rest: Rest) -> pd.DataFrame:
    """Table 2: measured or recorded steps at the report's pool, and TPOT = rest + step.

    Steps over a smaller pool are scaled to the report's by each phase's bytes and say so. The
    rest is the report's, the step another machine's: every TPOT here is a replay.
    """
    P = reported.published()["pool_tokens"]
    rows = []
    for seen in steps:
        step, running = resized(seen, P), seen.setting.load.concurrency
        tpot_ms = rest(running) + step.ms
        rows.append(
            dict(
                strategy=step.strategy.label,
                title=step.strategy.title,
                colour=step.strategy.colour,
                device=step.origin.device,
                pool_tokens=seen.setting.pool_tokens,
                context=step.setting.load.context,
                measured_ms=seen.ms,
                **{f"{name}_ms": ms for name, ms in _phases(seen).items()},
                step_ms=step.ms,
                scaled="; ".join(
                    p.provenance.how for p in step.phases if str(p.provenance) == "calibrated"
                ),
                rest_ms=rest(running),
                tpot_ms=tpot_ms,
                tokens_per_s=1000 * running / tpot_ms,
                error=step.error,
                provenance=str(step.provenance),
                label="replay",
            )
        )
    return pd.DataFrame(rows, columns=None if rows else MEASURED)


MEASURED = [  # columns of a table without rows
    *("strategy", "title", "colour", "device", "pool_tokens", "context", "measured_ms"),
    *(f"{name}_ms" for name in (*PHASES, "step", "tpot")),
    *("scaled", "tokens_per_s", "error", "provenance", "label"),
]


def _phases(step: Step) -> dict[str, float]:
    return {name: sum(p.ms for p in step.phases if p.name == name) for name in PHASES}


def recorded_steps(
    card: str = "h200",
    *,
    pool_tokens: int | None = None,
    concurrency: int = 1,
    context: int | None = None,
    steps: Sequence[Step] | None = None,
) -> list[Step]:
    """The newest recorded steps of the report's model at its pool, one load, on one card."""
    published = reported.published()
    model = load_model(published["model"]).name
    load = Load(concurrency, context or published["default_context"])
    wanted = (card, model, pool_tokens or published["pool_tokens"], load)
    found: dict[str, Step] = {}
    # What a user of flashinfer's "auto" gets, where several attention kernels were recorded.
    for s in sorted(replays(recorded() if steps is None else steps), key=lambda s: s.backend):
        if (s.card, s.setting.model.name, s.setting.pool_tokens, s.setting.load) == wanted:
            found[s.strategy.label] = s
    return sorted(found.values(), key=lambda s: s.strategy.order)


def bench_here(
    device: "str | torch.device | None" = None,
    model: Model | None = None,
    progress: Progress = lambda text, done: None,
) -> decode.Bench:
    """A bench for the report's model and heads on this machine."""
    model = model or load_model(reported.published()["model"])
    heads = model.heads_per_gpu(reported.published()["tensor_parallel"])
    return decode.Bench(
        model, heads, machine.as_device(device), modes=("graph",), progress=progress
    )


def pool_here(bench: decode.Bench) -> int:
    """The report's pool, or the largest of whole pages that a shadow beside FP8 leaves room for."""
    P = reported.published()["pool_tokens"]
    if bench.device.type == "cpu":
        return CPU_POOL_TOKENS
    a_token = parse("shadow").token_bytes(bench.model)
    page, free = reported.PAGE, machine.memory(bench.device).free_bytes
    return min(P, int(0.95 * free) // a_token // page * page)


def measure_here(
    bench: decode.Bench,
    pool_tokens: int,
    context: int,
    strategies: Sequence[str] | None = None,
    keep: Callable[[Step], None] = lambda step: None,
) -> tuple[list[Step], list[Check]]:
    """Measure each strategy here; one that fails its correctness check becomes a failed check.

    `keep` gets each step as soon as it is there.
    """
    if strategies is None:
        strategies = [*ASKED, *(ON_A_GPU if bench.device.type == "cuda" else ())]
    runs, checks = [], []
    for strategy in parse_list(list(strategies)):
        what = f"{strategy.label}: output within {strategy.tolerance:.0e} of float64"
        try:
            run = list(decode.measure(bench, [strategy], [pool_tokens], [(1, context)]))[-1]
        except WrongResult as error:
            checks.append(Check(what, False, error.what))
            continue
        except LabError as error:  # a kernel that this machine cannot run is not a wrong result
            bench.progress(f"{strategy.label} left out: {error.what}", 0.0)
            continue
        runs.append(run)
        keep(run)
        checks.append(Check(what, run.error <= strategy.tolerance, f"{run.error:.1e}"))
    return runs, checks


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


def checks_of(lines: Sequence[reported.Line]) -> list[Check]:
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
    steps: Sequence[Step], card: str, context: int
) -> tuple[dict[str, pd.DataFrame], dict[str, str]]:
    """All tables with their texts, the cheapest remedy first; `steps` are those of "measured"."""
    of, kept = reported.server(), recorded()
    rest = verdict.report_rest(card, context)
    found = {
        "smaller_pools": verdict.smaller_pools(card, context, rest=rest),
        "arithmetic": pd.DataFrame(
            [
                {**asdict(x), "agrees": x.agrees, "provenance": str(x.provenance)}
                for x in reported.arithmetic()
            ]
        ),
        "measured": measured(steps, rest),
        "does_not_add_up": hypotheses.recorded_hypotheses(of),
        "taken_away": reported.taken_away(),
        "same_class": hypotheses.same_class(),
        "faster_cast": reported.faster_cast(kept),
        "sglang_35291": reported.check_deepseek(fit.fit(), kept),
        "verdict": verdict.verdict(card, context, rest=rest),
    }
    published = reported.published()
    notes = {
        "smaller_pools": verdict.flag_first(found["smaller_pools"]),
        "measured": f"TPOT = rest + step: a replay of the GLM-5 report's rest, {rest(1):.1f} ms "
        f"({rest.provenance.how}; {rest.provenance}), with the step of the machine named. Context "
        f"{context:,} is assumed.",
        "does_not_add_up": hypotheses.in_words(of, found["does_not_add_up"]),
        "verdict": f"On {machine.card(card).title}, {published['pool_gib']} GiB of KV, one "
        f"request of {context:,} tokens. The cast is calibrated by the report's "
        f"{published['cast_ms']} ms.",
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
    """Reproduce the GLM-5 report on this machine beside the recorded H200 run; writes under `out`.

    A strategy that is wrong is a failed check, and `ok` is False. Raises `OutOfRange`,
    `DoesNotFit` and `CannotWrite` before anything is measured.
    """
    published = reported.published()
    context = published["default_context"] if context is None else context
    card = machine.card(card or published["gpu"][-1]).name
    bench, out = bench_here(device, progress=progress), Path(out)
    pool_tokens = pool_here(bench) if pool_tokens is None else pool_tokens
    check_size(pool_tokens, bench.page_size)
    check_load(bench.model, pool_tokens, 1, context)
    # The earlier file stands until the new one does, and a kill loses no finished step.
    files, growing = [ready(out / "measured.jsonl")], ready(out / "measuring.jsonl")
    growing.unlink(missing_ok=True)
    runs, checks = measure_here(bench, pool_tokens, context, keep=partial(append, growing))
    if runs:
        os.replace(growing, files[0])
    checks = [*checks_of(reported.arithmetic()), same_bits(bench), *checks]
    title = machine.device_title(bench.device)
    tables, notes = tables_of([*runs, *recorded_steps(context=context)], card, context)
    if disturbed := [s.strategy.label for s in runs if s.noisy]:
        notes["measured"] += f" Noisy: {', '.join(disturbed)}; {NOISY}."
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
        write(files[-1], table.to_csv(index=False))
    return Reproduction(title, tables, notes, tuple(checks), tuple(files))

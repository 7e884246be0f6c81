"""A server before and after its patch, from its own result files, logs and traces."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pandas as pd

from shadowkv_lab import files, machine
from shadowkv_lab.budget import Budget, budget
from shadowkv_lab.deployment import Setting
from shadowkv_lab.errors import BadFile, LabError, NoAnswer, whole
from shadowkv_lab.glm5 import hypotheses
from shadowkv_lab.glm5.reported import Server
from shadowkv_lab.load import Load
from shadowkv_lab.machine import Card
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.server import layouts, logs, results
from shadowkv_lab.server.results import Result
from shadowkv_lab.steps import trace as traces
from shadowkv_lab.steps.predict import predict_at
from shadowkv_lab.steps.trace import DRAFT, OUTSIDE, TARGET, Trace

# What must be the same on both sides for the patch to be the only difference: the engines' names
# of it, and ours. Of those marked, "none" is a value like another.
SAME = {
    "model": ("model_path", "model"),
    "engine version": ("version",),
    "tensor parallel size": ("tp_size", "tensor_parallel_size"),
    "data parallel size": ("dp_size", "data_parallel_size"),
    "DP attention": ("enable_dp_attention",),
    "pipeline parallel size": ("pp_size", "pipeline_parallel_size"),
    "expert parallel size": ("ep_size",),
    "expert parallelism": ("enable_expert_parallel", "enable_ep_moe", "enable_deepep_moe"),
    "decode context parallel size": ("dcp_size", "decode_context_parallel_size"),
    "KV dtype": ("kv_cache_dtype",),
    "dtype": ("dtype",),
    "quantization": ("quantization",),
    "attention backend": ("attention_backend",),
    "decode attention backend": ("decode_attention_backend",),
    "MoE backend": ("moe_runner_backend",),
    "MoE all-to-all backend": ("moe_a2a_backend",),
    "page size": ("page_size", "block_size"),
    "pool tokens": ("max_total_num_tokens",),
    "chunked prefill size": ("chunked_prefill_size", "max_num_batched_tokens"),
    "CUDA graphs off": ("disable_cuda_graph", "enforce_eager"),
    "overlap schedule off": ("disable_overlap_schedule",),
    "speculative decoding": ("speculative_algorithm", "speculative_config"),
    "speculative steps": ("speculative_num_steps",),
    "speculative top-k": ("speculative_eagle_topk",),
    "draft tokens": ("speculative_num_draft_tokens", "num_speculative_tokens"),
}
NONE_COUNTS = ("speculative decoding",)
PREDICTED_OFF = 0.05  # of a predicted cast: how far predictions may be from a measurement
TRACED_OFF = 0.01  # of a traced cast: small conversions that a patched server does besides
UNREPEATED = 0.01  # of a step that was measured once: its noise is not known
COPY_US = 20.0  # a copy of a pool of unknown size takes this at least


@dataclass(frozen=True)
class Side:
    """One run's files, read. `results` are the benchmark's, repeats one after the other."""

    name: str
    results: tuple[Result, ...]
    log: logs.ServerLog | None = None
    trace: Trace | None = None

    @property
    def runs(self) -> list[list[Result]]:
        """The repeats of each load; warm-ups count only where there is nothing else."""
        kept = [r for r in self.results if not r.warm_up] or list(self.results)
        groups: list[list[Result]] = []
        for result in kept:
            group = next((g for g in groups if g[0].same_load(result)), None)
            group.append(result) if group else groups.append([result])
        return groups

    def fact(self, words: str) -> object:
        """An argument of the server, named as in `SAME`; `...` where neither file says it."""
        found = [source(self, words) for source in (_of_result, _of_log)]
        return next((value for value in found if value is not ...), ...)


def _of_result(side: Side, words: str) -> object:
    server = next((r.server for r in side.results if r.server), {})
    return _named(server, words)


def _of_log(side: Side, words: str) -> object:
    if side.log is None:
        return ...
    read = {"pool tokens": side.log.pool_tokens, "KV dtype": side.log.dtype}
    read |= {"tensor parallel size": side.log.tensor_parallel, "engine version": side.log.version}
    if read.get(words) is not None:
        return _plain(read[words], words)
    return _named(side.log.arguments, words)


def _named(arguments: dict, words: str) -> object:
    for name in SAME[words]:
        if name in arguments and (arguments[name] is not None or words in NONE_COUNTS):
            return _plain(arguments[name], words)
    return ...


def _plain(value: object, words: str) -> object:
    if words == "model":
        return str(value).rstrip("/").split("/")[-1]
    if words == "KV dtype":
        word = str(value).removeprefix("torch.").lower()
        return {"float8_e4m3fn": "fp8_e4m3", "fp8": "fp8_e4m3", "bfloat16": "bf16"}.get(word, word)
    return None if value == "None" else value


@dataclass(frozen=True)
class Comparison:
    """All tables. `cast` is None without traces, `budget` without a log, a card or a model.

    `outcome` is "all" of the cast gone, "part", "more" than it, "none", or "unknown" where no cast
    is known, and "no cast" where the pool is not cast. `cast_ms` is the cast of one step before,
    `cast_how` where it comes from, `left` the share of it that is left, each None where unknown.
    """

    tpot: pd.DataFrame
    cast: pd.DataFrame | None
    outcome: str
    cast_ms: float | None
    cast_how: str
    left: float | None
    left_how: str
    budget: Budget | None
    hypotheses: pd.DataFrame
    sentence: str
    notes: tuple[str, ...]
    model: str = ""
    names: tuple[str, str] = ("before", "after")

    def as_dict(self) -> dict:
        """All of it as plain JSON values."""
        tables = {n: t for n, t in vars(self).items() if isinstance(t, pd.DataFrame)}
        rows = {n: json.loads(t.to_json(orient="records")) for n, t in tables.items()}
        plain = ("outcome", "cast_ms", "cast_how", "left", "left_how", "sentence", "model")
        return (
            rows
            | {name: getattr(self, name) for name in plain}
            | {
                "budget": self.budget.formula.splitlines() if self.budget else None,
                "notes": list(self.notes),
            }
        )


def read(
    folder: str | Path, *, log: str | Path | None = None, trace: str | Path | None = None
) -> Side:
    """A side from a result file, or from a folder of one run.

    In a folder: one result file (`*.jsonl`, or a `*.json` that is a result), at most one `*.log`,
    and traces (`*.json`, `*.json.gz`), of which the first GPU's is taken. Raises `BadFile`.
    """
    folder = Path(folder)
    file = folder
    if folder.is_dir():
        found, seen = sorted(folder.glob("*.jsonl")), []
        for path in sorted(p for p in folder.glob("*.json*") if p.suffix in (".json", ".gz")):
            kind = _kind(path)
            found += [path] if kind == "result" else []
            seen += [path] if kind == "trace" else []
        if len(found) != 1:
            raise BadFile(
                f"{folder} has {len(found)} result files (*.jsonl, or vLLM's *.json)",
                "one",
                "Name the file itself, and give log and trace as options",
            )
        file = found[0]
        log = log or next(iter(sorted(folder.glob("*.log"))), None)
        trace = trace or next(iter(seen), None)
    if not file.exists():
        raise BadFile(f"There is no {file}", "a result file, or the folder of one run")
    return Side(
        folder.name,
        tuple(results.read_results(file)),
        logs.parse(Path(log)) if log else None,
        traces.read_trace(trace) if trace else None,
    )


def _kind(path: Path) -> str:
    """Whether a JSON file of a folder is a trace, a result, or neither (a config)."""
    head = files.read_bytes(path)[: 1 << 16]
    if b'"traceEvents"' in head or b'"schemaVersion"' in head or b'"ph"' in head:
        return "trace"
    marks = (b"_tpot_ms", b"_itl_ms", b'"request_throughput"', b"decode_latency", b'"latency"')
    return "result" if any(mark in head for mark in marks) else ""


def compare(
    before: Side,
    after: Side,
    *,
    model: "Model | str | None" = None,
    gpu: str | None = None,
    steps: int | None = None,
    layers: int | None = None,
) -> Comparison:
    """Compare two sides of one model, by default that of the files; `gpu` a card of data/gpus.

    `steps` are the decode steps of a trace that does not mark them, `layers` those that read the
    pool (all). The cast is the trace's, or predicted for the card where casts were measured on it;
    else it is unknown. Raises `NoAnswer` saying what differs, `BadFile`.
    """
    for name, value in (("Steps", steps), ("Layers", layers)):
        if value is not None:
            whole(value, name)
    geometry, notes = _model(before, after, model)
    kind = _pool_kind(before, geometry)
    check(before, after, _auto(before, geometry, kind))
    tpot, pairs = _tpot(before, after)
    notes += _load_notes(pairs) + _run_notes(before, after)
    first = tpot.iloc[0]
    pool = next((p for s in (before, after) if isinstance(p := s.fact("pool tokens"), int)), None)
    card, guessed = _card(gpu, before, after, geometry, pool)
    shortest_us = _shortest_us(geometry, pool) if geometry and pool else COPY_US
    cast, seen, words = None, {}, []
    if before.trace or after.trace:
        cast = cast_table(before.trace, after.trace, shortest_us, steps)
        words = _trace_notes(before, after, cast, pool)
        target = cast[cast.model == TARGET]
        seen = {
            side: float(target[f"{side}_ms"].sum())
            for side, it in (("before", before.trace), ("after", after.trace))
            if it
        }
    notes += words
    cast_ms, cast_how = None, "not known"
    if kind in ("bf16", "packed"):
        cast_how = "no cast: the pool's rows are " + layouts.WORDS[OF_KIND[kind]]
    elif seen.get("before"):
        cast_ms, cast_how = seen["before"], "from the trace"
    elif before.trace:
        cast_how = "no cast of the pool in the trace before"
    elif ran := _ran(before):
        cast_how = f"not known: the server before runs {ran} already, by its log"
    elif geometry and pool and card:
        cast_ms, cast_how = _predicted(geometry, pool, card, layers, kind)
        if cast_ms and guessed:
            cast_how += ", assumed to be the card"
            notes.append(guessed)
    verdict = _verdict(first, cast_ms, cast_how, seen, kind, before.trace)
    plan = None
    if before.log and card and geometry:
        reading = logs.read(before.log, geometry, card)
        load = Load(int(first.requests or 1), int(first.input or 1024))
        plan = budget(reading.deployment, load)
        notes += reading.notes
    table = pd.DataFrame()
    sentence = verdict.sentence
    if verdict.outcome == "part" and geometry and pool:
        weights = before.log.weights_gib if before.log else None
        of = Server(
            float(first.before_step_ms),
            float(first.after_step_ms),
            cast_ms,
            pool,
            geometry,
            math.nan if weights is None else weights,
            layers or geometry.layers,
        )
        known = all(isinstance(side.fact("pool tokens"), int) for side in (before, after))
        table = explanations(of, card, same_pool=known)
        sentence = hypotheses.in_words(of, table)
        if weights is None:
            notes.append("whether an explanation fits the card is not said: no log, no weights")
    return Comparison(
        tpot,
        cast,
        verdict.outcome,
        cast_ms,
        cast_how,
        verdict.left,
        verdict.left_how,
        plan,
        table,
        sentence,
        tuple(dict.fromkeys([*verdict.notes, *notes])),
        geometry.name if geometry else "",
        (before.name, after.name),
    )


OF_KIND = {"bf16": "bf16", "packed": "fp8_ds_mla"}


def _model(before: Side, after: Side, asked) -> tuple[Model | None, list[str]]:
    """The model of both sides; None where no file names one that the lab knows."""
    found = asked = load_model(asked) if asked is not None else None
    for side in (before, after):
        path = side.fact("model")
        named = None if path is ... else logs.known_model(str(path))
        if named and asked and logs.shape(named) != logs.shape(asked):
            raise NoAnswer(
                f"The server ran {path}, not {asked.name}", remedy=f"Say --model {named.name}"
            )
        found = found or named
    for side in (before, after):
        if side.log and found is None and (side.log.model or side.log.architecture):
            with suppress(NoAnswer):  # a class that several models have
                found = logs.read(side.log).deployment.model
    if found is None:
        return None, ["no file names a model that the lab knows: say --model"]
    return found, []


def _pool_kind(side: Side, model: Model | None) -> str | None:
    """How the pool's rows lie: "fp8", "bf16" or "packed" (fp8_ds_mla, nvfp4); None if unknown."""
    if side.log and model and side.log.kv_gib and side.log.pool_tokens:
        found = logs.read(side.log, model).layouts
        if found:
            return KINDS[found[0].name]
    dtype = side.fact("KV dtype")
    if dtype is ...:
        return None
    if dtype == "auto":  # the model's own, but for checkpoints and models that set it themselves
        path = str(side.fact("model")).lower()
        own = model is None or model.dsa or any(word in path for word in ("fp4", "modelopt"))
        return None if own else "bf16"
    names = {KINDS[name] for name in layouts.named(str(dtype))}
    if names == {"fp8", "packed"}:
        return "fp8"
    return names.pop() if len(names) == 1 else None


KINDS = {
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "bf16": "bf16",
    "fp8_ds_mla": "packed",
    "nvfp4_ds_mla": "packed",
}


def _auto(side: Side, model: Model | None, kind: str | None) -> str:
    if side.fact("KV dtype") == "auto" and kind == "bf16" and model:
        return f"kv_cache_dtype auto is BF16 for {model.name}: nothing is cast on either side"
    return ""


def check(before: Side, after: Side, also: str = "") -> None:
    """Raise `NoAnswer` with everything that differs but should not; `also` is added to it."""
    differ = []
    for words in SAME:
        for source in (_of_result, _of_log, Side.fact):
            old, new = source(before, words), source(after, words)
            if old is not ... and new is not ...:
                if old != new:
                    differ.append(f"{words}: {old} and {new}")
                break
    accepted = [any(r.accept_length > 1 for r in s.results) for s in (before, after)]
    if accepted[0] != accepted[1] and not any("speculative" in d for d in differ):
        differ.append("speculative decoding: only one side accepts more than one token per step")
    if before.trace and after.trace and before.trace.device != after.trace.device:
        differ.append(f"GPU: {before.trace.device} and {after.trace.device}")
    if not any(a[0].same_load(b[0]) for a in before.runs for b in after.runs):
        show = [" x ".join(map(str, r[0].load)) for side in (before, after) for r in side.runs]
        differ.append(f"loads (requests x input x output): {'; '.join(show)}")
    if differ:
        steps = ""
        if accepted[0] != accepted[1]:
            pair = [s.results[0] for s in (before, after)]
            steps = (
                f" By step it is {pair[0].step_ms:.1f} and {pair[1].step_ms:.1f} ms: a TPOT is the "
                "step over the tokens that it gives"
            )
        raise NoAnswer(
            f"Before and after differ in more than the patch: {'; '.join(differ)}."
            + (f" {also}." if also else "")
            + steps,
            remedy="Run both with the same arguments, and the same --max-total-tokens where a "
            "shadow has to fit in",
        )


def _tpot(before: Side, after: Side) -> tuple[pd.DataFrame, list[tuple[list, list]]]:
    """One row per load that both sides ran, by requests; and the runs of each."""
    pairs = []
    for old in before.runs:
        new = next((n for n in after.runs if old[0].same_load(n[0])), None)
        if new:
            pairs.append((old, new))
    pairs.sort(key=lambda pair: (pair[0][0].requests or 0, pair[0][0].input_tokens or 0))
    rows = []
    for old, new in pairs:
        one, two = (_middle(runs) for runs in (old, new))
        noise = [_spread(runs) for runs in (old, new)]
        rows.append(
            dict(
                benchmark=one["benchmark"],
                requests=one["requests"],
                input=one["input"],
                output=one["output"],
                before_ms=one["tpot_ms"],
                after_ms=two["tpot_ms"],
                saved_ms=one["tpot_ms"] - two["tpot_ms"],
                before_tokens_per_s=one["tokens_per_s"],
                after_tokens_per_s=two["tokens_per_s"],
                gain_percent=100 * (two["tokens_per_s"] / one["tokens_per_s"] - 1),
                before_step_ms=one["step_ms"],
                after_step_ms=two["step_ms"],
                noise_ms=sum(noise) if None not in noise else math.nan,
                repeats=min(len(old), len(new)),
                tpot_from=one["how"],
            )
        )
    return pd.DataFrame(rows), pairs


def _middle(runs: list[Result]) -> dict:
    """The medians of the repeats of one load."""
    first = runs[0]
    return dict(
        benchmark=first.benchmark,
        requests=first.requests,
        input=first.input_tokens,
        output=first.output_tokens,
        how=first.how,
        tpot_ms=median(r.tpot_ms for r in runs),
        step_ms=median(r.step_ms for r in runs),
        tokens_per_s=median(r.tokens_per_s for r in runs),
    )


def _spread(runs: list[Result]) -> float | None:
    """How far the steps of repeats lie apart, ms; None for a single run."""
    times = [r.step_ms for r in runs]
    return max(times) - min(times) if len(times) > 1 else None


def _ran(side: Side) -> str | None:
    """The strategy that the plug-in put into a server, by its log; None for SGLang as it is."""
    found = side.log.strategy if side.log else None
    return None if found == "full_cast" else found


def _run_notes(before: Side, after: Side) -> list[str]:
    """Of which runs and strategies the sides are, where their files say so."""
    notes = []
    ids = [{r.run for r in side.results if r.run} for side in (before, after)]
    if all(ids) and ids[0] != ids[1]:
        names = " and ".join(", ".join(sorted(each)) for each in ids)
        notes.append(f"two runs ({names}): a difference of a few per cent may be of their machines")
    if _ran(before) or _ran(after):
        sides = [_ran(side) or "no plug-in" for side in (before, after)]
        notes.append(f"by the logs, {sides[0]} before and {sides[1]} after")
    return notes


def _load_notes(pairs: list[tuple[list[Result], list[Result]]]) -> list[str]:
    """What to say of the loads; raises `NoAnswer` for one whose batch was not set."""
    notes: list[str] = []
    for old, new in pairs:
        one, two = old[0], new[0]
        failed = [sum(r.failed for r in runs) for runs in (old, new)]
        lost = f"{failed[0]} and {failed[1]} requests failed" if any(failed) else ""
        if one.arrivals or two.arrivals:
            why = one.arrivals or two.arrivals
            if not all(r.how.startswith("median_itl") for r in (one, two)):
                raise NoAnswer(
                    f"The batch is a result here and not a setting: {why}. A mean TPOT then holds "
                    f"the stalls of other requests' prefills{f'; {lost}' if lost else ''}",
                    "a load with max_concurrency, or a file with median_itl_ms",
                    "Run with --max-concurrency N and --request-rate inf",
                )
            notes.append(
                f"rate-limited ({why}): the batch is a result and not a setting. The median ITL "
                "stands for a step; the mean holds prefill stalls"
            )
        if lost:
            notes.append(lost)
        notes += [*one.notes, *two.notes]
        if one.accept_length > 1:
            lengths = [median(r.accept_length for r in runs) for runs in (old, new)]
            steps = [median(r.step_ms for r in runs) for runs in (old, new)]
            notes.append(
                f"{lengths[0]:g} and {lengths[1]:g} tokens accepted per step: the steps are "
                f"{steps[0]:.1f} and {steps[1]:.1f} ms, {steps[0] - steps[1]:.1f} ms saved"
            )
        if "output" in one.measured and one.output_tokens != two.output_tokens:
            notes.append(
                f"outputs of {one.output_tokens} and {two.output_tokens} tokens on average"
            )
    return notes


def _card(
    gpu: str | None, before: Side, after: Side, model: Model | None, pool: int | None
) -> tuple[Card | None, str]:
    """The card, as typed or as the traces name it; else the one whose memory the log's is.

    Of cards of like memory those count on which casts were measured, and only where that is one.
    The words say that it was guessed, and from what.
    """
    if gpu:
        return machine.card(gpu), ""
    titles = [side.trace.device for side in (before, after) if side.trace and side.trace.device]
    if titles:
        return machine.card_of(titles[0]), ""
    free = before.log.free_before_gib if before.log else None
    cards = {machine.card(name).name: machine.card(name) for name in machine.known_cards()}
    like = [c for c in cards.values() if free and 0.97 <= free / c.memory_gib <= 1]
    like = [c for c in like if model and pool and _predicted(model, pool, c, None, "fp8")[0]]
    if len(like) != 1:
        return None, ""
    return like[0], (
        f"{free:.2f} GiB were free before weights: {like[0].title} is the one card of this memory "
        "on which casts were measured. That it is this card is assumed: --gpu says it"
    )


def _trace_notes(before: Side, after: Side, cast: pd.DataFrame, pool: int | None) -> list[str]:
    notes = []
    if pool is None:
        notes.append(
            f"the pool's tokens are in no log and no result file: copies of {COPY_US:.0f} us and "
            "more count as casts"
        )
    for side in (before, after):
        if side.trace and side.trace.left_out:
            stages = ", ".join(f"{n} {stage}" for stage, n in side.trace.left_out.items())
            notes.append(f"{side.trace.name}: left out {stages} steps")
    draft = cast[cast.model == DRAFT]
    if len(draft):
        each = f"{draft.before_ms.sum():.3f}" if before.trace else "not traced"
        notes.append(
            f"the draft's own cast, per step of the target: {each} ms before, "
            f"{draft.after_ms.sum():.3f} ms after; it is no part of the share that is left"
        )
    outside = cast[cast.model == OUTSIDE]
    if len(outside):
        notes.append(
            f"outside the marked steps lie {outside.before_ms.sum():.3f} ms of casts per step "
            f"before, {outside.after_ms.sum():.3f} after"
        )
    return notes


def _predicted(
    model: Model, pool: int, card: Card, layers: int | None, kind: str | None
) -> tuple[float | None, str]:
    """The cast of a step by the lab's own runs on this card; None without such runs."""
    try:
        step = predict_at("full_cast", Setting(model, 8, pool, Load(1, 1)), card.name)
    except LabError as error:
        return None, f"not known: {error.what}"
    phase = step["cast"]
    if str(phase.provenance) == "assumed":
        return None, f"not known: no cast was measured on a {card.title}"
    share = (layers or model.layers) / model.layers
    unsure = "" if kind == "fp8" else "; that the pool is FP8 is assumed"
    return share * phase.ms, f"predicted for {card.title} ({phase.provenance}){unsure}"


@dataclass(frozen=True)
class _Verdict:
    outcome: str
    sentence: str
    left: float | None = None
    left_how: str = "not known"
    notes: list[str] = field(default_factory=list)


def _verdict(first, cast_ms, cast_how, seen, kind, traced) -> _Verdict:
    """What went, of the cast before: by the traces where there are two, else by the step times."""
    old, new = float(first.before_step_ms), float(first.after_step_ms)
    saved, notes = old - new, []
    noise = first.noise_ms
    if math.isnan(noise):
        noise = UNREPEATED * old
        notes.append(
            f"one run each: the noise is not known, {UNREPEATED:.0%} of the step is taken, assumed"
        )
    what = "step" if old != first.before_ms else "TPOT"
    change = (
        f"The {what} did not change beyond the noise of {noise:.2f} ms ({old:.2f} to {new:.2f} ms)"
        if abs(saved) <= noise
        else f"The {what} became {abs(saved):.1f} ms {'shorter' if saved > 0 else 'longer'} "
        f"({old:.1f} to {new:.1f} ms, {-saved / old:+.0%})"
    )
    if cast_ms is None:
        if cast_how.startswith("no cast"):
            return _Verdict("no cast", f"{change}. There is {cast_how}.", notes=notes)
        of_it = "Which cast there is" if abs(saved) <= noise else "How much of that was the cast"
        return _Verdict("unknown", f"{change}. {of_it} {_wanted(cast_how)}", notes=notes)
    if cast_ms > old:
        return _Verdict(
            "unknown",
            f"{change}. The cast ({cast_ms:.1f} ms, {cast_how}) would be longer than the step "
            "before, so it is not this server's: check the pool, the layers and the card.",
            notes=notes,
        )
    slack = noise + (TRACED_OFF if "trace" in cast_how else PREDICTED_OFF) * cast_ms
    took = f"the cast took {cast_ms:.1f} ms ({cast_how})"
    still = cast_ms - saved
    if "after" in seen:
        left = seen["after"] / cast_ms
        how = "from the traces, kernel by kernel" if traced else "from the trace after"
        off = still - seen["after"]
        if abs(off) > slack:
            notes.append(
                f"the traces leave {seen['after']:.1f} ms of the cast, the step times {still:.1f}: "
                f"the rest of the step became {abs(off):.1f} ms "
                f"{'longer' if off > 0 else 'shorter'}"
            )
        if left <= TRACED_OFF:
            sentence = f"All of the cast is gone: {took}, and the trace after has none. {change}."
            return _Verdict("all", sentence, left, how, notes)
        if left >= 1 - TRACED_OFF:
            sentence = f"The whole cast is still there: {took}, and {seen['after']:.1f} ms after. "
            return _Verdict("none", f"{sentence}{change}.", left, how, notes)
        return _Verdict("part", change, left, how, notes)
    left, how = min(1.0, max(0.0, still / cast_ms)), "from the step times, if nothing else changed"
    if saved <= noise:
        sentence = f"{change}: nothing of the cast is seen to have gone ({took})."
        return _Verdict("none", sentence, left, how, notes)
    if abs(still) <= slack:
        beyond = f"the {abs(still):.1f} ms between them are within the noise"
        named = "repeats" if not math.isnan(first.noise_ms) else "single runs"
        more = f"{noise:.2f} ms of {named}"
        more += "" if "trace" in cast_how else f", {PREDICTED_OFF:.0%} of the prediction"
        return _Verdict(
            "all",
            f"All of the cast is gone: {change[0].lower()}{change[1:]}, and {took}; {beyond}: "
            f"{more}.",
            0.0,
            how,
            notes,
        )
    if still < 0:
        sentence = f"{change}: all of the cast, and {-still:.1f} ms more than it ({took}). "
        return _Verdict("more", f"{sentence}Something else has changed as well.", 0.0, how, notes)
    return _Verdict("part", change, left, how, notes)


def _wanted(how: str) -> str:
    why = how.removeprefix("not known").lstrip(": ")
    return (
        "is not known"
        + (f" ({why})" if why else "")
        + ": give a trace of the server before (--before-trace), or its card (--gpu, one on which "
        "casts were measured) and its log (the pool's tokens and dtype)."
    )


def explanations(of: Server, card: Card | None, same_pool: bool) -> pd.DataFrame:
    """The hypotheses that the files leave open: a pool that is the same was not cut."""
    table = hypotheses.hypotheses(of, (card.name,) if card else ())
    if same_pool:
        table = table[table.pool_tokens == of.pool_tokens]
    if math.isnan(of.weights_gib):
        table = table[[c for c in table if not c.startswith(("fits_", "total_"))]]
    return table.reset_index(drop=True)


def cast_table(
    before: Trace | None, after: Trace | None, shortest_us: float = 0.0, steps: int | None = None
) -> pd.DataFrame:
    """ms per step that each casting kernel takes, before and after; whole-pool casts only.

    `model` is "target", "draft", or "outside" for what lies in no marked step; all are per decode
    step of the target. A side without a trace is NaN.
    """
    sides: list[dict] = []
    for trace in (before, after):
        if trace is None:
            sides.append({})
            continue
        count = trace.steps if steps is None else steps
        if not count:
            raise BadFile(
                f"{trace.name} does not mark its steps",
                "traces with SGLang's step[DECODE ...] or vLLM's execute_context_...",
                "Say how many decode steps it holds: --steps",
            )
        sides.append(
            {
                (whose, name): ms / count
                for whose in (TARGET, DRAFT, OUTSIDE)
                for name, ms in trace.casts(shortest_us, whose).items()
            }
        )
    order = [TARGET, DRAFT, OUTSIDE]
    keys: Sequence[tuple] = sorted(
        {*sides[0], *sides[1]}, key=lambda k: (order.index(k[0]), -sides[0].get(k, 0.0), k[1])
    )
    absent = [0.0 if trace else math.nan for trace in (before, after)]
    rows = [
        dict(
            kernel=k[1],
            model=k[0],
            before_ms=sides[0].get(k, absent[0]),
            after_ms=sides[1].get(k, absent[1]),
        )
        for k in keys
    ]
    return pd.DataFrame(rows, columns=["kernel", "model", "before_ms", "after_ms"])


def _shortest_us(geometry: Model, pool_tokens: int) -> float:
    """A whole layer's cast in less time would need more bandwidth than the fastest known card."""
    fastest = max(machine.card(n).bandwidth_gb_per_s for n in machine.known_cards())
    moved = pool_tokens * (geometry.row_bytes("fp8") + geometry.row_bytes("bf16"))
    return moved / fastest / 1e3

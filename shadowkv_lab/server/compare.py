"""A server before and after its patch, from its own result files, logs and traces."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from shadowkv_lab import facts, machine
from shadowkv_lab.budget import Budget
from shadowkv_lab.errors import BadFile, NoAnswer
from shadowkv_lab.glm5 import case, hypotheses
from shadowkv_lab.load import Load
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.server import logs, results

# What must be the same on both sides for the patch to be the only difference.
SAME = {
    "model_path": "model",
    "tp_size": "tensor parallel size",
    "kv_cache_dtype": "KV dtype",
    "attention_backend": "attention backend",
    "page_size": "page size",
    "max_total_num_tokens": "pool tokens",
    "disable_cuda_graph": "CUDA graphs off",
}


@dataclass(frozen=True)
class Side:
    """One run's files, read. `lines` are the benchmark's, by load; a later one counts."""

    name: str
    lines: dict[tuple, results.Result]
    log: logs.ServerLog | None = None
    trace: results.Trace | None = None

    def fact(self, field: str) -> object:
        """An argument of the server, from the log where it says so, else from the result file."""
        server = next((r.server for r in self.lines.values() if r.server), {})
        found = server.get(field)
        if self.log is not None:
            of_log = {
                "tp_size": self.log.tensor_parallel,
                "kv_cache_dtype": self.log.kv_dtype,
                "max_total_num_tokens": self.log.pool_tokens,
            }
            found = of_log.get(field) if of_log.get(field) is not None else found
        if field == "model_path" and found:
            return str(found).rstrip("/").split("/")[-1]
        return "fp8" if field == "kv_cache_dtype" and str(found).startswith("fp8") else found


@dataclass(frozen=True)
class Comparison:
    """All tables. `cast` is None without traces, `budget` without a log or a card."""

    tpot: pd.DataFrame
    cast: pd.DataFrame | None
    left: float | None  # share of the cast that is left: from traces, else from the TPOTs
    left_how: str
    budget: Budget | None
    hypotheses: pd.DataFrame
    sentence: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict:
        """All of it as plain JSON values."""
        tables = {n: t for n, t in vars(self).items() if isinstance(t, pd.DataFrame)}
        rows = {n: json.loads(t.to_json(orient="records")) for n, t in tables.items()}
        return rows | {
            "left": self.left,
            "left_how": self.left_how,
            "sentence": self.sentence,
            "budget": self.budget.formula.splitlines() if self.budget else None,
            "notes": list(self.notes),
        }


def read(
    folder: str | Path, *, log: str | Path | None = None, trace: str | Path | None = None
) -> Side:
    """A side from a result file, or from a folder of one run.

    In a folder: one `*.jsonl`, at most one `*.log`, and traces `*.json` or `*.json.gz`, of which
    the first GPU's is taken. Raises `BadFile`, `BadFile`.
    """
    folder = Path(folder)
    file = folder
    if folder.is_dir():
        found = sorted(folder.glob("*.jsonl"))
        if len(found) != 1:
            raise BadFile(
                f"{folder} has {len(found)} result files (*.jsonl)",
                "one",
                "Name the file itself, and give log and trace as options",
            )
        file = found[0]
        log = log or next(iter(sorted(folder.glob("*.log"))), None)
        traces = sorted(p for p in folder.glob("*.json*") if p.suffix in (".json", ".gz"))
        trace = trace or next(iter(traces), None)
    if not file.exists():
        raise BadFile(f"There is no {file}", "a result file, or the folder of one run")
    lines = {(r.benchmark, *r.load): r for r in results.read_results(file)}
    return Side(
        folder.name,
        lines,
        logs.parse(Path(log)) if log else None,
        results.read_trace(trace) if trace else None,
    )


def compare(
    before: Side,
    after: Side,
    *,
    model: "Model | str" = "glm-5",
    gpu: str | None = None,
    steps: int | None = None,
    layers: int | None = None,
) -> Comparison:
    """Compare two sides on one model; `gpu` is a card of data/gpus, of the trace if left out.

    `steps` are the decode steps of a trace that does not mark them. `layers` that read the pool;
    the model's. Raises `NoAnswer` saying what differs.
    """
    geometry = load_model(model)
    layers = layers or geometry.layers
    check(before, after, geometry)
    loads = [load_ for load_ in before.lines if load_ in after.lines]
    rows, notes = [], []
    for load_ in loads:
        old, new = before.lines[load_], after.lines[load_]
        rows.append(
            dict(
                benchmark=load_[0],
                requests=load_[1],
                input=load_[2],
                output=load_[3],
                before_ms=old.tpot_ms,
                after_ms=new.tpot_ms,
                saved_ms=old.tpot_ms - new.tpot_ms,
                before_tokens_per_s=old.tokens_per_s,
                after_tokens_per_s=new.tokens_per_s,
                gain_percent=100 * (new.tokens_per_s / old.tokens_per_s - 1),
                tpot_from=old.how,
            )
        )
    tpot = pd.DataFrame(rows).sort_values("requests", ignore_index=True)
    first = tpot.iloc[0]
    card = gpu
    if card is None and before.trace and (seen := machine.card_of(before.trace.device or "")):
        card = seen.name
    pool = before.fact("max_total_num_tokens")
    cast = left = cast_ms = None
    left_how = "no trace: from the TPOTs, if nothing else has changed"
    shortest_us = _shortest_us(geometry, pool) if pool else 0.0
    if before.trace:
        cast = cast_table(before.trace, after.trace, shortest_us, steps)
        cast_ms = float(cast.before_ms.sum()) or None
        if after.trace and cast_ms:
            left = float(cast.after_ms.sum()) / cast_ms
            left_how = "from the traces, kernel by kernel"
    elif after.trace:
        notes.append("a trace of the after alone says nothing of what has gone")
    if pool is None:
        notes.append(
            "the pool's tokens are in no log and no result file: the case's are "
            "assumed, and short copies count as casts"
        )
    weights = before.log.weights_gib if before.log else None
    of = case.server(
        float(first.before_ms),
        float(first.after_ms),
        pool,
        layers,
        cast_ms=cast_ms,
        model=model,
        weights_gib=weights,
    )
    if left is None:
        left = max(0.0, of.still_ms) / of.cast_ms
    elif abs(other := of.still_ms - left * of.cast_ms) > hypotheses.NEAR_MS:
        notes.append(
            f"the traces leave {left * of.cast_ms:.1f} ms of the cast, the step times "
            f"{of.still_ms:.1f}: the rest of the step became {abs(other):.1f} ms "
            f"{'longer' if other > 0 else 'shorter'}"
        )
    if cast_ms is None:
        notes.append(
            f"the cast before, {of.cast_ms:.1f} ms, is the case's scaled by bytes: assumed"
        )
    if weights is None:
        notes.append("the weights are the case's: assumed")
    plan = None
    if before.log and card:
        load = Load(int(first.requests or 1))
        plan = logs.from_log(before.log, geometry, card, load=load)
    table = hypotheses.hypotheses(of, (card,) if card else None)
    return Comparison(
        tpot, cast, left, left_how, plan, table, hypotheses.in_words(of, table), tuple(notes)
    )


def check(before: Side, after: Side, geometry: Model) -> None:
    """Raise `NoAnswer` with everything that differs but should not."""
    differ = []
    for field, words in SAME.items():
        old, new = before.fact(field), after.fact(field)
        if old is not None and new is not None and old != new:
            differ.append(f"{words}: {old} and {new}")
    if before.trace and after.trace and before.trace.device != after.trace.device:
        differ.append(f"GPU: {before.trace.device} and {after.trace.device}")
    if not before.lines.keys() & after.lines.keys():
        show = [" x ".join(map(str, k)) for side in (before, after) for k in side.lines]
        differ.append(f"loads (benchmark, requests, input, output): {'; '.join(show)}")
    if differ:
        remedy = "Run both with the same arguments, and the same --max-total-tokens where a shadow "
        raise NoAnswer(
            f"Before and after differ in more than the patch: {'; '.join(differ)}",
            remedy=remedy + "has to fit in",
        )
    path = str(before.fact("model_path") or "").lower()
    known = [n for n in facts.catalogue("models") if n in path]
    if (
        known
        and geometry.name in facts.catalogue("models")
        and geometry.name not in {facts.catalogue("models")[n]["name"] for n in known}
    ):
        raise NoAnswer(
            f"The server ran {before.fact('model_path')}, not {geometry.name}",
            remedy=f"Say --model {max(known, key=len)}",
        )


def cast_table(
    before: results.Trace,
    after: results.Trace | None,
    shortest_us: float = 0.0,
    steps: int | None = None,
) -> pd.DataFrame:
    """ms a step that each casting kernel takes, before and after; whole-pool casts only."""
    sides = []
    for trace in (before, after):
        count = steps or (trace.steps if trace else 1)
        if trace and not count:
            raise BadFile(
                f"{trace.name} does not mark its steps",
                "traces with step[DECODE ...]",
                "Say how many decode steps it holds: --steps",
            )
        casts = trace.casts(shortest_us) if trace else {}
        sides.append({name: ms / count for name, ms in casts.items()})
    names: Sequence[str] = sorted({*sides[0], *sides[1]}, key=lambda n: -sides[0].get(n, 0.0))
    absent = 0.0 if after else float("nan")
    rows = [
        dict(kernel=n, before_ms=sides[0].get(n, 0.0), after_ms=sides[1].get(n, absent))
        for n in names
    ]
    return pd.DataFrame(rows, columns=["kernel", "before_ms", "after_ms"])


def _shortest_us(geometry: Model, pool_tokens: int) -> float:
    """A whole layer's cast in less time would need more bandwidth than the fastest known card."""
    fastest = max(machine.card(n).bandwidth_gb_per_s for n in machine.known_cards())
    moved = pool_tokens * (geometry.row_bytes("fp8") + geometry.row_bytes("bf16"))
    return moved / fastest / 1e3

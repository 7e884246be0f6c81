"""Utilisation of bandwidth per phase, kernel and GPU, fitted to recorded runs.

`time = launch + bytes / (bandwidth x utilisation)` per layer. The launch is what the two
smallest sizes leave at zero bytes; utilisation is then read off every recorded size and
interpolated between them in log space. Bandwidth is the datasheet's, so that a utilisation can
be lent to another card; on a device without a card file it is the copy bandwidth of the run.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from shadowkv_lab import facts, machine
from shadowkv_lab.errors import LabError
from shadowkv_lab.model import load_model
from shadowkv_lab.steps import records
from shadowkv_lab.strategies import parse

PHASES = ("cast", "attention", "write")
KEY = ["phase", "kernel", "gpu", "heads"]
CELL = [
    "strategy",
    "model",
    "layers",
    "heads",
    "pool_tokens",
    "concurrency",
    "context",
    "page_size",
    "slot_order",
    "backend",
    "mode",
    "gpu",
]
ROW_BYTES = {"bf16": 1152, "native_fp8": 576, "fused_fp8": 576}  # of every model in data/models
EDGE = 1.001  # a size this close to the recorded range is inside it


class Time(NamedTuple):
    """Milliseconds of one layer, and whether the size lies within the recorded ones."""

    ms: float
    inside: bool


@dataclass(frozen=True)
class Curve:
    """Utilisation of one kernel on one GPU: for each request count, over the size of a request.

    `knots[R]` holds (log size, log utilisation). Casts and writes do not depend on the requests
    apart from their bytes: their one curve lies at R = 1, over the bytes.
    """

    launch_ms: float
    gb_per_s: float
    knots: dict[int, tuple[np.ndarray, np.ndarray]]

    def utilisation(self, size: float, requests: float) -> tuple[float, bool]:
        """Share of the bandwidth, and whether it is interpolated; edges are held outside."""
        counts = sorted(self.knots)
        low = max((c for c in counts if c <= requests), default=counts[0])
        high = min((c for c in counts if c >= requests), default=counts[-1])
        inside = counts[0] <= requests <= counts[-1]
        values = []
        for count in (low, high):
            x, y = self.knots[count]
            inside &= x[0] - np.log(EDGE) <= np.log(size) <= x[-1] + np.log(EDGE)
            values.append(float(np.interp(np.log(size), x, y)))
        share = 0.0 if low == high else np.log(requests / low) / np.log(high / low)
        return float(np.exp(values[0] + share * (values[1] - values[0]))), bool(inside)

    def time(
        self, moved_bytes: float, size: float, requests: float = 1, gb_per_s: float | None = None
    ) -> Time:
        """One layer's time; `gb_per_s` lends the utilisation to a card of that bandwidth."""
        utilisation, inside = self.utilisation(size, requests)
        moving = moved_bytes / ((gb_per_s or self.gb_per_s) * utilisation * 1e6)
        return Time(self.launch_ms + moving, inside)


def points(runs: pd.DataFrame, benches: Iterable[Path] = ()) -> pd.DataFrame:
    """One row for each phase of each run, and of each kernel benchmark, that bears on a kernel.

    Runs of models that the lab has no file for, of mixed layers, and superseded ones are left out.
    """
    rows = []
    for run in latest(runs).itertuples():
        try:
            strategy, model = parse(run.strategy), load_model(run.model)
        except LabError:
            continue
        if strategy.at(0) != strategy.at(run.layers - 1):
            continue  # which layers a phase's time belongs to is not recorded
        P, L, R = run.pool_tokens, run.live_tokens, run.new_tokens
        moves = strategy.at(0).moves(model, P, L, R)
        common = dict(gpu=run.gpu, gb_per_s=run.gb_per_s, reads=strategy.reads)
        if moves.cast_bytes and run.cast_ms > 0:
            rows.append(
                dict(
                    common,
                    phase="cast",
                    kernel=strategy.at(0).label,
                    heads=0,
                    requests=1,
                    size=moves.cast_bytes,
                    bytes=moves.cast_bytes,
                    ms=run.cast_ms / run.layers,
                    exact=True,
                )
            )
        # Attention behind a cast is a difference of two long times: used only for want of better.
        rows.append(
            dict(
                common,
                phase="attention",
                kernel=run.backend,
                heads=run.heads,
                requests=R,
                size=L / R,
                bytes=moves.attention_bytes,
                ms=run.attention_ms / run.layers,
                exact=not moves.cast_bytes,
            )
        )
        rows.append(
            dict(
                common,
                phase="write",
                kernel="+".join(strategy.at(0).kinds),
                heads=0,
                requests=1,
                size=moves.write_bytes,
                bytes=moves.write_bytes,
                ms=run.write_ms / run.layers,
                exact=not moves.cast_bytes,
            )
        )
    known = {(r["kernel"], r["gpu"], r["heads"]) for r in rows if r["phase"] == "attention"}
    for path in benches:
        rows += bench_points(path, known)
    frame = pd.DataFrame(rows + _published())
    best = frame.groupby(KEY)["exact"].transform("any")
    return frame[(frame.exact | ~best) & (frame.ms > 0)]


def latest(runs: pd.DataFrame) -> pd.DataFrame:
    """The newest run of each cell, CUDA-graph replay where there is one, with its card's name."""
    if runs.empty:
        return runs.assign(gpu=[], gb_per_s=[])
    cards = {title: _card_of(title) for title in runs["origin.device"].unique()}
    runs = runs.assign(
        gpu=[cards[t].name if cards[t] else t for t in runs["origin.device"]],
        gb_per_s=[
            cards[t].bandwidth_gb_per_s if cards[t] else copy
            for t, copy in zip(runs["origin.device"], runs["origin.copy_gb_per_s"], strict=True)
        ],
    )
    has_graph = runs.groupby("gpu")["mode"].transform(lambda modes: (modes == "graph").any())
    runs = runs[(runs["mode"] == "graph") | ~has_graph].sort_values("origin.date")
    return runs.drop_duplicates(CELL, keep="last")


def _card_of(driver_name: str) -> machine.Card | None:
    entries = facts.catalogue("gpus").values()
    found = [e["name"] for e in entries if driver_name in (*e["driver_names"], e["name"])]
    return machine.card(found[0]) if found else None


def _published() -> list[dict]:
    """The case's own cast: it calibrates `full_cast` on the cards the case may have had."""
    case = facts.find("published", "published result", "case")
    model = load_model(case["model"])
    moved = parse("full_cast").moves(model, case["pool_tokens"], 0, 0).cast_bytes
    return [
        dict(
            gpu=gpu,
            gb_per_s=machine.card(gpu).bandwidth_gb_per_s,
            reads="bf16",
            phase="cast",
            kernel="full_cast",
            heads=0,
            requests=1,
            size=moved,
            bytes=moved,
            ms=case["cast_ms"] / model.layers,
            exact=True,
        )
        for gpu in case["gpu"]
    ]


def curve(rows: pd.DataFrame) -> Curve:
    """The curve through all points of one key; repeated sizes enter by their median."""
    rows = rows.groupby(["requests", "size"], as_index=False)[["bytes", "ms", "gb_per_s"]].median()
    smallest = rows.groupby("bytes", as_index=False).ms.median()
    launch = 0.0
    if len(smallest) > 1:
        (b0, t0), (b1, t1) = smallest.to_numpy()[:2]
        launch = max(0.0, min(t0 - (t1 - t0) / (b1 - b0) * b0, 0.98 * float(rows.ms.min())))
    share = rows.bytes / (rows.gb_per_s * (rows.ms - launch) * 1e6)
    knots = {
        int(count): (np.log(part["size"].to_numpy()), np.log(share[part.index].to_numpy()))
        for count, part in rows.sort_values("size").groupby("requests")
    }
    return Curve(launch, float(rows.gb_per_s.median()), knots)


@dataclass(frozen=True)
class Fit:
    """All curves of some runs, by (phase, kernel, GPU, heads); `reads` by attention kernel."""

    curves: dict[tuple[str, str, str, int], Curve]
    reads: dict[str, str]
    weight: dict[tuple[str, str, str, int], int]  # recorded sizes behind each curve

    def keys(self, phase: str, kernels: Iterable[str] | None = None) -> list[tuple]:
        """The fitted keys of a phase, of some kernels, those with most sizes behind them first."""
        wanted = None if kernels is None else set(kernels)
        found = [k for k in self.curves if k[0] == phase and (wanted is None or k[1] in wanted)]
        return sorted(found, key=lambda k: (-self.weight[k], k))


def fit(runs: pd.DataFrame | None = None, benches: Iterable[Path] = ()) -> Fit:
    """Fit recorded runs; those under data/runs, and its kernel benchmarks, if none are given."""
    if runs is None:
        return _fit_of(_files())
    found = points(runs, benches)
    groups = dict(list(found.groupby(KEY)))
    kernels = found[found.phase == "attention"]
    return Fit(
        {k: curve(g) for k, g in groups.items()},
        dict(zip(kernels.kernel, kernels.reads, strict=True)),
        {k: len(g) for k, g in groups.items()},
    )


def recorded() -> pd.DataFrame:
    """All runs under data/runs, read again when a file changes."""
    return _read(_files())


def bench_points(path: Path, known: set[tuple]) -> list[dict]:
    """Attention kernels timed by `shadowkv bench kernels` that no run has: (kernel, GPU, heads).

    Its peers there are those that a run does not choose by itself, such as fa2 beside fa3.
    """
    entry, rows = json.loads(path.read_text()), []
    card = _card_of(entry["origin"]["device"])
    for row in entry["rows"]:
        name = row["kernel"].replace("flashinfer bf16 ", "flashinfer_")
        name = re.sub(r"flashinfer native_fp8 (\w+)", r"flashinfer_\1_fp8", name)
        name = "lab_fused_fp8" if name == "fused_fp8" else name
        load = re.fullmatch(r"(\d+) x (\d+)", row["shape"])
        if not (card and load and row["heads"]) or (name, card.name, row["heads"]) in known:
            continue
        R, n = int(load[1]), int(load[2])
        reads = name if "fp8" in name else "bf16"
        reads = {"lab_fused_fp8": "fused_fp8"}.get(reads, "native_fp8" if "fp8" in reads else reads)
        a_layer = R * n * ROW_BYTES[reads]
        rows.append(
            dict(
                gpu=card.name,
                gb_per_s=card.bandwidth_gb_per_s,
                reads=reads,
                exact=True,
                phase="attention",
                kernel=name,
                heads=row["heads"],
                requests=R,
                size=n,
                bytes=a_layer,
                ms=row["ms"] * a_layer / row["bytes"],
            )
        )
    return rows


def _files() -> tuple:
    return tuple((p, p.stat().st_mtime_ns) for p in sorted(facts.RUNS.glob("*.jsonl")))


@cache
def _read(files: tuple) -> pd.DataFrame:
    return records.read()


@cache
def _fit_of(files: tuple) -> Fit:
    return fit(_read(files), sorted(facts.RUNS.glob("*_kernels.json")))

"""Utilisation of bandwidth per phase, kernel and GPU, fitted to recorded steps.

`time = launch + bytes / (bandwidth x utilisation)` per layer. The launch is what the two
smallest sizes leave at zero bytes; utilisation is then read off every recorded size and
interpolated between them in log space. Bandwidth is the datasheet's, so that a utilisation can
be lent to another card; on a device without a card file it is the copy bandwidth of the run.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from shadowkv_lab import facts, machine
from shadowkv_lab.model import load_model
from shadowkv_lab.steps import step as steps
from shadowkv_lab.steps.step import Step
from shadowkv_lab.strategies import parse

KEY = ["phase", "kernel", "gpu", "heads"]
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


def points(measured: Iterable[Step], benches: Iterable[Path] = ()) -> pd.DataFrame:
    """One row for each phase of each step, and of each kernel benchmark, that bears on a kernel.

    Phases of mixed layers and superseded steps are left out. `bytes`, `size` and `ms` are one
    layer's.
    """
    rows = []
    for s in replays(measured):
        card = machine.card_of(s.card)
        layers, R = s.setting.model.layers, s.setting.load.new_tokens
        casts = any(p.name == "cast" and p.bytes for p in s.phases)
        for p in s.phases:
            if p.curve is None or p.ms <= 0:
                continue
            attention = p.name == "attention"
            rows.append(
                dict(
                    gpu=s.card,
                    gb_per_s=card.bandwidth_gb_per_s if card else s.origin.copy_gb_per_s,
                    phase=p.name,
                    kernel=p.curve,
                    heads=s.setting.heads if attention else 0,
                    requests=R if attention else 1,
                    size=s.setting.load.live_tokens / R if attention else p.bytes / layers,
                    bytes=p.bytes / layers,
                    ms=p.ms / layers,
                    # Behind a cast, attention and write are differences of two long times: used
                    # only if there is nothing better.
                    exact=p.name == "cast" or not casts,
                )
            )
    known = {(r["kernel"], r["gpu"], r["heads"]) for r in rows if r["phase"] == "attention"}
    for path in benches:
        rows += bench_points(path, known)
    frame = pd.DataFrame(rows + _published())
    best = frame.groupby(KEY)["exact"].transform("any")
    return frame[frame.exact | ~best]


def replays(measured: Iterable[Step]) -> list[Step]:
    """The newest step of each cell; of a card's CUDA-graph replays only, where it has some."""
    newest = steps.latest(measured)
    graphs = {s.card for s in newest if s.mode == "graph"}
    return [s for s in newest if s.mode == "graph" or s.card not in graphs]


def reads_of(kernel: str) -> str:
    """What an attention kernel reads: "bf16", "fused_fp8" (the lab's own), "native_fp8"."""
    if kernel == "lab_fused_fp8":
        return "fused_fp8"
    return "native_fp8" if kernel.endswith("_fp8") else "bf16"


def _published() -> list[dict]:
    """The GLM-5 report's own cast: it calibrates `full_cast` on the cards it may have had."""
    case = facts.find("published", "published result", "case")
    model = load_model(case["model"])
    moved = parse("full_cast").moves(model, case["pool_tokens"], 0, 0).cast_bytes
    return [
        dict(
            gpu=gpu,
            gb_per_s=machine.card(gpu).bandwidth_gb_per_s,
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
    """All curves of some steps, by (phase, kernel, GPU, heads)."""

    curves: dict[tuple[str, str, str, int], Curve]
    weight: dict[tuple[str, str, str, int], int]  # recorded sizes behind each curve

    def keys(self, phase: str, kernels: Iterable[str] | None = None) -> list[tuple]:
        """The fitted keys of a phase, of some kernels, those with most sizes behind them first."""
        wanted = None if kernels is None else set(kernels)
        found = [k for k in self.curves if k[0] == phase and (wanted is None or k[1] in wanted)]
        return sorted(found, key=lambda k: (-self.weight[k], k))


def fit(measured: Sequence[Step] | None = None, benches: Iterable[Path] = ()) -> Fit:
    """Fit recorded steps; those under data/runs, and its kernel benchmarks, if none are given."""
    if measured is None:
        return _fit_of(facts.stamps("runs", "*.jsonl"), facts.stamps("runs", "*_kernels.json"))
    groups = dict(list(points(measured, benches).groupby(KEY)))
    return Fit({k: curve(g) for k, g in groups.items()}, {k: len(g) for k, g in groups.items()})


@cache
def _fit_of(runs: tuple, benches: tuple) -> Fit:
    return fit(steps.recorded(), [path for path, _ in benches])


def bench_points(path: Path, known: set[tuple]) -> list[dict]:
    """Attention kernels timed by `shadowkv bench kernels` that no step has: (kernel, GPU, heads).

    Its peers there are those that a step does not choose by itself, such as fa2 beside fa3.
    """
    entry, rows = json.loads(path.read_text()), []
    card = machine.card_of(entry["origin"]["device"])
    model = load_model("glm-5")  # its latent row is every bench's
    for row in entry["rows"]:
        name = row["kernel"].replace("flashinfer bf16 ", "flashinfer_")
        name = re.sub(r"flashinfer native_fp8 (\w+)", r"flashinfer_\1_fp8", name)
        name = "lab_fused_fp8" if name == "fused_fp8" else name
        load = re.fullmatch(r"(\d+) x (\d+)", row["shape"])
        if not (card and load and row["heads"]) or (name, card.name, row["heads"]) in known:
            continue
        R, n = int(load[1]), int(load[2])
        a_layer = R * n * model.row_bytes("bf16" if reads_of(name) == "bf16" else "fp8")
        rows.append(
            dict(
                gpu=card.name,
                gb_per_s=card.bandwidth_gb_per_s,
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

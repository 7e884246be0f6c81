"""Runs of a real server, one side per strategy: what was predicted, and what came.

A run is a folder as `scripts/server_bench.py` writes it: `run.json` (its id, card, versions, flags)
and one folder per side with `bench.jsonl`, `server.log`, and `profile.json` or `trace.json.gz`.
All sides of a run come from one card with the same flags, so that ratios are formed inside a run
only. The lab's own runs are under data/runs/server.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import pandas as pd

from shadowkv_lab import facts, files, machine
from shadowkv_lab.deployment import Setting
from shadowkv_lab.errors import BadFile, LabError, UnknownName
from shadowkv_lab.load import Load
from shadowkv_lab.model import load_model
from shadowkv_lab.steps.predict import predict_at
from shadowkv_lab.strategies import parse

FOLDER = ("runs", "server")
WITHIN = 0.05  # how far a prediction may be off
# What a strategy changes in a step, by the kernels' names in FlashInfer, SGLang, torch and here.
GROUPS = {
    "attention": ("BatchMLA", "pairs_kernel", "warps_kernel", "combine_kernel"),
    "FP8 conversions of new rows": ("float8_copy_kernel_cuda",),
    "write to the pool": ("set_mla_kv_buffer_kernel", "append_kernel"),  # ours mirrors as well
    "mirror of new rows": ("widen_kernel",),
    "copies of queries": ("elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast",),
}
CONTROL = "bf16"  # the side whose time gives the rest: it casts nothing
# A side's name, where it is not its strategy's: an SGLang without the plug-in, and part of a copy.
STRATEGY = {"plain": "full_cast", "bf16": "bf16_pool", "shadow-26": "shadow(layers=26)"}


@dataclass(frozen=True)
class Measured:
    """One side under one load: what one request's token took, by repeats, in ms.

    With one request it is the TPOT; with more the time between tokens once all have started, since
    a TPOT then holds the prefills of others. `tokens` is a hash of all tokens that came.
    """

    side: str
    requests: int
    input_tokens: int
    output_tokens: int
    times_ms: tuple[float, ...]
    tokens: str

    @property
    def load(self) -> tuple[int, int]:
        return self.requests, self.input_tokens

    @property
    def ms(self) -> float:
        """The median of the repeats."""
        return median(self.times_ms)

    @property
    def spread_ms(self) -> float:
        """How far the repeats lie apart."""
        return max(self.times_ms) - min(self.times_ms)

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together, while all of them decode."""
        return 1000 * self.requests / self.ms


@dataclass(frozen=True)
class ServerRun:
    """A run: `info` is its run.json, `folder` where its sides lie."""

    folder: Path
    info: dict

    @property
    def sides(self) -> list[str]:
        """The sides in the order of their strategies; the control last."""
        found = [p.parent.name for p in self.folder.glob("*/bench.jsonl")]
        return sorted(found, key=lambda side: (side == CONTROL, parse(strategy(side)).tag.order))

    def measured(self, side: str) -> list[Measured]:
        """What a side took, load by load; warm-ups are left out. Raises `BadFile`."""
        path = self.folder / side / "bench.jsonl"
        groups: dict[tuple, list[dict]] = defaultdict(list)
        for line in files.read_lines(path):
            try:
                names = ("max_concurrency", "random_input_len", "random_output_len")
                if not line.get("warm_up"):
                    groups[tuple(int(line[n]) for n in names)].append(line)
            except (KeyError, TypeError, ValueError) as error:
                raise BadFile(
                    f"{path} has a line without {error}", "server_bench's lines"
                ) from None
        found = []
        for load, lines in groups.items():
            name = "mean_tpot_ms" if load[0] == 1 else "steady_itl_ms"
            times = tuple(line.get(name) for line in lines)
            if not all(isinstance(t, int | float) and t > 0 for t in times):
                raise BadFile(f"{path} has a line without {name}", "server_bench's lines")
            tokens = {str(line.get("ids_sha1")) for line in lines}
            found.append(Measured(side, *load, times, "|".join(sorted(tokens))))
        return found

    @cached_property
    def all(self) -> list[Measured]:
        """Every side under every load."""
        return [m for side in self.sides for m in self.measured(side)]

    def predicted_ms(self, of: Measured) -> float:
        """What the lab predicts for a side: the control's time less its own predicted step, plus
        the strategy's predicted step. NaN without a control of that load, and for the control.
        """
        control = next((m for m in self.all if m.side == CONTROL and m.load == of.load), None)
        if control is None or of.side == CONTROL:
            return math.nan
        steps = [self._step_ms(side, of) for side in (CONTROL, of.side)]
        return control.ms - steps[0] + steps[1]

    def _step_ms(self, side: str, of: Measured) -> float:
        model = load_model(self.info["model"])
        card = machine.card_of(self.info["card"])
        if card is None:
            return math.nan
        # While its tokens are made, a request is on average half of its output longer.
        load = Load(of.requests, of.input_tokens + of.output_tokens / 2)
        heads = model.heads // int(self.info["tensor_parallel"])
        pool, page = int(self.info["pool_tokens"]), int(self.info["page_size"])
        try:
            setting = Setting(model, heads, pool, load, page)
            return predict_at(strategy(side), setting, card.name).ms
        except LabError:  # no evidence for it: nothing is predicted
            return math.nan

    def table(self) -> pd.DataFrame:
        """A row per side and load: measured, predicted, how far the prediction is off.

        `same_tokens` compares with the plain side; None where there is none, or nothing to compare.
        `kept` says whether the prediction is within 5 %.
        """
        plain = {m.load: m.tokens for m in self.all if m.side == "plain"}
        rows = []
        for m in self.all:
            predicted = self.predicted_ms(m)
            off = predicted / m.ms - 1
            same = None if m.side == "plain" or m.load not in plain else m.tokens == plain[m.load]
            rows.append(
                dict(
                    side=m.side,
                    requests=m.requests,
                    input=m.input_tokens,
                    ms=m.ms,
                    spread_ms=m.spread_ms,
                    tokens_per_s=m.tokens_per_s,
                    predicted_ms=predicted,
                    off=off,
                    kept=None if math.isnan(off) else abs(off) <= WITHIN,
                    same_tokens=same,
                )
            )
        return pd.DataFrame(rows)

    def memory(self) -> pd.DataFrame:
        """GiB per side as the server itself reported them, and MiB that the driver saw in use."""
        rows = []
        for side in self.sides:
            first = files.read_lines(self.folder / side / "bench.jsonl")[0]
            told = (first.get("server_info") or {}).get("memory_usage") or {}
            beside = self.folder / side / "side.json"
            used = files.read_json(beside).get("memory_used_mib") if beside.exists() else None
            graphs = told.get("graph")
            rows.append(
                dict(
                    side=side,
                    weights_gib=told.get("weight"),
                    kv_gib=told.get("kvcache"),
                    graphs_gib=graphs.get("decode") if isinstance(graphs, dict) else None,
                    used_gib=None if used is None else used / 1024,
                )
            )
        return pd.DataFrame(rows)

    def profile(self, side: str) -> dict | None:
        """A side's profile, kept or read from its trace; None where there is none."""
        kept, trace = (self.folder / side / n for n in ("profile.json", "trace.json.gz"))
        if kept.exists():
            return files.read_json(kept)
        return profile(trace) if trace.exists() else None

    def spent(self) -> pd.DataFrame:
        """Of the sides with a profile: ms per step in each of `GROUPS`, and in the step's graph.

        The graph's time is that in which a kernel runs, and idle time between them.
        """
        found = {side: p for side in self.sides if (p := self.profile(side))}
        columns = {}
        for side, p in found.items():
            told = {name: p["groups"][name][1] for name in GROUPS}
            told |= {"graph": p["graph_ms"], "idle in it": p["graph_ms"] - p["graph_busy_ms"]}
            columns[side] = told | {"launches in it": p["graph_launches"]}
        return pd.DataFrame(columns)


def strategy(side: str) -> str:
    """The label of the strategy that a side ran."""
    return STRATEGY.get(side, side)


def read(folder: str | Path) -> ServerRun:
    """The run in a folder. Raises `BadFile`."""
    folder = Path(folder)
    info = files.read_json(folder / "run.json")
    wanted = ("id", "date", "card", "model", "tensor_parallel", "pool_tokens", "page_size")
    if missing := [name for name in wanted if name not in info]:
        raise BadFile(
            f"{folder / 'run.json'} lacks {', '.join(missing)}", "server_bench's run.json"
        )
    return ServerRun(folder, info)


def recorded() -> list[ServerRun]:
    """The runs that the lab ships, and those under SHADOWKV_DATA, by date."""
    folders = {
        path.parent.name: path.parent
        for layer in facts.layers()
        for path in layer.joinpath(*FOLDER).glob("*/run.json")
    }
    return sorted(map(read, folders.values()), key=lambda run: str(run.info["date"]))


def find(name: str) -> ServerRun:
    """A recorded run by its id. Raises `UnknownName`."""
    found = {run.info["id"]: run for run in recorded()}
    if name not in found:
        raise UnknownName("server run", name, found)
    return found[name]


def profile(path: str | Path) -> dict:
    """What decode steps of a server's trace spent, per step: ms by kernel, and in its graph.

    `kernels` are (name, launches, ms); `groups` (launches, ms) of `GROUPS`, overlaps counted once.
    `graph_ms`, `graph_busy_ms` and `graph_launches` are medians over the replays of the step's
    CUDA graph; busy is the time in which at least one kernel ran. Raises `BadFile` for a trace
    whose steps the GPU does not mark.
    """
    content = files.read_json(path, dict | list, unique=False)
    events = content.get("traceEvents") if isinstance(content, dict) else content
    events = [e for e in events or [] if isinstance(e, dict) and e.get("ph") == "X"]
    kernels = sorted(
        (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
        key=lambda e: e["ts"],
    )
    marks: dict[tuple, list] = defaultdict(list)
    for event in events:
        if event.get("cat") == "gpu_user_annotation" and event["name"].startswith("step[DECODE"):
            marks[event.get("pid"), event.get("tid")].append(event)
    if not kernels or not marks:
        raise BadFile(f"{path} marks no decode steps on the GPU", "SGLang's traces of decode steps")
    # SGLang marks a step on two streams: the shorter mark is the graph's replay alone.
    spans = min(marks.values(), key=lambda each: median(e["dur"] for e in each))
    spans = [(mark["ts"], mark["ts"] + mark["dur"]) for mark in spans]
    sums: dict[str, list] = defaultdict(lambda: [0, 0.0])
    for event in kernels:
        sums[event["name"]][0] += 1
        sums[event["name"]][1] += event["dur"]
    steps, starts = len(spans), [e["ts"] for e in kernels]
    inside = [kernels[bisect_left(starts, a) : bisect_right(starts, b)] for a, b in spans]
    return dict(
        steps=steps,
        graph_ms=round(median(b - a for a, b in spans) / 1e3, 4),
        graph_busy_ms=round(median(map(_busy_us, inside)) / 1e3, 4),
        graph_launches=median(map(len, inside)),
        groups={
            group: [len(part) / steps, round(_busy_us(part) / steps / 1e3, 5)]
            for group, names in GROUPS.items()
            for part in [[e for e in kernels if any(name in e["name"] for name in names)]]
        },
        kernels=[
            [name, count / steps, round(us / steps / 1e3, 5)]
            for name, (count, us) in sorted(sums.items(), key=lambda item: -item[1][1])
        ],
    )


def _busy_us(launches: list[dict]) -> float:
    """Microseconds in which at least one of these kernels, sorted by start, ran."""
    busy, end = 0.0, -math.inf
    for event in launches:
        stop = event["ts"] + event["dur"]
        busy += max(0.0, stop - max(event["ts"], end))
        end = max(end, stop)
    return busy

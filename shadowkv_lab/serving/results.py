"""How a simulated run went, in the names of the field: TTFT, TPOT, ITL, latency, goodput."""

from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shadowkv_lab.provenance import Provenance
from shadowkv_lab.serving.blocks import BlockManager
from shadowkv_lab.serving.lines import PS_PER_MS, PS_PER_S
from shadowkv_lab.serving.scheduler import Request, Scheduler
from shadowkv_lab.serving.traffic import Traffic

if TYPE_CHECKING:
    from shadowkv_lab.serving.simulate import Engine

PERCENTILES = (50, 90, 99)


class Spread(NamedTuple):
    """Mean and percentiles, interpolated as numpy does by default; NaN where there is nothing."""

    mean: float
    p50: float
    p90: float
    p99: float


class Objective(NamedTuple):
    """What a user will bear: ms to the first token, ms per token after it."""

    ttft_ms: float = 5000.0
    tpot_ms: float = 100.0


OBJECTIVE = Objective()


class Log:
    """What happened along the way; columns of integers, times in picoseconds."""

    def __init__(self, requests: int):
        # By request; -1 for one that was refused.
        self.admitted, self.first, self.end = (array("q", [-1]) * requests for _ in range(3))
        self.preempted = array("i", [0]) * requests
        # Two lines per event: before it, and after it.
        self.at = array("q")
        self.admissions, self.preemptions = array("i"), array("i")
        self.running, self.free = array("i"), array("i")
        # Runs of steps: requests in each, its first duration, the growth per step, how many.
        self.gap_runs = tuple(array(kind) for kind in "iqqi")
        self.decode_steps = self.live_rows = self.shared_rows = 0

    def sample(self, now: int, scheduler: Scheduler, running: int, free: int) -> None:
        """Running requests and pages to be had before an event, and after it."""
        after = len(scheduler.running), scheduler.blocks.available
        for running_then, free_then in ((running, free), after):
            self.at.append(now)
            self.admissions.append(scheduler.admissions)
            self.preemptions.append(scheduler.preemptions)
            self.running.append(running_then)
            self.free.append(free_then)

    def gaps(self, running: int, first: int, growth: int, steps: int) -> None:
        """`steps` steps in a row: each of `running` requests had a token after each."""
        runs = self.gap_runs
        runs[0].append(running)
        runs[1].append(first)
        runs[2].append(growth)
        runs[3].append(steps)

    def decoded(self, blocks: BlockManager, steps: int) -> None:
        """`steps` decode steps are over; the last one read the live rows as they are now."""
        grown = blocks.decoding * (steps * (steps - 1) // 2)
        self.decode_steps += steps
        self.live_rows += blocks.live_tokens * steps - grown
        if blocks.cache:
            self.shared_rows += blocks.cache.shared_tokens * steps

    def finish(self, request: Request, now: int) -> None:
        id = request.id
        self.admitted[id], self.first[id], self.end[id] = request.admitted, request.first, now
        self.preempted[id] = request.preemptions


@dataclass(frozen=True, eq=False)
class Results:
    """One run. Arrays of ms have one value per finished request, in the order of arrival.

    TTFT = first token - arrival. Latency = last token - arrival. TPOT = (latency - TTFT) /
    (output tokens - 1), of requests with two tokens or more. ITL = the time between two tokens of
    one request, over all such pairs, preemptions included.
    """

    engine: "Engine"
    traffic: Traffic
    arrivals: array  # ps of every request
    refused: list[Request]
    scheduler: Scheduler
    log: Log

    @cached_property
    def served(self) -> np.ndarray:
        """Indices of the finished requests."""
        return np.flatnonzero(np.asarray(self.log.end) >= 0)

    @property
    def finished(self) -> int:
        """How many finished."""
        return len(self.served)

    @property
    def provenance(self) -> Provenance:
        """Of every time here: the weaker of the step's and the prefill's."""
        cast = self.engine.prefill_cast
        known = self.engine.step.provenance + self.engine.prefill
        return known + cast.provenance if cast else known

    def times(self, name: str) -> np.ndarray:
        """int64 ps of the finished requests: arrivals, admitted, first or end."""
        column = self.arrivals if name == "arrivals" else getattr(self.log, name)
        return np.asarray(column)[self.served]

    @cached_property
    def ttft_ms(self) -> np.ndarray:
        return (self.times("first") - self.times("arrivals")) / PS_PER_MS

    @cached_property
    def tpot_ms(self) -> np.ndarray:
        """NaN for a request of one token."""
        after = self.traffic.output_tokens[self.served] - 1
        span = self.times("end") - self.times("first")
        return np.where(after > 0, span / (PS_PER_MS * np.maximum(after, 1)), np.nan)

    @cached_property
    def latency_ms(self) -> np.ndarray:
        return (self.times("end") - self.times("arrivals")) / PS_PER_MS

    @cached_property
    def itl_ms(self) -> Spread:
        """Exact over all token pairs, without a list of them: runs of steps are counted."""
        return gap_spread(*map(np.asarray, self.log.gap_runs))

    @cached_property
    def duration_s(self) -> float:
        """From the first arrival to the last token."""
        if not self.finished:
            return 0.0
        return float(self.times("end").max() - self.arrivals[0]) / PS_PER_S

    @property
    def output_tokens(self) -> int:
        return int(self.traffic.output_tokens[self.served].sum())

    @property
    def cached_share(self) -> float:
        """Of the prompt rows that were admitted, those that were found in the prefix cache."""
        prompts = int(self.traffic.prompt_tokens[self.served].sum())
        rows = prompts + self.scheduler.recomputed_tokens
        return self.scheduler.cached_tokens / rows if rows else 0.0

    @property
    def shared_share(self) -> float:
        """Of the rows that the decode steps read, those that another running request holds too."""
        return self.log.shared_rows / self.log.live_rows if self.log.live_rows else 0.0

    def within(self, objective: Objective) -> np.ndarray:
        """Which finished requests met both objectives; one token has no TPOT to miss."""
        tpot = np.nan_to_num(self.tpot_ms)
        return (self.ttft_ms <= objective.ttft_ms) & (tpot <= objective.tpot_ms)

    def summary(self, objective: Objective = OBJECTIVE) -> dict[str, float | int | str]:
        """One flat row: names as benchmarks print them, units in the names."""
        row = {"label": self.engine.label, "provenance": str(self.provenance)}
        row |= {"requests": len(self.traffic), "finished": self.finished}
        row |= {"refused": len(self.refused), "duration_s": self.duration_s}
        seconds = self.duration_s or np.nan
        row["output_tokens_per_s"] = self.output_tokens / seconds
        row["requests_per_s"] = self.finished / seconds
        good = int(self.within(objective).sum())
        row["goodput_share"] = good / len(self.traffic)
        row["goodput_requests_per_s"] = good / seconds
        spreads = {
            "ttft_ms": spread(self.ttft_ms),
            "tpot_ms": spread(self.tpot_ms),
            "itl_ms": self.itl_ms,
            "latency_ms": spread(self.latency_ms),
        }
        for name, values in spreads.items():
            row |= {f"{part}_{name}": value for part, value in values._asdict().items()}
        row["preemptions"] = self.scheduler.preemptions
        row["recomputed_tokens"] = self.scheduler.recomputed_tokens
        row["queue_max"] = int(self.queue()[1].max(initial=0))
        row["kv_use_max"] = float(self.kv_use()[1].max(initial=0.0))
        return row | {"cached_share": self.cached_share, "shared_share": self.shared_share}

    def kv_use(self) -> tuple[np.ndarray, np.ndarray]:
        """(seconds, share of the pool's pages taken); straight between two points."""
        share = 1 - np.asarray(self.log.free) / self.scheduler.blocks.total
        return np.asarray(self.log.at) / PS_PER_S, share

    def queue(self) -> tuple[np.ndarray, np.ndarray]:
        """(seconds, requests that wait), a value that holds until the next point."""
        arrived = np.sort(self.times("arrivals"))
        at = np.asarray(self.log.at)
        times = np.concatenate([arrived, at])
        times.sort()  # np.unique hashes, which takes ten times the memory
        times = times[np.diff(times, prepend=-1) > 0]
        change = np.asarray(self.log.preemptions) - np.asarray(self.log.admissions)
        last = np.searchsorted(at, times, side="right") - 1
        left = np.where(last >= 0, change[np.maximum(last, 0)] if len(at) else 0, 0)
        return times / PS_PER_S, np.searchsorted(arrived, times, side="right") + left

    def refusals(self) -> list[str]:
        """Why each refused request could not be served, by name."""
        room = self.scheduler.blocks.total * self.scheduler.blocks.page_size
        return [
            f"request {r.id}: {r.prompt:,} prompt + {r.output:,} output tokens need "
            f"{self.scheduler.rows_needed(r):,} rows, the pool holds {room:,}"
            for r in self.refused
        ]


def spread(values: np.ndarray) -> Spread:
    """Mean and percentiles of the values that are numbers."""
    values = values[~np.isnan(values)]
    if not len(values):
        return Spread(*[np.nan] * 4)
    return Spread(float(values.mean()), *map(float, np.percentile(values, PERCENTILES)))


def gap_spread(weight, first, growth, steps) -> Spread:
    """ms over runs of steps: `weight` requests each, `first` ps, `growth` more with each step."""
    weight = weight.astype(np.float64)  # 2**53 tokens are enough
    counts = weight * steps
    if not (count := int(counts.sum())):
        return Spread(*[np.nan] * 4)
    last = first + growth * (steps - 1)
    mean = float((counts * ((first + last) / 2)).sum() / count) / PS_PER_MS
    runs = _Runs(weight, np.minimum(first, last), np.abs(growth), steps)
    quantiles = []
    for q in PERCENTILES:  # as numpy's default over the list of all gaps
        rank = q / 100 * (count - 1)
        lower, upper = runs.ranked(int(rank))
        quantiles.append((lower + (upper - lower) * (rank - int(rank))) / PS_PER_MS)
    return Spread(mean, *quantiles)


class _Runs(NamedTuple):
    """Runs of gaps that rise: a falling one counts the same backwards."""

    weight: np.ndarray
    first: np.ndarray
    growth: np.ndarray
    steps: np.ndarray

    @property
    def last(self) -> np.ndarray:
        return self.first + self.growth * (self.steps - 1)

    def ranked(self, rank: int) -> tuple[int, int]:
        """The gap with `rank` smaller or equal ones before it, and the one after it.

        Bisection over whole ps; runs wholly above or below what is left are counted once.
        """
        runs, last, below = self, self.last, 0.0
        low, high = int(runs.first.min()), int(last.max())
        while low < high:
            middle = (low + high) // 2
            counted = runs.up_to(middle)
            if below + counted.sum() > rank:
                high, kept = middle, runs.first <= middle
            else:
                low, kept = middle + 1, last > middle
                below += counted[~kept].sum()
            runs, last = _Runs(*(column[kept] for column in runs)), last[kept]
        return low, low if self.up_to(low).sum() > rank + 1 else self.after(low)

    def up_to(self, gap: int) -> np.ndarray:
        """How many gaps of each run are at most `gap`."""
        steps = np.clip((gap - self.first) // np.maximum(self.growth, 1) + 1, 0, self.steps)
        level = np.where(self.first <= gap, self.steps, 0)
        return self.weight * np.where(self.growth > 0, steps, level)

    def after(self, gap: int) -> int:
        """The least gap above `gap`; `gap` itself where there is none."""
        each = np.maximum(self.growth, 1)
        step = np.clip((gap - self.first) // each + 1, 0, self.steps - 1)
        above = self.first + self.growth * step
        above = above[above > gap]
        return int(above.min()) if len(above) else gap

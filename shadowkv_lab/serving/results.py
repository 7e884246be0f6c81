"""How a simulated run went, in the names of the field: TTFT, TPOT, ITL, latency, goodput."""

from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shadowkv_lab.serving.steps import FS_PER_MS, FS_PER_S, weakest

if TYPE_CHECKING:
    from shadowkv_lab.serving.scheduler import Request, Scheduler
    from shadowkv_lab.serving.simulate import Engine
    from shadowkv_lab.serving.traffic import Traffic

PERCENTILES = (50, 90, 99)
MOST_FS = 2**63 - 1


class Spread(NamedTuple):
    """Mean and percentiles, interpolated as numpy does by default; NaN where there is nothing."""

    mean: float
    p50: float
    p90: float
    p99: float


class Objective(NamedTuple):
    """What a user will bear: ms to the first token, ms a token after it."""

    ttft_ms: float = 5000.0
    tpot_ms: float = 100.0


OBJECTIVE = Objective()


class Log:
    """What happened along the way; columns of integers, times in femtoseconds."""

    def __init__(self):
        # Times pass int64 after 2.6 hours; a float holds them to a picosecond for four.
        self.at_s = array("d")
        self.admissions, self.preemptions = array("q"), array("q")
        self.running, self.free = array("q"), array("q")
        # Runs of steps: requests in each, its first duration, the growth a step, how many.
        self.gap_runs = tuple(array("q") for _ in range(4))
        self.gap_count = self.gap_total = 0
        self.decode_total = self.decode_steps = 0

    def sample(self, now: int, scheduler: "Scheduler", running: int, free: int) -> None:
        """Running requests and free pages before an event, and after it."""
        after = len(scheduler.running), scheduler.blocks.free
        for running_then, free_then in ((running, free), after):
            self.at_s.append(now / FS_PER_S)
            self.admissions.append(scheduler.admissions)
            self.preemptions.append(scheduler.preemptions)
            self.running.append(running_then)
            self.free.append(free_then)

    def gaps(self, running: int, first: int, growth: int, steps: int, span: int) -> None:
        """`steps` steps in a row: each of `running` requests had a token after each."""
        for column, value in zip(self.gap_runs, (running, first, growth, steps), strict=True):
            column.append(value)
        self.gap_count += running * steps
        self.gap_total += running * span
        self.decode_total += span
        self.decode_steps += steps

    def gap(self, fs: int) -> None:
        """One token after a preemption, so long after the one before.

        The percentiles count a gap of over 2.6 hours, the end of int64, as 2.6 hours.
        """
        for column, value in zip(self.gap_runs, (1, min(fs, MOST_FS), 0, 1), strict=True):
            column.append(value)
        self.gap_count += 1
        self.gap_total += fs


@dataclass(frozen=True, eq=False)
class Results:
    """One run. Arrays have one value a finished request, in the order of arrival.

    TTFT = first token - arrival. Latency = last token - arrival. TPOT = (latency - TTFT) /
    (output tokens - 1), of requests with two tokens or more. ITL = the time between two tokens of
    one request, over all such pairs, preemptions included.
    """

    engine: "Engine"
    traffic: "Traffic"
    requests: "list[Request]"
    refused: "list[Request]"
    scheduler: "Scheduler"
    log: Log

    @cached_property
    def finished(self) -> "list[Request]":
        return [r for r in self.requests if r.end >= 0]

    @property
    def provenance(self) -> str:
        """Of every time here: the weaker of the step's and the prefill's."""
        return weakest((self.engine.step.provenance, self.engine.prefill_provenance))

    @cached_property
    def ttft_ms(self) -> np.ndarray:
        return np.array([(r.first - r.arrival) / FS_PER_MS for r in self.finished])

    @cached_property
    def tpot_ms(self) -> np.ndarray:
        """NaN for a request of one token."""
        return np.array(
            [
                (r.end - r.first) / (FS_PER_MS * (r.output - 1)) if r.output > 1 else np.nan
                for r in self.finished
            ]
        )

    @cached_property
    def latency_ms(self) -> np.ndarray:
        return np.array([(r.end - r.arrival) / FS_PER_MS for r in self.finished])

    @cached_property
    def itl_ms(self) -> Spread:
        """Exact over all token pairs, without a list of them: runs of steps are counted."""
        if not self.log.gap_count:
            return Spread(*[np.nan] * 4)
        quantiles = [_run_quantile(self.log, q / 100) / FS_PER_MS for q in PERCENTILES]
        return Spread(self.log.gap_total / self.log.gap_count / FS_PER_MS, *quantiles)

    @cached_property
    def duration_s(self) -> float:
        """From the first arrival to the last token."""
        if not self.finished:
            return 0.0
        return (max(r.end for r in self.finished) - self.requests[0].arrival) / FS_PER_S

    @property
    def output_tokens(self) -> int:
        return sum(r.output for r in self.finished)

    def within(self, objective: Objective) -> np.ndarray:
        """Which finished requests met both objectives; one token has no TPOT to miss."""
        tpot = np.nan_to_num(self.tpot_ms)
        return (self.ttft_ms <= objective.ttft_ms) & (tpot <= objective.tpot_ms)

    def summary(self, objective: Objective = OBJECTIVE) -> dict[str, float | int | str]:
        """One flat row: names as benchmarks print them, units in the names."""
        row = {"label": self.engine.label, "provenance": self.provenance}
        row |= {"requests": len(self.requests), "finished": len(self.finished)}
        row |= {"refused": len(self.refused), "duration_s": self.duration_s}
        seconds = self.duration_s or np.nan
        row["output_tokens_per_s"] = self.output_tokens / seconds
        row["requests_per_s"] = len(self.finished) / seconds
        good = int(self.within(objective).sum()) if self.finished else 0
        row["goodput_share"] = good / len(self.requests)
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
        return row | {"kv_use_max": float(self.kv_use()[1].max(initial=0.0))}

    def kv_use(self) -> tuple[np.ndarray, np.ndarray]:
        """(seconds, share of the pool's pages taken); straight between two points."""
        share = 1 - np.array(self.log.free) / self.scheduler.blocks.total
        return np.array(self.log.at_s), share

    def queue(self) -> tuple[np.ndarray, np.ndarray]:
        """(seconds, requests that wait), a value that holds until the next point."""
        arrived = np.sort([r.arrival / FS_PER_S for r in self.requests if r.admitted >= 0])
        at = np.array(self.log.at_s)
        times = np.union1d(arrived, at)
        change = np.array(self.log.preemptions) - np.array(self.log.admissions)
        last = np.searchsorted(at, times, side="right") - 1
        left = np.where(last >= 0, change[np.maximum(last, 0)] if len(at) else 0, 0)
        return times, np.searchsorted(arrived, times, side="right") + left

    def refusals(self) -> list[str]:
        """Why each refused request could not be served, by name."""
        room = self.scheduler.blocks.total * self.scheduler.blocks.page_tokens
        return [
            f"request {r.id}: {r.prompt:,} prompt + {r.output:,} output tokens need "
            f"{r.most_rows:,} rows, the pool holds {room:,}"
            for r in self.refused
        ]


def spread(values: np.ndarray) -> Spread:
    """Mean and percentiles of the values that are numbers."""
    values = values[~np.isnan(values)]
    if not len(values):
        return Spread(*[np.nan] * 4)
    return Spread(float(values.mean()), *map(float, np.percentile(values, PERCENTILES)))


def _run_quantile(log: Log, share: float) -> float:
    """A quantile over runs of steps, as numpy's default over the list of all gaps would give."""
    weight, first, growth, steps = (np.array(column) for column in log.gap_runs)
    last = first + growth * (steps - 1)
    low_end, growth = np.minimum(first, last), np.abs(growth)  # a run counts the same backwards
    rank = share * (log.gap_count - 1)
    lower = _ranked(weight, low_end, growth, steps, int(rank))
    upper = _ranked(weight, low_end, growth, steps, min(int(rank) + 1, log.gap_count - 1))
    return lower + (upper - lower) * (rank - int(rank))


def _ranked(weight, first, growth, steps, rank: int) -> int:
    """The gap with `rank` smaller or equal ones before it: bisection over whole femtoseconds."""
    low, high = int(first.min()), int((first + growth * (steps - 1)).max())
    each = np.maximum(growth, 1)
    while low < high:
        middle = (low + high) // 2
        within = np.where(growth > 0, (middle - first) // each + 1, steps)
        counted = np.where(first <= middle, np.minimum(within, steps), 0)
        if int((weight * counted).sum()) > rank:
            high = middle
        else:
            low = middle + 1
    return low

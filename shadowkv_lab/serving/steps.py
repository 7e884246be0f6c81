"""Decode step time as the simulation needs it: lines over live tokens, in whole femtoseconds."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import NamedTuple, Protocol

from shadowkv_lab.errors import OutOfRange

# Time is counted in whole femtoseconds, so that k steps at once equal k steps, bit for bit.
FS_PER_MS = 10**12
FS_PER_S = 10**15
ENDLESS = 1 << 62
# From the firmest to the weakest. `predict` has the same; it imports torch, which this needs not.
PROVENANCES = ("measured", "recorded", "calibrated", "assumed")


class StepTime(Protocol):
    """ms of one decode step (rest + the strategy's step), and where that number comes from."""

    provenance: str

    def __call__(self, running: int, live_tokens: int) -> float: ...


@dataclass(frozen=True)
class Step:
    """A `StepTime` from any function of (running, live tokens) in ms."""

    ms: Callable[[int, int], float]
    provenance: str = "assumed"

    def __call__(self, running: int, live_tokens: int) -> float:
        return self.ms(running, live_tokens)


class Line(NamedTuple):
    """Step time `intercept_fs + slope_fs * live`, for live tokens up to and with `last_live`."""

    intercept_fs: int
    slope_fs: int
    last_live: int

    def fs(self, live_tokens: int) -> int:
        return self.intercept_fs + self.slope_fs * live_tokens

    def span_fs(self, live_tokens: int, running: int, steps: int) -> int:
        """Time of `steps` steps, of which the first reads `live_tokens`, each `running` more."""
        triangle = running * (steps * (steps - 1) // 2)
        return steps * self.fs(live_tokens) + self.slope_fs * triangle


class PiecewiseLinear:
    """A `StepTime` as lines between knots of live tokens, one set for each running count.

    A step that brings `knots(running) -> (live tokens, ms)` is taken at its word; any other is
    asked at `knots`: one that is linear in live tokens needs two, and is met to the femtosecond.
    Beyond the last knot the last line goes on. Raises `OutOfRange` for knots out of order and for a
    step time that is not above 0.
    """

    def __init__(self, step: StepTime, knots: Iterable[int]):
        self.step, self.provenance = step, step.provenance
        self.knots = list(knots)
        if len(self.knots) < 2 or self.knots[0] < 0 or sorted(set(self.knots)) != self.knots:
            raise OutOfRange(f"Knots {self.knots[:5]}", "two or more rising counts of live tokens")
        self._lines: dict[int, tuple[list[float], list[Line]]] = {}

    def __call__(self, running: int, live_tokens: int) -> float:
        """ms, as any `StepTime`."""
        return self.line(running, live_tokens).fs(live_tokens) / FS_PER_MS

    def line(self, running: int, live_tokens: int) -> Line:
        """The line that `running` requests are on at `live_tokens`."""
        if running not in self._lines:
            self._lines[running] = self._fit(running)
        starts, lines = self._lines[running]
        return lines[max(bisect_right(starts, live_tokens) - 1, 0)]

    def _fit(self, running: int) -> tuple[list[float], list[Line]]:
        own = getattr(self.step, "knots", None)
        if own is not None:
            live, ms = own(running)
        else:  # below one row a request there is no step
            live = [running, *(k for k in self.knots if k > running)]
            ms = [self.step(running, at) for at in live]
        if not min(ms) * FS_PER_MS >= 1:
            raise OutOfRange(f"A step of {min(ms)} ms at {running} requests", "above 0 ms")
        if len(live) == 1:
            return [live[0]], [Line(round(ms[0] * FS_PER_MS), 0, ENDLESS)]
        lines = []
        for (left, at), (right, then) in pairwise(zip(live, ms, strict=True)):
            slope = round((then - at) * FS_PER_MS / (right - left))
            last = ceil(right) - 1 if right < live[-1] else ENDLESS
            lines.append(Line(round(at * FS_PER_MS - slope * left), slope, last))
        return list(live[:-1]), lines


def piecewise(step: StepTime, capacity_tokens: int, knots: Iterable[int] = ()) -> PiecewiseLinear:
    """`step` as lines up to `capacity_tokens`; without `knots` or knots of its own, as one line."""
    if isinstance(step, PiecewiseLinear):
        return step
    inner = [k for k in knots if 0 < k < capacity_tokens]
    return PiecewiseLinear(step, [0, *inner, capacity_tokens])


def weakest(words: Iterable[str]) -> str:
    """The provenance of a number made from several: that of its weakest part."""
    return max(words, key=PROVENANCES.index)

"""Decode step time as the simulation needs it: lines over live tokens, in whole picoseconds."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.provenance import Provenance, assumed

# Time is counted in whole picoseconds, so that k steps at once equal k steps, bit for bit; an
# int64 holds 106 days of them.
PS_PER_MS = 10**9
PS_PER_S = 10**12
ENDLESS = 1 << 62


@dataclass(frozen=True)
class StepTime:
    """ms of one decode step, rest included, by running requests and their live tokens.

    `knots(running)` are counts of live tokens between which the time is taken as straight; without
    them it is one line up to a full pool.

    >>> StepTime(lambda running, live: 20 + 1e-4 * live)(8, 10_000)
    21.0
    """

    ms: Callable[[int, float], float]
    provenance: Provenance = field(default_factory=assumed)
    knots: Callable[[int], Sequence[float]] | None = None

    def __call__(self, running: int, live_tokens: float) -> float:
        return self.ms(running, live_tokens)


class Line(NamedTuple):
    """Step time `intercept_ps + slope_ps * live`, for live tokens up to and with `last_live`."""

    intercept_ps: int
    slope_ps: int
    last_live: int

    def ps(self, live_tokens: int) -> int:
        return self.intercept_ps + self.slope_ps * live_tokens

    def span_ps(self, live_tokens: int, running: int, steps: int) -> int:
        """Time of `steps` steps, of which the first reads `live_tokens`, each `running` more."""
        triangle = running * (steps * (steps - 1) // 2)
        return steps * self.ps(live_tokens) + self.slope_ps * triangle


class Lines:
    """A `StepTime` as lines between its knots, one set for each count of running requests.

    A step that is linear in live tokens is met to 0.5 ps per live token. Beyond the last knot the
    last line goes on. Raises `OutOfRange` for knots out of order and for a step time that is not
    above 0.
    """

    def __init__(self, step: StepTime, capacity_tokens: int):
        self.step, self.capacity_tokens = step, capacity_tokens
        self._lines: dict[int, tuple[list[float], list[Line]]] = {}

    def __call__(self, running: int, live_tokens: int) -> float:
        """ms on the line, where the step itself may bend."""
        return self.line(running, live_tokens).ps(live_tokens) / PS_PER_MS

    def line(self, running: int, live_tokens: int) -> Line:
        """The line that `running` requests are on at `live_tokens`."""
        if running not in self._lines:
            self._lines[running] = self._fit(running)
        starts, lines = self._lines[running]
        return lines[max(bisect_right(starts, live_tokens) - 1, 0)]

    def _fit(self, running: int) -> tuple[list[float], list[Line]]:
        knots = list(self.step.knots(running)) if self.step.knots else [self.capacity_tokens]
        if not knots or sorted(set(knots)) != knots or knots[0] < 0:
            raise OutOfRange(f"Knots {knots[:5]}", "rising counts of live tokens")
        # Fewer live tokens than one row per request there are not.
        live = [running, *(k for k in knots if k > running)]
        ms = [self.step(running, at) for at in live]
        if not min(ms) * PS_PER_MS >= 1:
            raise OutOfRange(f"A step of {min(ms)} ms at {running} requests", "above 0 ms")
        if len(live) == 1:
            return [live[0]], [Line(round(ms[0] * PS_PER_MS), 0, ENDLESS)]
        lines = []
        for (left, at), (right, then) in pairwise(zip(live, ms, strict=True)):
            slope = round((then - at) * PS_PER_MS / (right - left))
            last = ceil(right) - 1 if right < live[-1] else ENDLESS
            lines.append(Line(round(at * PS_PER_MS - slope * left), slope, last))
        return live[:-1], lines

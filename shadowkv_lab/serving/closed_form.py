"""Speed against capacity in one line: running = min(C, capacity / n), tokens/s = running / step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from shadowkv_lab.deployment import Deployment
from shadowkv_lab.errors import DoesNotFit, OutOfRange
from shadowkv_lab.provenance import Provenance
from shadowkv_lab.serving.lines import StepTime


@dataclass(frozen=True)
class Contender:
    """One strategy: how many tokens its pool keeps, and its whole step (rest included).

    `step` is ms of (running, live tokens); its pool is `capacity_tokens`, which is what a full
    cast moves. `prefill_cast` is what a prefill of up to `chunk_tokens` pays for its cast, as in
    `Engine`. `name` is the strategy's label, `deployment` where it runs.
    """

    name: str
    capacity_tokens: int
    step: StepTime
    prefill_cast: StepTime | None = None
    chunk_tokens: int = 2048
    deployment: Deployment | None = None

    def running(self, concurrency: int, context: int) -> int:
        """How many of `concurrency` requests of `context` live tokens fit at once."""
        if concurrency < 1 or context < 1:
            raise OutOfRange(f"{concurrency} requests of {context} tokens", "1 or more of each")
        return min(concurrency, self.capacity_tokens // context)

    def tokens_per_s(self, concurrency: int, context: int) -> float:
        """Output tokens/s of all running requests; 0 where not one fits."""
        running = self.running(concurrency, context)
        return 1000 * running / self.step(running, running * context) if running else 0.0


class Point(NamedTuple):
    """One strategy at one load. `provenance` is the step's, and so that of both times."""

    name: str
    running: int
    queued: int  # of the concurrency, those that find no room
    step_ms: float  # TPOT of those that run
    tokens_per_s: float  # of all of them
    provenance: Provenance

    @property
    def tokens_per_s_per_user(self) -> float:
        """Interactivity: what one running request sees."""
        return 1000 / self.step_ms


def point(contender: Contender, concurrency: int, context: int) -> Point:
    """The closed form; raises `DoesNotFit` for a pool that holds not one request."""
    running = contender.running(concurrency, context)
    if not running:
        raise DoesNotFit(
            f"{contender.name} keeps {contender.capacity_tokens:,} tokens, below one request "
            f"of {context:,}",
            f"contexts up to {contender.capacity_tokens:,}",
            "Take a strategy that keeps fewer bytes per token, or a larger card",
        )
    step_ms = contender.step(running, running * context)
    return Point(
        contender.name,
        running,
        concurrency - running,
        step_ms,
        1000 * running / step_ms,
        contender.step.provenance,
    )


def loop_tokens_per_s(
    contender: Contender,
    concurrency: int,
    prompt_tokens: int,
    output_tokens: int,
    prefill_tokens_per_s: float,
) -> float:
    """Output tokens/s of a closed loop of equal requests, prefill counted.

    A request takes prompt / prefill rate of the engine's time for itself, and shares output - 1
    steps with the others that run, at prompt + output / 2 live tokens each on average. Prompts are
    prefilled together, `chunk_tokens` at a time, and each time pays the prefill's cast.
    """
    context = prompt_tokens + output_tokens / 2
    running = min(concurrency, int(contender.capacity_tokens // context))
    if not running:
        return 0.0
    decode_s = (output_tokens - 1) * contender.step(running, round(running * context)) / 1000
    prefill_s = running * prompt_tokens / prefill_tokens_per_s
    if contender.prefill_cast:
        passes = ceil(running * prompt_tokens / contender.chunk_tokens)
        prefill_s += passes * contender.prefill_cast(1, prompt_tokens) / 1000
    return running * output_tokens / (prefill_s + decode_s)


class Cell(NamedTuple):
    """Who wins at one load, by how much over the next; `winner` is None where nobody fits one."""

    concurrency: int
    context: int
    winner: str | None
    tokens_per_s: float
    lead: float  # winner / runner-up - 1; infinite where only one fits
    running: int


def cell(contenders: Sequence[Contender], concurrency: int, context: int) -> Cell:
    """The winner at one load; a tie goes to the first named."""
    rates = [c.tokens_per_s(concurrency, context) for c in contenders]
    best = max(range(len(rates)), key=rates.__getitem__)
    if not rates[best]:
        return Cell(concurrency, context, None, 0.0, 0.0, 0)
    second = max((r for i, r in enumerate(rates) if i != best), default=0.0)
    lead = rates[best] / second - 1 if second else float("inf")
    winner = contenders[best]
    running = winner.running(concurrency, context)
    return Cell(concurrency, context, winner.name, rates[best], lead, running)


def winner_map(
    contenders: Sequence[Contender], concurrencies: Iterable[int], contexts: Iterable[int]
) -> list[list[Cell]]:
    """Rows of contexts, columns of concurrencies."""
    concurrencies = list(concurrencies)
    return [[cell(contenders, c, n) for c in concurrencies] for n in contexts]


class Crossover(NamedTuple):
    """At `context`, `after` wins from `concurrency` on, where `before` won one request earlier."""

    context: int
    concurrency: int
    before: str
    after: str


def crossovers(
    contenders: Sequence[Contender], contexts: Iterable[int], concurrencies: Sequence[int]
) -> list[Crossover]:
    """The lines of the map: to the single request, between neighbours of `concurrencies`.

    What changes and changes back between two neighbours is not seen; a finer list sees it.
    """
    found = []
    for context in contexts:
        at = [cell(contenders, c, context) for c in concurrencies]
        for left, right in pairwise(at):
            if left.winner == right.winner or None in (left.winner, right.winner):
                continue
            low, high = left.concurrency, right.concurrency
            while high - low > 1:
                middle = (low + high) // 2
                if cell(contenders, middle, context).winner == left.winner:
                    low = middle
                else:
                    high = middle
            after = cell(contenders, high, context).winner
            found.append(Crossover(context, high, left.winner, after))
    return found


def by_pair(found: Iterable[Crossover]) -> dict[tuple[str, str], list[Crossover]]:
    """Crossovers as one line for each pair of strategies."""
    lines: dict[tuple[str, str], list[Crossover]] = {}
    for crossover in found:
        lines.setdefault((crossover.before, crossover.after), []).append(crossover)
    return lines

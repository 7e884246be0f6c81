"""Who asks for how much, and when: closed loop, Poisson, bursts; traces come from `traces`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shadowkv_lab import facts
from shadowkv_lab.errors import BadFile, DoesNotFit, OutOfRange


class Demand(NamedTuple):
    """What open traffic asks of a server; infinite where all of it comes at once."""

    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, eq=False)
class Traffic:
    """Requests in the order of arrival. Raises `BadFile` for times or lengths that cannot be.

    `arrival_s` are seconds from the start. With `concurrency` the loop is closed: that many
    requests are under way, and the next is sent when one ends; `arrival_s` is not used then.
    `blocks` are hashes of each prompt's full blocks of `block_tokens`, where it is known which
    prompts begin alike: equal hashes mean that all the text up to there is equal.
    """

    name: str
    arrival_s: np.ndarray  # [N] float64
    prompt_tokens: np.ndarray  # [N] int64, 1 or more
    output_tokens: np.ndarray  # [N] int64, 1 or more
    concurrency: int | None = None
    source: str = "assumed"
    blocks: Sequence[Sequence[int]] | None = None
    block_tokens: int = 0

    def __post_init__(self):
        count = len(self.arrival_s)
        if not count:
            raise BadFile(f"{self.name} has no requests", "1 or more")
        if len(self.prompt_tokens) != count or len(self.output_tokens) != count:
            raise BadFile(f"{self.name} has columns of different lengths", f"{count} each")
        for what, lengths in (("prompt", self.prompt_tokens), ("output", self.output_tokens)):
            if lengths.min() < 1:
                at = int(np.argmin(lengths))
                raise BadFile(
                    f"{self.name}: request {at} has {lengths[at]} {what} tokens", "1 or more"
                )
        if not np.isfinite(self.arrival_s).all() or (np.diff(self.arrival_s) < 0).any():
            raise BadFile(f"{self.name}: arrivals do not rise, or are missing", "", "Sort them")
        if self.concurrency is not None and self.concurrency < 1:
            raise OutOfRange(f"A closed loop of {self.concurrency} requests", "1 or more")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def rows(self) -> Iterator[tuple[float, int, int]]:
        """(arrival in s, prompt tokens, output tokens) of each request."""
        columns = self.arrival_s, self.prompt_tokens, self.output_tokens
        return zip(*(column.tolist() for column in columns), strict=True)

    @property
    def demand(self) -> Demand | None:
        """Means between the first and the last arrival; None for a closed loop, which waits."""
        if self.concurrency is not None:
            return None
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        totals = len(self), int(self.prompt_tokens.sum()), int(self.output_tokens.sum())
        if not span:
            return Demand(*[float("inf") if len(self) > 1 else 0.0] * 3)
        return Demand(*(total / span for total in totals))

    def scaled(self, rate: float = 1.0, length: float = 1.0) -> "Traffic":
        """`rate` times as many requests per second, `length` times as long (at least 1 token)."""
        if not (0 < rate < np.inf and 0 < length < np.inf):
            raise OutOfRange(f"Scaled by {rate} in rate, {length} in length", "above 0")
        prompt, output = (
            np.maximum(1, np.rint(lengths * length)).astype(np.int64)
            for lengths in (self.prompt_tokens, self.output_tokens)
        )
        name = f"{self.name}, rate x {rate:.3g}" if rate != 1 else self.name
        name += f", length x {length:.3g}" if length != 1 else ""
        blocks = self.blocks
        if blocks and length < 1:  # a shorter prompt has fewer whole blocks
            blocks = [
                b[: p // self.block_tokens] for b, p in zip(blocks, prompt.tolist(), strict=True)
            ]
        return replace(
            self,
            blocks=blocks,
            name=name,
            arrival_s=self.arrival_s / rate,
            prompt_tokens=prompt,
            output_tokens=output,
        )


def require_servable(traffic: Traffic, prefill_tokens_per_s: float) -> None:
    """Raise `DoesNotFit` if no strategy can: the prompts alone take more than all the time."""
    demand = traffic.demand
    if demand is None or np.isinf(demand.requests_per_s):  # a loop, or one burst: it only queues
        return
    asked = demand.prompt_tokens_per_s
    if asked > prefill_tokens_per_s:
        raise DoesNotFit(
            f"{traffic.name} asks for {asked:,.0f} prompt tokens/s, more than the "
            f"{prefill_tokens_per_s:,.0f} that prefill makes: no strategy can serve it",
            f"up to {prefill_tokens_per_s:,.0f} prompt tokens/s, and less with decoding beside it",
            f"Scale the rate below {prefill_tokens_per_s / asked:.2f}, or allow overload",
        )


@dataclass(frozen=True)
class Lengths:
    """Prompt and output lengths, drawn apart from each other.

    Each is quantiles as (share, tokens) pairs, between which the logarithm of the length is
    straight; one pair is a fixed length. What ties long prompts to short answers is lost.
    """

    prompt: tuple[tuple[float, float], ...]
    output: tuple[tuple[float, float], ...]
    source: str = "assumed"
    title: str = ""
    burst_cv: float = field(default=1.0, compare=False)  # of the gaps between its arrivals

    def __post_init__(self):
        for pairs in (self.prompt, self.output):
            shares, tokens = zip(*pairs, strict=True)
            rising = all(a < b for a, b in pairwise(shares))
            if not rising or min(tokens) < 1 or list(tokens) != sorted(tokens):
                raise OutOfRange(f"Length quantiles {pairs}", "rising shares, lengths of 1 or more")

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """[count] prompt and output lengths."""
        if count < 1:
            raise OutOfRange(f"{count} requests", "1 or more")
        return _draw(self.prompt, count, rng), _draw(self.output, count, rng)


def _draw(pairs, count: int, rng: np.random.Generator) -> np.ndarray:
    shares, tokens = zip(*pairs, strict=True)
    logs = np.interp(rng.random(count), shares, np.log(tokens))
    return np.maximum(1, np.rint(np.exp(logs))).astype(np.int64)


def fixed(prompt_tokens: int, output_tokens: int) -> Lengths:
    """Every request alike."""
    title = f"{prompt_tokens:,} + {output_tokens:,} tokens"
    return Lengths(((0.5, prompt_tokens),), ((0.5, output_tokens),), title=title)


def long_answers() -> Lengths:
    """Short prompts and long answers, as models that reason give: assumed, for want of a trace."""
    prompt, output = ((0.0, 512.0), (1.0, 2048.0)), ((0.0, 1024.0), (1.0, 6144.0))
    return Lengths(prompt, output, title="0.5-2K + 1-6K tokens")


def published(name: str) -> Lengths:
    """Lengths of a public trace by its quantiles in data/traffic; raises `UnknownName`."""
    entry = facts.find("traffic", "traffic", name)
    prompt, output = (tuple(map(tuple, entry[k])) for k in ("prompt_tokens", "output_tokens"))
    said = str(facts.source(entry))
    return Lengths(prompt, output, said, entry["title"], entry["gaps_cv"])


def known_traffic() -> list[str]:
    """Names under data/traffic."""
    return sorted({entry["name"] for entry in facts.catalogue("traffic").values()})


def closed_loop(concurrency: int, requests: int, lengths: Lengths, seed: int = 0) -> Traffic:
    """`requests` requests, `concurrency` of them always under way, as benchmarks send them."""
    prompt, output = lengths.draw(requests, np.random.default_rng(seed))
    name = f"closed loop of {concurrency}, {lengths.title or 'drawn lengths'}"
    return Traffic(name, np.zeros(requests), prompt, output, concurrency, lengths.source)


def poisson(requests_per_s: float, requests: int, lengths: Lengths, seed: int = 0) -> Traffic:
    """Independent arrivals."""
    return bursts(requests_per_s, 1.0, requests, lengths, seed)


def bursts(
    requests_per_s: float, cv: float, requests: int, lengths: Lengths, seed: int = 0
) -> Traffic:
    """Gamma-distributed gaps, standard deviation `cv` times their mean: 1 is Poisson, 3 bursty."""
    rng = np.random.default_rng(seed)
    prompt, output = lengths.draw(requests, rng)
    arrival_s = gaps(requests_per_s, cv, requests, rng).cumsum()
    kind = "Poisson" if cv == 1 else f"bursts (cv {cv:g})"
    name = f"{kind}, {requests_per_s:.3g} requests/s, {lengths.title or 'drawn lengths'}"
    return Traffic(name, arrival_s, prompt, output, None, lengths.source)


def gaps(requests_per_s: float, cv: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """[count] seconds between arrivals, gamma-distributed with a coefficient of variation `cv`."""
    if not (0 < requests_per_s < np.inf):
        raise OutOfRange(f"{requests_per_s} requests/s", "a rate above 0")
    if not (0 < cv < np.inf):
        raise OutOfRange(
            f"Gaps that vary by {cv}", "a coefficient of variation above 0; 1 is Poisson"
        )
    return rng.gamma(1 / cv**2, cv**2 / requests_per_s, count)

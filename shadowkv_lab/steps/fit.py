"""Which evidence answers for a phase: the tables of shipped times, and how one is chosen.

The order, for attention of a strategy on a card: the kernel asked for, or those that the engine
would run there; its own head count; the head counts around it; another card's table, lent. What
each of them is worth is measured by leaving it out (`held_out`), and gives a prediction its range.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from shadowkv_lab import facts, files, machine
from shadowkv_lab.errors import NoAnswer, UnknownName
from shadowkv_lab.machine import Card
from shadowkv_lab.provenance import Kind, Provenance, assumed, calibrated
from shadowkv_lab.steps import evidence
from shadowkv_lab.steps import step as steps
from shadowkv_lab.steps.evidence import LAUNCH_MS, REACH, Key, Point, Table, table_of
from shadowkv_lab.steps.step import Step

# The kernel that reads BF16 where nobody names one, by SM generation: FlashInfer's as the lab
# records it, then those of SGLang's and TensorRT-LLM's tables.
PREFERRED = {
    9: (
        *("flashinfer_fa3", "flashinfer_fa3_fp8", "flash_attention"),
        *("flashinfer_fa2", "flashinfer_fa2_fp8", "trtllm_default"),
    ),
    10: ("trtllm_mla", "trtllm_default"),
    12: ("flashinfer_fa2", "triton"),
}
ISSUE_BOUND = {"full_cast", "lab_fused_fp8"}  # bound by instructions on an H200, not by memory


class Answer(NamedTuple):
    """One layer's time in a phase; `basis` names the kind of prediction, for its range."""

    ms: float
    kernel: str
    basis: str
    provenance: Provenance


@dataclass(frozen=True, eq=False)
class Fit:
    """All tables of some evidence."""

    tables: dict[Key, Table]
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    _found: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def cards(self) -> set[str]:
        """Cards and devices with a table."""
        return {key.card for key in self.tables}

    def of(self, phase: str, reads: str = "", card: str | None = None) -> list[Key]:
        """The keys of a phase, of what attention reads, and of one card."""
        asked = (phase, reads, card)
        if asked not in self._found:
            self._found[asked] = [
                k
                for k in self.tables
                if k.phase == phase and k.reads == reads and card in (None, k.card)
            ]
        return self._found[asked]

    def range_of(self, basis: str) -> tuple[float, float]:
        """Factors between which four of five times lay, where this kind of prediction was made."""
        return self.ranges.get(basis, (1.0, 1.0))

    def attention(
        self,
        reads: str,
        card: str,
        heads: int,
        requests: float,
        context: float,
        *,
        backend: str | None = None,
        page_size: int = 1,
        gathered: bool = False,
        chosen: bool = False,
        row_bytes: int = 1152,
    ) -> Answer:
        """One layer's attention of `requests` requests of `context` tokens on a card.

        `gathered` rows lie one behind the other, as a gather leaves them; `chosen` ones are those
        that an index named.
        """
        asked = (requests, context)
        if backend and not any(k.kernel == backend for k in self.of("attention", reads)):
            known = {k.kernel for k in self.of("attention", reads)}
            raise UnknownName(f"attention kernel that reads {reads}", backend, known)
        here = self.of("attention", reads, card)
        if kernel := self._kernel(here, card, heads, backend):
            own = [k for k in here if k.kernel == kernel]
            own = _of_rows(own, page_size, gathered, heads if chosen else None)
            return self._heads(own, heads, asked, page_size)
        return self._lent(reads, card, heads, asked, backend, page_size, row_bytes)

    def moved(self, phase: str, kernel: str, card: str, moved_bytes: float) -> Answer:
        """One layer's cast or write of some bytes on a card."""
        here = [k for k in self.of(phase, "", card) if k.kernel == kernel]
        if here:
            found = self.tables[here[0]](1, moved_bytes)
            if found.place == "inside":
                return Answer(found.ms, kernel, phase, calibrated(_where(self.tables[here[0]])))
            how = f"beyond the sizes of {_where(self.tables[here[0]])}"
            return Answer(found.ms, kernel, f"{phase} beyond", assumed(how))
        words = ""
        known = self.of(phase)
        if not any(k.kernel == kernel for k in known):
            plain = [k for k in known if k.kernel not in ISSUE_BOUND] or known
            words = f"no run of a kernel for {kernel}'s {phase}, so as {{}} does it; "
        else:
            plain = [k for k in known if k.kernel == kernel]
        if not plain:
            raise self._nothing(f"the {phase} of {kernel}", card)
        own = [k for k in plain if k.card == card]
        lender = own[0] if own else min(plain, key=lambda k: (_apart(k.card, card), self._order(k)))
        table = self.tables[lender]
        there = table(1, moved_bytes)
        basis = "another kernel" if words else f"{phase} lent"
        if own:
            how = words.format(lender.kernel).rstrip("; ")
            return Answer(there.ms, kernel, basis, assumed(how))
        ms = _lend(lender, there.ms, LAUNCH_MS / 2, card)
        floor = moved_bytes / (_card(card, self).bandwidth_gb_per_s * REACH) / 1e6
        how = f"{words.format(lender.kernel)}{lender.kernel} on {lender.card}, {_scaled(lender)}"
        return Answer(max(ms, floor), kernel, basis, assumed(how))

    def index(self, card: str, requests: float, more: float, moved_bytes: float) -> Answer:
        """By how much scores and top-k of one layer take longer for `more` tokens a request.

        Beyond `evidence.INDEX_FROM` tokens; `moved_bytes` are those of their keys. No table tells
        the two apart, and none holds their launches. Cards with tables take about the same time, so
        what is lent is not scaled: it is at least what the bytes take.
        """
        here = _card(card, self).bandwidth_gb_per_s
        floor = moved_bytes / (here * REACH) / 1e6
        known = self.of("index growth")
        if not known:
            raise self._nothing("the index", card)

        def far(key: Key) -> tuple:
            ratio = evidence.bandwidth(key.card) / here
            return key.card != card, _apart(key.card, card), abs(np.log(ratio)), key

        nearest = min(known, key=far)
        table = self.tables[nearest]
        if more <= 0:
            return Answer(0.0, nearest.kernel, "index", calibrated(_where(table)))
        found, words = table(requests, more), [_where(table)]
        if nearest.card != card:
            words.append("not scaled")
        if found.place != "inside":
            words.append("beyond its contexts or requests, at the pace of its last ones")
        kind, basis = assumed, "index beyond"
        if nearest.card != card:
            sibling = _apart(nearest.card, card) == 0
            basis = "index lent" if sibling else "index lent by another generation"
        elif found.place == "inside":
            kind, basis = calibrated, "index"
        return Answer(max(found.ms, floor), nearest.kernel, basis, kind(", ".join(words)))

    def choice(
        self, phase: str, kernel: str, card: str, requests: float, context: float
    ) -> Answer | None:
        """One layer's scores ("index") or choice ("top_k") where they were recorded on a card.

        `kernel` is `evidence.choosing`'s name for it.
        """
        here = [k for k in self.of(phase, "", card) if k.kernel == kernel]
        if not here:
            return None
        table = self.tables[here[0]]
        found = table(requests, context)
        if found.place == "inside":
            return Answer(found.ms, kernel, f"recorded {phase}", calibrated(_where(table)))
        how = f"{_where(table)}, beyond its contexts or requests, at the pace of its last ones"
        return Answer(found.ms, kernel, f"recorded {phase} beyond", assumed(how))

    def host(self, label: str, card: str, requests: float, context: float) -> Answer:
        """What the host takes to launch one layer of a strategy eagerly."""
        known = self.of("host")
        if not known:
            raise self._nothing("the host's time of eager launches", card)
        key = min(known, key=lambda k: (k.kernel != label, k.card != card, k))
        words = [f"recorded on {key.card}'s host"]
        if key.kernel != label:
            words.append(f"as {key.kernel} is launched")
        kind = calibrated if (key.kernel, key.card) == (label, card) else assumed
        ms = self.tables[key](requests, context).ms
        return Answer(ms, key.kernel, "another kernel", kind(", ".join(words)))

    # Which kernel, and from which head counts.

    def _kernel(self, here: list[Key], card: str, heads: int, backend: str | None) -> str | None:
        """The kernel whose tables answer here; one that has this head count, or head counts on
        both sides of it, before one that has not."""
        if backend:
            return backend if any(k.kernel == backend for k in here) else None
        # TensorRT-LLM's kernel on SM120 does not split a request: it says nothing of others there.
        split = generation(card) != 12
        counts = defaultdict(set)
        for key in here:
            if split or key.kernel != "trtllm_default":
                counts[key.kernel].add(key.heads)
        order = {name: i for i, name in enumerate(PREFERRED.get(generation(card), ()))}

        def rank(kernel: str) -> tuple:
            within = min(counts[kernel]) <= heads <= max(counts[kernel])
            return not within, order.get(kernel, 99), kernel

        return min(counts, key=rank, default=None)

    def _heads(self, keys: list[Key], heads: int, asked: tuple, page_size: int) -> Answer:
        """From the tables of one kernel on this card: its own head count, or those around it."""
        tables = {k.heads: self.tables[k] for k in keys}
        low = max((h for h in tables if h <= heads), default=min(tables))
        high = min((h for h in tables if h >= heads), default=max(tables))
        one = tables[low]
        found, other = one(*asked), tables[high](*asked)
        words, basis, kind = [_where(one)], f"{one.kind.value} table", calibrated
        if low != high:
            words.append(f"between {low} and {high} heads")
            basis, kind = "between heads", assumed
        elif low != heads:
            words.append(f"as with {low} heads" + (", and growing" if heads > low else ""))
            basis, kind = "other heads", assumed
        if not found.place == other.place == "inside":
            words.append("beyond its contexts or requests, at the pace of its last ones")
            basis, kind = "beyond", assumed
        table = basis == f"{one.kind.value} table"
        ms = found.ms if table else self._rising(keys, heads, asked)
        if one.key.page_size not in (0, page_size):
            words.append(f"as at page size {one.key.page_size}")
            kind = assumed
        if one.kind == Kind.PUBLISHED and _warm(one.key, asked):
            words.append("its L2 was warm, a real step's is cold")
        return Answer(ms, one.key.kernel, basis, kind(", ".join(words)))

    def _with_heads(self, key: Key, heads: int, asked: tuple) -> list[float]:
        """A head count that no table here has: as the nearest other card with it, lent."""
        there = [
            k for k in self.of("attention", key.reads) if k.heads == heads and lends(k, key.card)
        ]
        there = [k for k in there if k.card != key.card and machine.card_of(k.card)]
        if not there or not machine.card_of(key.card):
            return []
        nearest = min(there, key=lambda k: (_apart(k.card, key.card), _rank(k), k))
        return [_lend(nearest, self.tables[nearest].rising(*asked), LAUNCH_MS, key.card)]

    def _lent(
        self,
        reads: str,
        card: str,
        heads: int,
        asked: tuple,
        backend: str | None,
        page_size: int,
        row_bytes: int,
    ) -> Answer:
        """From another card: launch + max(its share of bandwidth, what the bytes take)."""
        target = _card(card, self)
        known = [k for k in self.of("attention", reads) if machine.card_of(k.card)]
        if backend:
            known = [k for k in known if k.kernel == backend]
        known = [k for k in known if lends(k, card)] or known
        passes = -(-heads // 16) if reads == "bf16" and generation(card) == 12 else 1
        moved = asked[0] * asked[1] * row_bytes
        floor = LAUNCH_MS + passes * moved / (target.bandwidth_gb_per_s * REACH) / 1e6
        if not known:
            how = (
                f"no time of a kernel that reads {reads}, so its bytes at {REACH:.0%} of bandwidth"
            )
            return Answer(floor, reads, "another kernel", assumed(how))
        nearest = min(known, key=lambda k: (_apart(k.card, card), _rank(k), k.kernel))
        keys = [k for k in known if (k.card, k.kernel) == (nearest.card, nearest.kernel)]
        keys = _of_rows(keys, page_size, False)
        there = self._rising(keys, heads, asked)
        ms = _lend(nearest, there, LAUNCH_MS, card)
        sibling = _apart(nearest.card, card) == 0
        basis = "lent by its generation" if sibling else "lent by another generation"
        how = f"{nearest.kernel} on {nearest.card}, {_scaled(nearest)}"
        return Answer(max(ms, floor), nearest.kernel, basis, assumed(how))

    def _rising(self, keys: list[Key], heads: int, asked: tuple) -> float:
        """Time that rises with heads, requests and context, as a formula's does."""
        times = {k.heads: self.tables[k].rising(*asked) for k in keys}
        low = max((h for h in times if h <= heads), default=min(times))
        high = min((h for h in times if h >= heads), default=max(times))
        fewer = max(times[h] for h in times if h <= low)
        if low == heads or heads < low:  # fewer heads take no longer
            return fewer
        if low == high:
            elsewhere = self._with_heads(keys[0], heads, asked)
            return max([fewer, *elsewhere]) if elsewhere else fewer * heads / low
        share = np.log(heads / low) / np.log(high / low)
        return float(fewer ** (1 - share) * max(fewer, times[high]) ** share)

    def _order(self, key: Key) -> tuple:
        """Recorded tables first, then the larger ones."""
        table = self.tables[key]
        return table.kind, -len(table), key

    def _nothing(self, what: str, card: str) -> NoAnswer:
        return NoAnswer(
            f"No recorded or published time bears on {what} on {card}",
            f"cards and devices with times: {', '.join(sorted(self.cards))}",
            "Record one with shadowkv measure --record, or choose a card of data/gpus",
        )


def _card(name: str, fitted: Fit) -> Card:
    """The card to lend to; raises `UnknownName`, or `NoAnswer` for a device without a file."""
    card = machine.card_of(name)
    if card is None:
        if name in fitted.cards:
            raise fitted._nothing("this", name)
        raise UnknownName("GPU", name, {*machine.known_cards(), *fitted.cards})
    return card


def lends(key: Key, card: str) -> bool:
    """Whether a kernel's table says something of another card's kernels.

    Off Hopper fa3 lends and not fa2: it is the nearer one to every published table there. Triton's
    many passes are SM120's alone, and so is a TensorRT-LLM kernel that does not split a request.
    """
    if generation(key.card) == 12:
        return key.kernel == "triton" and generation(card) == 12
    return "fa2" not in key.kernel


def generation(name: str) -> int | None:
    card = machine.card_of(name)
    return card.compute_capability[0] if card and card.compute_capability else None


def _apart(lender: str, card: str) -> int:
    """0 for cards of one generation, 1 for Hopper's tables, 2 for any other."""
    if generation(lender) == generation(card):
        return 0
    return 1 if generation(lender) == 9 else 2


def _rank(key: Key) -> int:
    order = PREFERRED.get(generation(key.card), ())
    return order.index(key.kernel) if key.kernel in order else 99


def _of_rows(
    keys: list[Key], page_size: int, gathered: bool, chosen_heads: int | None = None
) -> list[Key]:
    """The keys of one way in which rows lie: the one asked for, where it was recorded.

    Of rows that an index chose where it was recorded around `chosen_heads`.
    """
    chosen = [k for k in keys if k.chosen]
    around = chosen_heads is not None and min((k.heads for k in chosen), default=0) <= chosen_heads
    if around and chosen_heads <= max((k.heads for k in chosen), default=0):
        keys = chosen
    else:
        keys = [k for k in keys if not k.chosen] or keys
    as_laid = [k for k in keys if k.gathered == gathered] or keys
    exact = [k for k in as_laid if k.page_size in (0, page_size)]
    return exact or [k for k in as_laid if k.page_size == as_laid[0].page_size]


def _lend(lender: Key, ms: float, launch_ms: float, card: str) -> float:
    """A time on the lender's card as it would be on another: launches stay, the rest scales."""
    there, here = machine.card_of(lender.card), machine.card(card)
    by_bandwidth = there.bandwidth_gb_per_s / here.bandwidth_gb_per_s
    by_issue = there.issue_rate / here.issue_rate
    # A kernel bound by instructions gains no more from bandwidth than one that is bound by it.
    scale = max(by_bandwidth, by_issue) if lender.kernel == "lab_fused_fp8" else by_bandwidth
    if lender.kernel == "full_cast":
        scale = by_issue
    launch = min(launch_ms, ms)
    return launch + (ms - launch) * scale


def _scaled(lender: Key) -> str:
    if lender.kernel == "full_cast":
        return "scaled by SMs and clock, which bind it"
    if lender.kernel == "lab_fused_fp8":
        return "scaled by bandwidth or by SMs and clock, whichever gives less"
    return "at its share of the bandwidth"


def _where(table: Table) -> str:
    words = "recorded runs" if table.kind == Kind.RECORDED else "a published table"
    return f"{table.key.kernel} on {table.key.card}, {words}"


def _warm(key: Key, asked: tuple) -> bool:
    card = machine.card_of(key.card)
    row_bytes = 1152 if key.reads == "bf16" else 576
    return asked[0] * asked[1] * row_bytes < card.l2_mb * 1e6


def fit_points(points: Iterable[Point], ranges: dict | None = None) -> Fit:
    """The tables of some evidence."""
    groups = defaultdict(list)
    for point in points:
        groups[point.key].append(point)
    return Fit({key: table_of(key, found) for key, found in groups.items()}, ranges or {})


def fit(measured: Sequence[Step] | None = None) -> Fit:
    """The fit of recorded steps beside the published tables; of all that is shipped without."""
    if measured is None:
        stamps = [facts.stamps("runs", pattern) for pattern in ("*.jsonl", "*_kernels.json")]
        return _shipped(*stamps, facts.stamps("published/tables", "*.csv"))
    beside = [*evidence.published(), *evidence.index_growth()]
    return fit_points([*evidence.of_steps(measured), *beside], ranges())


@cache
def _shipped(*stamps: tuple) -> Fit:
    return fit_points([*evidence.shipped(), *evidence.index_growth()], ranges())


def by_published_index() -> Fit:
    """All that is shipped but recorded DSA steps: scores and choice grow as published modules do.

    A recorded choice is torch's top-k; an engine's own kernel, which is in the modules, is faster
    at short contexts.
    """
    stamps = [facts.stamps("runs", pattern) for pattern in ("*.jsonl", "*_kernels.json")]
    return _without_dsa(*stamps, facts.stamps("published/tables", "*.csv"))


@cache
def _without_dsa(*stamps: tuple) -> Fit:
    dense = [s for s in steps.recorded() if s.setting.load.reads == "dense"]
    return fit_points([*evidence.shipped(dense), *evidence.index_growth()], ranges())


def ranges() -> dict[str, tuple[float, float]]:
    """The factors of data/published/tables/errors.json, which `held_out.record` writes."""
    kept = files.read_json(facts.path("published", "tables", "errors.json"))["ranges"]
    return {basis: (found["low"], found["high"]) for basis, found in kept.items()}

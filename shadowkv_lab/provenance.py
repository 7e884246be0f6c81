"""Where a number comes from: one of five words, how it was made, and its source."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import total_ordering


@total_ordering
class Kind(Enum):
    """The five words, from the strongest to the weakest; `Kind.MEASURED < Kind.ASSUMED`."""

    MEASURED = "measured"  # timed now, here
    RECORDED = "recorded"  # a run that the lab ships
    PUBLISHED = "published"  # somebody else's figure, with its source
    CALIBRATED = "calibrated"  # a formula fitted to recorded or published figures, in their range
    ASSUMED = "assumed"  # a formula or constant borrowed from elsewhere

    def __lt__(self, other: Kind) -> bool:
        order = list(Kind)
        return order.index(self) < order.index(other)

    @property
    def pattern(self) -> str:
        """The fill pattern of its bars in a plotly figure."""
        return {"recorded": "/", "published": "-", "calibrated": "x", "assumed": "."}.get(
            self.value, ""
        )

    @property
    def dash(self) -> str:
        """The dash of its lines in a plotly figure."""
        return {"recorded": "dash", "published": "longdash", "calibrated": "dashdot"}.get(
            self.value, "solid" if self is Kind.MEASURED else "dot"
        )


@dataclass(frozen=True)
class Source:
    """A publication: its title and address, its own date, and when it was read (ISO dates).

    `url` and `date` are None where there is none: a datasheet without a date, a driver's answer.
    """

    title: str
    url: str | None = None
    date: str | None = None
    read: str | None = None

    def __str__(self) -> str:
        when = self.date or (f"read {self.read}" if self.read else "")
        return ", ".join(filter(None, (self.title, when, self.url)))


@dataclass(frozen=True)
class Provenance:
    """One of the five words, how the number was made, and from which source.

    The weakest part names a sum:

    >>> str(recorded("H200, 2026-11-30") + assumed("its kernel lent from another card"))
    'assumed'
    """

    kind: Kind
    how: str = ""
    source: Source | None = None

    def __add__(self, other: Provenance) -> Provenance:
        if self.kind != other.kind:
            return max(self, other, key=lambda p: p.kind)
        hows = dict.fromkeys(filter(None, (*self.how.split("; "), *other.how.split("; "))))
        source = self.source if self.source == other.source else None
        return Provenance(self.kind, "; ".join(hows), source)

    def __radd__(self, other: int) -> Provenance:
        return self  # `sum` begins with 0

    def __str__(self) -> str:
        return self.kind.value


def measured(how: str = "") -> Provenance:
    """Timed now, here."""
    return Provenance(Kind.MEASURED, how)


def recorded(how: str = "", source: Source | None = None) -> Provenance:
    """A run that the lab, or a user's log, keeps."""
    return Provenance(Kind.RECORDED, how, source)


def published(how: str = "", source: Source | None = None) -> Provenance:
    """Somebody else's figure."""
    return Provenance(Kind.PUBLISHED, how, source)


def calibrated(how: str = "", source: Source | None = None) -> Provenance:
    """A formula fitted to recorded or published figures, used within their range."""
    return Provenance(Kind.CALIBRATED, how, source)


def assumed(how: str = "", source: Source | None = None) -> Provenance:
    """A formula or constant borrowed from elsewhere."""
    return Provenance(Kind.ASSUMED, how, source)

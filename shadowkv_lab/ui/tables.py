"""What a column is called, its unit, and how its values are written; once, for every reader.

A frame keeps the lab's own column names and full precision: that is what a CSV holds. `table`
makes it readable in a notebook, and the command line prints the same cells.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Column:
    """A heading, its unit, the format of its numbers, and a factor that they are shown times."""

    title: str
    unit: str = ""
    form: str = ""
    times: float = 1.0

    @property
    def head(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def cell(self, value: object) -> str:
        """A value as text; empty where there is none."""
        if value is None or value != value:
            return ""
        if isinstance(value, str):
            return value
        if isinstance(value, bool) or type(value).__name__ == "bool_":
            return "yes" if value else "no"
        number = value * self.times if self.times != 1 else value
        return format(number, self.form) if self.form else plain(number)


def plain(value: object) -> str:
    """A number without a format of its own: whole, or to three digits and more."""
    if not isinstance(value, int | float) and not hasattr(value, "dtype"):
        return str(value)
    if value == int(value) if abs(value) < 1e18 else False:
        return f"{int(value):,}"
    if abs(value) < 1e-2:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.2f}"


GIB, COUNT, MS, SHORT = 2.0**-30, ",.0f", ",.3f", ",.2f"
COLUMNS = {
    # of a setting
    "title": Column("strategy"),
    "strategy": Column("strategy"),
    "model": Column("model"),
    "gpu": Column("card"),
    "card": Column("card"),
    "device": Column("device"),
    "pool_tokens": Column("pool", "slots", COUNT),
    "concurrency": Column("requests", "", COUNT),
    "context": Column("context", "tokens", COUNT),
    "heads": Column("heads", "", COUNT),
    "mode": Column("mode"),
    "backend": Column("attention"),
    "load": Column("load"),
    # of a step
    "step_ms": Column("step", "ms", MS),
    "cast_ms": Column("cast", "ms", MS),
    "attention_ms": Column("attention", "ms", MS),
    "write_ms": Column("write", "ms", MS),
    "index_ms": Column("index", "ms", MS),
    "top_k_ms": Column("top-k", "ms", MS),
    "residual_ms": Column("residual", "ms", MS),
    "step_spread_ms": Column("spread", "ms", MS),
    "spread_ms": Column("spread", "ms", MS),
    "measured_ms": Column("measured", "ms", MS),
    "recorded_ms": Column("recorded", "ms", MS),
    "predicted_ms": Column("predicted", "ms", MS),
    "error": Column("error", "", ".1e"),
    "provenance": Column("provenance"),
    "how": Column("how"),
    "scaled": Column("scaled"),
    # of memory
    "kept_bytes": Column("kept", "GiB", SHORT, GIB),
    "kept_gib": Column("kept", "GiB", SHORT),
    "scratch_gib": Column("scratch", "GiB", SHORT),
    "left_gib": Column("left of the reserve", "GiB", SHORT),
    "token_bytes": Column("bytes per token", "", COUNT),
    "index_bytes": Column("of them index keys", "", COUNT),
    "tokens": Column("tokens", "", COUNT),
    "tokens_that_fit": Column("tokens that fit", "", COUNT),
    "capacity_tokens": Column("capacity", "tokens", COUNT),
    "requests": Column("requests", "", COUNT),
    "fits": Column("fits"),
    "gib_for_pool": Column("pool", "GiB", SHORT),
    "total_gib": Column("with weights", "GiB", SHORT),
    # of a token
    "tpot_ms": Column("TPOT", "ms", SHORT),
    "rest_ms": Column("rest", "ms", SHORT),
    "off_ms": Column("off by", "ms", SHORT),
    "tokens_per_s": Column("tok/s", "", ",.1f"),
    "low_tokens_per_s": Column("tok/s from", "", ",.1f"),
    "high_tokens_per_s": Column("to", "", ",.1f"),
    "low_ms": Column("from", "ms", SHORT),
    "high_ms": Column("to", "ms", SHORT),
    "share_of_the_cast": Column("of the cast went", "", ".0%"),
    "tokens_per_s_per_gib": Column("tok/s per GiB", "", SHORT),
    "gb_per_s": Column("GB/s", "", COUNT),
    "verdict": Column("verdict"),
    # of the arithmetic and the hypotheses
    "formula": Column("from"),
    "value": Column("value", "", SHORT),
    "fits_server": Column("fits the Server card"),
    "fits_workstation": Column("fits the Workstation card"),
    "under_server": Column("under the Server card's GB/s"),
    "under_workstation": Column("under the Workstation card's GB/s"),
    "share_server": Column("of the Server card's GB/s", "", ".0%"),
    "share_workstation": Column("of the Workstation card's GB/s", "", ".0%"),
    # of the kernel benchmark
    "ms": Column("ms", "", MS),
    "of_copy": Column("of copy", "", ".1%"),
    "ratio": Column("ours / this", "", ".3f"),
    # of a simulated run
    "running": Column("running", "", COUNT),
    "finished": Column("finished", "", COUNT),
    "output_tokens_per_s": Column("output tok/s", "", ",.1f"),
    "requests_per_s": Column("requests/s", "", SHORT),
    "goodput_share": Column("within both objectives", "", ".0%"),
    "p50_ttft_ms": Column("TTFT p50", "ms", COUNT),
    "p99_ttft_ms": Column("TTFT p99", "ms", COUNT),
    "p50_tpot_ms": Column("TPOT p50", "ms", ",.1f"),
    "p99_tpot_ms": Column("TPOT p99", "ms", ",.1f"),
    "p99_itl_ms": Column("ITL p99", "ms", ",.1f"),
    "p99_latency_ms": Column("latency p99", "ms", COUNT),
    "preemptions": Column("preemptions", "", COUNT),
    "recomputed_tokens": Column("tokens computed again", "", COUNT),
    "queue_max": Column("longest queue", "requests", COUNT),
}


def column(name: str) -> Column:
    """The column of a name; one that has none is called so, with spaces."""
    return COLUMNS.get(name) or Column(str(name).replace("_", " "))


def table(frame: pd.DataFrame, columns: Iterable[str] | None = None) -> pd.DataFrame:
    """A frame ready to be read: `columns` of it (all, if left out), titled, each cell as text.

    The index stays where it names the rows.
    """
    names = list(frame.columns if columns is None else columns)
    chosen = [column(name) for name in names]
    shown = frame[names].copy()
    for place, (name, of) in enumerate(zip(names, chosen, strict=True)):
        shown.isetitem(place, [of.cell(value) for value in frame[name]])
    shown.columns = [of.head for of in chosen]
    return shown if shown.index.dtype.kind not in "iu" else shown.reset_index(drop=True)

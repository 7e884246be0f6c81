"""Figures of the kernel benchmark: bandwidth against the floor, and ours against the peers."""

from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab import facts
from shadowkv_lab.errors import BadFile, OutOfRange
from shadowkv_lab.files import read_json
from shadowkv_lab.steps.bench import Row
from shadowkv_lab.steps.step import Origin
from shadowkv_lab.ui import charts
from shadowkv_lab.ui.app import View
from shadowkv_lab.ui.application import application
from shadowkv_lab.ui.controls import Menu
from shadowkv_lab.ui.plots import Figures

# Kernels take the colour of the strategy that uses them; all others are grey.
FAMILY = {
    "cast": "vector_cast",
    "gather_cast": "gather_cast",
    "fused_fp8": "fused_fp8",
    "torch copy_": "full_cast",
    "flashinfer bf16": "bf16_pool",
    "flashinfer native_fp8": "native_fp8",
}
MOVERS = ("cast", "torch copy_", "torch.compile", "gather_cast", "torch index_select + to")
TABLE = ("kernel", "shape", "heads", "ms", "gb_per_s", "of_copy", "error", "ratio")


def recorded(path: str | Path | None = None, kernel: str = "cast") -> tuple[pd.DataFrame, dict]:
    """Rows of a `shadowkv bench kernels --record` file, and where they come from.

    If no path is given, the newest file of data/runs that has this kernel is taken. Raises
    `BadFile`.
    """
    stamps = facts.stamps("runs", "*kernels.json")
    files = [_framed(_recorded(Path(path)))] if path else _all(stamps)
    having = [(rows, origin) for rows, origin in files if kernel in set(rows.kernel)]
    if not having:
        raise BadFile(
            f"No kernel benchmark with {kernel} is recorded",
            "data/runs/*kernels.json",
            "Record one on a GPU: shadowkv bench kernels --record FILE",
        )
    rows, origin = max(having, key=lambda file: file[1]["date"])
    # Of several page sizes the largest, which DSA models run; a file of one names none.
    rows = rows[rows.page_size.isin([0, rows.page_size.max()]) & (rows.queries == 1)]
    return rows, dict(origin)


@lru_cache(maxsize=4)
def _all(stamps: tuple[tuple[Path, int], ...]) -> list[tuple[pd.DataFrame, dict]]:
    """Every benchmark there is, read again when a file has changed."""
    return [_framed(file) for _, file in facts.each([path for path, _ in stamps], _recorded)]


def _framed(file: "_Recorded") -> tuple[pd.DataFrame, dict]:
    return pd.DataFrame([asdict(row) for row in file.rows]), asdict(file.origin)


@dataclass(frozen=True)
class _Recorded:
    origin: Origin
    rows: tuple[Row, ...]


def _recorded(path: Path) -> _Recorded:
    schema = read_json(path).get("schema")
    found = read_json(path, _Recorded) if schema == 1 else None
    if not found or not any(row.heads for row in found.rows):
        raise BadFile(f"{path.name} is no kernel benchmark of schema 1", remedy="Record it again")
    return found


def bandwidth(rows: pd.DataFrame, origin: dict) -> go.Figure:
    """Each kernel's bytes over its time, beside the copy bandwidth of the same run."""
    moved = rows[rows.kernel.isin(MOVERS)]
    shape = moved.loc[moved[moved["shape"].str.contains("slots")].ms.idxmax(), "shape"]
    of_copy = moved[moved["shape"] == shape].set_index("kernel").of_copy
    return _against_copy(
        moved,
        f"The cast reaches {of_copy['cast']:.0%} of copy bandwidth, torch's "
        f"{of_copy['torch copy_']:.0%}",
        f"{shape}, all layers, recorded on {origin['device']}; copy "
        f"{origin['copy_gb_per_s']:,.0f} GB/s",
        origin,
    )


def decode_bandwidth(rows: pd.DataFrame, origin: dict, heads: int = 8) -> go.Figure:
    """Decode attention: live bytes over time at one head count, and what copying them takes."""
    ours = rows[(rows.heads == heads) & rows.error.notna()]
    best = ours[ours.kernel == "fused_fp8"].of_copy.max()
    return _against_copy(
        _better(ours),
        f"With {heads} heads the FP8 decode reads its rows at up to {best:.0%} of copy bandwidth",
        f"recorded on {origin['device']}",
        origin,
    )


def decode_time(rows: pd.DataFrame, origin: dict, heads: int = 8) -> go.Figure:
    """Decode attention in ms per step: ours, and each library's BF16 and FP8 kernels."""
    ours = _better(rows[(rows.heads == heads) & rows.error.notna()])
    ratios = against(rows, "bf16")[heads]
    traces = _bars(ours, "ms", ",.2f", " ms", lambda row: f"{row.gb_per_s:,.0f} GB/s")
    floor = ours[ours.kernel == "fused_fp8"]
    mark = {"symbol": "line-ew-open", "size": 34, "line": {"width": 4}}
    traces.append(
        charts.points(
            floor["shape"],
            floor.bytes / origin["copy_gb_per_s"] / 1e6,
            "FP8 bytes at copy speed",
            "#bbbbbb",
            marker=mark,
            hover="floor %{y:.2f} ms<extra></extra>",
            offsetgroup="fused_fp8",
        )
    )
    return charts.figure(
        charts.heading(
            f"With {heads} heads the FP8 decode takes {ratios.min():.2f} to {ratios.max():.2f} of "
            "the fastest BF16 kernel's time",
            f"attention of all layers, recorded on {origin['device']}",
        ),
        traces,
        "requests x context",
        "attention, all layers (ms)",
        log_y=True,
        barmode="group",
        scattermode="group",
    )


def _against_copy(rows: pd.DataFrame, finding: str, note: str, origin: dict) -> go.Figure:
    return charts.figure(
        charts.heading(finding, note),
        _bars(rows, "gb_per_s", ",.0f", " GB/s", lambda row: f"{row.ms:.3f} ms"),
        "what is moved" if "slots" in rows["shape"].iloc[0] else "requests x context",
        "bytes moved over time (GB/s)",
        barmode="group",
        **charts.level(origin["copy_gb_per_s"], "copy"),
    )


def _bars(rows: pd.DataFrame, column: str, form: str, unit: str, hover) -> list[dict]:
    """Standing bars, a group per shape, one per kernel in it."""
    others, traces = iter(charts.OTHERS), []
    for kernel, part in rows.groupby("kernel", sort=False):
        own = FAMILY.get(kernel)
        trace = charts.bar(
            part["shape"],
            part[column],
            kernel,
            charts.tag(own).colour if own else next(others),
            "recorded",
            [hover(row) for row in part.itertuples()],
            form=form,
            unit=unit,
            upright=True,
            offsetgroup=kernel,
        )
        trace["marker"]["pattern"]["size"] = 6
        traces.append(trace)
    return traces


def _better(rows: pd.DataFrame) -> pd.DataFrame:
    """The better of fa2 and fa3 at each shape speaks for FlashInfer."""
    rows = rows.assign(kernel=rows.kernel.str.replace(r" fa\d$", "", regex=True))
    best = rows.groupby(["heads", "shape", "kernel"], sort=False).ms.idxmin()
    return rows.loc[best]


def against(rows: pd.DataFrame, reads: str) -> pd.DataFrame:
    """Our decode's time over that of the fastest peer that reads "bf16" or "native_fp8" rows, by
    shape and head count."""
    peers = rows[rows.error.notna() & rows.kernel.str.contains(f" {reads}")]
    ratios = peers.pivot_table(index="shape", columns="heads", values="ratio", aggfunc="max")
    return ratios.loc[[*peers["shape"].unique()]]


def worth_of_a_shadow(frame: pd.DataFrame) -> pd.DataFrame:
    """Whole steps of shadow and fused FP8 at every recorded setting, and what each keeps.

    `frame` has recorded steps of one model. A ratio over 1 says that the shadow's step is longer.
    """
    keys = ["pool_tokens", "concurrency", "context"]
    found = frame.pivot_table(index=keys, columns="strategy", values=["step_ms", "kept_bytes"])
    ours = [(value, name) for value in found.columns.levels[0] for name in ("shadow", "fused_fp8")]
    found = found[ours].dropna().reset_index()
    step, kept = found["step_ms"], found["kept_bytes"]
    return pd.DataFrame(
        {
            "pool": found.pool_tokens,
            "load": found.concurrency.astype(str) + " x " + found.context.astype(str),
            "shadow ms": step.shadow,
            "fused FP8 ms": step.fused_fp8,
            "shadow / fused": step.shadow / step.fused_fp8,
            "bytes kept, shadow / fused": kept.shadow / kept.fused_fp8,
        }
    )


def verdict(worth: pd.DataFrame) -> str:
    """One paragraph, from the numbers: is a shadow still worth anything beside a fused kernel?"""
    ratio = worth["shadow / fused"]
    wins = worth[ratio < 1]
    kept = worth["bytes kept, shadow / fused"].iloc[0]
    text = (
        f"At {len(worth)} recorded settings the shadow's step takes {ratio.min():.2f} to "
        f"{ratio.max():.2f} times the fused FP8 step's, and it keeps {kept:.0f} times the bytes. "
    )
    if wins.empty:
        return text + "It wins at none: beside this kernel a shadow is worth nothing."
    where = ", ".join(sorted(set(wins.load)))
    return text + f"It is the shorter one at {len(wins)} of them ({where})."


def _heads(rows: pd.DataFrame) -> list[int]:
    return sorted({int(n) for n in rows.heads if n > 0})


@application("shadowkv_lab.ui.kernels.kernels_app")
def kernels_view(
    heads: Annotated[
        int, Menu("heads per GPU", lambda _: _heads(recorded(kernel="fused_fp8")[0]))
    ] = 8,
) -> View:
    """Each kernel of the lab beside its peers, as recorded: bandwidth, and decode attention."""
    movers, copied = recorded()
    rows, origin = recorded(kernel="fused_fp8")
    if heads not in (known := _heads(rows)):
        raise OutOfRange(f"{heads} heads", f"recorded ones: {', '.join(map(str, known))}")
    figures = Figures(
        lambda: bandwidth(movers, copied),
        lambda: decode_time(rows, origin, heads),
        lambda: decode_bandwidth(rows, origin, heads),
    )
    shown = pd.concat([movers[movers.heads == 0], rows[rows.heads == heads]])
    shown = shown.assign(heads=shown.heads.where(shown.heads > 0))
    note = f"<b>recorded</b> on {origin['device']}, page size {rows.page_size.max()}"
    return View(figures, note, shown, TABLE)


kernels_app = kernels_view.app

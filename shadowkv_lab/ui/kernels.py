"""Figures of the kernel benchmark: bandwidth against the floor, and ours against the peers."""

from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab import facts
from shadowkv_lab.errors import BadFile
from shadowkv_lab.files import read_json
from shadowkv_lab.strategies import parse
from shadowkv_lab.ui import style

OURS = ("cast", "append", "gather_cast", "fused_fp8")
# A kernel has the colour of the strategy that uses it; the others have one of no strategy.
FAMILY = {
    "cast": "vector_cast",
    "torch copy_": "full_cast",
    "gather_cast": "gather_cast",
    "flashinfer bf16": "bf16_pool",
    "flashinfer native_fp8": "native_fp8",
}
OTHER = {"torch.compile": style.OTHERS[0], "torch index_select + to": style.OTHERS[1]}


def recorded(path: str | Path | None = None) -> tuple[pd.DataFrame, dict]:
    """Rows of a `shadowkv bench kernels --record` file, the newest of data/runs if none is named,
    and where they come from. Raises `BadFile`."""
    paths = [Path(path)] if path else facts.files("runs", "*kernels.json")
    if not paths:
        raise BadFile(
            "No kernel benchmark is recorded",
            "data/runs/*kernels.json",
            "Record one on a GPU: shadowkv bench kernels --record FILE",
        )
    files = [read_json(p) for p in paths]
    for p, file in zip(paths, files, strict=True):
        if file.get("schema") != 1:
            raise BadFile(f"{p.name} is no kernel benchmark of schema 1", remedy="Record it again")
    newest = max(files, key=lambda f: f["origin"]["date"])
    return pd.DataFrame(newest["rows"]), newest["origin"]


def bandwidth(rows: pd.DataFrame, origin: dict) -> go.Figure:
    """Each kernel's bytes over its time, beside the copy bandwidth of the same run."""
    moved = rows[
        rows.kernel.isin(
            ["cast", "torch copy_", "torch.compile", "gather_cast", "torch index_select + to"]
        )
    ]
    big = moved[moved["shape"].str.contains("slots")].ms.idxmax()
    shape = moved.loc[big, "shape"]
    at = moved[moved["shape"] == shape].set_index("kernel")
    heading = (
        f"The cast reaches {at.of_copy['cast']:.0%} of copy bandwidth, torch's "
        f"{at.of_copy['torch copy_']:.0%}<br><sup>{shape}, all layers, recorded on "
        f"{origin['device']}; copy {origin['copy_gb_per_s']:,.0f} GB/s</sup>"
    )
    return _bars(moved, heading, origin["copy_gb_per_s"])


def decode_bandwidth(rows: pd.DataFrame, origin: dict, heads: int = 8) -> go.Figure:
    """Decode attention: live bytes over time at one head count, and what copying them takes."""
    ours = rows[(rows.heads == heads) & rows.error.notna()]
    best = ours[ours.kernel == "fused_fp8"].of_copy.max()
    heading = (
        f"With {heads} heads the FP8 decode reads its rows at up to {best:.0%} of copy bandwidth"
        f"<br><sup>recorded on {origin['device']}</sup>"
    )
    return _bars(_better(ours), heading, origin["copy_gb_per_s"])


def decode_time(rows: pd.DataFrame, origin: dict, heads: int = 8) -> go.Figure:
    """Decode attention in ms a step: ours, FlashInfer's better BF16, its better FP8."""
    ours = _better(rows[(rows.heads == heads) & rows.error.notna()])
    ratios = ours[ours.kernel == "flashinfer bf16"].ratio
    heading = (
        f"With {heads} heads the FP8 decode takes {ratios.min():.2f} to {ratios.max():.2f} of "
        f"FlashInfer's BF16 time<br><sup>attention of all layers, recorded on {origin['device']}"
        "</sup>"
    )
    fig = style.figure(heading, "", "attention, all layers (ms)", log_y=True)
    for kernel, part in ours.groupby("kernel", sort=False):
        _bar(fig, kernel, part, part.ms, "%{y:.2f} ms<br>%{customdata[0]:,.0f} GB/s")
    floor = ours[ours.kernel == "fused_fp8"]
    fig.add_scatter(
        x=floor["shape"],
        y=floor.bytes / origin["copy_gb_per_s"] / 1e6,
        mode="markers",
        marker=dict(symbol="line-ew-open", size=34, color="#bbbbbb", line_width=4),
        name="FP8 bytes at copy speed",
        hovertemplate="floor %{y:.2f} ms<extra></extra>",
        offsetgroup="fused_fp8",
    )
    return fig.update_layout(barmode="group", scattermode="group")


def limits(heads: int = 8, path: str | Path | None = None) -> str:
    """What ncu found of the decode with so many heads, in a sentence. Raises `BadFile`."""
    path = path or facts.path("runs", "h200_ncu.json")
    try:
        entry = read_json(path)
        seen = {k["heads"]: k for k in entry["kernels"]}
        k = seen[min(seen, key=lambda n: abs(n - heads))]
        return (
            f"At {k['shape']} and {k['heads']} heads ncu finds memory {k['memory_percent']:.0f} % "
            f"busy, shared memory {k['shared_percent']:.0f} % and issue slots "
            f"{k['issue_percent']:.0f} % ({entry['origin']['device']}, its clock locked at "
            f"{entry['origin']['sm_clock_mhz'] / 1000:.2f} GHz). {k['registers']} registers a "
            f"thread and {k['shared_kb']:.0f} KB a block allow {k['warps_per_sm']} warps on a "
            "multiprocessor, too few to hide every load: the rest is waiting."
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile(f"{path} is no record of ncu's ({error!r})", "data/runs/*_ncu.json") from None


def _better(rows: pd.DataFrame) -> pd.DataFrame:
    """The better of fa2 and fa3 at each shape speaks for FlashInfer."""
    rows = rows.assign(kernel=rows.kernel.str.replace(r" fa\d$", "", regex=True))
    best = rows.groupby(["heads", "shape", "kernel"], sort=False).ms.idxmin()
    return rows.loc[best]


def against_bf16(rows: pd.DataFrame) -> pd.DataFrame:
    """Ours over FlashInfer's better BF16 time, by shape and head count."""
    better = _better(rows[rows.error.notna()])
    peers = better[better.kernel == "flashinfer bf16"]
    return peers.pivot(index="shape", columns="heads", values="ratio").loc[
        [*peers["shape"].unique()]
    ]


def _bars(rows: pd.DataFrame, heading: str, ceiling: float) -> go.Figure:
    fig = style.figure(heading, "", "bytes moved over time (GB/s)")
    for kernel, part in rows.groupby("kernel", sort=False):
        _bar(fig, kernel, part, part.gb_per_s, "%{y:,.0f} GB/s<br>%{customdata[1]:.3f} ms")
    fig.add_hline(
        y=ceiling,
        line=dict(color="#000", dash="dot"),
        annotation_text="copy",
        annotation_position="top left",
    )
    return fig.update_layout(barmode="group")


def _bar(fig: go.Figure, kernel: str, part: pd.DataFrame, y: pd.Series, hover: str) -> None:
    fig.add_bar(
        x=part["shape"],
        y=y,
        name=kernel,
        customdata=part[["gb_per_s", "ms"]],
        offsetgroup=kernel,
        marker=dict(
            color=OTHER.get(kernel) or style.colour(FAMILY.get(kernel, kernel)),
            pattern=dict(shape=style.PATTERNS["recorded"], size=6),
        ),
        hovertemplate=f"{kernel}, %{{x}}: {hover}, recorded<extra></extra>",
    )


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """All rows, ready to be read; `ours / this` below 1 means that ours is faster."""
    names = {
        "kernel": "kernel",
        "shape": "shape",
        "heads": "heads",
        "ms": "ms",
        "gb_per_s": "GB/s",
        "of_copy": "of copy",
        "error": "error",
        "ratio": "ours / this",
    }
    shown = rows[[*names]].rename(columns=names)
    shown["error"] = shown.error.map(lambda e: "" if pd.isna(e) else f"{e:.1e}")
    shown["heads"] = shown.heads.map(lambda h: h or "")
    return shown.round({"ms": 3, "GB/s": 0, "of copy": 3, "ours / this": 3})


def worth_of_a_shadow(runs: pd.DataFrame) -> pd.DataFrame:
    """Whole steps of shadow and fused FP8 at every recorded setting, and what each keeps.

    `runs` are recorded runs of one model. A ratio over 1 says that the shadow's step is longer.
    """
    keys = ["pool_tokens", "concurrency", "context"]
    steps = runs.pivot_table(index=keys, columns="strategy", values="step_ms")
    steps = steps.dropna(subset=["shadow", "fused_fp8"]).reset_index()
    model = runs.model.iloc[0]
    from shadowkv_lab.model import load_model

    kept = {name: parse(name).token_bytes(load_model(model)) for name in ("shadow", "fused_fp8")}
    return pd.DataFrame(
        {
            "pool": steps.pool_tokens,
            "load": steps.concurrency.astype(str) + " x " + steps.context.astype(str),
            "shadow ms": steps.shadow,
            "fused FP8 ms": steps.fused_fp8,
            "shadow / fused": steps.shadow / steps.fused_fp8,
            "bytes kept, shadow / fused": kept["shadow"] / kept["fused_fp8"],
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

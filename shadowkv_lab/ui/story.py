"""The story in pictures: what moves in a step, and the answers of a server as bars."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab.deployment import Deployment
from shadowkv_lab.load import Load
from shadowkv_lab.steps.answer import Answer
from shadowkv_lab.ui import charts
from shadowkv_lab.ui.rows import named

POOLS = np.geomspace(2048, 4_194_304, 12)


def bytes_per_step(at: Deployment, load: Load, pool_tokens: int) -> go.Figure:
    """Bytes that one GPU moves in a step, over pool size: the whole pool, live rows, new rows."""
    model, page = at.model, at.page_size
    pools = np.unique([*(POOLS // page * page).astype(int), pool_tokens])
    row, wide = model.layers * model.row_bytes("fp8"), model.layers * model.row_bytes("bf16")
    live, new = model.read_tokens(load) * wide, load.new_tokens * row
    cast = pool_tokens * (row + wide)
    parts = {
        "the whole pool: full cast reads FP8 and writes BF16": (pools * (row + wide), "#D55E00"),
        "live rows: what attention reads": (np.full(len(pools), live), charts.DARK),
        "new rows: what a shadow casts": (np.full(len(pools), new), "#009E73"),
    }
    traces = [
        charts.line(
            pools.tolist(),
            moved.tolist(),
            f"{name}, {_size(moved[pools == pool_tokens][0])}",
            colour,
            "calibrated",
            marker={},
            hover="%{x:,} tokens: %{y:.3s}B per step<extra></extra>",
        )
        for name, (moved, colour) in parts.items()
    ]
    here = charts.points([pool_tokens] * 3, [cast, live, new], "", [c for _, c in parts.values()])
    traces.append(here | {"showlegend": False, "hoverinfo": "skip"})
    return charts.figure(
        charts.heading(
            f"The cast moves {_size(cast)} per step for {load.new_tokens} new "
            f"row{'s' * (load.new_tokens != 1)}: {cast / live:,.0f} times what attention reads",
            f"{model.layers} layers of {model.name}, {load} live tokens, pool of {pool_tokens:,}; "
            "from the sizes of the rows",
        ),
        traces,
        "pool (tokens)",
        "bytes per step on each GPU",
        log_x=True,
        log_y=True,
        xaxis={"tickformat": "~s"},
        yaxis={"dtick": 2, "tickformat": "~s"},
        legend={"y": -0.25, "orientation": "v"},
        margin={"b": 150},
        height=470,
    )


def _size(amount: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if amount >= size:
            return f"{amount / size:,.1f} {unit}"
    return f"{amount / 1e3:,.1f} kB"


def answer_bars(
    found: Sequence[Answer], load: Load, reported: Sequence[tuple[str, float]] = ()
) -> go.Figure:
    """TPOT of each strategy that runs, by phase, the fastest first; `reported` are (what, ms)."""
    runs = [a for a in found if a.runs]
    frame = pd.DataFrame(
        {
            "title": [named(a) for a in runs],
            "colour": [a.strategy.colour for a in runs],
            "provenance": [str(a.step.provenance) for a in runs],
            "cast": [a.step["cast"].ms for a in runs],
            "attention": [a.step["attention"].ms for a in runs],
            "write": [a.step["write"].ms for a in runs],
        }
    )
    shades = charts.OPACITY
    if load.reads == "dsa":
        shades = shades | charts.DSA_OPACITY
        frame = frame.assign(**{n: [a.step[n].ms for a in runs] for n in charts.DSA_OPACITY})
    parts = {name: (charts.NAMES.get(name, name), shade) for name, shade in shades.items()}
    rest = [a.rest_ms for a in runs]
    bars = charts.phases(frame, parts)
    bars.append(charts.bar(frame.title, rest, "rest", charts.GREY, "assumed"))
    names, ms = [name for name, _ in reported], [ms for _, ms in reported]
    bars.append(charts.bar(names, ms, "reported", "#e8e8e8", "published"))
    texts = [
        f"{a.tpot_ms:.1f} ms, {a.tokens_per_s:,.1f} tok/s, {a.kept_tokens:,} tokens" for a in runs
    ]
    texts += [f"{each:.1f} ms, {1000 / each:.1f} tok/s" for each in ms]
    first, last = runs[0], runs[-1]
    return charts.figure(
        charts.heading(
            f"{named(last)} takes {last.tpot_ms:.1f} ms per token, {named(first)} "
            f"{first.tpot_ms:.1f}",
            f"{load} tokens; bars: ms per token by phase; tokens: what the pool keeps",
        ),
        bars,
        "ms per token",
        height=460,
        **charts.totals(
            [*frame.title, *names], [*(a.tpot_ms for a in runs), *ms], texts, widest=1.75
        ),
    )

"""The story in pictures: what moves in a step, and the answers of a server as bars."""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab.deployment import Deployment
from shadowkv_lab.load import Load
from shadowkv_lab.steps.answer import Answer
from shadowkv_lab.strategies import parse
from shadowkv_lab.ui import charts
from shadowkv_lab.ui.rows import leader, named

# Of squares, in pixels of the picture as it is drawn; a note is as wide as NOTE.
LARGEST, GAP, LEAST, NOTE = 340.0, 12.0, 3.0, 130.0


def bytes_per_step(at: Deployment, load: Load, pool_tokens: int) -> go.Figure:
    """Bytes that one GPU moves in a step, as squares drawn to scale, at pools of three sizes.

    The whole pool is what full cast casts, live rows what attention reads afterwards, new rows
    what a shadow writes in place of the cast: `Moves` of the two strategies over all layers. Of
    the load only as many requests count as the pool holds.
    """
    full, shadow = parse("full_cast"), parse("shadow")
    each = max(1, int(load.context))
    load = replace(
        load, concurrency=min(load.concurrency, max(1, pool_tokens // each)), context=each
    )
    pools = [pool_tokens]
    for part in (4, 16):
        if pool_tokens // part >= load.live_tokens:
            pools.insert(0, pool_tokens // part)
    rest = (int(at.model.read_tokens(load)), load.new_tokens)
    moved = [full.step_moves(at.model, P, *rest) for P in pools]
    new = shadow.step_moves(at.model, pool_tokens, *rest).write_bytes
    live, whole = moved[-1].attention_bytes, moved[-1].cast_bytes
    parts = (
        ("the whole pool, cast", charts.tag("full_cast").colour, [m.cast_bytes for m in moved]),
        ("live rows, read", charts.DARK, [m.attention_bytes for m in moved]),
        ("new rows, written to a shadow", charts.tag("shadow").colour, [new] * len(moved)),
    )
    scale = LARGEST / sqrt(max(whole, live))
    squares, notes, left = [([], []) for _ in parts], [], 0.0
    for k, P in enumerate(pools):
        start = left
        for (xs, ys), (_, _, amounts) in zip(squares, parts, strict=True):
            side = max(LEAST, scale * sqrt(amounts[k]))
            xs += [left, left, left + side, left + side, left, None]
            ys += [0, side, side, 0, 0, None]
            left += side + GAP
        left = max(left + 2 * GAP, start + NOTE)
        words = f"<b>{_size(moved[k].cast_bytes)}</b><br>pool of<br>{P:,}"
        at_top = {"y": squares[0][1][-4], "yanchor": "bottom"}
        notes.append({"x": start, "xanchor": "left", "align": "left", "text": words, **at_top})
    traces = [
        {
            **{"type": "scatter", "mode": "lines", "fill": "toself", "x": xs, "y": ys},
            **{"line": {"color": colour, "width": 0}, "fillcolor": colour},
            **{"name": f"{name}: {_upto(amounts)}", "hoverinfo": "name"},
        }
        for (xs, ys), (name, colour, amounts) in zip(squares, parts, strict=True)
    ]
    right = left - 2 * GAP
    one = load.new_tokens == 1
    return charts.figure(
        charts.heading(
            f"{load.new_tokens} new row{'' if one else 's'}: full cast moves {_size(whole)} "
            f"per step, a shadow {_size(new)}",
            f"squares to scale ({LEAST:.0f} pixels at least): the cast grows with the pool, live "
            f"and new rows do not; {at.model.layers} layers of {at.model.name}, {load} tokens, "
            "one GPU",
        ),
        traces,
        height=LARGEST + 190,
        xaxis={"visible": False, "range": [-4, right]},
        yaxis={"visible": False, "range": [-8, LARGEST + 70], "scaleanchor": "x"},
        annotations=notes,
        margin={"l": 20, "b": 100},
        legend={"orientation": "v", "y": -0.02},
    )


def _upto(amounts: Sequence[float]) -> str:
    first, last = _size(amounts[0]), _size(amounts[-1])
    return last if first == last else f"{first} to {last}"


def _size(amount: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if amount >= size:
            return f"{amount / size:,.1f} {unit}"
    return f"{amount / 1e3:,.0f} kB"


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
    first, last = leader(runs, load), runs[-1]
    untried = ", ".join(named(a) for a in runs if a.untried)
    return charts.figure(
        charts.heading(
            f"{named(last)} takes {last.tpot_ms:.1f} ms per token, {named(first)} "
            f"{first.tpot_ms:.1f}",
            f"{load} tokens; bars: ms per token by phase; tokens: what the pool keeps"
            + (f"; never run on this card: {untried}" if untried else ""),
        ),
        bars,
        "ms per token",
        height=460,
        **charts.totals(
            [*frame.title, *names], [*(a.tpot_ms for a in runs), *ms], texts, widest=1.75
        ),
    )

"""How far predictions can be trusted: errors on times that they had not seen."""

import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab.ui import charts

SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star", "pentagon")
KINDS = {
    "card": "a card left out",
    "heads": "a head count left out",
    "requests": "a request count left out",
    "context": "the longest contexts left out",
    "cells": "one cell in four left out",
}


def in_short(rows: pd.DataFrame) -> str:
    """The finding in two sentences of Markdown, from the errors themselves."""
    attention = rows[rows.phase == "attention"]
    median = {kind: part.error.median() for kind, part in attention.groupby("kind")}
    lent = attention[(attention.kind == "card") & attention.basis.str.startswith("lent")]
    by = {basis: part.error.median() for basis, part in lent.groupby("basis")}
    return (
        f"**In short:** inside a table, attention is predicted within {median['cells']:.0%} in the "
        f"median. A card that is left out whole is predicted within "
        f"{by['lent by its generation']:.0%} if another card of its generation has a table, and "
        f"within {by['lent by another generation']:.0%} if none has. Beyond the longest contexts "
        f"it is {median['context']:.0%}, and the range is wide."
    )


def errors(rows: pd.DataFrame) -> go.Figure:
    """Share of left-out times within an error, one line for each kind of leaving out."""
    traces = []
    for colour, (kind, words) in zip(charts.OTHERS, KINDS.items(), strict=False):
        error = rows.loc[rows.kind == kind, "error"].sort_values()
        if error.empty:
            continue
        step = max(1, len(error) // 300)
        share = pd.Series(range(1, len(error) + 1), index=error.index) / len(error)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{words} ({len(error):,} times)",
                "x": error[::step].clip(lower=1e-3).tolist(),
                "y": share[::step].tolist(),
                "line": {"color": colour, "width": 2},
                "hovertemplate": "%{y:.0%} within %{x:.1%}",
            }
        )
    inside = rows.loc[rows.kind == "cells", "error"]
    heading = charts.heading(
        f"Inside a table half of the predictions are within {inside.median():.1%}",
        "shipped times predicted without themselves; recorded and published",
    )
    return charts.figure(
        heading,
        traces,
        "relative error",
        "share of predictions",
        xaxis={"type": "log", "range": [-2.5, 0.5], "tickformat": ".1%", "dtick": 1},
        yaxis={"tickformat": ".0%", "range": [0, 1]},
        legend={"y": -0.28},
        margin={"b": 130},
    )


def predicted_and_seen(rows: pd.DataFrame, kind: str = "card") -> go.Figure:
    """Each left-out time against its prediction, a colour per card; the diagonal is right."""
    part = rows[rows.kind == kind]
    traces, symbols = [], iter(SYMBOLS)
    for colour, (card, of_card) in zip(charts.OTHERS, part.groupby("card"), strict=False):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": card,
                "x": of_card.seen_us.round(2).tolist(),
                "y": of_card.predicted_us.round(2).tolist(),
                "marker": {"color": colour, "size": 5, "opacity": 0.6, "symbol": next(symbols)},
                "hovertemplate": f"{card}: %{{x:,.1f}} us, predicted %{{y:,.1f}}<extra></extra>",
            }
        )
    ends = [float(part.seen_us.min()), float(part.seen_us.max())]
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "x": ends,
            "y": ends,
            "line": {"color": charts.DARK, "width": 1},
            "showlegend": False,
            "hoverinfo": "skip",
        }
    )
    heading = charts.heading(
        f"With {KINDS[kind]}, half of the times are predicted within {part.error.median():.0%}",
        "one layer's attention, cast or write",
    )
    return charts.figure(
        heading,
        traces,
        "time (us per layer)",
        "predicted (us per layer)",
        xaxis=charts.LOG | {"dtick": 1},
        yaxis=charts.LOG | {"dtick": 1},
        height=460,
    )

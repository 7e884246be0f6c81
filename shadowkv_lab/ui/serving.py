"""Figures of the closed form: one load, throughput against interactivity, who wins where."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab.serving.closed_form import Cell, Contender, by_pair, crossovers, point, winner_map
from shadowkv_lab.serving.steps import weakest
from shadowkv_lab.ui import style

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = tuple(2**k for k in range(10, 18))


def source_of(contenders: Sequence[Contender]) -> str:
    """The weakest provenance among the steps, as figures say it."""
    return f"step times: {weakest(c.step.provenance for c in contenders)}"


def heading(finding: str, note: str) -> str:
    """A finding, and beneath it, smaller, what it rests on."""
    return f"{finding[0].upper()}{finding[1:]}<br><sup>{note}</sup>"


def legend(contender: Contender) -> str:
    return f"{style.title(contender.name)} ({contender.step.provenance})"


def line_style(contender: Contender) -> dict:
    """Colour of the strategy, dash of the provenance."""
    return {"color": style.colour(contender.name), "dash": style.DASHES[contender.step.provenance]}


def verdict(contenders: Sequence[Contender], concurrency: int, context: int) -> go.Figure:
    """The closed form at one load: output tokens/s of each strategy, and how many run."""
    fit = [c for c in contenders if c.running(concurrency, context)]
    points = [point(c, concurrency, context) for c in fit]
    what = f"{concurrency} requests of {context:,} tokens"
    if not points:
        return style.figure(f"Nobody holds one request of {context:,} tokens", "", "")
    best = max(points, key=lambda p: p.tokens_per_s)
    fig = style.figure(
        heading(
            f"{style.title(best.name)} gives most: {best.tokens_per_s:,.0f} tokens/s",
            f"{what}; {source_of(fit)}",
        ),
        "output tokens/s, all requests",
        "",
    )
    for p, c in zip(points, fit, strict=True):
        said = f"{p.running} run, {p.queued} wait, {p.step_ms:.0f} ms a token, {p.provenance}"
        fig.add_bar(
            y=[style.title(p.name)],
            x=[p.tokens_per_s],
            orientation="h",
            showlegend=False,
            marker={
                "color": style.colour(p.name),
                "pattern": {"shape": style.PATTERNS[p.provenance], "size": 6},
            },
            hovertemplate=f"{legend(c)}: {p.tokens_per_s:,.1f} tokens/s<br>{said}<br>"
            f"pool of {c.capacity_tokens:,} tokens<extra></extra>",
        )
        fig.add_annotation(
            x=p.tokens_per_s,
            y=style.title(p.name),
            xanchor="left",
            xshift=6,
            showarrow=False,
            text=said,
        )
    fig.update_xaxes(range=[0, 1.75 * best.tokens_per_s])
    fig.update_yaxes(automargin=True)
    fig.update_layout(height=170 + 50 * len(points))
    return fig


def pareto(
    contenders: Sequence[Contender], context: int, concurrencies: Sequence[int] = CONCURRENCIES
) -> go.Figure:
    """Throughput against interactivity: up is more for the server, right is more for a user."""
    fit = [c for c in contenders if c.running(1, context)]
    curves = {c.name: [point(c, n, context) for n in concurrencies] for c in fit}
    peaks = {name: max(p.tokens_per_s for p in points) for name, points in curves.items()}
    if not fit:
        return style.figure(f"Nobody holds one request of {context:,} tokens", "", "")
    best = max(peaks, key=peaks.__getitem__)
    finding = (
        f"At {context:,} tokens {style.title(best)} peaks highest: {peaks[best]:,.0f} tokens/s"
    )
    fig = style.figure(
        heading(
            finding,
            f"1 to {concurrencies[-1]} requests; a cross: the pool is full; " + source_of(fit),
        ),
        "output tokens/s that one running request sees",
        "output tokens/s of the server",
        log_x=True,
        log_y=True,
    )
    for c in fit:
        points = curves[c.name]
        fig.add_scatter(
            x=[p.tokens_per_s_per_user for p in points],
            y=[p.tokens_per_s for p in points],
            name=legend(c),
            line=line_style(c),
            mode="lines+markers",
            marker={"size": 8, "symbol": ["x" if p.queued else "circle" for p in points]},
            text=[
                f"{n} sent, {p.running} run, {p.queued} wait<br>{p.step_ms:.1f} ms a token"
                for n, p in zip(concurrencies, points, strict=True)
            ],
            hovertemplate="%{text}<br>%{y:,.0f} tokens/s in all<br>%{x:.1f} tokens/s for each"
            f"<extra>{legend(c)}</extra>",
        )
    return fig


def winners(
    contenders: Sequence[Contender],
    concurrencies: Sequence[int] = CONCURRENCIES,
    contexts: Sequence[int] = CONTEXTS,
    note: str = "",
) -> go.Figure:
    """Which strategy gives most tokens/s at each load, and the lines where that changes."""
    rows = winner_map(contenders, concurrencies, contexts)
    cells = [cell for row in rows for cell in row]
    names = [c.name for c in contenders]
    won = _shares(cells)
    counted = ", ".join(f"{style.title(n)} {share:.0%}" for n, share in won.items())
    never = ", ".join(style.title(n) for n in names if n not in won)
    said = "; ".join(filter(None, [note, f"never {never}" if never else "", "pale: a small lead"]))
    fig = style.figure(
        heading(f"Most tokens/s, of these loads: {counted}", f"{said}; {source_of(contenders)}"),
        "requests sent at once",
        "context (tokens a request)",
        log_x=True,
        log_y=True,
        height=460,
    )
    for name in names:
        mine = [cell for cell in cells if cell.winner == name]
        fig.add_scatter(
            x=[m.concurrency for m in mine] or [None],
            y=[m.context for m in mine] or [None],
            mode="markers",
            name=style.title(name),
            marker={
                "symbol": "square",
                "size": 22,
                "color": style.colour(name),
                "opacity": [0.35 + 0.65 * min(m.lead, 0.5) / 0.5 for m in mine] or 1,
            },
            text=[
                f"{m.tokens_per_s:,.0f} tokens/s, {m.running} run<br>"
                + (
                    "only one that holds a request"
                    if np.isinf(m.lead)
                    else "a tie"
                    if m.lead < 5e-4
                    else f"{m.lead:.1%} over the next"
                )
                for m in mine
            ],
            hovertemplate="%{x} requests of %{y:,} tokens<br>%{text}<extra>"
            f"{style.title(name)}</extra>",
        )
    for (before, after), line in by_pair(crossovers(contenders, contexts, concurrencies)).items():
        fig.add_scatter(
            x=[p.concurrency for p in line],
            y=[p.context for p in line],
            mode="lines+markers",
            line={"color": "#222", "width": 1.5},
            marker={"size": 5},
            name=f"from here {style.title(after)}, below {style.title(before)}",
            hovertemplate=f"from %{{x}} requests of %{{y:,}} tokens on {style.title(after)} beats "
            f"{style.title(before)}<extra></extra>",
        )
    for axis, values in ((fig.layout.xaxis, concurrencies), (fig.layout.yaxis, contexts)):
        axis.update(tickvals=list(values), ticktext=[f"{v:,}" for v in values])
    fig.update_layout(legend={"orientation": "h", "y": -0.2})
    return fig


def wins(cases: dict[str, Sequence[Contender]]) -> pd.DataFrame:
    """The share of the map's loads that each strategy wins, one row a case, in %."""
    rows = {}
    for name, found in cases.items():
        cells = [cell for row in winner_map(found, CONCURRENCIES, CONTEXTS) for cell in row]
        rows[name] = {
            style.title(c.name): round(100 * _shares(cells).get(c.name, 0.0)) for c in found
        }
        rows[name]["provenance"] = weakest(c.step.provenance for c in found)
    return pd.DataFrame(rows).T


def _shares(cells: Sequence[Cell]) -> pd.Series:
    return pd.Series([cell.winner for cell in cells]).value_counts(normalize=True)

"""A comparison as one picture and one sentence, for an issue: Markdown, HTML or PNG."""

import html
import textwrap
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab import files
from shadowkv_lab.errors import CannotRun, OutOfRange
from shadowkv_lab.provenance import Kind
from shadowkv_lab.server.compare import Comparison
from shadowkv_lab.strategies import parse

KINDS = (".md", ".html", ".png")
REST, UNKNOWN = "#BBBBBB", "#777777"
WIDTH, LINE = 860, 108  # pixels, and characters of the title in them


def figure(found: Comparison, most: int = 6) -> go.Figure:
    """Step times before and after, one pair of bars per load, the cast in each where it is known.

    The cast does not depend on the load: it is the same in every pair. A predicted one has the
    pattern of its provenance.
    """
    rows = found.tpot.head(most)
    names = [name for row in rows.itertuples() for name in _pair(row)]
    steps = [ms for row in rows.itertuples() for ms in (row.before_step_ms, row.after_step_ms)]
    known = found.cast_ms is not None and found.left is not None
    casts = [found.cast_ms, found.cast_ms * found.left] * len(rows) if known else []
    casts = [min(cast, step) for cast, step in zip(casts, steps, strict=False)]
    kind = Kind.MEASURED if "trace" in found.cast_how else Kind.CALIBRATED
    kind = Kind.ASSUMED if "assumed" in found.cast_how else kind
    fig = go.Figure()
    common = dict(
        y=names, orientation="h", hovertemplate="%{y}: %{x:.2f} ms<extra>%{fullData.name}"
    )
    common["hovertemplate"] += "</extra>"
    if known:
        fig.add_bar(
            x=casts,
            name="cast of the pool",
            marker=dict(
                color=parse("full_cast").tag.colour,
                pattern=dict(shape=kind.pattern, solidity=0.15, fgcolor="white"),
            ),
            **common,
        )
    fig.add_bar(
        x=[step - cast for step, cast in zip(steps, casts or [0.0] * len(steps), strict=True)],
        name="the rest of the step" if known else "whole step (its cast is not known)",
        marker_color=REST if known else UNKNOWN,
        text=[f"{step:.1f} ms" for step in steps],
        textposition="outside",
        cliponaxis=False,
        **common,
    )
    lines = textwrap.wrap(html.escape(found.sentence), LINE)
    fig.update_layout(
        barmode="stack",
        width=WIDTH,
        height=140 + 22 * len(lines) + 34 * len(names),
        margin=dict(l=20, r=70, t=30 + 20 * len(lines), b=70),
        title=dict(text="<br>".join(lines), x=0.01, xanchor="left", font_size=14),
        font=dict(family="Inter, Helvetica, Arial, sans-serif", size=12, color="#222"),
        plot_bgcolor="white",
        legend=dict(orientation="h", y=-0.18, yanchor="top", traceorder="normal"),
        xaxis=dict(title="ms per step", gridcolor="#e6e6e6", rangemode="tozero"),
        yaxis=dict(autorange="reversed", automargin=True),
    )
    return fig


def _pair(row) -> tuple[str, str]:
    load = f"{_words(row.requests)} x {_words(row.input)}"
    return f"{load}, before", f"{load}, after"


def _words(value: object) -> str:
    return "?" if value is None or pd.isna(value) else f"{value:,.1f}".removesuffix(".0")


COLUMNS = {
    "requests": "requests",
    "input": "input",
    "before_ms": "TPOT before, ms",
    "after_ms": "after, ms",
    "saved_ms": "saved, ms",
    "noise_ms": "noise, ms",
    "before_tokens_per_s": "tok/s before",
    "after_tokens_per_s": "after",
}


def markdown(found: Comparison, picture: str | None = None) -> str:
    """The sentence, the picture's name if there is one, the table and the notes, as Markdown."""
    head = " | ".join(COLUMNS.values())
    lines = [f"**{found.sentence}**", ""]
    if picture:
        lines += [f"![before and after]({picture})", ""]
    lines += [f"| {head} |", "|" + " ---: |" * len(COLUMNS)]
    for row in found.tpot[list(COLUMNS)].itertuples(index=False):
        lines.append("| " + " | ".join(_cell(value) for value in row) + " |")
    lines += ["", *(f"- {note}" for note in found.notes)]
    if found.model:
        lines.append(f"- model: {found.model}; compared by `shadowkv compare`")
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if value is None or pd.isna(value):
        return ""
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def page(found: Comparison) -> str:
    """One HTML file that works without a network: the sentence, the live picture, the notes."""
    fig = figure(found)
    fig.update_layout(title_text="", margin_t=20, width=None)
    plot = fig.to_html(full_html=False, include_plotlyjs=True, config={"responsive": True})
    table = found.tpot[list(COLUMNS)].rename(columns=COLUMNS)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in found.notes)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(found.sentence[:80])}</title>"
        "<style>body{font:16px/1.5 Inter,Helvetica,Arial,sans-serif;max-width:900px;"
        "margin:2em auto;padding:0 1em;color:#222}td,th{padding:3px 10px;text-align:right}"
        "table{border-collapse:collapse;font-size:14px;display:block;overflow-x:auto}</style>"
        f"</head><body><p><b>{html.escape(found.sentence)}</b></p>{plot}"
        f"{table.to_html(index=False, border=0, float_format='{:,.2f}'.format)}"
        f"<ul>{notes}</ul></body></html>\n"
    )


def write(
    found: Comparison, path: str | Path, draw: Callable[[go.Figure], bytes | None]
) -> list[Path]:
    """Write a comparison as its name's suffix says; returns the files written.

    `draw` makes a PNG of a figure, None where nothing can. Markdown gets its picture beside it,
    under the same name. Raises `OutOfRange` for another suffix, `CannotRun` where a PNG was asked
    for and cannot be drawn, `CannotWrite`.
    """
    path = Path(path)
    if path.suffix not in KINDS:
        raise OutOfRange(f"A comparison as {path.suffix or path.name!r}", ", ".join(KINDS))
    if path.suffix == ".html":
        return [files.write(path, page(found))]
    files.ready(path)
    picture = draw(figure(found))
    if path.suffix == ".png":
        if picture is None:
            raise CannotRun(
                "A PNG needs a Chromium, and none could be started",
                ".md and .html, which need none",
                "Install one, for example: apt-get install chromium",
            )
        return [files.write(path, picture)]
    beside = path.with_suffix(".png")
    wrote = [files.write(path, markdown(found, beside.name if picture else None))]
    return [*wrote, *([files.write(beside, picture)] if picture else [])]

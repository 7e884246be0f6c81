"""How every figure looks, and the bars, lines and points that all are made of.

One colour means one strategy, and comes from its tag or a table's `colour` column; what is no
strategy is grey. Where a number comes from is told by pattern, outline and dash, never by colour.
Frames are tidy: one row per strategy or point, with the columns `title`, `colour` and
`provenance`.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab.provenance import Kind
from shadowkv_lab.strategies import Label, parse

# For what is no strategy: greys, and hues too dull to be taken for a strategy's.
OTHERS = ("#4a5568", "#8d99ae", "#6b5b4b", "#b8a98f", "#777777", "#bbbbbb", "#3d5a40")
GREY, DARK = "#bdbdbd", "#555555"
pd.set_option("styler.format.escape", "html")  # a table's fields are text, as in a plain frame
OPACITY = {"cast": 1.0, "attention": 0.62, "write": 0.3}
DSA_OPACITY = {"index": 0.45, "top_k": 0.2}  # beside them, where a step reads by an index
NAMES = {"top_k": "top-k"}

WIDTH, HEIGHT = 860, 420
BELOW_PX = 66  # below a plot: its ticks and their title, then the legend
NOTE_LETTERS = 140  # of a note's line in a figure WIDTH wide
LOG = {"type": "log", "dtick": "D2", "tickformat": ",~g"}  # ticks at 1, 2 and 5 of each decade
AXIS = {
    "showline": True,
    "linecolor": "#888",
    "gridcolor": "#e6e6e6",
    "zeroline": False,
    "ticks": "outside",
    "automargin": True,
}
# The whole look. plotly's own template is 7 kB in each figure, and 70 ms in the first.
TEMPLATE = {
    "layout": {
        "font": {"family": "Inter, Helvetica, Arial, sans-serif", "size": 13, "color": "#222"},
        "title": {"font": {"size": 16}, "x": 0, "xref": "paper", "xanchor": "left"},
        "plot_bgcolor": "white",
        "paper_bgcolor": "white",
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        "xaxis": AXIS,
        "yaxis": AXIS,
        "annotationdefaults": {"showarrow": False},
        "legend": {"traceorder": "normal", "x": 0, "xanchor": "left", "yanchor": "top"},
    },
    "data": {
        "bar": [
            {
                "marker": {
                    "line": {"color": "white", "width": 1},
                    "pattern": {"fillmode": "overlay", "size": 12, "solidity": 0.15},
                }
            }
        ]
    },
}
# Built once with plotly's checks on: it reads its schema here rather than in the first view.
go.Figure(go.Bar(), go.Layout(template=TEMPLATE))


def tag(strategy) -> Label:
    """Title, colour and place of a strategy, from itself, its label, or a tag that it brings."""
    return strategy if isinstance(strategy, Label) else parse(strategy).tag


def heading(finding: str, note: str = "") -> str:
    """A finding, and beneath it, smaller, what it rests on, in lines that a figure has room for."""
    lines = textwrap.wrap(note, NOTE_LETTERS)
    return f"{finding[0].upper()}{finding[1:]}" + "".join(f"<br><sup>{x}</sup>" for x in lines)


def requests(count: int) -> str:
    """Requests, counted: "1 request"."""
    return f"{count:,} request{'' if count == 1 else 's'}"


OURS = re.compile(r"<(?!(?:/?(?:b|i|em|sup|sub|pre|code|extra)|br)>)")


def words(text: str) -> str:
    """Text with the lab's own marks alone, none of which has an attribute: whatever else looks
    like an element stands there as it is, since a record or a log may hold anything."""
    return OURS.sub("&lt;", text) if "<" in text else text


def _in_words(value: object) -> object:
    if isinstance(value, str):
        return words(value)
    if isinstance(value, dict):
        return {key: _in_words(part) for key, part in value.items()}
    return [_in_words(part) for part in value] if isinstance(value, list | tuple) else value


def figure(
    title: str,
    /,
    traces: Iterable[Mapping] = (),
    x: str = "",
    y: str = "",
    *,
    log_x: bool = False,
    log_y: bool = False,
    **layout,
) -> go.Figure:
    """A finished figure. `title` states the finding; axes carry units; `layout` is plotly's, whole
    parts of it as dicts, which are merged into the house's."""
    base = {
        "title": {"text": title},
        "width": WIDTH,
        "height": HEIGHT,
        "margin": {"l": 70, "r": 20, "t": 70 + 14 * max(0, title.count("<sup>") - 1), "b": 90},
        "legend": {"orientation": "h"},
        "xaxis": {"title": {"text": x}, **(LOG if log_x else {})},
        "yaxis": {"title": {"text": y}, **(LOG if log_y else {})},
        "template": TEMPLATE,
    }
    layout = merged(base, layout)
    plot_px = layout["height"] - layout["margin"]["t"] - layout["margin"]["b"]
    layout["legend"] = {"y": -BELOW_PX / plot_px} | layout["legend"]
    # NOTE: plotly's checks of every property take most of a figure's time; a test makes them.
    return go.Figure(_in_words(list(traces)), _in_words(layout), _validate=False)


def merged(base: Mapping, more: Mapping) -> dict:
    """`base` with `more` laid over it, dict by dict."""
    both = dict(base)
    for key, value in more.items():
        old = both.get(key)
        both[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return both


def bar(
    y: Iterable,
    x: Iterable[float],
    name: str,
    colour,
    provenance,
    hover: Iterable[str] | None = None,
    *,
    form: str = ",.2f",
    unit: str = " ms",
    opacity: float = 1.0,
    upright: bool = False,
    **more,
) -> dict:
    """Lying bars; `colour` and `provenance` are one, or one for each bar; `hover` adds a line.

    `upright` swaps the axes.
    """
    y, x = list(y), [None if pd.isna(v) else float(v) for v in x]
    words = [provenance] * len(y) if isinstance(provenance, str) else list(provenance)
    said = [""] * len(y) if hover is None else list(hover)
    label, value = ("x", "y") if upright else ("y", "x")
    marker = {"color": colour if isinstance(colour, str) else list(colour), "opacity": opacity}
    shapes = [Kind(word).pattern for word in words]
    if any(shapes):
        marker["pattern"] = {"shape": shapes}
        if not isinstance(colour, str):
            # plotly looks for what stands out from one colour, and warns at length of a list: each
            # bar's own is taken all the same.
            marker["pattern"]["bgcolor"] = "#888888"
    return {
        "type": "bar",
        label: y,
        value: x,
        "name": name,
        "orientation": "v" if upright else "h",
        "customdata": [list(pair) for pair in zip(words, said, strict=True)],
        "marker": marker,
        "hovertemplate": f"%{{{label}}}: {name} %{{{value}:{form}}}{unit}, %{{customdata[0]}}<br>"
        "%{customdata[1]}<extra></extra>",
        **more,
    }


def shaded(name: str, opacity: float) -> dict:
    """The legend's entry for an opacity, whatever the colour: legends do not show a marker's."""
    colour = f"rgba(60,60,60,{opacity})"
    return {"type": "bar", "x": [None], "y": [None], "name": name, "marker": {"color": colour}}


def phases(
    frame: pd.DataFrame, parts: Mapping[str, tuple], hover: Mapping[str, Sequence[str]] = {}, **more
) -> list[dict]:
    """Stacked bars: one per row of `frame`, in its colour, and in it a shade per part.

    `parts` maps a column to its name and its opacity; `hover` a column to a line per row.
    """
    traces, own = [], (frame.colour, frame.provenance)
    for column, (name, opacity) in parts.items():
        more |= {"opacity": opacity, "showlegend": False}
        traces.append(bar(frame.title, frame[column], name, *own, hover.get(column), **more))
        traces.append(shaded(name, opacity))
    return traces


def line(
    x: Iterable,
    y: Iterable,
    name: str,
    colour: str,
    provenance: str,
    *,
    marker: Mapping | None = None,
    hover: str = "",
    **more,
) -> dict:
    """A line in a strategy's colour, its dash the provenance; `marker` {} marks no points."""
    marked = {"size": 6} if marker is None else dict(marker)
    return {
        "type": "scatter",
        "mode": "lines+markers" if marked else "lines",
        "x": list(x),
        "y": list(y),
        "name": name,
        "line": {"color": colour, "dash": Kind(provenance).dash},
        **({"marker": marked} if marked else {}),
        **({"hovertemplate": hover} if hover else {}),
        **more,
    }


def lines(
    frame: pd.DataFrame, x: str, y: str, hover: str = "", columns: Sequence[str] = (), **more
) -> list[dict]:
    """One line per `title`; `columns` are the customdata of `hover`.

    A line that lies under another is a ring: of lines with the same points the first.
    """
    needed, parts, found = dict.fromkeys(("colour", "provenance", x, y, *columns)), {}, []
    for row in frame[["title", *needed]].to_dict("records"):
        parts.setdefault(row["title"], []).append(row)
    for title, rows in parts.items():
        rows.sort(key=lambda row: row[x])
        own = {"hover": hover, **more}
        if columns:
            own["customdata"] = [[row[name] for name in columns] for row in rows]
        colour, word = rows[0]["colour"], rows[0]["provenance"]
        xs, ys = ([row[name] for row in rows] for name in (x, y))
        found.append(line(xs, ys, title, colour, word, **own))
    rings = 0
    for i, trace in reversed([*enumerate(found)]):
        if any(_covers(later, trace) for later in found[i + 1 :]):
            size, rings = 12 + 5 * rings, rings + 1
            trace["marker"] = {"size": size, "symbol": "circle-open", "line": {"width": 2}}
    return found


def _covers(over: Mapping, under: Mapping) -> bool:
    """Whether one line hides another: within 3 % of it at half of its points or more."""
    there = dict(zip(over["x"], over["y"], strict=True))
    near = [
        x in there and abs(there[x] - y) <= 0.03 * abs(y)
        for x, y in zip(under["x"], under["y"], strict=True)
    ]
    return bool(near) and sum(near) >= len(near) / 2


def points(
    x: Iterable, y: Iterable, name: str, colour, *, hover: str = "", marker: Mapping = {}, **more
) -> dict:
    """Marks without a line; `colour` is one or one per point."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(x),
        "y": list(y),
        "name": name,
        "marker": {"size": 13, "color": colour, **marker},
        **({"hovertemplate": hover} if hover else {}),
        **more,
    }


def totals(
    names: Iterable[str],
    ends: Iterable[float],
    texts: Iterable[str],
    across: Sequence[tuple[float, str]] = (),
    widest: float = 1.45,
) -> dict:
    """Layout of stacked bars: a text after each, and dashed lines (value, text) across.

    `widest` is the axis' end, as a multiple of the longest bar.
    """
    names, ends = list(names), [float(end) for end in ends]
    notes = [
        {
            "y": name,
            "x": end,
            "text": text,
            "xanchor": "left",
            "xshift": 5,
            "bgcolor": "rgba(255,255,255,0.85)",
        }
        for name, end, text in zip(names, ends, texts, strict=True)
    ]
    above = {"y": 1, "yref": "paper", "yanchor": "bottom"}
    last = max((at for at, _ in across), default=0)
    for at, text in across:  # of several the last to the right of its line, others to the left
        side = {"xanchor": "left" if at == last else "right"} if len(across) > 1 else {}
        notes.append({"x": at, "text": text, **above, **side})
    dashed = {"color": "#222", "dash": "dash", "width": 1.2}
    return {
        "barmode": "stack",
        "margin": {"t": 90 if across else 70},
        "annotations": notes,
        "shapes": [
            {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": dashed}
            for at, _ in across
        ],
        "xaxis": {"range": [0, widest * max([*ends, *(at for at, _ in across)], default=1)]},
        "yaxis": {"autorange": "reversed", "categoryorder": "array", "categoryarray": names},
    }


def level(y: float, text: str = "") -> dict:
    """Layout of a dotted line across, with its name above its left end."""
    across = {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": y, "y1": y}
    note = {"x": 0, "xref": "paper", "y": y, "text": text, "xanchor": "left", "yanchor": "bottom"}
    return {
        "shapes": [across | {"line": {"color": "#222", "dash": "dot"}}],
        "annotations": [note] if text else [],
    }


def ticks(values: Iterable[float], form: str = ",") -> dict:
    """An axis with a tick at each value and at no other."""
    values = sorted(set(values))
    return {"tickvals": values, "ticktext": [format(value, form) for value in values]}

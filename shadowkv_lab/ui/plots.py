"""Figures inside an application: fitted to a column, and changed by what differs."""

import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import plotly.graph_objects as go
from plotly.utils import PlotlyJSONEncoder

PAGE_WIDTH, GAP = 968, 4  # what a JupyterLab 1400 px wide shows, its side bar open
CHAR_PX = 6.1  # of a label at FONT_SIZE
TITLE_PX, SMALL_PX = 7.6, 6.1  # of a title's characters
TITLE_SIZE, FONT_SIZE = 14, 11
PHONE, LINE_PX = 450, 15  # a figure below PHONE wide is a phone's; a label's line
AXIS_PX, ROW_PX = 58, 20  # below a plot: its ticks and their title, then a legend's rows


def column_width(columns: int) -> int:
    """Width in pixels of one of `columns` columns."""
    return PAGE_WIDTH // columns - GAP


class Figures(Sequence):
    """Figures made when they are first asked for: the first is drawn while others are made."""

    def __init__(self, *makers: Callable[[], go.Figure]):
        self._makers = [cache(maker) for maker in makers]

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, index):
        makers = self._makers[index]
        return [make() for make in makers] if isinstance(index, slice) else makers()


def draw(
    shown: list[go.FigureWidget],
    drawn: list[dict],
    figures: Sequence[go.Figure],
    width: int,
    fit: Callable[[go.Figure, int], dict] | None = None,
) -> tuple[list[go.FigureWidget], list[dict]]:
    """Make `shown` show `figures`; returns the widgets and what they show, as plain JSON.

    `drawn` is what they show so far. A widget is patched where its traces are of the same types,
    and replaced elsewhere. `fit` makes a figure plain JSON for that width, as `fitted` does.
    """
    specs, widgets = [], []
    for i, figure in enumerate(figures):
        specs.append(spec := (fit or fitted)(figure, width))
        if i < len(shown) and _alike(drawn[i], spec):
            _patch(shown[i], drawn[i], spec)
            widgets.append(shown[i])
        else:
            # NOTE: a FigureWidget's stored state is that of the figure it was made from.
            widgets.append(go.FigureWidget(go.Figure(spec, _validate=False)))
    return widgets, specs


def _parts(title: str) -> list[str]:
    """A title's finding, and its note as one part however it was broken."""
    return title.replace("</sup><br><sup>", " ").split("<br>")


def wrapped(title: str, letters: int, small: int | None = None) -> str:
    """A title in lines of that many letters; those of its smaller lines are `small`."""
    lines = []
    for part in _parts(title):
        little = part.startswith("<sup>")
        part = part.removeprefix("<sup>").removesuffix("</sup>")
        for line in textwrap.wrap(part, (small or int(1.2 * letters)) if little else letters):
            lines.append(f"<sup>{line}</sup>" if little else line)
    return "<br>".join(lines)


def fitted(figure: go.Figure, width: int) -> dict:
    """A figure as plain JSON, its size, title, legend and labels fitted; the figure stays."""
    # NOTE: Figure.to_json() packs arrays as base64, which compares and reads back badly.
    spec = json.loads(json.dumps(figure.to_plotly_json(), cls=PlotlyJSONEncoder))
    layout = spec["layout"]
    lines = []
    for part in _parts(layout.get("title", {}).get("text", "")):
        small = part.startswith("<sup>")
        part = part.removeprefix("<sup>").removesuffix("</sup>")
        for line in textwrap.wrap(part, int(width / (SMALL_PX if small else TITLE_PX))):
            lines.append(f"<sup>{line}</sup>" if small else line)
    margin, title, legend = (layout.get(part, {}) for part in ("margin", "title", "legend"))
    height = layout.get("height", 420)
    # A subtitle stands below the title and needs a line of its own.
    rows = len(lines) + bool(title.get("subtitle", {}).get("text"))
    margin = margin | {"t": max(margin.get("t", 0), 34 + 19 * rows)}
    if legend.get("orientation") == "h" and legend.get("yref", "paper") == "paper":
        below = AXIS_PX + ROW_PX * _legend_rows(spec, width)
        height += max(0, below - margin.get("b", 80))
        margin["b"] = max(below, margin.get("b", 80))
        legend = legend | {"y": -AXIS_PX / max(height - margin["t"] - margin["b"], 1)}
    layout |= {
        "width": width,
        "height": height,
        "font": layout.get("font", {}) | {"size": FONT_SIZE},
        "margin": margin,
        "legend": legend,
        # NOTE: plotly anchors the first of several lines by its baseline.
        "title": title
        | {
            "text": "<br>".join(lines),
            "font": {"size": TITLE_SIZE},
            "x": 0.01,
            "y": 1 - 20 / height,
            "xref": "container",
            "yref": "container",
            "yanchor": "top",
        },
    }
    if layout.get("yaxis", {}).get("scaleanchor"):  # as high as it is drawn, to the same scale
        (left, right), (low, high) = layout["xaxis"]["range"], layout["yaxis"]["range"]
        plot = width - margin.get("l", 80) - margin.get("r", 80)
        drawn = plot * (high - low) / (right - left)
        layout["height"] = min(height, drawn + margin["t"] + margin.get("b", 80))
    if width < PHONE:
        _for_a_phone(spec)
    _make_room(spec)
    layout["title"]["y"] = 1 - 20 / layout["height"]
    return spec


def _for_a_phone(spec: dict) -> None:
    """Long names of bars and axes in lines of a few letters."""
    layout = spec["layout"]
    names = [n for t in spec["data"] if t.get("orientation") == "h" for n in t.get("y") or () if n]
    if names and all(isinstance(name, str) for name in names):
        names = list(dict.fromkeys(names))
        shown = ["<br>".join(textwrap.wrap(name, 18)) for name in names]
        layout["yaxis"] = layout.get("yaxis", {}) | {"tickvals": names, "ticktext": shown}
    for axis in ("xaxis", "yaxis"):
        if text := layout.get(axis, {}).get("title", {}).get("text"):
            layout[axis]["title"]["text"] = "<br>".join(textwrap.wrap(text, 34))


def _legend_rows(spec: dict, width: int) -> int:
    """Rows of a lying legend; plotly makes its columns as wide as the longest entry."""
    names = [t.get("name") or "" for t in spec["data"] if t.get("showlegend", True)]
    if not any(names) or (len(spec["data"]) == 1 and "showlegend" not in spec["data"][0]):
        return 0
    widest = 45 + CHAR_PX * max(map(len, names))
    return -(-len(names) // max(1, int((width - 120) // widest)))


def _make_room(spec: dict) -> None:
    """Lengthen the axis of lying bars until the labels beside them are inside; in a narrow figure
    they are broken over lines."""
    layout, bars = spec["layout"], [t for t in spec["data"] if t.get("orientation") == "h"]
    axis = layout.get("xaxis", {})
    if not bars or "range" not in axis or axis.get("type") == "log":
        return
    names = {str(name) for trace in bars for name in trace.get("y") or () if name}
    lines = [
        line
        for name in layout.get("yaxis", {}).get("ticktext", names)
        for line in name.split("<br>")
    ]
    left = max(layout["margin"].get("l", 0), 20 + CHAR_PX * max(map(len, lines), default=0))
    plot = layout["width"] - left - layout["margin"].get("r", 20)

    def broken(text: str) -> str:
        fits = CHAR_PX * len(text) + 10 < 0.75 * plot
        return text if fits else "<br>".join(textwrap.wrap(text, int(0.6 * plot / CHAR_PX) + 1))

    notes = layout.get("annotations", ())
    beside = [n for n in notes if n.get("xanchor") == "left" and isinstance(n["x"], int | float)]
    for note in beside:
        note |= {"text": broken(note["text"]), "align": "left"}
    labels = [(note["x"], note["text"]) for note in beside]
    for trace in bars:
        if "text" in trace:
            trace["text"] = [broken(text) for text in trace["text"]]
            labels += zip(trace["x"], trace["text"], strict=False)
    texts = [*layout.get("yaxis", {}).get("ticktext", ()), *(text for _, text in labels)]
    deepest = max((text.count("<br>") + 1 for text in texts), default=1)
    margin = layout["margin"]
    needed = len(names) * LINE_PX * deepest + margin.get("t", 0) + margin.get("b", 0)
    layout["height"] = max(layout["height"], needed if deepest > 1 else 0)
    for x, text in labels:
        room = plot - CHAR_PX * max(map(len, text.split("<br>"))) - 10
        if x and room > plot / 4:
            axis["range"][1] = max(axis["range"][1], x * plot / room)


def _alike(old: dict, new: dict) -> bool:
    """Whether the traces that both figures have are of the same types, one by one."""
    return all(a["type"] == b["type"] for a, b in zip(old["data"], new["data"], strict=False))


def _patch(widget: go.FigureWidget, old: dict, new: dict) -> None:
    """Send what differs, value by value and in one message: whole parts cost plotly's checks of
    every property in them, and the browser more."""
    kept = min(len(old["data"]), len(new["data"]))
    if len(old["data"]) > kept:
        widget.data = widget.data[:kept]
    with widget.batch_update():
        for trace, before, after in zip(widget.data, old["data"], new["data"], strict=False):
            for path, value in _differences(before, after):
                trace[path] = value
        for path, value in _differences(old["layout"], new["layout"]):
            widget.layout[path] = value
    if len(new["data"]) > kept:
        widget.add_traces(new["data"][kept:])


def _differences(old: dict, new: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(path, new value) of each value that is another one; None where it is gone."""
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", after

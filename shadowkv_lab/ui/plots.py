"""Figures inside an application: fitted to a column, and changed by what differs."""

import json
import textwrap
from collections.abc import Callable, Sequence
from functools import cache

import plotly.graph_objects as go
from plotly.utils import PlotlyJSONEncoder

WIDTH = 548  # two side by side fit a JupyterLab 1280 px wide, its side bar closed
TITLE_CHARS = 70  # of a title at TITLE_SIZE px in a plot that wide
NOT_DRAWN = {"scene", "geo", "polar", "ternary", "map", "mapbox", "smith"}  # layouts of other plots
TITLE_SIZE, FONT_SIZE = 14, 11


class Figures(Sequence):
    """Figures made when they are first asked for: the first is drawn while others are made."""

    def __init__(self, *makers: Callable[[], go.Figure]):
        self._makers = [cache(maker) for maker in makers]

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, index: int) -> go.Figure:
        return self._makers[index]()


def draw(shown: list[go.FigureWidget], drawn: list[dict],
         figures: Sequence[go.Figure]) -> tuple[list[go.FigureWidget], list[dict]]:  # fmt: skip
    """Make `shown` show `figures`; returns the widgets and what they show, as plain JSON.

    `drawn` is what they show so far. A widget is changed where its traces are of the same types,
    and replaced elsewhere.
    """
    specs, widgets = [], []
    for i, figure in enumerate(figures):
        specs.append(spec := fitted(figure))
        if i < len(shown) and _alike(drawn[i], spec):
            _patch(shown[i], drawn[i], spec)
            widgets.append(shown[i])
        else:
            # NOTE: a FigureWidget's stored state is that of the figure it was made from.
            widgets.append(go.FigureWidget(go.Figure(spec)))
    return widgets, specs


def fitted(figure: go.Figure) -> dict:
    """A figure as plain JSON, its size and title fitted to one column; the figure stays."""
    spec = {"data": [_plain(trace) for trace in figure.data], "layout": _plain(figure.layout)}
    layout = spec["layout"]
    layout["template"] = _used(layout.get("template", {}), {t["type"] for t in spec["data"]})
    lines = []
    for part in layout.get("title", {}).get("text", "").split("<br>"):
        small = part.startswith("<sup>")
        part = part.removeprefix("<sup>").removesuffix("</sup>")
        for line in textwrap.wrap(part, TITLE_CHARS * 5 // 4 if small else TITLE_CHARS):
            lines.append(f"<sup>{line}</sup>" if small else line)
    margin, title = layout.get("margin", {}), layout.get("title", {})
    height = layout.get("height", 420)
    # A subtitle stands below the title and needs a line of its own.
    rows = len(lines) + bool(title.get("subtitle", {}).get("text"))
    layout |= dict(
        width=WIDTH, font=layout.get("font", {}) | dict(size=FONT_SIZE),
        margin=margin | dict(t=max(margin.get("t", 0), 34 + 19 * rows)),
        # NOTE: plotly anchors the first of several lines by its baseline.
        title=title | dict(text="<br>".join(lines), font=dict(size=TITLE_SIZE), x=0.01,
                           y=1 - 20 / height, xref="container", yref="container", yanchor="top"),
    )  # fmt: skip
    return spec


def _used(template: dict, types: set[str]) -> dict:
    """The part of a template that a figure uses: plotly.js goes through all of it at each draw."""
    layout = {k: v for k, v in template.get("layout", {}).items() if k not in NOT_DRAWN}
    return {"data": {k: v for k, v in template.get("data", {}).items() if k in types},
            "layout": layout}  # fmt: skip


def _plain(part: "go.Layout | go.Trace") -> dict:
    # NOTE: Figure.to_json() packs arrays as base64, which compares and reads back badly.
    return json.loads(json.dumps(part.to_plotly_json(), cls=PlotlyJSONEncoder))


def _alike(old: dict, new: dict) -> bool:
    """Whether the traces that both figures have are of the same types, one by one."""
    return all(a["type"] == b["type"] for a, b in zip(old["data"], new["data"], strict=False))


def _patch(widget: go.FigureWidget, old: dict, new: dict) -> None:
    """Send what differs. To set everything anew costs plotly's check of every property."""
    kept = min(len(old["data"]), len(new["data"]))
    if len(old["data"]) > kept:
        widget.data = widget.data[:kept]
    with widget.batch_update():
        for trace, before, after in zip(widget.data, old["data"], new["data"], strict=False):
            trace.update(_difference(before, after), overwrite=True)
        widget.layout.update(_difference(old["layout"], new["layout"]), overwrite=True)
    if len(new["data"]) > kept:
        widget.add_traces(new["data"][kept:])


def _difference(old: dict, new: dict) -> dict:
    return {key: new.get(key) for key in {**old, **new} if old.get(key) != new.get(key)}

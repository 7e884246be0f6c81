"""Figures inside an application: fitted to a column, and drawn by one plotly.js."""

import json
import textwrap
from collections.abc import Callable, Sequence
from functools import cache

import anywidget
import ipywidgets as w
import plotly.graph_objects as go
import traitlets
from plotly.offline import get_plotlyjs, get_plotlyjs_version
from plotly.utils import PlotlyJSONEncoder

PAGE_WIDTH, GAP = 968, 4  # what a JupyterLab 1400 px wide shows, its side bar open
CHAR_PX = 6.1  # of a label at FONT_SIZE
TITLE_PX, SMALL_PX, SUBTITLE_PX = 7.6, 6.1, 6.6  # of a title's characters
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


# A page loads plotly.js once: JupyterLab's own where an output has brought it and it is the same
# one, else that of the widget that holds it. A figure is drawn when its place has a size; then only
# values that differ are set, which takes plotly less than a figure drawn anew and leaves a zoomed
# view as it is.
SCRIPT = """
const KEY = 'shadowkv-plotly';
const there = () => globalThis.Plotly?.version === 'VERSION' ? globalThis.Plotly : undefined;
const loaded = model => globalThis[KEY] ??= (async () => {
  const held = await model.widget_manager.get_model(model.get('plotly'));
  if (there()) return there();
  const url = URL.createObjectURL(new Blob([held.get('value')], {type: 'text/javascript'}));
  try { await import(url); } finally { URL.revokeObjectURL(url); }
  return globalThis.Plotly;
})().catch(error => { delete globalThis[KEY]; throw error; });
const inner = part =>
  part === undefined || (part && typeof part === 'object' && !Array.isArray(part));
const differences = (before, after, prefix = '', found = {}) => {
  for (const key of new Set([...Object.keys(before), ...Object.keys(after)])) {
    const old = before[key], now = after[key];
    if (JSON.stringify(old) === JSON.stringify(now)) continue;
    if (inner(old) && inner(now)) differences(old ?? {}, now ?? {}, prefix + key + '.', found);
    else found[prefix + key] = now ?? null;
  }
  return found;
};
const change = (plotly, place, old, now) => {
  const apart = now.data.map((trace, i) => differences(old.data[i], trace));
  const traces = [...apart.keys()].filter(i => Object.keys(apart[i]).length);
  const layout = differences(old.layout, now.layout);
  if (!traces.length) {
    if (Object.keys(layout).length) plotly.relayout(place, layout);
    return;
  }
  const names = new Set(traces.flatMap(i => Object.keys(apart[i])));
  const values = [...names].map(name => [name, traces.map(i => apart[i][name])]);
  plotly.update(place, Object.fromEntries(values), layout, traces);
};
export default {
  async render({model, el}) {
    const place = document.createElement('div');
    el.append(place);
    const held = await model.widget_manager.get_model(model.get('held'));
    let plotly, shown, due = false;
    const draw = async () => {
      if (due || !place.offsetWidth) return;
      due = true;
      try { plotly = there() ?? await loaded(model); } finally { due = false; }
      const spec = JSON.parse(held.get('value'));
      const types = of => of?.data.map(trace => trace.type).join();
      const now = structuredClone(spec);  // plotly writes into what it is given
      if (types(shown) === types(spec)) change(plotly, place, shown, now);
      else plotly.react(place, now.data, now.layout, {displaylogo: false});
      shown = spec;
    };
    const sized = new ResizeObserver(() => {
      if (!plotly) draw();
      else if (place.offsetWidth && place.layout && !place.layout.width) plotly.Plots.resize(place);
    });
    sized.observe(el);
    held.on('change:value', draw);
    return () => {
      sized.disconnect();
      held.off('change:value', draw);
      plotly?.purge(place);
    };
  },
};
""".replace("VERSION", get_plotlyjs_version())


class Plot(anywidget.AnyWidget):
    """A figure on a page.

    Where a page is busy for 2 s while a widget opens, anywidget drops whatever is sent to that
    widget from then on. So all that changes is held by a widget of ipywidgets' own. plotly's
    FigureWidget, which sends a page 5 MB of script with each figure, stayed empty there.
    """

    _esm = SCRIPT
    of: go.Figure | None = None  # what the JSON was made of
    held = traitlets.Unicode().tag(sync=True)  # the id of the widget that holds the figure as JSON
    plotly = traitlets.Unicode().tag(sync=True)  # of the one that holds plotly.js

    def __init__(self, spec: dict):
        self._holder = w.HTML()
        self.spec = spec
        super().__init__(held=self._holder.model_id, plotly=_plotly().model_id)

    @property
    def spec(self) -> dict:
        """What is shown, as plain JSON."""
        return self._spec

    @spec.setter
    def spec(self, spec: dict) -> None:
        self._spec, self._holder.value = spec, json.dumps(spec)

    @property
    def figure(self) -> go.Figure:
        """What is shown, as a figure of its own."""
        return go.Figure(self.spec)

    def close(self) -> None:
        """Take it from the page."""
        self._holder.close()
        super().close()


@cache
def _plotly() -> w.HTML:
    return w.HTML(get_plotlyjs())


def draw(
    shown: Sequence[Plot],
    figures: Sequence[go.Figure],
    width: int,
    fit: Callable[[go.Figure, int], dict] | None = None,
) -> list[Plot]:
    """Make `shown` show `figures`; returns the plots, new ones where there are more figures.

    `fit` makes a figure plain JSON for that width in pixels, as `fitted` does. A figure that is
    shown already is not fitted again.
    """
    plots = []
    for i, figure in enumerate(figures):
        plot = shown[i] if i < len(shown) else None
        if plot is None or plot.of is not figure:
            spec = (fit or fitted)(figure, width)
            if plot is None:
                plot = Plot(spec)
            else:
                plot.spec = spec
            plot.of = figure
        plots.append(plot)
    return plots


def plain(figure: go.Figure) -> dict:
    """A figure as plain JSON of its own."""
    # NOTE: Figure.to_json() packs arrays as base64, which compares and reads back badly.
    return json.loads(json.dumps(figure.to_plotly_json(), cls=PlotlyJSONEncoder))


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
    spec = plain(figure)
    layout = spec["layout"]
    if width < PHONE:
        _for_a_phone(spec)
    lines = []
    for part in _parts(layout.get("title", {}).get("text", "")):
        small = part.startswith("<sup>")
        part = part.removeprefix("<sup>").removesuffix("</sup>")
        for line in textwrap.wrap(part, int(width / (SMALL_PX if small else TITLE_PX))):
            lines.append(f"<sup>{line}</sup>" if small else line)
    margin, title, legend = (layout.get(part, {}) for part in ("margin", "title", "legend"))
    height = layout.get("height", 420)
    # A subtitle stands below the title and needs lines of its own.
    if subtitle := title.get("subtitle", {}).get("text"):
        said = textwrap.wrap(subtitle.replace("<br>", " "), int(width / SUBTITLE_PX))
        title["subtitle"]["text"], subtitle = "<br>".join(said), len(said)
    margin = margin | {"t": max(margin.get("t", 0), 34 + 19 * (len(lines) + (subtitle or 0)))}
    if legend.get("orientation") == "h":
        axis = AXIS_PX + _more_below(spec, width - margin.get("l", 80) - margin.get("r", 80))
        below = axis + ROW_PX * _legend_rows(spec, width)
        height += max(0, below - margin.get("b", 80))
        margin["b"] = max(below, margin.get("b", 80))
        if legend.get("yref", "paper") == "paper":
            legend = legend | {"y": -axis / max(height - margin["t"] - margin["b"], 1)}
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
    _fix_margins(layout, spec["data"])
    _make_room(spec)
    layout["title"]["y"] = 1 - 20 / layout["height"]
    return spec


def _fix_margins(layout: dict, traces: Sequence[dict]) -> None:
    """Margins for the labels as long as they are guessed to be.

    plotly measures labels once a figure is drawn, and draws it again where its margins were
    others: that doubles what an update takes. Names below standing bars may turn, so they are
    left to it.
    """
    named = bool(_names(traces, "x"))
    for name in layout:
        if name.startswith(("xaxis", "yaxis")) and not (named and name.startswith("xaxis")):
            layout[name] = layout[name] | {"automargin": False}
    shown = layout.get("yaxis", {}).get("ticktext", _names(traces, "y"))
    if longest := max((len(line) for name in shown for line in str(name).split("<br>")), default=0):
        layout["margin"]["l"] = max(layout["margin"].get("l", 0), 20 + CHAR_PX * longest)


def _names(traces: Sequence[dict], axis: str) -> list[str]:
    """The names along an axis, each once; none where it has numbers."""
    values = [value for t in traces for value in t.get(axis) or () if isinstance(value, str)]
    return list(dict.fromkeys(value for value in values if value))


def _more_below(spec: dict, plot: float) -> int:
    """Pixels that the x axis needs beyond ticks and a title of one line: names that turn as they
    have no room beside one another, and further lines."""
    names = _names(spec["data"], "x")
    longest = max(map(len, names), default=0)
    turned = longest * CHAR_PX > 0.9 * plot / max(1, len(names))
    lines = spec["layout"].get("xaxis", {}).get("title", {}).get("text", "").count("<br>")
    return LINE_PX * lines + int(0.55 * longest * CHAR_PX * turned)


def _for_a_phone(spec: dict) -> None:
    """Long names of bars, lines, points and axes in lines of a few letters; a tick a decade."""
    layout = spec["layout"]
    if names := _names(spec["data"], "y"):
        shown = ["<br>".join(textwrap.wrap(name, 18)) for name in names]
        layout["yaxis"] = layout.get("yaxis", {}) | {"tickvals": names, "ticktext": shown}
        layout["margin"] = layout.get("margin", {}) | {"l": 70}
    for note in layout.get("annotations", ()):
        if note.get("ax"):  # at the end of a leader
            text, ax = note["text"].replace(", ", "<br>", 1), 0.7 * note["ax"]
            note |= {"text": text, "font": {"size": 9}, "ax": ax, "align": "left"}
    for trace in spec["data"]:
        if len(trace.get("name") or "") > 44:
            trace["name"] = "<br>".join(textwrap.wrap(trace["name"], 44))
    for axis in ("xaxis", "yaxis"):
        if text := layout.get(axis, {}).get("title", {}).get("text"):
            layout[axis]["title"]["text"] = "<br>".join(textwrap.wrap(text, 34))
    x = [v for t in spec["data"] for v in t.get("x") or () if isinstance(v, int | float) and v > 0]
    if layout.get("xaxis", {}).get("dtick") == "D2" and x and max(x) > 100 * min(x):
        layout["xaxis"]["dtick"] = 1


def _legend_rows(spec: dict, width: int) -> int:
    """Rows of a lying legend; plotly makes its columns as wide as the longest entry."""
    names = [t.get("name") or "" for t in spec["data"] if t.get("showlegend", True)]
    if not any(names) or (len(spec["data"]) == 1 and "showlegend" not in spec["data"][0]):
        return 0
    lines = [line for name in names for line in name.split("<br>")]
    widest = 45 + CHAR_PX * max(map(len, lines))
    return -(-len(lines) // max(1, int((width - 120) // widest)))


def _make_room(spec: dict) -> None:
    """Lengthen the axis of lying bars until the labels beside them are inside; in a narrow figure
    they are broken over lines."""
    layout, bars = spec["layout"], [t for t in spec["data"] if t.get("orientation") == "h"]
    axis = layout.get("xaxis", {})
    if not bars or "range" not in axis or axis.get("type") == "log":
        return
    names = _names(bars, "y")
    plot = layout["width"] - layout["margin"]["l"] - layout["margin"].get("r", 20)

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

"""When the answer changes: tok/s along one axis, and a map of who leads over concurrency x context.

Lines are predictions (`steps.grid`); rings on them are published servers and recorded steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import numpy as np
import plotly.graph_objects as go

from shadowkv_lab import facts
from shadowkv_lab.deployment import Deployment
from shadowkv_lab.load import Load
from shadowkv_lab.rules import can_run
from shadowkv_lab.steps import step as steps
from shadowkv_lab.steps.fit import fit
from shadowkv_lab.steps.grid import CONTEXTS, REQUESTS, Grid
from shadowkv_lab.steps.predict import predict
from shadowkv_lab.steps.rest import Rest, whole_servers
from shadowkv_lab.strategies import STRATEGIES, Label, parse
from shadowkv_lab.ui import charts

ALONG = {"pool": "pool size", "concurrency": "concurrency", "context": "context"}
UNITS = {"pool": "tokens", "concurrency": "requests", "context": "tokens of context"}
# Positions of the slider, and columns of the map: between two powers of two one more.
CONCURRENCIES = tuple(sorted({*REQUESTS, *(3 * R for R in REQUESTS[:-2])}))
SHORT = 4096  # a published context that is "short", or not said, is compared up to here
NOBODY = "#eceff1"  # of the map, where no strategy holds the load


@dataclass(frozen=True)
class Seen:
    """One stream's or server's tok/s as somebody saw it; None for what was not said."""

    strategy: Label
    tokens_per_s: float
    who: str
    concurrency: int = 1
    context: int | None = None
    pool_tokens: int | None = None
    whole: bool = True  # a server's; else a step to which a rest was added

    def at(self, along: str, load: Load, limit: int) -> bool:
        """Whether it belongs on a line along an axis through a load and a pool."""
        if along != "concurrency" and self.concurrency != load.concurrency:
            return False
        if along == "context":
            return self.context is not None
        short = self.context is None and load.context <= SHORT
        return short or self.context == load.context

    def place(self, along: str, kept: int) -> float | None:
        if along == "pool":
            return self.pool_tokens or kept
        return self.concurrency if along == "concurrency" else self.context


def seen(at: Deployment, rest: Rest, measured: Sequence[steps.Step] = ()) -> list[Seen]:
    """What was published of this model on this card and spread, and the steps recorded there.

    A recorded or measured step has this deployment's rest added.
    """
    found = []
    for entry in {e["name"]: e for e in facts.catalogue("published").values()}.values():
        cards = entry.get("gpu", ())
        cards = [cards] if isinstance(cards, str) else cards
        same = entry.get("model") == at.model.name and at.card.name in cards
        if same and entry.get("tensor_parallel") == at.tensor_parallel:
            found += _published(entry)
    for s in [*_replays(facts.stamps("runs", "*.jsonl")), *measured]:
        of, load = s.setting, s.setting.load
        if of.model != at.model or s.card != at.card.name or of.heads != at.heads:
            continue
        if load.reads == "dsa":  # the curves are of dense reads
            continue
        if s.strategy.name in STRATEGIES and of.order == "random":
            rate = 1000 * load.concurrency / (s.ms + rest(load.concurrency))
            who = f"{'measured' if s in measured else 'recorded'} step and this rest"
            found.append(
                Seen(
                    s.strategy,
                    rate,
                    who,
                    load.concurrency,
                    int(load.context),
                    of.pool_tokens,
                    False,
                )
            )
    return found


READERS = ("bf16_pool", "native_fp8", "fused_fp8")  # one strategy for what attention reads


def timed(at: Deployment, rest: Rest, load: Load, along: str, limit: int) -> list[Seen]:
    """Attention as it was timed on this card with these heads, on one line each.

    Beside a time of all layers stand the strategy's other phases and the rest, as predicted. Only
    times of the kernel that the prediction takes there count.
    """
    tables = fit().tables
    mine = [
        k for k in tables if (k.phase, k.card, k.heads) == ("attention", at.card.name, at.heads)
    ]
    found = {}
    for name in READERS if mine else ():
        strategy = parse(name)
        rows = min(at.rows(strategy), limit) if can_run(strategy, at) else 0
        for key in (
            k for k in mine if k.reads == strategy.reads and not k.gathered and not k.chosen
        ):
            for R, (sizes, times) in tables[key].rows.items():
                if along != "concurrency" and load.concurrency != R:
                    continue
                for n, ms in zip(sizes.tolist(), times.tolist(), strict=True):
                    fits = R * n <= rows and n <= at.model.max_positions and n == int(n)
                    if not fits or (along != "context" and load.context != n):
                        continue
                    step = predict(strategy, at, Load(int(R), int(n)), pool_tokens=rows)
                    attention = step["attention"]
                    if attention.curve != key.kernel:
                        continue
                    whole = step.ms - attention.ms + at.model.layers * ms + rest(R)
                    who = f"{tables[key].kind.value} attention, {key.kernel}; the rest predicted"
                    seen_ = Seen(strategy.tag, 1000 * R / whole, who, int(R), int(n), None, False)
                    own_pages = key.page_size == at.page_size
                    found.setdefault((name, R, n), seen_)
                    if own_pages:
                        found[name, R, n] = seen_
    return list(found.values())


@cache
def _replays(stamps: tuple) -> list[steps.Step]:
    return steps.replays(steps.recorded())


def _published(entry: dict) -> list[Seen]:
    def of(strategy, tpot_ms, who, R=1, **more):
        return Seen(parse(strategy).tag, 1000 * R / tpot_ms, who, R, **more)

    anchor, found = entry.get("anchor", {}), []
    pool = entry.get("pool_tokens")
    if "after" in entry:
        found.append(of("full_cast", entry["before"]["tpot_ms"], "reported", pool_tokens=pool))
        found.append(of("shadow", entry["after"]["tpot_ms"], "reported: 13.5 tok/s"))
    if "bf16_pool" in entry:
        own = entry["bf16_pool"]
        found.append(of("full_cast", entry["step_ms"], "reported", pool_tokens=pool))
        found.append(of("bf16_pool", own["step_ms"], "reported", pool_tokens=own["pool_tokens"]))
    for strategy, times in entry.get("tpot_ms", {}).items():
        for (R, n), ms in zip(entry["loads"], times, strict=True):
            found.append(of(strategy, ms, "recorded on the server", R, context=n, pool_tokens=pool))
    if entry["name"] == "rtx6kpro":
        for row in whole_servers():
            R, n = int(row["requests"]), int(row["context"]) or None
            ms = 1000 * R / float(row["tokens_per_s"])
            who = f"rtx6kpro, {row['moe_backend']} MoE"
            found.append(of(anchor["strategy"], ms, who, R, context=n))
    return found


@dataclass(frozen=True)
class Line:
    """One strategy's line: its rows in this memory, and whether it is cut to the load."""

    strategy: Label
    rows: int
    cut: bool = False

    @property
    def title(self) -> str:
        return self.strategy.title.split(" (")[0] + (", pool cut" if self.cut else "")


@dataclass(frozen=True)
class Field:
    """A grid in one memory and with one rest: what the curve and the map are drawn from."""

    grid: Grid | None  # None where there is no line
    lines: tuple[Line, ...]
    rest: Rest
    limit: int
    accepted: float = 1.0  # tokens of each request and step that are kept

    @property
    def untried(self) -> list[bool]:
        """Which lines were never run on the card."""
        return [bool(self.grid.times[line.strategy.label].untried) for line in self.lines]

    @property
    def of_tried(self) -> str:
        """What a statement about leaders adds, where some were left out."""
        untried = self.untried
        return " of those tried here" if any(untried) and not all(untried) else ""

    def rates(self, R, n, limit=None) -> tuple[np.ndarray, np.ndarray]:
        """tok/s and running requests, [line, ...] over arrays of loads and pools."""
        limit = self.limit if limit is None else limit
        if not self.lines:
            nothing = np.zeros((0, *np.broadcast(R, n, limit).shape))
            return nothing, nothing
        page = self.grid.page_size
        found = []
        for line in self.lines:
            rows = np.minimum(line.rows, limit) // page * page
            label = line.strategy.label
            found.append(self.grid.tokens_per_s(label, rows, self.rest, R, n, line.cut))
        rates, running = (np.array(part) for part in zip(*found, strict=True))
        return self.accepted * rates, running

    def leaders(self, rates: np.ndarray, running: np.ndarray, R) -> np.ndarray:
        """The line that leads at each point, -1 where none runs: of those that hold the load and
        were tried on the card if there are such, the fastest."""
        if not self.lines:
            return np.full(rates.shape[1:], -1)
        untried = np.array(self.untried)
        shape = (-1, *[1] * (rates.ndim - 1))
        rank = np.where(running >= R, 2e9, 0.0) + np.where(untried.reshape(shape), 0.0, 1e9)
        rank = np.where(running > 0, rank + rates, -1.0)
        return np.where(rank.max(0) < 0, -1, rank.argmax(0))


def curve(
    field: Field, along: str, load: Load, points: Sequence[Seen], marks: Sequence[tuple] = ()
) -> go.Figure:
    """tok/s of every strategy along one axis, through the load and pool as they are set.

    `marks` are (tok/s, words) drawn as lines across.
    """
    largest = max((line.rows for line in field.lines), default=1024)
    at = {"pool": field.limit, "concurrency": load.concurrency, "context": load.context}[along]
    if along == "pool":
        first = min(max(1024, int(load.context)), largest)
        x = np.unique([*np.geomspace(first, largest, 40).astype(int), at, *_ends(field, first)])
    else:
        x = np.unique([*(CONCURRENCIES if along == "concurrency" else CONTEXTS), int(at)])
    R = x if along == "concurrency" else np.full(len(x), load.concurrency)
    n = x if along == "context" else np.full(len(x), int(load.context))
    limit = x if along == "pool" else field.limit
    rates, running = field.rates(R, n, limit)
    lead = field.leaders(rates, running, R)
    here = lead[int(np.searchsorted(x, at))] if len(lead) else -1
    by_line = {(line.strategy.label, line.cut): i for i, line in enumerate(field.lines)}
    traces, ends = [], ([], [], [])
    for label, cut in _every():
        i = by_line.get((label.label, cut))
        xs, ys, words = [], [], []
        if i is not None:
            kept = field.lines[i].rows if along == "pool" else largest
            shown = (running[i] > 0) & (x <= max(kept, x[0]))
            xs, ys = x[shown].tolist(), np.round(rates[i][shown], 2).tolist()
            words = [
                "" if r >= c else f"<br>{r} of {c} requests run"
                for r, c in zip(running[i][shown].tolist(), R[shown].tolist(), strict=True)
            ]
            short = (running[i] < R) & shown
            if short.any() and not short.all():
                where = int(np.argmax(short)) if along != "pool" else int(np.argmin(short))
                ends[0].append(int(x[where]))
                ends[1].append(round(float(rates[i][where]), 2))
                ends[2].append(f"{field.lines[i].title}: its limit")
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": xs,
                "y": ys,
                "name": label.title + (", cut to the load" if cut else ""),
                "line": {
                    "color": label.colour,
                    "width": 5 if i == here else 2,
                    "dash": _dash(field, i, cut),
                },
                "customdata": words,
                "hovertemplate": "%{fullData.name}<br>%{y:,.1f} tok/s at %{x:,} "
                + f"{UNITS[along]}%{{customdata}}<extra></extra>",
                "showlegend": bool(xs),
            }
        )
    traces.append(_marks(ends, "x-thin", "holds no more requests", "#444"))
    kept_rows = {line.strategy.label: min(line.rows, field.limit) for line in field.lines}
    rings, colours = ([], [], []), []
    for point in points:
        where = point.place(along, kept_rows.get(point.strategy.label, 0))
        if point.at(along, load, field.limit) and where and x[0] <= where <= x[-1]:
            rings[0].append(where)
            rings[1].append(round(point.tokens_per_s, 2))
            rings[2].append(f"{point.strategy.title}: {point.who}")
            colours.append(point.strategy.colour)
    traces.append(_marks(rings, "circle-open", "published or recorded", colours or "#444"))
    log_y = along == "concurrency"
    marks = () if log_y else marks
    through = _through(along, load, field.limit)
    keys = ["dots: pool cut"] if any(line.cut for line in field.lines) else []
    keys += ["dashes: untried here"] if any(field.untried) else []
    keys += ["rings: seen"] if rings[0] else []
    title = charts.heading(_finding(field, along, x, lead), "; ".join([through, *keys]))
    shapes = [_rule(x0=at, x1=at, y0=0, y1=1, yref="paper")]
    notes = [
        {
            **{"x": float(np.log10(at)), "xref": "x", "y": 1, "yref": "paper", "text": "here"},
            **{"xanchor": "right" if _late(at, x) else "left", "yanchor": "bottom"},
            **{"font": {"size": 10, "color": "#444"}},
        }
    ]
    lowest = min((rate for rate, _ in marks), default=0.0)
    for rate, words in marks:
        shapes.append(_rule(x0=0, x1=1, xref="paper", y0=rate, y1=rate))
        notes.append(
            {
                **{"x": 0.01, "xref": "paper", "xanchor": "left", "y": rate},
                "yanchor": "top" if rate == lowest and len(marks) > 1 else "bottom",
                **{"text": words, "font": {"size": 10, "color": "#444"}},
            }
        )
    top = max([*rates.flat, *rings[1], *(rate for rate, _ in marks)], default=0.0) or 1.0
    y = {"type": "log", "dtick": 1, "tickformat": ",~s"} if log_y else {"range": [0, 1.08 * top]}
    return charts.figure(
        title,
        traces,
        UNITS[along] if along != "pool" else "pool, at most (tokens)",
        "tok/s",
        xaxis={"type": "log", "tickformat": "~s", "dtick": "D2" if len(x) < 12 else 1},
        yaxis=y,
        shapes=shapes,
        annotations=notes,
        legend={"y": -0.24},
        margin={"b": 120},
        height=450,
    )


def _dash(field: Field, i: int | None, cut: bool) -> str:
    if i is not None and field.untried[i]:
        return "dash"
    return "dot" if cut else "solid"


def _ends(field: Field, first: int) -> list[int]:
    return [line.rows for line in field.lines if line.rows >= first]


def _every() -> list[tuple[Label, bool]]:
    """Every line that a curve can have, always in the same order: whether cut comes second."""
    labels = [kind().tag for kind in STRATEGIES.values()]
    return [(label, False) for label in labels] + [(label, True) for label in labels]


def _marks(at: tuple, symbol: str, name: str, colour) -> dict:
    x, y, words = at
    return {
        "type": "scatter",
        "mode": "markers",
        **{"x": x, "y": y, "customdata": words, "name": name, "showlegend": bool(x)},
        "marker": {"size": 9, "symbol": symbol, "color": colour, "line": {"width": 2}},
        "hovertemplate": "%{customdata}<br>%{y:,.1f} tok/s at %{x:,}<extra></extra>",
    }


def _rule(**where) -> dict:
    return {"type": "line", **where, "line": {"color": "#777", "dash": "dot", "width": 1}}


def _late(at: float, x: np.ndarray) -> bool:
    return np.log(at / x[0]) > 0.5 * np.log(x[-1] / x[0])


def _finding(field: Field, along: str, x: np.ndarray, lead: np.ndarray) -> str:
    """Who leads from where to where, in words."""
    runs = [
        (i, [at for _, at in group])
        for i, group in groupby(zip(lead, x, strict=True), lambda pair: pair[0])
    ]
    runs = [(i, at) for i, at in runs if i >= 0]
    if not runs:
        return "No strategy holds such a load" if field.lines else "No answer at this setting"
    if len({i for i, _ in runs}) == 1:
        first = field.lines[runs[0][0]].title
        return f"{first} leads{field.of_tried} at every {ALONG[along]}"
    said = []
    for k, (i, at) in enumerate(runs[:3]):
        upto = f" up to {_short(at[-1])}" if k < len(runs) - 1 else ""
        said.append(f"{field.lines[i].title}{upto}")
    return f"lead{field.of_tried}: {', then '.join(said)}" + (" ..." if len(runs) > 3 else "")


def _short(number: float) -> str:
    return f"{number / 1024:,.0f}K" if number >= 10_000 else f"{number:,.0f}"


def _through(along: str, load: Load, limit: int) -> str:
    """What is held along an axis."""
    parts = {
        "concurrency": charts.requests(load.concurrency),
        "context": f"context {int(load.context):,}",
        "pool": f"pool up to {limit:,} tokens",
    }
    held = ", ".join(text for name, text in parts.items() if name != along)
    return held


def lead_map(field: Field, load: Load) -> go.Figure:
    """Who leads over concurrency x context, in the pool as it is limited."""
    R, n = np.meshgrid(CONCURRENCIES, CONTEXTS)
    rates, running = field.rates(R, n)
    lead = field.leaders(rates, running, R)
    order = [label for label, cut in _every() if not cut]
    place = {label.label: k + 1 for k, label in enumerate(order)}
    z = np.zeros(R.shape, int)
    said = np.full(R.shape, "no strategy holds one such request", object)
    names = np.full(R.shape, "", object)
    for i, line in enumerate(field.lines):
        here = lead == i
        short = here & (running[i] < R)
        z[here] = place[line.strategy.label]
        z[short] += len(order)
        names[here & ~short] = line.title
        for j, k in zip(*np.nonzero(here), strict=True):
            more = f", {running[i, j, k]} of {R[j, k]} run" if short[j, k] else ""
            said[j, k] = f"{line.title}, {rates[i, j, k]:,.1f} tok/s{more}"
    columns = range(len(CONCURRENCIES))
    full = [label.colour for label in order]
    colours = [NOBODY, *full, *map(_pale, full)]
    steps_ = len(colours)
    scale = [
        [edge, colour]
        for k, colour in enumerate(colours)
        for edge in (k / steps_, (k + 1) / steps_)
    ]
    counts = {name: int((names == name).sum()) for name in dict.fromkeys(names.flat) if name}
    counts = dict(sorted(counts.items(), key=lambda item: -item[1]))
    finding, fit = "No strategy holds any of these loads", sum(counts.values())
    if not field.lines:
        finding = "No answer at this setting"
    if counts:
        first, most = next(iter(counts.items()))
        finding = f"{first} leads{field.of_tried} in {most} of the {fit} loads that fit"
        if most == fit:
            finding = f"{first} leads{field.of_tried} at every load that fits"
    large = [name for name, count in counts.items() if count >= 10]
    held = [_middle(names == name) for name in large]
    hover = "%{customdata}<extra></extra>"
    cells = {
        **{"type": "heatmap", "z": z.tolist(), "zmin": -0.5, "zmax": steps_ - 0.5},
        **{"colorscale": scale, "showscale": False, "xgap": 1, "ygap": 1, "opacity": 0.85},
        **{"customdata": said.tolist(), "hovertemplate": hover},
    }
    words = {
        **{"type": "scatter", "mode": "text", "hoverinfo": "skip", "showlegend": False},
        **{"x": [at[1] for at in held], "y": [at[0] for at in held]},
        "text": [f"<b>{name}</b>" for name in large],
        "textfont": {"color": "white", "size": 10},
    }
    # A shape: plotly moves one at once, and for a point draws the whole map again.
    here = {
        **{"type": "circle", "xref": "x", "yref": "y", "xsizemode": "pixel", "ysizemode": "pixel"},
        "xanchor": float(np.interp(np.log(load.concurrency), np.log(CONCURRENCIES), columns)),
        "yanchor": float(np.log2(load.context / CONTEXTS[0])),
        **{"x0": -6, "x1": 6, "y0": -6, "y1": 6},
        **{"fillcolor": "white", "line": {"color": "#111", "width": 3}},
    }
    return charts.figure(
        charts.heading(finding, "ring: you are here; pale: only part of the requests run"),
        [cells, words],
        "requests",
        "context, tokens",
        shapes=[here],
        xaxis={
            **{"tickvals": [CONCURRENCIES.index(R) for R in REQUESTS]},
            **{"ticktext": [*map(str, REQUESTS)], "tickangle": 0},
            **{"showgrid": False, "range": [-0.5, len(CONCURRENCIES) - 0.5]},
        },
        yaxis={
            **{"tickvals": [*range(0, len(CONTEXTS), 2)]},
            **{"ticktext": [_thousands(n) for n in CONTEXTS[::2]], "showgrid": False},
            **{"range": [-0.5, len(CONTEXTS) - 0.5]},
        },
    )


def _pale(colour: str) -> str:
    """A colour two thirds of the way to white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * 0.33):02X}" for part in parts)


def _thousands(number: int) -> str:
    return f"{number // 1024}K" if number >= 1024 else str(number)


def _middle(mask: np.ndarray) -> tuple[float, float]:
    """A cell of a region that is near its middle."""
    rows, columns = np.nonzero(mask)
    far = (rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2
    best = int(far.argmin())
    return int(rows[best]), int(columns[best])

"""The GLM-5 report's figures (steps, profile, hypotheses, verdict), and its application."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab import facts, machine
from shadowkv_lab.deployment import GIB
from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.glm5 import hypotheses, reported, verdict
from shadowkv_lab.provenance import Kind
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.steps.trace import Profile, short_name
from shadowkv_lab.ui import charts
from shadowkv_lab.ui.app import View
from shadowkv_lab.ui.application import application
from shadowkv_lab.ui.controls import Concurrency, Context, Menu, Number, Tick, cards

PARTS = {"cast_ms": ("cast", 1.0), "own_ms": ("attention and write", charts.OPACITY["attention"])}
TABLE = (
    *("strategy", "running", "step_ms", "tpot_ms", "tokens_per_s", "low_tokens_per_s"),
    *("high_tokens_per_s", "gib_for_pool", "fits", "tokens_that_fit", "tokens_per_s_per_gib"),
    "provenance",
)


def report_steps() -> go.Figure:
    """The report before and after its patch, without a cast, and a peer: what does not add up."""
    of, peer = reported.server(), hypotheses.same_class().iloc[1]
    bare = of.before_ms - of.cast_ms
    names = [
        "before (reported)",
        "no cast at all (arithmetic)",
        "after the patch (reported)",
        "BF16 pool, same class (reported)",
    ]
    words = ["published", "calibrated", "calibrated", "published"]
    speed = f"{of.cast_gb:.1f} GB at {1000 * of.cast_gb / of.cast_ms:,.0f} GB/s"
    others = [bare, bare, bare, peer.step_ms]
    totals = [of.before_ms, bare, of.after_ms, peer.step_ms]
    cast, rest = charts.tag("full_cast").colour, charts.OTHERS[0]
    return charts.figure(
        charts.heading(
            f"The patch took {of.before_ms - of.after_ms:.1f} of the cast's {of.cast_ms:.1f} ms; "
            f"{of.still_ms:.1f} ms are unexplained",
            f"and a whole step with a BF16 pool is reported at {peer.step_ms:.1f} ms, below the "
            f"report's {bare:.1f} ms without any cast",
        ),
        [
            charts.bar(names, others, "all but the cast", charts.GREY, words),
            charts.bar(names[:1], [of.cast_ms], "cast", cast, "published", [speed]),
            charts.bar(names[2:3], [of.still_ms], "unexplained", rest, "calibrated"),
        ],
        "one token of one request (ms)",
        height=340,
        legend={"y": -0.3},
        **charts.totals(names, totals, [f"{t:.1f} ms, {1000 / t:.1f} tok/s" for t in totals]),
    )


def tpot(table: pd.DataFrame, rest: Rest, running: int = 1, where: str = "") -> go.Figure:
    """Stacked TPOT of each row of a verdict: cast, attention and write, and the rest."""
    of, whence = reported.server(), str(rest.provenance)
    best = table.loc[table.tokens_per_s.idxmax()]
    full = table[table.strategy == "full_cast"].iloc[0]
    frame = table.assign(own_ms=table.step_ms - table.cast_ms)
    hover = {name: table.how for name in PARTS if "how" in table}
    bars = charts.phases(frame, PARTS, hover)
    bars.append(charts.bar(frame.title, frame.rest_ms, "rest", charts.GREY, whence))
    texts = [
        f"{row.tpot_ms:.1f} ms, {_rate(row)}, {_weaker(row.provenance, whence)}"
        for row in frame.itertuples()
    ]
    lines = [(of.before_ms, f"before, {of.before_ms:.1f}"), (of.after_ms, f"after, {of.after_ms}")]
    return charts.figure(
        charts.heading(
            f"{best.title} would give {best.tokens_per_s:.1f} tok/s where full cast gives "
            f"{full.tokens_per_s:.1f}",
            f"{where}; rest {full.rest_ms:.1f} ms, {whence}"
            + ("; lines: as reported" if running == 1 else ""),
        ),
        bars,
        "TPOT (ms)",
        height=200 + 30 * len(frame),
        legend={"y": -0.3},
        **charts.totals(frame.title, frame.tpot_ms, texts, lines if running == 1 else (), 1.6),
    )


def _rate(row) -> str:
    """tok/s of a row, as a range where it has one."""
    low, high = getattr(row, "low_tokens_per_s", None), getattr(row, "high_tokens_per_s", None)
    if low is None:
        return f"{row.tokens_per_s:.1f} tok/s"
    return f"{low:.1f} to {high:.1f} tok/s"


def _weaker(*words: str) -> str:
    return max(map(Kind, words)).value


def hypotheses_bars(table: pd.DataFrame, of: reported.Server) -> go.Figure:
    """Predicted TPOT of each hypothesis beside the reported one; what fits and what does not."""
    names = [c.removeprefix("fits_") for c in table.columns if c.startswith("fits_")]
    # A row about one card is judged on that card, any other on all.
    possible = table.apply(
        lambda row: hypotheses.judged(row, "fits") and hypotheses.judged(row, "under"), axis=1
    ).astype(bool)
    near = possible & table.reaches
    title = f"The step did not become faster: no hypothesis explains {of.after_ms:.1f} ms"
    if of.after_ms < of.before_ms:
        title = charts.heading(
            f"{near.sum()} of {len(table)} explanations are possible at {of.after_ms:.1f} ms",
            f"none is established; to within {hypotheses.NEAR_MS} ms or in their range",
        )
    bars = []
    for ok, name, colour in (
        (True, "fits, below the datasheet's bandwidth", charts.OTHERS[0]),
        (False, "does not", charts.GREY),
    ):
        rows = table[possible == ok]
        hover = [
            f"{r.assumes}<br>{r.total_gib:.1f} GiB with the weights; "
            + ("no cast" if pd.isna(r.gb_per_s) else f"{r.gb_per_s:,.0f} GB/s")
            for r in rows.itertuples()
        ]
        bars.append(charts.bar(rows.hypothesis, rows.tpot_ms, name, colour, rows.provenance, hover))
    texts = [_why(row, names) for row in table.itertuples()]
    line = (of.after_ms, f"reported, {of.after_ms:.1f} ms")
    return charts.figure(
        title,
        bars,
        "TPOT that the explanation predicts (ms)",
        height=210 + 22 * len(table),
        legend={"y": -0.25},
        **charts.totals(table.hypothesis, table.tpot_ms, texts, [line], 2.9),
    )


def layers_and_pool(of: reported.Server | None = None) -> go.Figure:
    """TPOT over layers shadowed x pool tokens, with the line of the reported TPOT and of memory."""
    of = of or reported.server()
    solved, card = hypotheses.line(of), machine.card(reported.published()["gpu"][-1])
    layers = list(range(0, of.layers + 1, 2))
    tokens = [round(of.pool_tokens * i / 40) for i in range(1, 41)]
    cells = hypotheses.grid(of, layers, tokens).pivot(
        index="pool_tokens", columns="layers", values="tpot_ms"
    )
    field = {
        "type": "heatmap",
        "x": layers,
        "y": tokens,
        "z": cells.round(2).values.tolist(),
        "colorscale": [[0, "#F7F7F7"], [1, "#9A9A9A"]],
        "colorbar": {"title": {"text": "TPOT (ms)"}},
        "hovertemplate": "%{x} layers shadowed, %{y:,} tokens: %{z:.1f} ms<extra></extra>",
    }
    kv_gib, room = of.kv_gib or of.pool_gib(), of.room_gib(card)
    traces = [
        field,
        charts.line(
            solved.layers,
            solved.pool_tokens.round(),
            f"{of.after_ms:.1f} ms, as reported",
            charts.OTHERS[0],
            "calibrated",
            marker={},
        ),
    ]
    for gib, name, colour in (
        (kv_gib, f"{kv_gib:.2f} GiB, the pool's own memory", charts.OTHERS[1]),
        (room, f"{room:.1f} GiB, all that the weights leave", charts.OTHERS[2]),
    ):
        most = [min(of.pool_tokens, round(gib * GIB / of.token_bytes(n))) for n in layers]
        traces.append(charts.line(layers, most, name, colour, "calibrated", marker={}))
    held = [solved[solved.kv_gib <= gib].layers.max() for gib in (kv_gib, room)]
    return charts.figure(
        charts.heading(
            f"{of.after_ms:.1f} ms with 0 to {held[0]:.0f} layers shadowed in the pool's memory, "
            f"to {held[1]:.0f} beside the weights",
            "on the rising line; a pool fits below a falling line; the other layers are cast as "
            "before; none is established",
        ),
        traces,
        "layers shadowed",
        "pool (tokens)",
        height=420,
        legend={"y": -0.25},
        yaxis={"range": [0, 1.02 * of.pool_tokens], "tickformat": ",~s"},
    )


def _why(row, names: list[str]) -> str:
    fits = all(getattr(row, f"fits_{c}") for c in names)
    memory = f"{row.total_gib:.1f} GiB, {'fits' if fits else 'does not fit'}"
    if pd.isna(row.gb_per_s):
        return f"{row.tpot_ms:.1f} ms; {memory}; no cast"
    shares = ", ".join(f"{getattr(row, f'share_{c}'):.0%}" for c in names)
    return f"{row.tpot_ms:.1f} ms; {memory}; {shares} of GB/s"


def profile_bars(profiles: Sequence[Profile], rest: Rest) -> go.Figure:
    """Share of a profiled step's time by kernel, one bar per strategy."""
    tables = [p.table(5) for p in profiles]
    first, of = profiles[0], reported.server()
    share = of.cast_ms / (of.cast_ms + rest(1))
    names = [f"{charts.tag(p.strategy).title}, {p.total_ms:.1f} ms" for p in profiles]
    kernels = list(dict.fromkeys(k for t in tables for k in t.kernel if not k.endswith(" others")))
    bars = []
    for i, kernel in enumerate(kernels):
        rows = [t[t.kernel == kernel] for t in tables]
        rows = [row.iloc[0] if len(row) else None for row in rows]
        hover = [
            "" if r is None else f"{kernel[:160]}<br>{r.ms:.2f} ms in {r.calls} calls" for r in rows
        ]
        shares = [None if r is None else 100 * r.share for r in rows]
        colour = charts.OTHERS[i % len(charts.OTHERS)]
        name = short_name(kernel, 70)
        word = str(first.provenance)
        bars.append(charts.bar(names, shares, name, colour, word, hover, form=".1f", unit=" %"))
    below = 75 + 20 * len(kernels)  # the axis and its title, then a line per kernel
    return charts.figure(
        charts.heading(
            f"One copy kernel takes {tables[0].iloc[0].share:.0%} of full cast's profiled step, "
            "all layers",
            f"{first.device}, {first.pool_tokens:,} slots, {first.provenance}; it has no GEMMs. "
            f"In the GLM-5 report: {share:.0%} of cast + rest",
        ),
        bars,
        "share of kernel time (%)",
        barmode="stack",
        height=210 + below,
        margin={"t": 90, "b": below},
        legend={"orientation": "v", "y": -0.5},
        yaxis={"autorange": "reversed"},
        xaxis={"range": [0, 100]},
    )


def speed_and_room(table: pd.DataFrame, where: str = "") -> go.Figure:
    """tokens/s of one request against the tokens that fit: the verdict as a picture."""
    table = table[~table.cut]  # a pool cut to the load is no more than the load
    best = table.loc[(table.tokens_per_s * table.tokens_that_fit).idxmax()]
    table = table.sort_values("tokens_per_s", ascending=False)
    rooms = sorted(set(table.tokens_that_fit), reverse=True)
    place = table.groupby("tokens_that_fit").cumcount()
    notes, leader = [], {"showarrow": True, "arrowwidth": 1, "arrowhead": 0, "arrowcolor": "#999"}
    for row, nth in zip(table.itertuples(), place, strict=True):
        side = (-1) ** rooms.index(row.tokens_that_fit)
        text = f"{row.title}, {row.tokens_per_s:.1f}, {row.provenance}"
        at = {"x": row.tokens_that_fit, "y": row.tokens_per_s, "text": text, "xanchor": "left"}
        notes.append({**leader, **at, "ax": 30, "ay": -side * (28 - 24 * nth)})
    marks = charts.points(
        table.tokens_that_fit,
        table.tokens_per_s,
        "",
        list(table.colour),
        customdata=table[["gib_for_pool", "provenance", "title"]].values.tolist(),
        hover="%{customdata[2]}: %{y:.1f} tok/s, %{x:,} tokens<br>%{customdata[0]:.1f} GiB for the "
        "report's pool, %{customdata[1]}<extra></extra>",
        showlegend=False,
    )
    return charts.figure(
        charts.heading(
            f"{best.title}: {best.tokens_per_s:.1f} tok/s and {best.tokens_that_fit:,} tokens, the "
            "best of both",
            where,
        ),
        [marks],
        "tokens that fit",
        "tokens/s, one request",
        annotations=notes,
        xaxis={"range": [0, 1.6 * table.tokens_that_fit.max()], "tickformat": ",~s"},
        yaxis={"range": [0, 1.25 * table.tokens_per_s.max()]},
    )


def rest_over_context(table: pd.DataFrame) -> go.Figure:
    """The report's rest at one request for each context that it might have had."""
    word = table.provenance.iloc[0]
    columns = (("rest_ms", "rest", charts.DARK), ("attention_ms", "attention", charts.OTHERS[1]))
    return charts.figure(
        charts.heading(
            f"The unknown context of the GLM-5 report moves its rest from "
            f"{table.rest_ms.max():.1f} to {table.rest_ms.min():.1f} ms",
            "rest = TPOT less full cast's whole step, whose attention grows with the context; "
            f"{word}",
        ),
        [
            charts.line(table.context, table[column], f"{name}, {word}", colour, word)
            for column, name, colour in columns
        ],
        "context (tokens)",
        "ms",
        log_x=True,
        height=320,
        yaxis={"rangemode": "tozero"},
        legend={"y": -0.3},
    )


# The application.


def follow(settings: dict, name: str | None) -> dict:
    """What a user leaves open of a server is the report's."""
    names = ("before_ms", "after_ms", "pool_tokens", "layers")
    if name is not None or None not in [settings[n] for n in names]:
        return settings
    of = reported.server(*(settings[n] for n in names), cast_ms=settings["cast_ms"] or None)
    return settings | {n: getattr(of, n) for n in names}


@application(
    "shadowkv_lab.reproduction_app",
    columns=1,
    changed=follow,
    asleep=lambda s: {"rest_grows": "only for several requests"} if s["concurrency"] == 1 else {},
)
def reproduction_view(
    gpu: Annotated[
        str, Menu("GPU", cards(lambda: reported.published()["gpu"]), "GPU")
    ] = "rtx-pro-6000-server",
    context: Context = 1024,
    concurrency: Concurrency = 1,
    rest_ms: Annotated[float, Number("rest, ms (0: derive)", 0.5)] = 0.0,
    rest_grows: Annotated[bool, Tick("the rest grows")] = True,
    before_ms: Annotated[float | None, Number("your TPOT before, ms", 0.1)] = None,
    after_ms: Annotated[float | None, Number("your TPOT after, ms", 0.1)] = None,
    pool_tokens: Annotated[int | None, Number("your pool, slots", 64, True)] = None,
    layers: Annotated[int | None, Number("your layers", 1, True)] = None,
    cast_ms: Annotated[float, Number("cast, ms (0: scale)", 0.1)] = 0.0,
) -> View:
    """TPOT by strategy on the report's card, and the hypotheses for two TPOTs.

    `rest_ms` at one request replaces the derived one where it is above 0; `rest_grows` lets it
    grow with the requests as published servers do. A `cast_ms` of 0 scales the report's own by
    bytes.
    """
    if not (math.isfinite(rest_ms) and rest_ms >= 0):
        raise OutOfRange(f"rest_ms of {rest_ms}", "a finite number, 0 or more")
    stamps = facts.stamps("runs", "*.jsonl")
    found, rest, bars, flag = _answered(stamps, gpu, context, concurrency, rest_ms, rest_grows)
    server = (before_ms, after_ms, pool_tokens, layers)
    table, explained, words = _explained(stamps, server, cast_ms or None)
    said = f"{flag} {words} Rest: {rest.provenance.how}; {rest.provenance}."
    return View([bars, explained], said, found, TABLE, {"hypotheses": table})


# A control moves one of the two halves; the other one is remembered, while the runs are the same.


@lru_cache(maxsize=64)
def _answered(
    stamps: tuple, gpu: str, context: int, concurrency: int, rest_ms: float, rest_grows: bool
) -> tuple[pd.DataFrame, Rest, go.Figure, str]:
    """The verdict at a load, the rest it takes, its figure, and the flag in words."""
    rest = verdict.report_rest(gpu, context, rest_ms or None)
    if not rest_grows:
        rest = Rest(rest(1), experts=0, provenance=rest.provenance)
    found = verdict.verdict(gpu, context, concurrency, rest=rest)
    where = f"{machine.card(gpu).title}, {concurrency} x {context:,} tokens"
    flag = verdict.flag_first(verdict.smaller_pools(gpu, context, rest=rest))
    return found, rest, tpot(found, rest, concurrency, where), flag


@lru_cache(maxsize=64)
def _explained(
    stamps: tuple, server: tuple, cast_ms: float | None
) -> tuple[pd.DataFrame, go.Figure, str]:
    """The explanations of two TPOTs, their figure, and what they come to."""
    of = reported.server(*server, cast_ms=cast_ms)
    table = hypotheses.recorded_hypotheses(of)
    return table, hypotheses_bars(table, of), hypotheses.in_words(of, table)


reproduction_app = reproduction_view.app

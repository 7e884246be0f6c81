"""The GLM-5 report's figures (steps, profile, hypotheses, verdict), and its application."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated

import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab import machine
from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.glm5 import case, hypotheses, verdict
from shadowkv_lab.provenance import Kind
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.steps.trace import Profile, short_name
from shadowkv_lab.ui import charts
from shadowkv_lab.ui.app import View
from shadowkv_lab.ui.application import application
from shadowkv_lab.ui.controls import Concurrency, Context, Menu, Number, Tick, cards

PARTS = {"cast_ms": ("cast", 1.0), "own_ms": ("attention and write", charts.OPACITY["attention"])}
TABLE = (
    *("strategy", "step_ms", "tpot_ms", "tokens_per_s", "gib_for_pool", "fits", "tokens_that_fit"),
    *("tokens_per_s_per_gib", "provenance"),
)


def case_steps() -> go.Figure:
    """The report before and after its patch, without a cast, and a peer: what does not add up."""
    of, peer = case.server(), hypotheses.same_class().iloc[1]
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
    of, best, whence = case.server(), table.loc[table.tpot_ms.idxmin()], str(rest.provenance)
    frame = table.assign(own_ms=table.step_ms - table.cast_ms)
    hover = {name: table.how for name in PARTS if "how" in table}
    bars = charts.phases(frame, PARTS, hover)
    bars.append(charts.bar(frame.title, [rest(running)] * len(frame), "rest", charts.GREY, whence))
    texts = [
        f"{row.tpot_ms:.1f} ms, {row.tokens_per_s:.1f} tok/s, {_weaker(row.provenance, whence)}"
        for row in frame.itertuples()
    ]
    lines = [(of.before_ms, f"before, {of.before_ms:.1f}"), (of.after_ms, f"after, {of.after_ms}")]
    return charts.figure(
        charts.heading(
            f"{best.title} would take {best.tpot_ms:.1f} ms per token where full cast takes "
            f"{table.tpot_ms.max():.1f}",
            f"{where}; rest {rest(running):.1f} ms, {whence}"
            + ("; lines: as reported" if running == 1 else ""),
        ),
        bars,
        "TPOT (ms)",
        **charts.totals(frame.title, frame.tpot_ms, texts, lines if running == 1 else ()),
    )


def _weaker(*words: str) -> str:
    return max(map(Kind, words)).value


def hypotheses_bars(table: pd.DataFrame, of: case.Server) -> go.Figure:
    """Predicted TPOT of each hypothesis beside the reported one; what fits and what does not."""
    names = [c.removeprefix("fits_") for c in table.columns if c.startswith("fits_")]
    # A row about one card is judged on that card, any other on all.
    possible = pd.Series(
        [
            all(
                row[f"fits_{c}"] and row[f"under_{c}"]
                for c in [c for c in names if f"the {c} card" in row["hypothesis"]] or names
            )
            for row in table.to_dict("records")
        ],
        index=table.index,
    )
    near = possible & (table.off_ms.abs() <= hypotheses.NEAR_MS)
    title = f"The step did not become faster: no hypothesis explains {of.after_ms:.1f} ms"
    if of.after_ms < of.before_ms:
        title = charts.heading(
            f"{near.sum()} of {len(table)} hypotheses reach {of.after_ms:.1f} ms, and fit the "
            "cards",
            f"to within {hypotheses.NEAR_MS} ms, below the datasheet's bandwidth; none is "
            "established",
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
        bars.append(charts.bar(rows.hypothesis, rows.tpot_ms, name, colour, "calibrated", hover))
    texts = [_why(row, names) for row in table.itertuples()]
    line = (of.after_ms, f"reported, {of.after_ms:.1f} ms")
    return charts.figure(
        title,
        bars,
        "TPOT that the hypothesis predicts (ms)",
        **charts.totals(table.hypothesis, table.tpot_ms, texts, [line], 2.9),
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
    first, of = profiles[0], case.server()
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
        "share of the step's kernel time (%)",
        barmode="stack",
        height=210 + below,
        margin={"t": 90, "b": below},
        legend={"orientation": "v", "y": -0.5},
        yaxis={"autorange": "reversed"},
        xaxis={"range": [0, 100]},
    )


def speed_and_room(table: pd.DataFrame, where: str = "") -> go.Figure:
    """tokens/s of one request against the tokens that fit: the verdict as a picture."""
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
    of = case.server(*(settings[n] for n in names), cast_ms=settings["cast_ms"] or None)
    return settings | {n: getattr(of, n) for n in names}


@application("shadowkv_lab.reproduction_app", columns=1, changed=follow)
def reproduction_view(
    gpu: Annotated[
        str, Menu("GPU", cards(lambda: case.published("case")["gpu"]), "GPU")
    ] = "rtx-pro-6000-server",
    context: Context = 1024,
    concurrency: Concurrency = 1,
    rest_ms: Annotated[float, Number("rest, ms (0: derive)", 0.5)] = 0.0,
    rest_grows: Annotated[bool, Tick("rest grows with the experts read")] = True,
    before_ms: Annotated[float | None, Number("your TPOT before, ms", 0.1)] = None,
    after_ms: Annotated[float | None, Number("your TPOT after, ms", 0.1)] = None,
    pool_tokens: Annotated[int | None, Number("your pool, slots", 64, True)] = None,
    layers: Annotated[int | None, Number("your layers", 1, True)] = None,
    cast_ms: Annotated[float, Number("cast, ms (0: scale)", 0.1)] = 0.0,
) -> View:
    """TPOT by strategy on the report's card, and the hypotheses for two TPOTs.

    `rest_ms` at one request replaces the derived one where it is above 0; `rest_grows` adds the
    experts that more requests read. A `cast_ms` of 0 scales the report's own by bytes.
    """
    if not (math.isfinite(rest_ms) and rest_ms >= 0):
        raise OutOfRange(f"rest_ms of {rest_ms}", "a finite number, 0 or more")
    rest = verdict.case_rest(gpu, context)
    if rest_ms:
        at_one = rest_ms - rest.expert_ms * rest.per_token
        how = dataclasses.replace(rest.provenance, how=f"{rest_ms} ms at one request, typed")
        rest = dataclasses.replace(rest, fixed_ms=at_one, provenance=how)
    if not rest_grows:
        rest = dataclasses.replace(rest, fixed_ms=rest(1), expert_ms=0.0)
    of = case.server(before_ms, after_ms, pool_tokens, layers, cast_ms=cast_ms or None)
    table = hypotheses.recorded_hypotheses(of)
    found = verdict.verdict(gpu, context, concurrency, rest=rest)
    where = f"{machine.card(gpu).title}, {concurrency} x {context:,} tokens"
    figures = [tpot(found, rest, concurrency, where), hypotheses_bars(table, of)]
    words = f"{hypotheses.in_words(of, table)} Rest: {rest.provenance.how}; {rest.provenance}."
    return View(figures, words, found, TABLE, {"hypotheses": table})


reproduction_app = reproduction_view.app

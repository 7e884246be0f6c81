"""The reproduction's figures: the case's steps, its profile, hypotheses and verdict."""

import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab.glm5 import case, hypotheses
from shadowkv_lab.steps.predict import weakest
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.steps.trace import Profile, short_name
from shadowkv_lab.ui import style

GREY, DARK = "#bdbdbd", "#555555"


def _bar(fig: go.Figure, y, x, name: str, colour, provenance, hover=None, **more) -> None:
    """Horizontal stacked bars; `provenance` is one word, or one for each bar."""
    words = [provenance] * len(y) if isinstance(provenance, str) else list(provenance)
    hover = [""] * len(y) if hover is None else list(hover)
    fig.add_bar(
        y=list(y),
        x=[float(v) for v in x],
        name=name,
        orientation="h",
        customdata=[list(pair) for pair in zip(words, hover, strict=True)],
        marker=dict(
            color=colour,
            line=dict(color="white", width=1),
            opacity=more.pop("opacity", 1),
            pattern=dict(shape=[style.PATTERNS[p] for p in words], size=18, solidity=0.1),
        ),
        hovertemplate="%{y}<br>" + name + ": %{x:.2f} ms, %{customdata[0]}<br>%{customdata[1]}"
        "<extra></extra>",
        **more,
    )


def case_steps() -> go.Figure:
    """The case before and after its patch, without a cast, and a peer: what does not add up."""
    of, peer = case.server(), hypotheses.same_class().iloc[1]
    bare = of.before_ms - of.cast_ms
    names = [
        "before (reported)",
        "no cast at all (arithmetic)",
        "after the patch (reported)",
        "BF16 pool, same class (reported)",
    ]
    gone = of.before_ms - of.after_ms
    fig = style.figure(
        f"The patch took {gone:.1f} of the cast's {of.cast_ms:.1f} ms; {of.still_ms:.1f} ms are "
        "unexplained<br><sup>and a whole step with a BF16 pool is reported at "
        f"{peer.step_ms:.1f} ms, below the case's {bare:.1f} ms without any cast</sup>",
        "one token of one request (ms)",
        "",
        height=340,
    )
    words = ["recorded", "calibrated", "calibrated", "recorded"]
    _bar(fig, names, [bare, bare, bare, peer.step_ms], "all but the cast", GREY, words)
    _bar(
        fig,
        names[:1],
        [of.cast_ms],
        "cast",
        style.colour("full_cast"),
        "recorded",
        [f"{of.cast_gb:.1f} GB at {1000 * of.cast_gb / of.cast_ms:,.0f} GB/s"],
    )
    _bar(fig, names[2:3], [of.still_ms], "unexplained", style.OTHERS[0], "calibrated")
    fig.update_layout(legend_y=-0.3)
    totals = [of.before_ms, bare, of.after_ms, peer.step_ms]
    totals_beside(fig, names, totals, [f"{t:.1f} ms, {1000 / t:.1f} tok/s" for t in totals])
    return fig


def totals_beside(fig: go.Figure, names, totals, texts, lines=(), widest: float = 1.45) -> None:
    """Write a text behind each stacked bar, and dashed lines (ms, text) across; in one update."""
    labels = [
        dict(
            y=name,
            x=float(total),
            text=text,
            showarrow=False,
            xanchor="left",
            xshift=5,
            bgcolor="rgba(255,255,255,0.85)",
        )
        for name, total, text in zip(names, totals, texts, strict=True)
    ]
    shapes = []
    for x, text in lines:
        shapes.append(
            dict(
                type="line",
                x0=x,
                x1=x,
                y0=0,
                y1=1,
                yref="paper",
                line=dict(color="#222", dash="dash", width=1.2),
            )
        )
        labels.append(dict(x=x, y=1, yref="paper", yanchor="bottom", showarrow=False, text=text))
    top = widest * max([*map(float, totals), *(x for x, _ in lines)])
    fig.update_layout(
        barmode="stack",
        margin_t=90,
        annotations=labels,
        shapes=shapes,
        xaxis_range=[0, top],
        yaxis=dict(
            automargin=True, autorange="reversed", categoryorder="array", categoryarray=list(names)
        ),
    )


def tpot(table: pd.DataFrame, rest: Rest, running: int = 1, where: str = "") -> go.Figure:
    """Stacked TPOT of each row of a verdict: cast, attention and write, and the rest."""
    of, names = case.server(), [style.title(s) for s in table.strategy]
    best, faded = table.loc[table.tpot_ms.idxmin()], style.PHASE_OPACITY["attention"]
    fig = style.figure(
        f"{style.title(best.strategy)} would take {best.tpot_ms:.1f} ms a token where full cast "
        f"takes {table.tpot_ms.max():.1f}<br><sup>{where}; rest {rest(running):.1f} ms, "
        f"{rest.provenance}; lines: the case as reported</sup>",
        "TPOT (ms)",
        "",
    )
    _bar(
        fig,
        names,
        table.cast_ms,
        "cast",
        [style.colour(s) for s in table.strategy],
        table.provenance,
        table.get("how"),
        showlegend=False,
    )
    _bar(
        fig,
        names,
        table.step_ms - table.cast_ms,
        "attention and write",
        [style.colour(s) for s in table.strategy],
        table.provenance,
        table.get("how"),
        opacity=faded,
        showlegend=False,
    )
    fig.add_traces(
        [style.legend_entry("cast", 1), style.legend_entry("attention and write", faded)]
    )
    _bar(fig, names, [rest(running)] * len(names), "rest", GREY, rest.provenance)
    lines = [(of.before_ms, f"before, {of.before_ms:.1f}"), (of.after_ms, f"after, {of.after_ms}")]
    totals_beside(
        fig,
        names,
        table.tpot_ms,
        [
            f"{t:.1f} ms, {r:.1f} tok/s, {weakest([p, rest.provenance])}"
            for t, r, p in zip(table.tpot_ms, table.tokens_per_s, table.provenance, strict=True)
        ],
        lines if running == 1 else (),
    )
    return fig


def hypotheses_bars(table: pd.DataFrame, of: case.Server) -> go.Figure:
    """Predicted TPOT of each hypothesis beside the reported one; what fits and what does not."""
    cards = [c.removeprefix("fits_") for c in table.columns if c.startswith("fits_")]
    # A row about one card is judged on that card, any other on all.
    possible = [
        all(
            row[f"fits_{c}"] and row[f"under_{c}"]
            for c in [c for c in cards if f"the {c} card" in row["hypothesis"]] or cards
        )
        for row in table.to_dict("records")
    ]
    faster = of.after_ms < of.before_ms
    close = table.off_ms.abs() <= hypotheses.NEAR_MS
    near = [faster and p and c for p, c in zip(possible, close, strict=True)]
    fig = style.figure(
        f"{sum(near)} of {len(table)} hypotheses reach {of.after_ms:.1f} ms, and fit the "
        f"cards<br><sup>to within {hypotheses.NEAR_MS} ms, below the datasheet's bandwidth; none "
        "is established</sup>"
        if faster
        else f"The step did not become faster: no hypothesis explains {of.after_ms:.1f} ms",
        "TPOT that the hypothesis predicts (ms)",
        "",
    )
    for ok, name, colour in (
        (True, "fits, below the datasheet's bandwidth", style.OTHERS[2]),
        (False, "does not", GREY),
    ):
        rows = table[[p == ok for p in possible]]
        _bar(
            fig,
            list(rows.hypothesis),
            rows.tpot_ms,
            name,
            colour,
            "calibrated",
            [
                f"{r.assumes}<br>{r.total_gib:.1f} GiB with the weights; "
                + ("no cast" if pd.isna(r.gb_per_s) else f"{r.gb_per_s:,.0f} GB/s")
                for r in rows.itertuples()
            ],
        )
    texts = [_why(row, cards) for row in table.itertuples()]
    line = (of.after_ms, f"reported, {of.after_ms:.1f} ms")
    totals_beside(fig, table.hypothesis, table.tpot_ms, texts, [line], 2.9)
    return fig


def _why(row, cards: list[str]) -> str:
    fits = all(getattr(row, f"fits_{c}") for c in cards)
    memory = f"{row.total_gib:.1f} GiB, {'fits' if fits else 'does not fit'}"
    if pd.isna(row.gb_per_s):
        return f"{row.tpot_ms:.1f} ms; {memory}; no cast"
    shares = ", ".join(f"{getattr(row, f'share_{c}'):.0%}" for c in cards)
    return f"{row.tpot_ms:.1f} ms; {memory}; {shares} of GB/s"


def profile_bars(profiles: list[Profile], rest: Rest) -> go.Figure:
    """Share of a profiled step's time by kernel, one bar a strategy; the case's share beside."""
    tables = [p.table(5) for p in profiles]
    first, of = profiles[0], case.server()
    share = of.cast_ms / (of.cast_ms + rest(1))
    top = tables[0].iloc[0]
    fig = style.figure(
        f"One copy kernel takes {top.share:.0%} of full cast's profiled step, all layers<br><sup>"
        f"{first.device}, {first.pool_tokens:,} slots, {first.provenance}; it has no GEMMs. "
        f"In the case: {share:.0%} of cast + rest</sup>",
        "share of the step's kernel time (%)",
        "",
    )
    names = [f"{style.title(p.strategy)}, {p.total_ms:.1f} ms" for p in profiles]
    kernels = list(dict.fromkeys(k for t in tables for k in t.kernel if not k.endswith(" others")))
    for i, kernel in enumerate(kernels):
        found = [
            t[t.kernel == kernel].iloc[0] if (t.kernel == kernel).any() else None for t in tables
        ]
        fig.add_bar(
            y=names,
            x=[100 * f.share if f is not None else None for f in found],
            orientation="h",
            name=short_name(kernel, 70),
            marker=dict(
                color=style.OTHERS[i % len(style.OTHERS)],
                line=dict(color="white", width=1),
                pattern=dict(shape=style.PATTERNS[first.provenance], size=18, solidity=0.1),
            ),
            customdata=[(0, 0, "") if f is None else (f.ms, f.calls, kernel[:160]) for f in found],
            hovertemplate="%{customdata[2]}<br>%{x:.1f} %, %{customdata[0]:.2f} ms in "
            "%{customdata[1]} calls<extra></extra>",
        )
    below = 75 + 20 * len(kernels)  # the axis and its title, then a line a kernel
    fig.update_layout(
        barmode="stack",
        height=210 + below,
        margin=dict(t=90, b=below),
        legend=dict(orientation="v", y=-0.5),
    )
    fig.update_yaxes(automargin=True, autorange="reversed")
    fig.update_xaxes(range=[0, 100])
    return fig


def speed_and_room(table: pd.DataFrame, where: str = "") -> go.Figure:
    """tokens/s of one request against the tokens that fit: the verdict as a picture."""
    best = table.loc[(table.tokens_per_s * table.tokens_that_fit).idxmax()]
    fig = style.figure(
        f"{style.title(best.strategy)}: {best.tokens_per_s:.1f} tok/s and {best.tokens_that_fit:,} "
        f"tokens, the best of both<br><sup>{where}</sup>",
        "tokens that fit",
        "tokens/s, one request",
    )
    crowded: dict[int, int] = {}
    sides = {n: (-1) ** i for i, n in enumerate(sorted(set(table.tokens_that_fit), reverse=True))}
    for row in table.sort_values("tokens_per_s", ascending=False).itertuples():
        place = crowded[row.tokens_that_fit] = crowded.get(row.tokens_that_fit, -1) + 1
        fig.add_scatter(
            x=[row.tokens_that_fit],
            y=[row.tokens_per_s],
            mode="markers",
            showlegend=False,
            marker=dict(size=13, color=style.colour(row.strategy), line=dict(width=1)),
            customdata=[(row.gib_for_pool, row.provenance)],
            name=style.title(row.strategy),
            hovertemplate="%{y:.1f} tok/s, %{x:,} tokens<br>%{customdata[0]:.1f} GiB for the "
            "case's pool, %{customdata[1]}",
        )
        fig.add_annotation(
            x=row.tokens_that_fit,
            y=row.tokens_per_s,
            showarrow=True,
            arrowwidth=1,
            arrowhead=0,
            ax=30,
            ay=-sides[row.tokens_that_fit] * (28 - 24 * place),
            xanchor="left",
            arrowcolor="#999",
            text=f"{style.title(row.strategy)}, {row.tokens_per_s:.1f}, {row.provenance}",
        )
    fig.update_xaxes(range=[0, 1.6 * table.tokens_that_fit.max()], tickformat=",~s")
    fig.update_yaxes(range=[0, 1.25 * table.tokens_per_s.max()])
    return fig


def predicted_against_recorded(rows: pd.DataFrame) -> go.Figure:
    """Held-out steps: predicted over recorded, with a band of 20 % either way."""
    fig = style.figure(
        f"Predictions of unseen runs are off by {rows.error.median():.1%} in the median, "
        f"{rows.error.quantile(0.9):.1%} at p90<br><sup>{len(rows)} runs of pools, contexts and "
        "models that the fit had not seen; band: 20 %</sup>",
        "recorded step (ms)",
        "predicted step (ms)",
        log_x=True,
        log_y=True,
    )
    ends = [0.8 * rows.recorded_ms.min(), 1.25 * rows.recorded_ms.max()]
    fig.add_scatter(
        x=ends + ends[::-1],
        y=[1.2 * e for e in ends] + [0.8 * e for e in ends[::-1]],
        fill="toself",
        fillcolor="rgba(0,0,0,0.07)",
        line_width=0,
        hoverinfo="skip",
        showlegend=False,
        mode="lines",
    )
    symbols = {"pool": "circle", "context": "diamond", "model": "x"}
    for (kind, strategy), part in rows.groupby(["kind", "strategy"], sort=False):
        fig.add_scatter(
            x=part.recorded_ms.round(3).tolist(),
            y=part.predicted_ms.round(3).tolist(),
            mode="markers",
            legendgroup=strategy,
            name=style.title(strategy),
            showlegend=bool(kind == rows.kind.iloc[0]),
            marker=dict(color=style.colour(strategy), symbol=symbols[kind], size=7),
            text=[f"{r.pool_tokens:,}, {r.concurrency} x {r.context:,}" for r in part.itertuples()],
            hovertemplate=f"{kind} held out: pool %{{text}}<br>"
            "%{x:.2f} ms recorded, %{y:.2f} predicted",
        )
    fig.update_layout(height=440)
    return fig


def rest_over_context(table: pd.DataFrame) -> go.Figure:
    """The case's rest at one request for each context that it might have had."""
    low, high = table.rest_ms.min(), table.rest_ms.max()
    fig = style.figure(
        f"The case's unknown context moves its rest from {high:.1f} to {low:.1f} ms<br><sup>rest = "
        "TPOT less full cast's whole step, whose attention grows with the context; assumed</sup>",
        "context (tokens)",
        "ms",
        log_x=True,
        height=320,
    )
    for column, name, colour in (
        ("rest_ms", "rest", DARK),
        ("attention_ms", "attention", style.OTHERS[2]),
    ):
        fig.add_scatter(
            x=table.context.tolist(),
            y=table[column].tolist(),
            name=f"{name}, assumed",
            mode="lines+markers",
            line=dict(color=colour, dash=style.DASHES["assumed"]),
        )
    fig.update_layout(yaxis_rangemode="tozero", legend_y=-0.3)
    return fig

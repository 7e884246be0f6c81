"""Figures of the serving notebook: who wins at which load, and what a full pool does."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from shadowkv_lab.serving import traffic
from shadowkv_lab.serving.closed_form import (
    Contender,
    by_pair,
    crossovers,
    loop_tokens_per_s,
    point,
    winner_map,
)
from shadowkv_lab.serving.contenders import engine
from shadowkv_lab.serving.results import OBJECTIVE, Objective, Results
from shadowkv_lab.serving.simulate import PREFILL_TOKENS_PER_S, simulate
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


def _line(contender: Contender) -> dict:
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
        heading(f"{style.title(best.name)} gives most: {best.tokens_per_s:,.0f} tokens/s",
                f"{what}; {source_of(fit)}"), "output tokens/s, all requests", "")  # fmt: skip
    for p, c in zip(points, fit, strict=True):
        said = f"{p.running} run, {p.queued} wait, {p.step_ms:.0f} ms a token, {p.provenance}"
        fig.add_bar(
            y=[style.title(p.name)], x=[p.tokens_per_s], orientation="h", showlegend=False,
            marker={"color": style.colour(p.name),
                    "pattern": {"shape": style.PATTERNS[p.provenance], "size": 6}},
            hovertemplate=f"{legend(c)}: {p.tokens_per_s:,.1f} tokens/s<br>{said}<br>"
                          f"pool of {c.capacity_tokens:,} tokens<extra></extra>",
        )  # fmt: skip
        fig.add_annotation(x=p.tokens_per_s, y=style.title(p.name), xanchor="left", xshift=6,
                           showarrow=False, text=said)  # fmt: skip
    fig.update_xaxes(range=[0, 1.75 * best.tokens_per_s])
    fig.update_yaxes(automargin=True)
    fig.update_layout(height=170 + 50 * len(points))
    return fig


def pareto(contenders: Sequence[Contender], context: int,
           concurrencies: Sequence[int] = CONCURRENCIES) -> go.Figure:  # fmt: skip
    """Throughput against interactivity: up is more for the server, right is more for a user."""
    fit = [c for c in contenders if c.running(1, context)]
    curves = {c.name: [point(c, n, context) for n in concurrencies] for c in fit}
    peaks = {name: max(p.tokens_per_s for p in points) for name, points in curves.items()}
    if not fit:
        return style.figure(f"Nobody holds one request of {context:,} tokens", "", "")
    best = max(peaks, key=peaks.__getitem__)
    finding = (f"At {context:,} tokens {style.title(best)} peaks highest: "
               f"{peaks[best]:,.0f} tokens/s")  # fmt: skip
    fig = style.figure(
        heading(finding, f"1 to {concurrencies[-1]} requests; a cross: the pool is full; "
                + source_of(fit)),
        "output tokens/s that one running request sees", "output tokens/s of the server",
        log_x=True, log_y=True,
    )  # fmt: skip
    for c in fit:
        points = curves[c.name]
        fig.add_scatter(
            x=[p.tokens_per_s_per_user for p in points], y=[p.tokens_per_s for p in points],
            name=legend(c), line=_line(c), mode="lines+markers",
            marker={"size": 8, "symbol": ["x" if p.queued else "circle" for p in points]},
            text=[f"{n} sent, {p.running} run, {p.queued} wait<br>{p.step_ms:.1f} ms a token"
                  for n, p in zip(concurrencies, points, strict=True)],
            hovertemplate="%{text}<br>%{y:,.0f} tokens/s in all<br>%{x:.1f} tokens/s for each"
                          f"<extra>{legend(c)}</extra>",
        )  # fmt: skip
    return fig


def winners(contenders: Sequence[Contender], concurrencies: Sequence[int] = CONCURRENCIES,
            contexts: Sequence[int] = CONTEXTS) -> go.Figure:  # fmt: skip
    """Which strategy gives most tokens/s at each load, and the lines where that changes."""
    rows = winner_map(contenders, concurrencies, contexts)
    cells = [cell for row in rows for cell in row]
    names = [c.name for c in contenders]
    won = pd.Series([cell.winner for cell in cells]).value_counts(normalize=True)
    counted = ", ".join(f"{style.title(n)} {share:.0%}" for n, share in won.items())
    never = ", ".join(style.title(n) for n in names if n not in won)
    counted += f"; never {never}" if never else ""
    fig = style.figure(
        heading(f"Most tokens/s: {counted}",
                f"shares of the loads shown; pale: a small lead; {source_of(contenders)}"),
        "requests sent at once", "context (tokens a request)", log_x=True, log_y=True, height=460,
    )  # fmt: skip
    for name in names:
        mine = [cell for cell in cells if cell.winner == name]
        fig.add_scatter(
            x=[m.concurrency for m in mine] or [None], y=[m.context for m in mine] or [None],
            mode="markers", name=style.title(name),
            marker={"symbol": "square", "size": 22, "color": style.colour(name),
                    "opacity": [0.35 + 0.65 * min(m.lead, 0.5) / 0.5 for m in mine] or 1},
            text=[f"{m.tokens_per_s:,.0f} tokens/s, {m.running} run<br>"
                  + ("only one that holds a request" if np.isinf(m.lead) else
                     "a tie" if m.lead < 5e-4 else f"{m.lead:.1%} over the next") for m in mine],
            hovertemplate="%{x} requests of %{y:,} tokens<br>%{text}<extra>"
                          f"{style.title(name)}</extra>",
        )  # fmt: skip
    for (before, after), line in by_pair(crossovers(contenders, contexts, concurrencies)).items():
        fig.add_scatter(
            x=[p.concurrency for p in line], y=[p.context for p in line],
            mode="lines+markers", line={"color": "#222", "width": 1.5}, marker={"size": 5},
            name=f"from here {style.title(after)}, below {style.title(before)}",
            hovertemplate=f"from %{{x}} requests of %{{y:,}} tokens on {style.title(after)} beats "
                          f"{style.title(before)}<extra></extra>",
        )  # fmt: skip
    for axis, values in ((fig.layout.xaxis, concurrencies), (fig.layout.yaxis, contexts)):
        axis.update(tickvals=list(values), ticktext=[f"{v:,}" for v in values])
    fig.update_layout(legend={"orientation": "h", "y": -0.2})
    return fig


def cliff(contender: Contender, load: traffic.Traffic, capacities: dict[str, int],
          shares: Sequence[float] = tuple(np.geomspace(0.04, 1.25, 14))) -> go.Figure:  # fmt: skip
    """Preemptions against capacity, at one step time; `capacities` mark what strategies keep."""
    largest = max(capacities.values())
    sizes = sorted({*(round(largest * s) for s in shares), *capacities.values()})
    server = engine(contender)
    runs = [simulate(replace(server, capacity_tokens=n), load, overload=True) for n in sizes]
    each = [100 * r.scheduler.preemptions / len(load) for r in runs]
    again = [r.scheduler.recomputed_tokens / int(load.prompt_tokens.sum()) for r in runs]
    free = min((n for n, e in zip(sizes, each, strict=True) if not e), default=None)
    finding = (f"From {free:,} tokens on nobody is preempted" if free else
               "Every capacity here preempts")  # fmt: skip
    fig = style.figure(
        heading(finding, f"{load.name}; every point with the step of "
                f"{style.title(contender.name)}, {runs[0].provenance}"),
        "capacity, tokens", "preemptions a hundred requests", log_x=True,
    )  # fmt: skip
    told = dict(
        text=[f"{a:.0%} of all prompt tokens computed again" for a in again],
        hovertemplate="%{x:,} tokens: %{y:.1f} a hundred requests<br>%{text}<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(x=sizes, y=each, mode="lines+markers", showlegend=False, **told,
                    line={"color": "#888", "dash": style.DASHES[runs[0].provenance]})  # fmt: skip
    for name, tokens in capacities.items():
        fig.add_scatter(
            x=[tokens], y=[each[sizes.index(tokens)]], mode="markers",
            name=f"{style.title(name)}: {tokens:,} tokens, {each[sizes.index(tokens)]:.0f}",
            marker={"size": 14, "color": style.colour(name)}, hoverinfo="skip",
        )  # fmt: skip
    return fig


def kv_use(runs: Sequence[Results]) -> go.Figure:
    """KV use and queue over time, one line a run."""
    fig = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.08)
    rows = sorted((r.summary() for r in runs), key=lambda row: -row["output_tokens_per_s"])
    preempted = {row["label"]: row["preemptions"] for row in rows}
    said = [f"{style.title(row['label'])} {row['output_tokens_per_s']:,.0f}" for row in rows]
    note = f"{', '.join(['then', *said[1:]])}; " if said[1:] else ""
    note = note.replace("then,", "then") + runs[0].traffic.name
    layout = style.figure(heading(f"{said[0]} tokens/s", note), "", "", height=520).layout.to_plotly_json()
    axis = {k: v for k, v in layout.pop("xaxis").items() if k != "title"}
    layout.pop("yaxis")
    fig.update_layout(layout)
    fig.update_xaxes(axis)
    fig.update_yaxes(axis)
    for r in runs:
        dash = {"color": style.colour(r.engine.label), "dash": style.DASHES[r.provenance]}
        (at, share), (when, waiting) = r.kv_use(), r.queue()
        name = style.title(r.engine.label)
        fig.add_scatter(
            x=at,
            y=100 * share,
            line=dash,
            name=f"{name}: {preempted[r.engine.label]} preemptions ({r.provenance})",
            row=1,
            col=1,
            hovertemplate=f"{name}: %{{y:.0f}} % at %{{x:.0f}} s<extra></extra>",
        )
        fig.add_scatter(
            x=when,
            y=waiting,
            line=dash | {"shape": "hv"},
            showlegend=False,
            row=2,
            col=1,
            hovertemplate=f"{name}: %{{y}} wait at %{{x:.0f}} s<extra></extra>",
        )
    fig.update_layout(legend_y=-0.15)
    fig.update_xaxes(title="time, s", row=2, col=1)
    fig.update_yaxes(title="pool in use, %", range=[0, 105], row=1, col=1)
    fig.update_yaxes(title="requests waiting", row=2, col=1)
    return fig


def attainment(contenders: Sequence[Contender], lengths: traffic.Lengths, rates: Sequence[float],
               requests: int = 400, objective: Objective = OBJECTIVE,
               goal: float = 0.9) -> go.Figure:  # fmt: skip
    """Share of requests within the objectives against the rate; Poisson, the same draws for all."""
    one = traffic.poisson(1.0, requests, lengths)
    found: dict[str, list[Results]] = {}
    for c in contenders:
        server = engine(c)
        found[c.name] = [simulate(server, one.scaled(rate=rate), overload=True) for rate in rates]
    shares = {name: [float(r.within(objective).sum()) / requests for r in runs]
              for name, runs in found.items()}  # fmt: skip
    most = {name: _highest(rates, ss, goal) for name, ss in shares.items()}
    XX = {name: max((r for r, s in zip(rates, ss, strict=True) if s >= goal), default=0.0)
            for name, ss in shares.items()}  # fmt: skip
    best = max(most, key=most.__getitem__)
    finding = (f"{style.title(best)} keeps {goal:.0%} in time up to {most[best]:.2g} requests/s"
               if most[best] else f"Nobody keeps {goal:.0%} of the requests in time")  # fmt: skip
    fig = style.figure(
        heading(finding, f"TTFT within {objective.ttft_ms / 1000:g} s, TPOT within "
                f"{objective.tpot_ms:g} ms; {source_of(contenders)}"),
        "requests/s, Poisson", "share within both objectives, %", log_x=True)  # fmt: skip
    for c in contenders:
        fig.add_scatter(
            x=list(rates), y=[100 * s for s in shares[c.name]], name=legend(c), line=_line(c),
            mode="lines+markers", customdata=[_told(r) for r in found[c.name]],
            hovertemplate="%{x:.2g} requests/s: %{y:.0f} %<br>%{customdata}"
                          f"<extra>{legend(c)}</extra>",
        )  # fmt: skip
    fig.add_hline(y=100 * goal, line={"color": "#888", "dash": "dot"})
    fig.update_xaxes(tickvals=list(rates), ticktext=[f"{r:.2g}" for r in rates])
    return fig


def _told(run: Results) -> str:
    row = run.summary()
    return (f"p90 TTFT {row['p90_ttft_ms'] / 1000:.1f} s, p90 TPOT {row['p90_tpot_ms']:.0f} ms<br>"
            f"{row['preemptions']} preemptions, at most {row['queue_max']} wait")  # fmt: skip


def check(contenders: Sequence[Contender], concurrencies: Sequence[int], prompt_tokens: int,
          output_tokens: int) -> pd.DataFrame:  # fmt: skip
    """The closed form beside the simulation: a closed loop of equal requests, prefill counted."""
    rows = []
    for c in contenders:
        for n in concurrencies:
            load = traffic.closed_loop(n, 6 * n, traffic.fixed(prompt_tokens, output_tokens))
            run = simulate(engine(c), load).summary()
            formula = loop_tokens_per_s(c, n, prompt_tokens, output_tokens, PREFILL_TOKENS_PER_S)
            rows.append({
                "strategy": style.title(c.name), "requests": n, "closed form tok/s": formula,
                "simulated tok/s": run["output_tokens_per_s"],
                "off by %": 100 * (run["output_tokens_per_s"] / formula - 1),
                "preemptions": run["preemptions"], "provenance": run["provenance"],
            })  # fmt: skip
    return pd.DataFrame(rows).round(1)


def table(runs: Sequence[Results], objective: Objective = OBJECTIVE) -> pd.DataFrame:
    """One row a run: the field's numbers."""
    rows = [r.summary(objective) for r in runs]
    kept = ["provenance", "finished", "output_tokens_per_s", "requests_per_s", "goodput_share",
            "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "p99_itl_ms",
            "p99_latency_ms", "preemptions", "recomputed_tokens", "queue_max"]  # fmt: skip
    frame = pd.DataFrame(rows, index=[style.title(row["label"]) for row in rows])
    return frame[kept].round(2)

"""Figures and tables of simulated runs: the pressure cliff, KV use over time, objectives met."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from shadowkv_lab.serving import traffic
from shadowkv_lab.serving.closed_form import Contender, loop_tokens_per_s
from shadowkv_lab.serving.contenders import engine
from shadowkv_lab.serving.results import OBJECTIVE, Objective, Results
from shadowkv_lab.serving.simulate import PREFILL_TOKENS_PER_S, simulate
from shadowkv_lab.ui import style
from shadowkv_lab.ui.serving import heading, legend, line_style, source_of


def cliff(
    contender: Contender,
    load: traffic.Traffic,
    capacities: dict[str, int],
    shares: Sequence[float] = tuple(np.geomspace(0.04, 1.25, 14)),
) -> go.Figure:
    """Preemptions against capacity, at one step time; `capacities` mark what strategies keep."""
    largest = max(capacities.values())
    sizes = sorted({*(round(largest * s) for s in shares), *capacities.values()})
    server = engine(contender)
    runs = [simulate(replace(server, capacity_tokens=n), load, overload=True) for n in sizes]
    each = [None if r.refused else 100 * r.scheduler.preemptions / len(load) for r in runs]
    again = [r.scheduler.recomputed_tokens / int(load.prompt_tokens.sum()) for r in runs]
    calm = list(itertools.takewhile(lambda i: each[i] == 0, reversed(range(len(sizes)))))
    finding = (
        f"From {sizes[calm[-1]]:,} tokens on nobody is preempted"
        if calm
        else "Every capacity here preempts or refuses requests"
    )
    fig = style.figure(
        heading(
            finding,
            f"{load.name}; every point with the step of "
            f"{style.title(contender.name)}, {runs[0].provenance}",
        ),
        "capacity, tokens",
        "preemptions a hundred requests",
        log_x=True,
    )
    told = dict(
        text=[f"{a:.0%} of all prompt tokens computed again" for a in again],
        hovertemplate="%{x:,} tokens: %{y:.1f} a hundred requests<br>%{text}<extra></extra>",
    )
    fig.add_scatter(
        x=sizes,
        y=each,
        mode="lines+markers",
        showlegend=False,
        **told,
        line={"color": "#888", "dash": style.DASHES[runs[0].provenance]},
    )
    for i, (name, tokens) in enumerate(capacities.items()):
        fig.add_scatter(
            x=[tokens],
            y=[each[sizes.index(tokens)]],
            mode="markers",
            name=f"{style.title(name)}: {tokens:,} tokens, {_said(each[sizes.index(tokens)])}",
            marker={"size": max(8, 20 - 3 * i), "color": style.colour(name)},
            hoverinfo="skip",
        )
    return fig


def _said(preemptions: float | None) -> str:
    return "refuses requests" if preemptions is None else f"{preemptions:.0f}"


def kv_use(runs: Sequence[Results]) -> go.Figure:
    """KV use and queue over time, one line a run."""
    fig = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.08)
    rows = sorted((r.summary() for r in runs), key=lambda row: -row["output_tokens_per_s"])
    preempted = {row["label"]: row["preemptions"] for row in rows}
    said = [f"{style.title(row['label'])} {row['output_tokens_per_s']:,.0f}" for row in rows]
    note = f"then {', '.join(said[1:])}; " if said[1:] else ""
    best = f"{style.title(rows[0]['label'])} gives most: {rows[0]['output_tokens_per_s']:,.0f}"
    finding = heading(f"{best} tokens/s", note + runs[0].traffic.name)
    layout = style.figure(finding, "", "", height=520).layout.to_plotly_json()
    axis = {k: v for k, v in layout.pop("xaxis").items() if k != "title"}
    layout.pop("yaxis")
    fig.update_layout(layout)
    fig.update_xaxes(axis)
    fig.update_yaxes(axis)
    for r in runs:
        line = {"color": style.colour(r.engine.label), "dash": style.DASHES[r.provenance]}
        (at, share), (when, waiting) = _thinned(*r.kv_use()), _thinned(*r.queue())
        name = style.title(r.engine.label)
        fig.add_scatter(
            x=at,
            y=100 * share,
            line=line,
            row=1,
            col=1,
            name=f"{name}: {preempted[r.engine.label]} preemptions ({r.provenance})",
            hovertemplate=f"{name}: %{{y:.0f}} % at %{{x:.0f}} s<extra></extra>",
        )
        fig.add_scatter(
            x=when,
            y=waiting,
            line=line | {"shape": "hv"},
            showlegend=False,
            row=2,
            col=1,
            hovertemplate=f"{name}: %{{y}} wait at %{{x:.0f}} s<extra></extra>",
        )
    fig.update_layout(legend_y=-0.15)
    fig.update_xaxes(title="time, s", row=2, col=1)
    fig.update_yaxes(title="pool in use (peaks), %", range=[0, 105], row=1, col=1)
    fig.update_yaxes(title="requests waiting", row=2, col=1)
    return fig


def _thinned(at: np.ndarray, values: np.ndarray, most: int = 120) -> tuple:
    """At most so many points, each the highest of as many neighbours; the last one stays."""
    size = max(1, -(-len(at) // most))
    kept = [i + int(values[i : i + size].argmax()) for i in range(0, len(at), size)]
    kept = [*kept, len(at) - 1] if kept and kept[-1] < len(at) - 1 else kept
    return at[kept].round(2), values[kept].round(4)


def attainment(
    contenders: Sequence[Contender],
    lengths: traffic.Lengths,
    rates: Sequence[float],
    requests: int = 400,
    objective: Objective = OBJECTIVE,
    goal: float = 0.9,
) -> go.Figure:
    """Share of requests within the objectives against the rate; Poisson, the same draws for all."""
    one = traffic.poisson(1.0, requests, lengths)
    found: dict[str, list[Results]] = {}
    for c in contenders:
        server = engine(c)
        found[c.name] = [simulate(server, one.scaled(rate=rate), overload=True) for rate in rates]
    shares = {
        name: [float(r.within(objective).sum()) / requests for r in runs]
        for name, runs in found.items()
    }
    most = {name: _highest(rates, ss, goal) for name, ss in shares.items()}
    highest = max(most.values())
    ahead = [style.title(name) for name, rate in most.items() if rate >= 0.95 * highest]
    verb = "keeps" if len(ahead) == 1 else "keep"
    finding = (
        f"{' and '.join(ahead)} {verb} {goal:.0%} in time up to {highest:.2g} requests/s"
        if highest
        else f"Nobody keeps {goal:.0%} of the requests in time"
    )
    fig = style.figure(
        heading(
            finding,
            f"TTFT within {objective.ttft_ms / 1000:g} s, TPOT within "
            f"{objective.tpot_ms:g} ms; {source_of(contenders)}",
        ),
        "requests/s, Poisson",
        "share within both objectives, %",
        log_x=True,
    )
    for c in contenders:
        fig.add_scatter(
            x=list(rates),
            y=[100 * s for s in shares[c.name]],
            name=legend(c),
            line=line_style(c),
            mode="lines+markers",
            marker=style.marker(c.name),
            customdata=[_told(r) for r in found[c.name]],
            hovertemplate="%{x:.2g} requests/s: %{y:.0f} %<br>%{customdata}"
            f"<extra>{legend(c)}</extra>",
        )
    fig.add_hline(y=100 * goal, line={"color": "#888", "dash": "dot"})
    fig.update_xaxes(tickvals=list(rates), ticktext=[f"{r:.2g}" for r in rates])
    return fig


def _highest(rates: Sequence[float], shares: Sequence[float], goal: float) -> float:
    """The rate up to which the share stays at `goal`, straight between two rates; 0 if none."""
    if shares[0] < goal:
        return 0.0
    for (low, at), (high, then) in pairwise(zip(rates, shares, strict=True)):
        if then < goal:
            return low + (high - low) * (at - goal) / (at - then)
    return rates[-1]


def _told(run: Results) -> str:
    row = run.summary()
    return (
        f"p90 TTFT {row['p90_ttft_ms'] / 1000:.1f} s, p90 TPOT {row['p90_tpot_ms']:.0f} ms<br>"
        f"{row['preemptions']} preemptions, at most {row['queue_max']} wait"
    )


def check(
    contenders: Sequence[Contender],
    concurrencies: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
) -> pd.DataFrame:
    """The closed form beside the simulation: a closed loop of equal requests, prefill counted."""
    rows = []
    for c in contenders:
        for n in concurrencies:
            load = traffic.closed_loop(n, 6 * n, traffic.fixed(prompt_tokens, output_tokens))
            run = simulate(engine(c), load).summary()
            formula = loop_tokens_per_s(c, n, prompt_tokens, output_tokens, PREFILL_TOKENS_PER_S)
            rows.append(
                {
                    "strategy": style.title(c.name),
                    "requests": n,
                    "closed form tok/s": formula,
                    "simulated tok/s": run["output_tokens_per_s"],
                    "off by %": 100 * (run["output_tokens_per_s"] / formula - 1),
                    "preemptions": run["preemptions"],
                    "provenance": run["provenance"],
                }
            )
    return pd.DataFrame(rows).round(1)


def table(runs: Sequence[Results], objective: Objective = OBJECTIVE) -> pd.DataFrame:
    """One row a run: the field's numbers."""
    rows = [r.summary(objective) for r in runs]
    kept = [
        "provenance",
        "finished",
        "output_tokens_per_s",
        "requests_per_s",
        "goodput_share",
        "p50_ttft_ms",
        "p99_ttft_ms",
        "p50_tpot_ms",
        "p99_tpot_ms",
        "p99_itl_ms",
        "p99_latency_ms",
        "preemptions",
        "recomputed_tokens",
        "queue_max",
    ]
    frame = pd.DataFrame(rows, index=[style.title(row["label"]) for row in rows])
    return frame[kept].round(2)

"""Traffic simulated: KV use and queue over time, the pressure cliff, objectives met."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab.errors import DoesNotFit, OutOfRange
from shadowkv_lab.serving import traffic
from shadowkv_lab.serving.closed_form import Contender, loop_tokens_per_s
from shadowkv_lab.serving.contenders import WANTED, engine
from shadowkv_lab.serving.results import OBJECTIVE, Objective, Results
from shadowkv_lab.serving.simulate import PREFILL_SOURCE, PREFILL_TOKENS_PER_S, simulate
from shadowkv_lab.ui import charts, serving
from shadowkv_lab.ui.app import QUIET, View, Work
from shadowkv_lab.ui.application import application
from shadowkv_lab.ui.controls import Menu, ModelName, Slider, TensorParallel, powers

RATES = [0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0]
ARRIVALS = ("closed loop", "Poisson", "bursts")
BURST_CV = 3.0
REQUESTS = 400
CAPACITY_SHARES = (0.06, 0.1, 0.16, 0.25, 0.4, 0.63, 0.8, 1.0, 1.25)
TABLE = (
    *("provenance", "finished", "output_tokens_per_s", "requests_per_s", "goodput_share"),
    *("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "p99_itl_ms", "p99_latency_ms"),
    *("preemptions", "recomputed_tokens", "queue_max"),
)


def cliff(
    contender: Contender,
    load: traffic.Traffic,
    capacities: dict[str, int],
    shares: Sequence[float] = tuple(np.geomspace(0.04, 1.25, 14)),
    work: Work = QUIET,
) -> go.Figure:
    """Preemptions against capacity, at one step time; `capacities` mark what strategies keep."""
    largest = max(capacities.values())
    sizes = sorted({*(round(largest * s) for s in shares), *capacities.values()})
    server, runs = engine(contender), []
    for i, size in enumerate(sizes):
        work.stage(f"a pool of {size:,} tokens", i / len(sizes))
        runs.append(simulate(replace(server, capacity_tokens=size), load, overload=True))
    each = [None if r.refused else 100 * r.scheduler.preemptions / len(load) for r in runs]
    again = [r.scheduler.recomputed_tokens / int(load.prompt_tokens.sum()) for r in runs]
    calm = list(itertools.takewhile(lambda i: each[i] == 0, reversed(range(len(sizes)))))
    finding = "Every capacity here preempts or refuses requests"
    if calm:
        finding = f"From {sizes[calm[-1]]:,} tokens on no request is preempted"
    word, title = str(runs[0].provenance), charts.tag(contender.name).title
    traces = [
        charts.line(
            sizes,
            each,
            "",
            "#888",
            word,
            showlegend=False,
            text=[f"{share:.0%} of all prompt tokens computed again" for share in again],
            hover="%{x:,} tokens: %{y:.1f} per 100 requests<br>%{text}<extra></extra>",
        )
    ]
    for i, (name, tokens) in enumerate(capacities.items()):
        tag, found = charts.tag(name), each[sizes.index(tokens)]
        said = "refuses requests" if found is None else f"{found:.0f}"
        marker = {"size": max(8, 20 - 3 * i)}
        named = f"{tag.title}: {tokens:,} tokens, {said}"
        mark = charts.points([tokens], [found], named, tag.colour, marker=marker, hoverinfo="skip")
        traces.append(mark)
    return charts.figure(
        charts.heading(finding, f"{load.name}; every point with the step of {title}, {word}"),
        traces,
        "capacity (tokens)",
        "preemptions per 100 requests",
        log_x=True,
    )


def kv_use(runs: Sequence[Results]) -> go.Figure:
    """KV use and queue over time, one line per run."""
    rows = sorted((r.summary() for r in runs), key=lambda row: -row["output_tokens_per_s"])
    preempted = {row["label"]: row["preemptions"] for row in rows}
    said = [f"{charts.tag(row['label']).title} {row['output_tokens_per_s']:,.0f}" for row in rows]
    others = f"then {', '.join(said[1:])}; " if said[1:] else ""
    best = f"{charts.tag(rows[0]['label']).title} gives most: "
    best += f"{rows[0]['output_tokens_per_s']:,.0f} tokens/s"
    lines = []
    for r in runs:
        (at, share), (when, waiting) = _thinned(*r.kv_use()), _thinned(*r.queue())
        tag, word = charts.tag(r.engine.label), str(r.provenance)
        style = {"colour": tag.colour, "provenance": word, "marker": {}}
        named = f"{tag.title}: {preempted[r.engine.label]} preemptions ({word})"
        hover = f"{tag.title}: %{{y:.0f}} % at %{{x:.0f}} s<extra></extra>"
        lines.append(charts.line(at, 100 * share, named, hover=hover, xaxis="x2", **style))
        hover = f"{tag.title}: %{{y}} wait at %{{x:.0f}} s<extra></extra>"
        queue = charts.line(when, waiting, named, hover=hover, showlegend=False, **style)
        queue |= {"yaxis": "y2", "line": queue["line"] | {"shape": "hv"}}
        lines += [queue]
    return charts.figure(
        charts.heading(best, others + runs[0].traffic.name),
        lines,
        "time (s)",
        "pool in use (peaks, %)",
        height=520,
        legend={"y": -0.15},
        xaxis={"anchor": "y2"},
        xaxis2={"anchor": "y", "matches": "x", "showticklabels": False, **charts.AXIS},
        yaxis={"range": [0, 105], "domain": [0.54, 1], "anchor": "x2"},
        yaxis2={
            **charts.AXIS,
            "title": {"text": "requests waiting"},
            "domain": [0, 0.46],
            "anchor": "x",
        },
    )


def _thinned(at: np.ndarray, values: np.ndarray, most: int = 120) -> tuple:
    """At most `most` points, each the highest of as many neighbours; the last one stays."""
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
    work: Work = QUIET,
) -> go.Figure:
    """Share of requests within the objectives against the rate; Poisson, the same draws for all."""
    one, rows = traffic.poisson(1.0, requests, lengths), []
    for i, (c, rate) in enumerate(itertools.product(contenders, rates)):
        tag = charts.tag(c.name)
        work.stage(f"{tag.title} at {rate:g} requests/s", i / len(rates) / len(contenders))
        run = simulate(engine(c), one.scaled(rate=rate), overload=True)
        share = 100 * float(run.within(objective).sum()) / requests
        row = {**vars(tag), "rate": rate, "share": share, "told": _told(run)}
        rows.append(row | {"provenance": str(c.step.provenance)})
    frame = pd.DataFrame(rows)
    most = {
        title: _highest(rates, [share / 100 for share in part.share], goal)
        for title, part in frame.groupby("title", sort=False)
    }
    highest = max(most.values())
    ahead = [title for title, rate in most.items() if rate >= 0.95 * highest]
    finding = f"No strategy keeps {goal:.0%} of the requests in time"
    if highest:
        finding = f"{' and '.join(ahead)} keep{'s' * (len(ahead) == 1)} {goal:.0%} in time up to "
        finding += f"{highest:.2g} requests/s"
    frame.title += " (" + frame.provenance + ")"
    return charts.figure(
        charts.heading(
            finding,
            f"TTFT within {objective.ttft_ms / 1000:g} s, TPOT within {objective.tpot_ms:g} ms; "
            f"{serving.source_of(contenders)}",
        ),
        charts.lines(
            frame, "rate", "share", "%{x:.2g} requests/s: %{y:.0f} %<br>%{customdata[0]}", ["told"]
        ),
        "requests/s, Poisson",
        "share within both objectives (%)",
        log_x=True,
        xaxis=charts.ticks(rates, ".2g"),
        **charts.level(100 * goal),
    )


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
    for c, n in itertools.product(contenders, concurrencies):
        load = traffic.closed_loop(n, 6 * n, traffic.fixed(prompt_tokens, output_tokens))
        run = simulate(engine(c), load).summary()
        formula = loop_tokens_per_s(c, n, prompt_tokens, output_tokens, PREFILL_TOKENS_PER_S)
        rows.append(
            {
                "strategy": charts.tag(c.name).title,
                "requests": n,
                "closed form tok/s": formula,
                "simulated tok/s": run["output_tokens_per_s"],
                "off by %": 100 * (run["output_tokens_per_s"] / formula - 1),
                "preemptions": run["preemptions"],
                "provenance": run["provenance"],
            }
        )
    return pd.DataFrame(rows).round(1)


# The application.


def lengths_of(name: str, prompt_tokens: int, output_tokens: int) -> traffic.Lengths:
    """Lengths by the name a control shows."""
    if name == "fixed":
        return traffic.fixed(prompt_tokens, output_tokens)
    return traffic.long_answers() if name == "long answers" else traffic.published(name)


def traffic_of(
    arrivals: str,
    rate: float,
    concurrency: int,
    lengths: traffic.Lengths,
    requests: int | None = None,
    seed: int = 0,
) -> traffic.Traffic:
    """Traffic by the names that the controls show."""
    requests = requests or REQUESTS
    if arrivals not in ARRIVALS:
        raise OutOfRange(f"Arrivals {arrivals!r}", ", ".join(ARRIVALS))
    if arrivals == "closed loop":
        return traffic.closed_loop(concurrency, max(requests, 4 * concurrency), lengths, seed)
    return traffic.bursts(rate, 1.0 if arrivals == "Poisson" else BURST_CV, requests, lengths, seed)


def asleep(settings: dict) -> dict[str, str]:
    """A closed loop has no rate, open arrivals no number under way, drawn lengths no fixed one."""
    if nothing := serving.asleep(settings):
        return nothing
    loop, fixed = settings["arrivals"] == "closed loop", settings["lengths"] == "fixed"
    found = {"rate": "only for open arrivals"} if loop else {"concurrency": "only for closed loop"}
    lengths = dict.fromkeys(("prompt_tokens", "output_tokens"), "only for fixed")
    return found | ({} if fixed else lengths)


@application(
    "shadowkv_lab.ui.simulated.traffics",
    changed=serving.follow,
    asleep=asleep,
    slow=lambda settings: True,
    refusals=2,
)
def traffic_view(
    model: ModelName = "glm-5",
    gpu: serving.Gpu = "rtx-pro-6000-server",
    tensor_parallel: TensorParallel = 8,
    rest: serving.Rest = "glm5-report",
    arrivals: Annotated[str, Menu("arrivals", ARRIVALS)] = "closed loop",
    rate: Annotated[float, Slider("open, rate", RATES, "requests/s")] = 0.8,
    concurrency: Annotated[
        int, Slider("closed loop of", (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256), "requests")
    ] = 96,
    lengths: Annotated[
        str, Menu("lengths", lambda s: ["long answers", *traffic.known_traffic(), "fixed"])
    ] = "long answers",
    prompt_tokens: Annotated[int, Slider("fixed prompt", powers(32, 65_536), "tokens")] = 1024,
    output_tokens: Annotated[int, Slider("fixed output", powers(32, 65_536), "tokens")] = 256,
    strategies: serving.Strategies = WANTED,
    *,
    work: Work,
) -> View:
    """Traffic simulated: KV use and queue over time, and the pressure cliff or objectives met."""
    found, left_out = serving.asked(model, gpu, tensor_parallel, rest, strategies)
    drawn = lengths_of(lengths, prompt_tokens, output_tokens)
    load, runs = traffic_of(arrivals, rate, concurrency, drawn), []
    for i, c in enumerate(found):
        work.stage(f"{charts.tag(c.name).title}, {len(load)} requests", i / len(found))
        runs.append(simulate(engine(c), load))  # refuses more prompt tokens than prefill serves
    if not any(run.finished for run in runs):
        why = f"No request fits: {runs[0].refusals()[0]}"
        raise DoesNotFit(why, "shorter requests, or a larger pool")
    if arrivals == "closed loop":
        plain = next((c for c in found if c.name == "bf16_pool"), found[-1])
        kept = {c.name: c.capacity_tokens for c in found}
        second = cliff(plain, load, kept, CAPACITY_SHARES, work)
    else:
        second = attainment(found, drawn, RATES, REQUESTS, work=work)
    refused = [line for run in runs for line in run.refusals()]
    note = f"{serving.note(rest, found, left_out)}; prefill: {PREFILL_SOURCE}, assumed here"
    note += f"; lengths: {drawn.source}"
    if refused:
        note += f"; refused: {len(refused)}, such as {refused[0]}"
    return View([kv_use(runs), second], note, table(runs), TABLE)


def table(runs: Sequence[Results], objective: Objective = OBJECTIVE) -> pd.DataFrame:
    """One row per run: the field's numbers."""
    rows = [r.summary(objective) for r in runs]
    titles = [charts.tag(row["label"]).title for row in rows]
    return pd.DataFrame(rows, index=titles)[[*TABLE]]


traffics = traffic_view.app

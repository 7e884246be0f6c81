"""Many requests by the closed form: one load, throughput against interactivity, who wins where."""

import html
import itertools
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab import machine
from shadowkv_lab.errors import CannotRun, DoesNotFit, OutOfRange
from shadowkv_lab.model import load_model
from shadowkv_lab.rules import can_run
from shadowkv_lab.serving.closed_form import Cell, Contender, by_pair, crossovers, point, winner_map
from shadowkv_lab.serving.contenders import WANTED, contenders, reported_or_derived
from shadowkv_lab.steps.answer import ANCHORS
from shadowkv_lab.strategies import STRATEGIES, parse
from shadowkv_lab.ui import charts
from shadowkv_lab.ui.app import QUIET, View, Work
from shadowkv_lab.ui.application import application
from shadowkv_lab.ui.controls import (
    Context,
    Menu,
    ModelName,
    Several,
    Slider,
    TensorParallel,
    cards,
    named,
    powers,
    spread,
)

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = tuple(powers(1024, 131_072))


def weakest(found: Sequence[Contender]) -> str:
    """The weakest provenance among the steps."""
    return str(sum(c.step.provenance for c in found))


def source_of(found: Sequence[Contender]) -> str:
    """`weakest`, as figures say it."""
    return f"step times: {weakest(found)}"


def legend(contender: Contender) -> str:
    return f"{charts.tag(contender.name).title} ({contender.step.provenance})"


def verdict(found: Sequence[Contender], concurrency: int, context: int) -> go.Figure:
    """The closed form at one load: output tokens/s of each strategy, and how many run."""
    fit = [c for c in found if c.running(concurrency, context)]
    if not fit:
        return charts.figure(f"No strategy holds one request of {context:,} tokens")
    rows = []
    for c in fit:
        p, tag = point(c, concurrency, context), charts.tag(c.name)
        said = f"{p.running} run, {p.queued} wait, {p.step_ms:.0f} ms per token, {p.provenance}"
        rows.append({**vars(tag), **p._asdict(), "capacity": c.capacity_tokens, "said": said})
    frame = pd.DataFrame(rows)
    best = frame.loc[frame.tokens_per_s.idxmax()]
    bars = charts.bar(
        frame.title,
        frame.tokens_per_s,
        "",
        frame.colour,
        frame.provenance.astype(str),
        [f"{row.said}<br>pool of {row.capacity:,} tokens" for row in frame.itertuples()],
        form=",.1f",
        unit=" tokens/s",
        showlegend=False,
    )
    return charts.figure(
        charts.heading(
            f"{best.title} gives most: {best.tokens_per_s:,.0f} tokens/s",
            f"{charts.requests(concurrency)} of {context:,} tokens; {source_of(fit)}",
        ),
        [bars],
        "output tokens/s, all requests",
        height=170 + 50 * len(frame),
        **charts.totals(frame.title, frame.tokens_per_s, frame.said, widest=1.75),
    )


def pareto(
    found: Sequence[Contender], context: int, concurrencies: Sequence[int] = CONCURRENCIES
) -> go.Figure:
    """Throughput against interactivity: up is more for the server, right is more for a user."""
    fit = [c for c in found if c.running(1, context)]
    if not fit:
        return charts.figure(f"No strategy holds one request of {context:,} tokens")
    curves = {c.name: [point(c, n, context) for n in concurrencies] for c in fit}
    peaks = {name: max(p.tokens_per_s for p in points) for name, points in curves.items()}
    best = max(peaks, key=peaks.__getitem__)
    lines = []
    for c in fit:
        points = curves[c.name]
        said = [
            f"{n} sent, {p.running} run, {p.queued} wait<br>{p.step_ms:.1f} ms per token"
            for n, p in zip(concurrencies, points, strict=True)
        ]
        lines.append(
            charts.line(
                [p.tokens_per_s_per_user for p in points],
                [p.tokens_per_s for p in points],
                legend(c),
                charts.tag(c.name).colour,
                str(c.step.provenance),
                marker={"size": 8, "symbol": ["x" if p.queued else "circle" for p in points]},
                text=said,
                hover="%{text}<br>%{y:,.0f} tokens/s in all<br>%{x:.1f} tokens/s for each",
            )
        )
    return charts.figure(
        charts.heading(
            f"At {context:,} tokens {charts.tag(best).title} peaks highest: "
            f"{peaks[best]:,.0f} tokens/s",
            f"1 to {concurrencies[-1]} requests; a cross: the pool is full; {source_of(fit)}",
        ),
        lines,
        "output tokens/s that one running request sees",
        "output tokens/s of the server",
        log_x=True,
        log_y=True,
    )


def winners(
    found: Sequence[Contender],
    concurrencies: Sequence[int] = CONCURRENCIES,
    contexts: Sequence[int] = CONTEXTS,
    note: str = "",
) -> go.Figure:
    """Which strategy gives most tokens/s at each load, and the lines where that changes."""
    cells = [cell for row in winner_map(found, concurrencies, contexts) for cell in row]
    names = [c.name for c in found]
    won = _shares(cells)
    counted = ", ".join(f"{charts.tag(n).title} {share:.0%}" for n, share in won.items())
    never = ", ".join(charts.tag(n).title for n in names if n not in won)
    said = "; ".join(filter(None, [note, f"never {never}" if never else "", "pale: a small lead"]))
    traces = []
    for name in names:
        mine, tag = [cell for cell in cells if cell.winner == name], charts.tag(name)
        pale = [0.35 + 0.65 * min(m.lead, 0.5) / 0.5 for m in mine]
        traces.append(
            charts.points(
                [m.concurrency for m in mine] or [None],
                [m.context for m in mine] or [None],
                tag.title,
                tag.colour,
                marker={"symbol": "square", "size": 22, "opacity": pale or 1},
                text=[
                    f"{m.tokens_per_s:,.0f} tokens/s, {m.running} run<br>{_lead(m)}" for m in mine
                ],
                hover="%{x} requests of %{y:,} tokens<br>%{text}",
            )
        )
    for (before, after), line in by_pair(crossovers(found, contexts, concurrencies)).items():
        after, before = charts.tag(after).title, charts.tag(before).title
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [p.concurrency for p in line],
                "y": [p.context for p in line],
                "line": {"color": "#222", "width": 1.5},
                "marker": {"size": 5},
                "name": f"from here {after}, below {before}",
                "hovertemplate": f"from %{{x}} requests of %{{y:,}} tokens on {after} beats "
                f"{before}<extra></extra>",
            }
        )
    return charts.figure(
        charts.heading(f"Most tokens/s, of these loads: {counted}", f"{said}; {source_of(found)}"),
        traces,
        "requests sent at once",
        "context (tokens per request)",
        log_x=True,
        log_y=True,
        height=460,
        xaxis=charts.ticks(concurrencies),
        yaxis=charts.ticks(contexts),
    )


def _lead(cell: Cell) -> str:
    if np.isinf(cell.lead):
        return "only one that holds a request"
    return "a tie" if cell.lead < 5e-4 else f"{cell.lead:.1%} over the next"


def wins(cases: dict[str, Sequence[Contender]]) -> pd.DataFrame:
    """The share of the map's loads that each strategy wins, one row per case, in %."""
    rows = {}
    for name, found in cases.items():
        won = _shares([c for row in winner_map(found, CONCURRENCIES, CONTEXTS) for c in row])
        rows[name] = {charts.tag(c.name).title: round(100 * won.get(c.name, 0.0)) for c in found}
        rows[name]["provenance"] = weakest(found)
    return pd.DataFrame(rows).T


def _shares(cells: Sequence[Cell]) -> pd.Series:
    return pd.Series([cell.winner for cell in cells]).value_counts(normalize=True)


# The application; the simulation's shares its first controls.


def chosen(settings: dict) -> list[str]:
    """Every strategy that is defined, and those chosen with options."""
    return [*dict.fromkeys([*STRATEGIES, *settings["strategies"]])]


Gpu = Annotated[str, Menu("GPUs of", cards(machine.known_cards), "GPU")]
Rest = Annotated[str, Menu("rest as in", tuple(ANCHORS), "rest")]
Strategies = Annotated[tuple[str, ...], Several("strategies", chosen)]
Requests = Annotated[
    int, Slider("concurrency", (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256), "requests")
]


def follow(settings: dict, name: str | None) -> dict:
    """One strategy may be named alone, and a model by its alias."""
    chosen = settings["strategies"]
    chosen = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    for strategy in chosen:
        parse(strategy)
    found = settings | {"strategies": chosen, "model": named(settings["model"])}
    return found | ({"tensor_parallel": spread(found)} if name == "model" else {})


def asked(
    model: str, gpu: str, tensor_parallel: int, rest: str, strategies: Sequence[str]
) -> tuple[list[Contender], str]:
    """The contenders that the controls ask for, and why others of them are left out.

    Raises `DoesNotFit`, `NoAnswer`, and `CannotRun` where no strategy is left.
    """
    if not strategies:
        raise OutOfRange("No strategy is chosen", "one or more", "Choose some in the list")
    there = reported_or_derived(model, gpu, tensor_parallel=tensor_parallel)
    verdicts = {name: can_run(parse(name), there) for name in strategies}
    refused = {name: v.reason for name, v in verdicts.items() if not v}
    if len(refused) == len(verdicts):
        name, why = next(iter(refused.items()))
        raise CannotRun(f"{parse(name).tag.title} in {there}: {why}", remedy="Choose another")
    left = [f"{parse(name).tag.title}: {why.rstrip('.')}" for name, why in refused.items()]
    runs = [name for name in strategies if name not in refused]
    return contenders(there, runs, anchor=rest), f"Left out: {'; '.join(left)}. " if left else ""


def note(rest: str, found: Sequence[Contender], left_out: str = "") -> str:
    """What the verdict rests on, in words."""
    anew = any(can_run(parse(c.name), c.deployment).untried for c in found)
    kept = ", ".join(f"{charts.tag(c.name).title} {c.capacity_tokens:,}" for c in found)
    return html.escape(left_out) + (
        f"<b>{source_of(found)}</b>: the rest at many requests was never measured; it "
        f"is anchored on {ANCHORS[rest]}. Tokens kept: {kept}"
        + ("; the fused kernel was never run on this card" if anew else "")
    )


def asleep(settings: dict) -> dict[str, str]:
    """Where the weights leave no room for KV, all but what could give some."""
    try:
        of = {n: settings[n] for n in ("model", "tensor_parallel")}
        reported_or_derived(card=settings["gpu"], **of).memory()
    except DoesNotFit:
        return dict.fromkeys(settings.keys() - {"gpu", *of}, "no room for KV")
    return {}


WORKED: set[tuple] = set()  # the settings whose steps were predicted in this session


def _steps(settings: dict) -> tuple:
    return tuple(settings[n] for n in ("model", "gpu", "tensor_parallel", "strategies"))


@application(
    "shadowkv_lab.ui.serving.loads",
    changed=follow,
    asleep=asleep,
    slow=lambda s: _steps(s) not in WORKED,
    refusals=3,
)
def load_view(
    model: ModelName = "glm-5",
    gpu: Gpu = "rtx-pro-6000-server",
    tensor_parallel: TensorParallel = 8,
    rest: Rest = "glm5-report",
    concurrency: Requests = 64,
    context: Context = 8192,
    strategies: Strategies = WANTED,
    *,
    work: Work = QUIET,
) -> View:
    """Many requests at once by the closed form: one load, speed against interactivity, who wins."""
    found, left_out = asked(model, gpu, tensor_parallel, rest, strategies)
    contexts = [n for n in CONTEXTS if n <= load_model(model).max_positions]
    for i, c in enumerate(found):  # the steps that the three figures have in common
        work.stage(f"{charts.tag(c.name).title}, every load", i / len(found))
        for n, R in itertools.product(contexts, CONCURRENCIES):
            c.tokens_per_s(R, n)
    WORKED.add((model, gpu, tensor_parallel, tuple(strategies)))
    figures = [
        verdict(found, concurrency, context),
        pareto(found, context),
        winners(found, contexts=contexts),
    ]
    rows = [
        {
            "strategy": c.name,
            "capacity_tokens": c.capacity_tokens,
            "running": c.running(concurrency, context),
            "tokens_per_s": c.tokens_per_s(concurrency, context),
            "provenance": str(c.step.provenance),
        }
        for c in found
    ]
    return View(figures, note(rest, found, left_out), pd.DataFrame(rows))


loads = load_view.app

"""The memory budget's figures and its application."""

import html
from dataclasses import replace
from typing import Annotated

import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab import facts
from shadowkv_lab.budget import Budget, Capacity, budget
from shadowkv_lab.deployment import GIB, Deployment, checked, deployment, published_deployment
from shadowkv_lab.errors import CannotRun, DoesNotFit, LabError
from shadowkv_lab.load import Load
from shadowkv_lab.model import load_model
from shadowkv_lab.provenance import assumed
from shadowkv_lab.server import logs
from shadowkv_lab.strategies import STRATEGIES
from shadowkv_lab.ui import charts
from shadowkv_lab.ui.app import View
from shadowkv_lab.ui.application import application
from shadowkv_lab.ui.controls import (
    CardName,
    Concurrency,
    Context,
    Menu,
    ModelName,
    Number,
    Paste,
    TensorParallel,
    Tick,
    named,
    spread,
)

FIXED = {"before weights": "#c9c9c9", "weights": "#9a9a9a", "reserve": "#e4e4e4"}
TABLE = (
    *("strategy", "token_bytes", "index_bytes", "tokens", "requests", "kept_gib", "scratch_gib"),
    *("left_gib", "fits", "reason"),
)


def memory_stack(plan: Budget, tokens: int | None = None) -> go.Figure:
    """Stacked GiB of one GPU for `tokens` of KV in each strategy, against the card.

    `tokens` defaults to the most that any strategy holds in the plan's KV memory.
    """
    at, tokens = plan.deployment, tokens or max(c.tokens for c in plan.capacities)
    terms = [t for t in plan.terms if t.name in FIXED and t.gib]
    frame = _frame(plan).assign(
        kept=lambda f: tokens * (f.token_bytes - f.index_bytes) / GIB,
        index_keys=lambda f: tokens * f.index_bytes / GIB,
        total=lambda f: tokens * f.token_bytes / GIB + sum(abs(t.gib) for t in terms),
    )
    least, most = frame.loc[frame.total.idxmin()], frame.loc[frame.total.idxmax()]
    over = (frame.total > at.card.memory_gib).sum()
    traces = [
        charts.bar(
            frame.title,
            [abs(t.gib)] * len(frame),
            t.name,
            FIXED[t.name],
            str(t.provenance),
            unit=" GiB",
        )
        for t in terms
    ]
    parts = {"kept": ("KV rows", 0.9), "index_keys": ("index keys", 0.45)}
    hover = {
        name: [f"{size * GIB / tokens:,.0f} B per token" for size in frame[name]] for name in parts
    }
    parts = {name: part for name, part in parts.items() if frame[name].any()}
    card = (at.card.memory_gib, f"card, {at.card.memory_gib:.1f} GiB")
    return charts.figure(
        charts.heading(
            f"{tokens:,} tokens need {least.total:.1f} GiB as {least.title} and {most.total:.1f} "
            f"as {most.title}",
            f"{over} of {len(frame)} do not fit; {at.model.name} on {at.card.title}, one GPU of "
            f"{at.gpus}",
        ),
        [*traces, *charts.phases(frame, parts, hover, unit=" GiB")],
        "memory of one GPU (GiB)",
        **charts.totals(
            frame.title, frame.total, [f"{t:.1f} GiB" for t in frame.total], [card], 1.15
        ),
    )


def tokens_that_fit(plan: Budget) -> go.Figure:
    """Bars: tokens that each strategy keeps in the plan's KV memory, and requests they make."""
    frame, by_kind = _frame(plan), {}
    for tokens, title in zip(frame.tokens, frame.title, strict=True):
        by_kind.setdefault(tokens, title)
    most = ", ".join(f"{n:,} as {name}" for n, name in sorted(by_kind.items(), reverse=True))
    hover = [
        f"{c.token_bytes:,} B per token, of them {c.index_bytes:,} index keys<br>"
        f"scratch {c.scratch_gib:.2f} GiB"
        for c in plan.capacities
    ]
    texts = [
        f"{c.tokens:,} tokens, {charts.requests(c.requests)} of {plan.load.context:,}"
        for c in plan.capacities
    ]
    bars = charts.bar(
        frame.title,
        frame.tokens,
        "",
        frame.colour,
        frame.provenance,
        hover,
        form=",",
        unit=" tokens",
        showlegend=False,
        text=texts,
        textposition="outside",
        cliponaxis=False,
    )
    load = plan.load
    short = [t for t, c in zip(frame.title, plan.capacities, strict=True) if not _holds(c, load)]
    held = f"all hold {charts.requests(load.concurrency)} of {load.context:,}"
    if short:
        asked = f"{charts.requests(load.concurrency)} of {load.context:,}"
        held = f"{', '.join(short)} do{'es' * (len(short) == 1)} not hold {asked}"
    line = charts.totals([], [], [], [(load.live_tokens, f"load, {load.live_tokens:,.0f}")])
    return charts.figure(
        charts.heading(
            f"{plan.kv_gib:.2f} GiB hold {max(by_kind):,} to {min(by_kind):,} tokens; {held}",
            f"{most}; calibrated: GiB / bytes per token",
        ),
        [bars],
        "tokens that fit",
        margin={"t": 96},
        shapes=line["shapes"],
        annotations=[note | {"xanchor": "left"} for note in line["annotations"]],
        xaxis={"range": [0, max(1.75 * max(by_kind), 1.1 * load.live_tokens)], "tickformat": ",~s"},
        yaxis={"autorange": "reversed"},
    )


def _holds(capacity: Capacity, load: Load) -> bool:
    return capacity.requests >= load.concurrency


def over_the_card(at: Deployment, why: DoesNotFit) -> go.Figure:
    """Weights and reserve of one GPU against its card, where they leave nothing for KV."""
    weights = at.checkpoint.weights_gib or 0.0
    before = at.before_weights_gib
    kept = (1 - at.memory_fraction) * (at.card.memory_gib - before)
    parts = {"before weights": before, "weights": weights, "reserve": kept}
    total = sum(parts.values())
    name = f"{at.model.name} on {at.gpus} GPU{'s' * (at.gpus != 1)}"
    return charts.figure(
        charts.heading(
            f"nothing is left for KV: {weights:.1f} GiB of weights on each {at.card.title} of "
            f"{at.card.memory_gib:.1f} GiB",
            why.what,
        ),
        [
            charts.bar([name], [gib], part, FIXED[part], "assumed", unit=" GiB")
            for part, gib in parts.items()
        ],
        "memory of one GPU (GiB)",
        height=260,
        **charts.totals(
            [name],
            [total],
            [f"{total:.1f} GiB"],
            [(at.card.memory_gib, f"card, {at.card.memory_gib:.1f} GiB")],
            1.3,
        ),
    )


def _frame(plan: Budget) -> pd.DataFrame:
    """A plan's capacities with their strategies' titles and colours."""
    rows = [{**vars(c), **vars(c.strategy), "provenance": "calibrated"} for c in plan.capacities]
    return pd.DataFrame(rows)


# The application.


def _reported(settings: dict) -> bool:
    """Whether the GLM-5 report's server is asked for."""
    report = facts.find("published", "published result", "glm5-report")
    asked = [load_model(settings["model"]).name, settings["tensor_parallel"], settings["engine"]]
    theirs = [report["model"], report["tensor_parallel"], report["engine"]]
    return asked == theirs and settings["gpu"] in report["gpu"]


def _derived(settings: dict) -> Deployment:
    """The deployment without what was typed of its memory: the GLM-5 report's, or derived."""
    more = {"index_layers": None if settings["index"] else 0, "mtp": settings["mtp"] or None}
    if _reported(settings):
        return published_deployment("glm5-report", settings["gpu"], **more)
    spread = {"tensor_parallel": settings["tensor_parallel"], "engine": settings["engine"]}
    return deployment(settings["model"], settings["gpu"], **spread, **more)


def _memory(at: Deployment) -> dict[str, float]:
    """What the controls say of a deployment's memory; 0 for what is not known or follows."""
    return {
        "weights_gib": round(at.checkpoint.weights_gib or 0.0, 2),
        "mem_fraction_static": at.memory_fraction,
        "kv_gib": round(at.kv_gib or 0.0, 2),
    }


def follow(settings: dict, name: str | None) -> dict:
    """Another model, card, spread or engine has other weights, and another KV memory."""
    if name == "mtp":  # its weights are others; what was typed stays
        before, after = (
            _memory(_derived(settings | {"mtp": m})) for m in (not settings["mtp"], settings["mtp"])
        )
        return settings | {n: v for n, v in after.items() if settings[n] == before[n]}
    if name not in (None, "model", "gpu", "tensor_parallel", "engine"):
        return settings
    found = settings | {"model": named(settings["model"])}
    found |= {"tensor_parallel": spread(found)} if name == "model" else {}
    own = _memory(_derived(found))
    return found | {n: v for n, v in own.items() if name or settings[n] is None}


def _typed(settings: dict) -> dict[str, float]:
    """What was typed of the memory, in place of what the deployment has."""
    own = _memory(_derived(settings))
    return {n: settings[n] for n, value in own.items() if settings[n] != value}


def _as_typed(at: Deployment, typed: dict[str, float]) -> Deployment:
    """The deployment with what was typed of its memory; 0 follows the engine's rule."""
    said = assumed("as typed")
    given = dict(at.given)
    if "weights_gib" in typed:
        given["weights_gib"] = said
        weights = {"weights_gib": typed["weights_gib"] or None, "provenance": said}
        at = replace(at, checkpoint=replace(at.checkpoint, **weights))
    if "mem_fraction_static" in typed:
        given["memory_fraction"] = said
        at = replace(at, memory_fraction=typed["mem_fraction_static"])
    if "kv_gib" in typed:
        given["kv_gib"] = said
        at = replace(at, kv_gib=typed["kv_gib"] or None, pool_tokens=None)
    return checked(replace(at, given=given))


def asleep(settings: dict) -> dict[str, str]:
    """What a model without an index, or without an MTP layer, has no use for; without room for
    KV, all that shares it out."""
    model = load_model(settings["model"])
    found = {} if model.mtp_layers else {"mtp": f"{model.name} has no MTP layer"}
    try:
        if not settings["log"].strip():
            _as_typed(_derived(settings), _typed(settings)).memory()
    except DoesNotFit:
        found |= dict.fromkeys(("dtype", "concurrency", "context", "index"), "no room for KV")
    except LabError:  # the view says it
        pass
    return found if model.dsa else found | {"index": f"{model.name} has no index"}


@application("shadowkv_lab.budget_app", changed=follow, asleep=asleep)
def budget_view(
    model: ModelName = "glm-5",
    gpu: CardName = "rtx-pro-6000-server",
    tensor_parallel: TensorParallel = 8,
    weights_gib: Annotated[
        float | None, Number("weights, GiB/GPU", 0.5, help="0: not known")
    ] = None,
    mem_fraction_static: Annotated[float | None, Number("memory fraction", 0.01)] = None,
    dtype: Annotated[str, Menu("KV dtype", ("all", "fp8", "bf16", "fp8+bf16"))] = "all",
    kv_gib: Annotated[float | None, Number("KV, GiB (0: rule)", 0.5)] = None,
    concurrency: Concurrency = 1,
    context: Context = 1024,
    index: Annotated[bool, Tick("index keys (DSA models)")] = True,
    mtp: Annotated[bool, Tick("MTP layer's KV")] = False,
    engine: Annotated[str, Menu("engine's rule", ("sglang", "vllm"))] = "sglang",
    log: Annotated[str, Paste("start-up log", "paste SGLang's or vLLM's log here")] = "",
) -> View:
    """What fits: memory term by term, and the tokens of each strategy.

    What is not typed follows from model, card and spread, or is the GLM-5 report's where these
    are; what a log says comes first.
    """
    settings = dict(locals())
    load, typed, at = Load(concurrency, context), _typed(settings), _derived(settings)
    kept = None
    if dtype != "all":
        kept = [n for n, kind in STRATEGIES.items() if dtype == "+".join(kind.kinds)]
    read = logs.parse(log) if log.strip() else None
    if read:
        own = {"memory_fraction": typed.pop("mem_fraction_static", None), **typed}
        own |= {"tensor_parallel": tensor_parallel, "engine": engine, "mtp": mtp or None}
        own |= {"index_layers": None if index else 0}
        own = {name: value for name, value in own.items() if value}
        reading = logs.read(read, model, gpu, **own)
        plan = budget(reading.deployment, load, kept)
    else:
        try:
            plan = budget(_as_typed(at, typed), load, kept)
        except DoesNotFit as error:
            if "kv_gib" in typed:
                raise
            none = charts.figure(charts.heading("no token is kept", error.remedy), height=260)
            return View([over_the_card(at, error), none], error.remedy, unanswered=error)
    if not plan.capacities:
        raise CannotRun(f"No strategy of {dtype} rows: {plan.refused[0].verdict.reason}")
    note = f"<pre>{html.escape(plan.formula, quote=False)}</pre>"
    note += "".join(
        f"Left out: {r.strategy.title}. {html.escape(r.verdict.reason)} " for r in plan.refused
    )
    if read:
        note += "".join(f"<br>{html.escape(line)}" for line in reading.lines)
    beside = dict.fromkeys(typed, "typed")
    if not read:
        beside = {n: _whence(at, n) for n in _memory(at) if n not in typed} | beside
    figures = [memory_stack(plan), tokens_that_fit(plan)]
    return View(figures, note, plan.table(), TABLE, beside=beside)


def _whence(at: Deployment, name: str) -> str:
    if name == "weights_gib":
        return str(at.checkpoint.provenance)
    return str(at.provenance({"mem_fraction_static": "memory_fraction"}.get(name, name)))


budget_app = budget_view.app

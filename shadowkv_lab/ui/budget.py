"""The memory budget's figures and its application."""

import html

import ipywidgets as w
import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab import machine
from shadowkv_lab.budget import Budget, budget
from shadowkv_lab.deployment import GIB, deployment, published_deployment
from shadowkv_lab.glm5.case import published
from shadowkv_lab.load import Load
from shadowkv_lab.model import known_models, load_model
from shadowkv_lab.server import logs
from shadowkv_lab.strategies import STRATEGIES
from shadowkv_lab.ui import style
from shadowkv_lab.ui.app import App, View
from shadowkv_lab.ui.controls import LABEL, check, gpus, menu, number, slider
from shadowkv_lab.ui.reproduce import totals_beside

CONTEXTS = [2**k for k in range(9, 18)]
CONCURRENCIES = [1, 2, 4, 8, 16, 32, 64, 128]
STORAGES = ("all", "fp8", "bf16", "fp8+bf16")
FIXED = {"before weights": "#c9c9c9", "weights": "#9a9a9a", "reserve": "#e4e4e4"}


def memory_stack(plan: Budget, tokens: int | None = None) -> go.Figure:
    """Stacked GiB of one GPU for `tokens` of KV in each strategy, against the card.

    `tokens` defaults to the most that any strategy holds in the plan's KV memory.
    """
    shown, at = plan.capacities, plan.deployment
    tokens = tokens or max(c.tokens for c in shown)
    names = [c.strategy.title for c in shown]
    terms = {t.name: abs(t.gib) for t in plan.terms if t.name in FIXED and t.gib}
    kept = [tokens * (c.token_bytes - c.index_bytes) / GIB for c in shown]
    index = [tokens * c.index_bytes / GIB for c in shown]
    totals = [sum(terms.values()) + a + b for a, b in zip(kept, index, strict=True)]
    worst = max(range(len(shown)), key=lambda i: totals[i])
    over = sum(total > at.card.memory_gib for total in totals)
    heading = (
        f"{tokens:,} tokens need {min(totals):.1f} GiB as {names[totals.index(min(totals))]} and "
        f"{totals[worst]:.1f} as {names[worst]}<br><sup>{over} of {len(shown)} do not fit; "
        f"{at.model.name} on {at.card.title}, one GPU of {at.tensor_parallel}</sup>"
    )
    fig = style.figure(heading, "memory of one GPU (GiB)", "")
    provenance = {t.name: str(t.provenance) for t in plan.terms}
    for name, gib in terms.items():
        fig.add_bar(
            y=names,
            x=[gib] * len(names),
            name=name,
            orientation="h",
            marker=dict(
                color=FIXED[name],
                pattern=dict(
                    shape=style.PATTERNS[provenance[name]], fgcolor="#666", size=12, solidity=0.15
                ),
            ),
            hovertemplate=f"{name}: %{{x:.2f}} GiB, {provenance[name]}<extra></extra>",
        )
    colours = [c.strategy.colour for c in shown]
    for values, name, opacity in ((kept, "KV rows", 0.9), (index, "index keys", 0.45)):
        if any(values):
            fig.add_bar(
                y=names,
                x=values,
                name=name,
                orientation="h",
                showlegend=False,
                marker=dict(
                    color=colours,
                    opacity=opacity,
                    pattern=dict(
                        shape=style.PATTERNS["calibrated"], size=12, solidity=0.15, fgcolor="white"
                    ),
                ),
                customdata=[v * GIB / tokens for v in values],
                hovertemplate=name + ": %{x:.2f} GiB, %{customdata:,.0f} B a token, calibrated"
                "<extra>%{y}</extra>",
            )
            fig.add_trace(style.legend_entry(name, opacity))
    line = (at.card.memory_gib, f"card, {at.card.memory_gib:.1f} GiB")
    totals_beside(fig, names, totals, [f"{t:.1f} GiB" for t in totals], [line], 1.15)
    return fig


def tokens_that_fit(plan: Budget) -> go.Figure:
    """Bars: tokens that each strategy keeps in the plan's KV memory, and requests they make."""
    shown, context = plan.capacities, plan.load.context
    by_kind: dict[int, str] = {}
    for c in shown:
        by_kind.setdefault(c.tokens, c.strategy.title)
    most = ", ".join(f"{n:,} as {name}" for n, name in sorted(by_kind.items(), reverse=True))
    heading = f"{plan.kv_gib:.2f} GiB hold {max(by_kind):,} to {min(by_kind):,} tokens<br><sup>"
    heading += f"{most}; calibrated: GiB / bytes a token</sup>"
    fig = style.figure(heading, "tokens that fit", "")
    fig.add_bar(
        y=[c.strategy.title for c in shown],
        x=[c.tokens for c in shown],
        orientation="h",
        marker=dict(
            color=[c.strategy.colour for c in shown],
            pattern=dict(
                shape=style.PATTERNS["calibrated"], size=12, solidity=0.15, fgcolor="white"
            ),
        ),
        text=[f"{c.tokens:,} tokens, {c.requests:,} requests of {context:,}" for c in shown],
        textposition="outside",
        cliponaxis=False,
        customdata=[(c.token_bytes, c.index_bytes, c.scratch_gib) for c in shown],
        hovertemplate="%{y}: %{x:,} tokens<br>%{customdata[0]:,} B a token, of them "
        "%{customdata[1]:,} index keys<br>scratch %{customdata[2]:.2f} GiB<extra></extra>",
    )
    fig.update_xaxes(range=[0, 1.75 * max(c.tokens for c in shown)], tickformat=",~s")
    fig.update_yaxes(automargin=True, autorange="reversed")
    return fig


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def table(plan: Budget) -> pd.DataFrame:
    """A plan's strategies, ready to be read."""
    names = {
        "strategy": "strategy",
        "token_bytes": "B a token",
        "index_bytes": "of them index",
        "tokens": "tokens",
        "requests": f"requests of {plan.load.context:,}",
        "kept_gib": "KV GiB",
        "scratch_gib": "scratch GiB",
        "left_gib": "left of reserve GiB",
        "fits": "fits",
    }
    return plan.table()[[*names]].rename(columns=names).round(2)


def budget_view(
    model: str = "glm-5",
    gpu: str = "rtx-pro-6000-server",
    tensor_parallel: int = 8,
    weights_gib: float | None = None,
    mem_fraction_static: float | None = None,
    dtype: str = "all",
    kv_gib: float = 0.0,
    concurrency: int = 1,
    context: int = 1024,
    index: bool = True,
    mtp: bool = False,
    engine: str = "sglang",
    log: str = "",
) -> View:
    """Both figures and the terms. A `kv_gib` of 0 follows the engine's rule; a log comes first."""
    case = published("case")
    kept = [n for n, kind in STRATEGIES.items() if dtype in ("all", "+".join(kind.kinds))]
    # Where what is typed is the GLM-5 report's, it is its own deployment, with its source.
    told = dict(weights_gib=weights_gib, kv_gib=kv_gib or None, memory_fraction=mem_fraction_static)
    theirs = (case["weights_gib"], case["pool_gib"], case["mem_fraction_static"])
    reported = load_model(model).name == case["model"] and gpu in case["gpu"]
    reported = reported and tensor_parallel == case["tensor_parallel"] and engine == "sglang"
    told = {n: v for (n, v), t in zip(told.items(), theirs, strict=True) if not reported or v != t}
    options = dict(
        **told,
        tensor_parallel=None if reported else tensor_parallel,
        engine=None if reported else engine,
        index_layers=None if index else 0,
        mtp=mtp or None,
    )
    load = Load(concurrency, context)
    read = logs.parse(log) if log.strip() else None
    if read:
        plan = logs.from_log(read, model, gpu, load=load, strategies=kept, **options)
    elif reported:
        if "kv_gib" in told:
            options |= dict(pool_tokens=None)
        plan = budget(published_deployment("case", gpu, **options), load, kept)
    else:
        plan = budget(deployment(model, gpu, **options), load, kept)
    note = "<pre>" + plan.formula + "</pre>"
    note += "".join(
        f"Left out: {r.strategy.title}. {html.escape(r.verdict.reason)} " for r in plan.refused
    )
    if read:
        note += f"read from {read.engine}'s log; not found in it: {', '.join(read.missing) or '-'}"
    return View([memory_stack(plan), tokens_that_fit(plan)], note, table(plan))


def budget_app(**start) -> w.Widget:
    """The budget as a widget; arguments are `budget_view`'s, as start values."""
    return make_app(**start).widget


def make_app(
    model: str = "glm-5",
    gpu: str = "rtx-pro-6000-server",
    tensor_parallel: int = 8,
    weights_gib: float | None = None,
    mem_fraction_static: float | None = None,
    dtype: str = "all",
    kv_gib: float | None = None,
    concurrency: int = 1,
    context: int = 1024,
    index: bool = True,
    mtp: bool = False,
    engine: str = "sglang",
    log: str = "",
) -> App:
    """The application behind `budget_app`; it starts at the case's log."""
    case = published("case")
    controls = {
        "model": menu("model", known_models(), load_model(model).name),
        "gpu": gpus("GPU", machine.known_cards(), gpu),
        "tensor_parallel": menu("GPUs (TP)", [1, 2, 4, 8, 16], tensor_parallel),
        "dtype": menu("KV dtype", STORAGES, dtype),
        "weights_gib": number("weights, GiB/GPU", _or(weights_gib, case["weights_gib"]), 0.5),
        "mem_fraction_static": number(
            "memory fraction", _or(mem_fraction_static, case["mem_fraction_static"]), 0.01
        ),
        "kv_gib": number("KV, GiB (0: rule)", _or(kv_gib, case["pool_gib"]), 0.5),
        "engine": menu("engine's rule", ["sglang", "vllm"], engine),
        "concurrency": slider("concurrency", CONCURRENCIES, concurrency, "requests"),
        "context": slider("context", CONTEXTS, context, "tokens"),
        "index": check("index keys (DSA models)", index),
        "mtp": check("MTP layer's KV", mtp),
        "log": w.Textarea(
            value=log,
            description="start-up log",
            rows=3,
            style=LABEL,
            placeholder="paste SGLang's or vLLM's start-up log here",
            continuous_update=False,
        ),
    }
    return App(
        "shadowkv_lab.ui.budget.budget_app",
        controls,
        lambda settings, report, cancelled: budget_view(**settings),
    )

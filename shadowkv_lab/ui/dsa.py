"""With DSA, which way? Dense reads beside those of an index, over contexts, cards and heads."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab import machine
from shadowkv_lab.deployment import Setting
from shadowkv_lab.load import Load
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.provenance import Kind
from shadowkv_lab.steps import evidence, held_out
from shadowkv_lab.steps import step as steps
from shadowkv_lab.steps.evidence import INDEX_FROM
from shadowkv_lab.steps.fit import Fit
from shadowkv_lab.steps.predict import predict_at
from shadowkv_lab.steps.step import Step
from shadowkv_lab.strategies import Strategy, parse
from shadowkv_lab.ui import charts

PAGE = 64  # SGLang's for models with an index
STRATEGIES = ("bf16_pool", "gather_cast", "fused_fp8")
SHORTEST, PER_OCTAVE = 1024, 2


def contexts(model: Model, per_octave: int = PER_OCTAVE) -> list[int]:
    """From 1,024 tokens to the model's last position, evenly in logs."""
    octaves = np.log2(model.max_positions / SHORTEST)
    count = int(octaves * per_octave) + 1
    return [*(int(SHORTEST * 2 ** (i / per_octave)) for i in range(count))]


def step_at(
    strategy: "str | Strategy",
    reads: str,
    context: int,
    *,
    model: "str | Model" = "glm-5.2",
    card: str = "h200",
    heads: int = 8,
    concurrency: int = 1,
    fitted: Fit | None = None,
) -> Step:
    """A predicted step over a pool of just the live tokens, in pages of 64.

    `fitted` is by default all that is shipped; with `by_published_index()` an index grows as
    published modules do, whose top-k is an engine's own and not torch's.
    """
    pool = -(-context // PAGE) * PAGE * concurrency
    load = Load(concurrency, context, reads=reads)
    setting = Setting(load_model(model), heads, pool, load, PAGE)
    return predict_at(strategy, setting, card, fitted=fitted)


def over_contexts(strategies: Sequence[str] = STRATEGIES, **where) -> pd.DataFrame:
    """`steps.frame` of dense and DSA steps at every context; `where` as in `step_at`."""
    model = load_model(where.get("model", "glm-5.2"))
    return steps.frame(
        step_at(name, reads, n, **where)
        for name in strategies
        for reads in ("dense", "dsa")
        for n in contexts(model)
    )


def worth_from(strategy: str, **where) -> int | None:
    """The context from which on DSA's step is the shorter one, to the longest; None if it never is.

    Between two predicted contexts the place where the lines cross, straight in logs. Where all rows
    are chosen, DSA reads what dense attention reads, and the index comes on top.
    """
    model = load_model(where.get("model", "glm-5.2"))
    first = model.index_topk + 1
    asked, ahead = [first, *(n for n in contexts(model) if n > first)], []
    for n in asked:
        dense, sparse = (step_at(strategy, reads, n, **where).ms for reads in ("dense", "dsa"))
        ahead.append(np.log(dense / sparse))
    behind = [i for i, lead in enumerate(ahead) if lead <= 0]
    if not behind:
        return first
    last = behind[-1]
    if last == len(asked) - 1:
        return None
    share = -ahead[last] / (ahead[last + 1] - ahead[last])
    return int(asked[last] * (asked[last + 1] / asked[last]) ** share)


def crossovers(
    models: Sequence[str] = ("glm-5", "glm-5.2"),
    cards: Sequence[str] = ("h200", "b200", "rtx-pro-6000-server"),
    heads: Sequence[int] = (8, 64),
    concurrency: Sequence[int] = (1, 16),
    strategies: Sequence[str] = ("bf16_pool", "fused_fp8"),
    fitted: Fit | None = None,
) -> pd.DataFrame:
    """`worth_from` of every combination, in tokens; NaN where DSA is never ahead."""
    return pd.DataFrame(
        dict(
            model=model,
            card=card,
            heads=count,
            requests=R,
            **{
                parse(s).title: worth_from(
                    s, model=model, card=card, heads=count, concurrency=R, fitted=fitted
                )
                for s in strategies
            },
        )
        for model in models
        for card in cards
        for count in heads
        for R in concurrency
    )


def rounded(tokens: float | None) -> str:
    """A context to two digits: a prediction does not know it better."""
    if tokens is None or pd.isna(tokens):
        return "never"
    if tokens < 1000:
        return f"{tokens:,.0f}"
    kilo = float(f"{tokens / 1000:.2g}")
    return f"{kilo / 1000:g}M" if kilo >= 1000 else f"{kilo:g}K"


def table(found: pd.DataFrame) -> pd.DataFrame:
    """`crossovers` in words: the context from which on DSA is the faster way."""
    names = [c for c in found.columns if c not in ("model", "card", "heads", "requests")]
    words = found.assign(**{name: found[name].map(rounded) for name in names})
    words["card"] = words.card.map(lambda name: machine.card(name).title)
    return words.pivot(index=["model", "card", "heads"], columns="requests", values=names)


def against_context(frame: pd.DataFrame) -> go.Figure:
    """Steps over context: a strategy's dense reads thin and hollow, with DSA thick and full."""
    traces, frame = [], frame.sort_values(["order", "reads", "context"])
    for (title, reads), rows in frame.groupby(["title", "reads"], sort=False):
        word = max(map(Kind, rows.provenance)).value
        dense = reads == "dense"
        shape = {"size": 6, "symbol": "circle-open" if dense else "circle"}
        line = charts.line(
            rows.context,
            rows.step_ms,
            f"{title}, dense" if dense else title,
            rows.colour.iloc[0],
            word,
            marker=shape,
            hover="%{x:,} tokens: %{y:.2f} ms, %{customdata}",
            customdata=rows.provenance.tolist(),
        )
        line["line"]["width"] = 1.5 if dense else 3
        traces.append(line)
    first = frame.iloc[0]
    where = dict(model=str(first.model), card=str(first.card), heads=int(first.heads))
    where["concurrency"] = int(first.concurrency)
    starts = {name: rounded(worth_from(name, **where)) for name in dict.fromkeys(frame.strategy)}
    said = ", ".join(
        f"{start} ({charts.tag(name).title.split(' (')[0]})" for name, start in starts.items()
    )
    longest = frame.context.max()
    return _over_context(
        charts.heading(
            f"DSA is faster from this context on: {said}",
            f"{first.model}, {machine.card(first.card).title}, {first.heads} heads per GPU, "
            f"{charts.requests(first.concurrency)}, to {rounded(longest)} tokens; predicted",
        ),
        traces,
        "step, all layers (ms)",
        below=120,
    )


TICKS = [1024 << i for i in range(0, 11)]


def rounded_binary(tokens: int) -> str:
    return f"{tokens >> 10}K" if tokens < 1 << 20 else f"{tokens >> 20}M"


def _over_context(title: str, traces: list, y: str, below: int) -> go.Figure:
    """Lines over a request's context, both axes in logs, with `below` pixels for the legend."""
    return charts.figure(
        title,
        traces,
        "context (tokens of a request)",
        y,
        log_x=True,
        log_y=True,
        xaxis={"dtick": None, "tickvals": TICKS, "ticktext": [rounded_binary(n) for n in TICKS]},
        height=520,
        legend={"y": -0.22},
        margin={"b": below},
    )


def costs_and_saves(concurrency: int = 1, card: str = "h200", heads: int = 8) -> go.Figure:
    """Per layer, what grows beyond 2,049 tokens: the index, published and predicted, and what
    dense attention takes more instead. Where the index lies lower, it saves time."""
    grown = [p for p in evidence.index_growth() if p.requests == concurrency]
    longest = 1_048_576
    at = [int(n) for n in np.geomspace(4096, longest, 25)]
    where = dict(card=card, heads=heads, concurrency=concurrency, model="glm-5.2")
    layers = load_model("glm-5.2")

    def more(strategy: str, reads: str, names: Sequence[str], over: int) -> list[float]:
        found = [step_at(strategy, reads, n, **where) for n in (INDEX_FROM, *at)]
        ms = [sum(s[name].ms for name in names) for s in found]
        return [1000 * (each - ms[0]) / over for each in ms[1:]]

    index = more("bf16_pool", "dsa", ("index", "top_k"), len(layers.choosing))
    traces = [
        charts.line(
            at, index, "index: scores and top-k", charts.DARK, "assumed", marker={}, hover=HOVER
        )
    ]
    saved = []
    for name in ("bf16_pool", "fused_fp8"):
        tag = parse(name).tag
        saved.append(more(name, "dense", ("attention",), layers.layers))
        label = f"dense attention, {tag.title}"
        traces.append(
            charts.line(at, saved[-1], label, tag.colour, "assumed", marker={}, hover=HOVER)
        )
    symbols = ("circle", "square", "diamond", "cross")
    for symbol, name in zip(symbols, sorted({p.key.card for p in grown}), strict=False):
        own = [p for p in grown if p.key.card == name]
        traces.append(
            charts.points(
                [p.size + INDEX_FROM for p in own],
                [1000 * p.ms for p in own],
                f"published, {machine.card(name).title}",
                charts.OTHERS[symbols.index(symbol)],
                marker={"symbol": symbol, "size": 10},
                hover="%{x:,} tokens: %{y:.1f} us more than at 2,049, published",
            )
        )
    there = at.index(min(at, key=lambda n: abs(n - 131_072)))
    wide, narrow = (index[there] / ms[there] for ms in saved)
    return _over_context(
        charts.heading(
            f"At 128K the index adds {wide:.1f} times what dense BF16 rows add, {narrow:.1f} times "
            "what FP8 rows add",
            f"one layer, {machine.card(card).title}, {heads} heads per GPU, "
            f"{charts.requests(concurrency)}; points are differences of published DSA modules",
        ),
        traces,
        "more than at 2,049 tokens, one layer (us)",
        below=140,
    )


HOVER = "%{x:,} tokens: %{y:.1f} us"


def left_out() -> pd.DataFrame:
    """Errors of the index' growth on published rows that the prediction had not seen."""
    rows = held_out.held_out(evidence.index_growth())
    long = held_out.summary(rows[rows["size"] > 10_000]).set_index("kind")
    found = held_out.summary(rows).set_index("kind")
    return found.assign(median_beyond_10k=long["median"]).reset_index()

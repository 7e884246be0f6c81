"""A deployment's strategies as contenders: capacity and step are read off it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shadowkv_lab import facts
from shadowkv_lab.deployment import Deployment, deployment, published_deployment
from shadowkv_lab.errors import CannotRun, DoesNotFit, OutOfRange
from shadowkv_lab.load import Load
from shadowkv_lab.machine import Card
from shadowkv_lab.model import Model
from shadowkv_lab.provenance import Provenance, assumed, published
from shadowkv_lab.rules import can_run
from shadowkv_lab.serving.closed_form import Contender
from shadowkv_lab.serving.lines import StepTime
from shadowkv_lab.serving.simulate import PREFILL_SOURCE, Engine, simulate
from shadowkv_lab.serving.traffic import Traffic
from shadowkv_lab.steps.answer import anchored
from shadowkv_lab.steps.fit import Fit, fit
from shadowkv_lab.steps.predict import predict_at
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.steps.step import Step
from shadowkv_lab.strategies import STRATEGIES, Strategy, parse

WANTED = ("full_cast", "bf16_pool", "shadow", "fused_fp8")
KNOTS = 13  # of a predicted step, over live tokens, evenly in their logarithm


def reported_or_derived(
    model: "Model | str" = "glm-5", card: "Card | str" = "rtx-pro-6000-server", **options
) -> Deployment:
    """The GLM-5 report's deployment for its own model, cards and spread; else `deployment`'s.

    `options` are those of `deployment`; with a memory size among them, nothing is the report's.
    """
    options = {name: value for name, value in options.items() if value is not None}
    made, report = deployment(model, card, **options), published_deployment("glm5-report")
    if options.keys() & {"kv_gib", "weights_gib", "pool_tokens"}:
        return made
    cards = facts.find("published", "published result", "glm5-report")["gpu"]
    spread = (made.model, made.tensor_parallel, made.gpus, made.layout, made.engine)
    if made.card.name not in cards or spread != (
        report.model,
        report.tensor_parallel,
        report.gpus,
        report.layout,
        report.engine,
    ):
        return made
    return published_deployment("glm5-report", made.card, **options)


def contenders(
    deployment: Deployment,
    strategies: "Sequence[str | Strategy] | None" = None,
    *,
    anchor: str = "glm5-report",
    rest: Rest | None = None,
) -> list[Contender]:
    """Each strategy with its capacity in a deployment and its step; all DP ranks together.

    `rest` is your own; else `anchor` names a published one of `steps.answer`. Ranks of DP attention
    count as one pool of their tokens: their requests are taken as evenly spread. Raises
    `DoesNotFit`, `NoAnswer` where the deployment's memory is not known, and `CannotRun` for a named
    strategy that cannot run there; without names, those that cannot are left out.
    """
    chosen = [parse(s) for s in strategies or [s for s in WANTED if s in STRATEGIES]]
    verdicts = {s: can_run(s, deployment) for s in chosen}
    for s, verdict in verdicts.items():
        if strategies and not verdict:
            raise CannotRun(f"{s.title} in {deployment}: {verdict.reason}", remedy="Leave it out")
    rest = rest or anchored(anchor, deployment)
    return [_contender(s, deployment, rest) for s in chosen if verdicts[s]]


def _contender(strategy: Strategy, deployment: Deployment, rest: Rest) -> Contender:
    rows = deployment.rows(strategy)
    if not rows:
        raise DoesNotFit(f"{strategy.label} keeps not one token", "a larger KV cache")
    tokens = deployment.tokens(strategy) * deployment.data_parallel
    if strategy.live_rows is not None:  # taken as its pool: what waits outside them is not told
        rows = min(rows, strategy.live_rows)
        tokens = min(tokens, rows * deployment.data_parallel)
    most, step = deployment.model.max_positions, _steps(strategy, deployment, rows, fit())

    def knots(running: int) -> list[float]:
        # Whole tokens per request: a prediction checks that they fit.
        each = max(1, min(tokens // running, most))
        return (running * np.unique(np.geomspace(1, each, KNOTS).round())).tolist()

    many = min(64, tokens)
    seen = [step(1, min(1024, tokens, most)), step(many, many * min(tokens // many, most))]
    known = sum(s.provenance for s in seen) + rest.provenance
    time = StepTime(lambda running, live: rest(running) + step(running, live).ms, known, knots)
    cast = None
    if seen[1]["cast"].bytes and deployment.engine == "sglang":
        cast = StepTime(lambda _, read: step(1, min(read, tokens, most))["cast"].ms, known)
    return Contender(strategy.label, tokens, time, cast, chunk_tokens(deployment), deployment)


@lru_cache(maxsize=64)
def _steps(
    strategy: Strategy, deployment: Deployment, rows: int, fitted: Fit
) -> Callable[[int, float], Step]:
    """The predicted step by running requests and their live tokens, each predicted once."""
    setting = deployment.setting(pool_tokens=rows)

    @lru_cache(maxsize=8192)
    def step(running: int, live_tokens: float) -> Step:
        load = deployment.share(Load(running, live_tokens / running))
        # Ranks that hold a request more than others hold shorter ones.
        load = replace(load, context=min(load.context, rows // load.concurrency))
        return predict_at(strategy, replace(setting, load=load), deployment.card, fitted=fitted)

    return step


def engine(contender: Contender, **options) -> Engine:
    """A contender's server as its deployment runs it; `options` are `Engine`'s."""
    there = contender.deployment
    if there is None:
        raise OutOfRange(f"{contender.name} without its deployment", "one of `contenders`")
    rate, known = prefill(there)
    found = dict(
        label=contender.name,
        policy=there.engine,
        page_size=there.page_size,
        chunk_tokens=contender.chunk_tokens,
        prefill_tokens_per_s=rate,
        prefill=known,
        prefill_cast=contender.prefill_cast,
    )
    return Engine(contender.capacity_tokens, contender.step, **found | options)


def chunk_tokens(deployment: Deployment) -> int:
    """Prompt tokens of a step: vLLM's max_num_batched_tokens, SGLang's choice by the card."""
    if deployment.engine == "vllm":
        return 2048
    gib = deployment.card.memory_mib / 1024
    return 4096 if gib < 60 else 8192 if gib < 160 else 16_384


def prefill(deployment: Deployment) -> tuple[float, Provenance]:
    """Prefilled tokens/s of a server, and where that comes from: published for one machine only."""
    seen = facts.find("published", "published result", "rtx6kpro")
    there = published_deployment("rtx6kpro")
    rate = float(seen["prefill_tokens_per_s"])
    if deployment.card.name in seen["gpu"] and (deployment.model, deployment.gpus) == (
        there.model,
        there.gpus,
    ):
        return rate, published(seen["prefill_note"], facts.source(seen))
    return rate, assumed(f"not known for {deployment}, so as {PREFILL_SOURCE}")


def over_rates(
    contenders: Sequence[Contender], traffic: Traffic, rates: Sequence[float], **options
) -> list[dict]:
    """`Results.summary` of each contender at each multiple of the traffic's rate.

    `options` are `Engine`'s. Rates that prefill cannot serve are overload, and are served late.
    """
    return [
        {"rate": rate} | simulate(engine(c, **options), load, overload=True).summary()
        for rate in rates
        for load in [traffic.scaled(rate=rate)]
        for c in contenders
    ]

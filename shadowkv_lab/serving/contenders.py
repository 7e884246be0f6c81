"""Strategies on a card as contenders: capacity from the budget, step from the prediction."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shadowkv_lab import facts, machine
from shadowkv_lab.budget import budget
from shadowkv_lab.deployment import Deployment, Setting, deployment, published_deployment
from shadowkv_lab.errors import CannotRun, DoesNotFit, NoAnswer, UnknownName
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.serving.closed_form import Contender
from shadowkv_lab.serving.simulate import Engine
from shadowkv_lab.serving.steps import StepTime, piecewise
from shadowkv_lab.steps.predict import StepTime as Prediction
from shadowkv_lab.steps.predict import step_time
from shadowkv_lab.steps.rest import Rest, rest_from
from shadowkv_lab.strategies import STRATEGIES, Strategy, parse

WANTED = ("full_cast", "bf16_pool", "shadow", "fused_fp8")
# Whole steps of one stream that were published: what is left beside the attention is a rest.
ANCHORS = {
    "case": "the case: GLM-5 on 8x RTX PRO 6000, full cast, 95.6 ms",
    "rtx6kpro": "rtx6kpro: GLM-5 on 8x RTX PRO 6000, BF16 pool, about 51 tok/s",
    "sglang-35291": "sglang #35291: DeepSeek-R1 on 8x H200, BF16 pool, 17.2 ms",
}
KNOTS = 13  # of a predicted step, over live tokens, evenly in their logarithm


@dataclass(frozen=True)
class ByBytes:
    """A step as bytes over bandwidth, where no recorded run says more: assumed.

    `cast_gb_per_s` is the speed of the cast's kernel, `gb_per_s` of everything else.
    """

    strategy: Strategy
    model: Model
    pool_tokens: int
    gb_per_s: float
    cast_gb_per_s: float
    rest: Rest
    provenance: str = "assumed"

    def __call__(self, running: int, live_tokens: float) -> float:
        ms = self.rest(running)
        for strategy, count in Counter(map(self.strategy.at, range(self.model.layers))).items():
            moves = strategy.moves(self.model, self.pool_tokens, live_tokens, running)
            ms += count * moves.cast_bytes / self.cast_gb_per_s / 1e6
            ms += count * (moves.attention_bytes + moves.write_bytes) / self.gb_per_s / 1e6
        return ms


@dataclass(frozen=True)
class Predicted:
    """`predict`'s step asked point by point, and with few knots where lines are wanted."""

    step: Prediction
    provenance: str

    def __call__(self, running: int, live_tokens: float) -> float:
        rest = self.step.rest(running) if self.step.rest else 0.0
        return rest + self.step.at(running, live_tokens).ms

    def knots(self, running: int) -> tuple[list[float], list[float]]:
        # Whole tokens a request: a prediction checks that they fit.
        each = min(self.step.pool_tokens // running, self.step.setting.model.max_positions)
        live = running * np.unique(np.geomspace(1, max(1, each), KNOTS).round())
        return live.tolist(), [self(running, at) for at in live.tolist()]


def anchored_rest(
    anchor: str, geometry: Model, card: machine.Card, tensor_parallel: int = 8
) -> Rest:
    """The rest of a step by running requests, from one of `ANCHORS`: always assumed.

    One stream's whole step less its strategy's own, on the machine and model that it was seen
    on; `rest_from` says how it grows with the requests on `card`.
    """
    if anchor not in ANCHORS:
        raise UnknownName("anchor of the rest", anchor, ANCHORS)
    case, seen = (facts.find("published", "published result", name) for name in ("case", anchor))
    strategy, pool = parse("bf16_pool"), case["pool_tokens"] // 2
    if anchor == "case":
        strategy, pool, tpot_ms = parse("full_cast"), case["pool_tokens"], case["before"]["tpot_ms"]
    elif anchor == "rtx6kpro":
        tpot_ms = 1000 / (sum(seen["tokens_per_s"]) / len(seen["tokens_per_s"]))
    else:
        pool, tpot_ms = seen["bf16_pool"]["pool_tokens"], seen["bf16_pool"]["step_ms"]
    # Which of the two cards the case has is not reported; the slower leaves the smaller rest.
    gpu = seen.get("gpu", case["gpu"])
    there = machine.card(gpu if isinstance(gpu, str) else gpu[-1])
    model = load_model(seen["model"])
    bare = _step(strategy, model, there, pool, Rest(0.0, experts=0), model.heads_per_gpu(8))
    step_ms = bare(1, case["default_context"])
    return rest_from(tpot_ms, step_ms, geometry, card, tensor_parallel=tensor_parallel)


def contenders(
    model: "str | Model" = "glm-5",
    card: str = "rtx-pro-6000-server",
    strategies: "Sequence[str | Strategy] | None" = None,
    *,
    anchor: str = "case",
    rest: Rest | None = None,
    kv_gib: float | None = None,
    weights_gib: float | None = None,
    tensor_parallel: int = 8,
    **options,
) -> list[Contender]:
    """Each strategy with its capacity on this card and its step.

    Raises `DoesNotFit`, and `CannotRun` for a strategy that no kernel serves there.

    `rest` is your own; else `anchor` names a published one. `kv_gib` is a log's KV size; without
    it the GLM-5 report's model, spread and card have its 25.49 GiB, and others what the engine's
    rule leaves. `options` are those of `deployment`. Where no recorded run bears on a
    strategy, its step is `ByBytes`.
    """
    at = deployment(
        model,
        card,
        tensor_parallel=tensor_parallel,
        kv_gib=kv_gib,
        weights_gib=weights_gib,
        **options,
    )
    if kv_gib is None and weights_gib is None and _of_the_report(at):
        at = published_deployment("case", at.card, **options)
    geometry, card, heads = at.model, at.card, at.heads
    chosen = [parse(s) for s in strategies or [s for s in WANTED if s in STRATEGIES]]
    plan = budget(at, strategies=chosen)
    if strategies and plan.refused:
        refused = plan.refused[0]
        raise CannotRun(
            f"{refused.strategy.title} on {card.title}: {refused.verdict.reason}",
            remedy="Leave it out",
        )
    able = {c.strategy.label for c in plan.capacities}
    rest = rest or anchored_rest(anchor, geometry, card, tensor_parallel)
    return [
        Contender(
            s.label, plan.of(s).tokens, _step(s, geometry, card, plan.of(s).tokens, rest, heads)
        )
        for s in chosen
        if s.label in able
    ]


def _of_the_report(at: Deployment) -> bool:
    """Whether this is the GLM-5 report's model, on one of its cards, spread as it was."""
    report = published_deployment("case")
    known = facts.find("published", "published result", "case")["gpu"]
    same = at.model == report.model and at.tensor_parallel == report.tensor_parallel
    return same and at.card.name in known and at.gpus == report.gpus


def _step(strategy, geometry, card, tokens, rest, heads) -> StepTime:
    """Predicted where recorded runs bear on it, by bytes where none does."""
    if not tokens:
        raise DoesNotFit(f"{strategy.label} keeps not one token", "a larger KV cache")
    predicted = step_time(strategy, Setting(geometry, heads, tokens), card.name, rest=rest)
    many = min(64, tokens)
    each = min(tokens // many, geometry.max_positions)
    try:
        ends = [predicted.at(1, min(1024, tokens)), predicted.at(many, many * each)]
    except NoAnswer:
        cast = _cast_gb_per_s(card)
        return ByBytes(strategy, geometry, tokens, card.bandwidth_gb_per_s, cast, rest)
    return Predicted(predicted, str(sum([*(p.provenance for p in ends), rest.provenance])))


def _cast_gb_per_s(card: machine.Card) -> float:
    """torch's copy kernel at the case's own speed, 1.03 TB/s: it is not bound by memory."""
    case = facts.find("published", "published result", "case")
    moves = parse("full_cast").step_moves(load_model(case["model"]), case["pool_tokens"], 0, 0)
    return min(moves.cast_bytes / case["cast_ms"] / 1e6, card.bandwidth_gb_per_s)


def engine(contender: Contender, **options) -> Engine:
    """A contender's server; `options` are `Engine`'s, such as page_tokens or max_running."""
    lines = piecewise(contender.step, contender.capacity_tokens)
    return Engine(contender.capacity_tokens, lines, contender.name, **options)

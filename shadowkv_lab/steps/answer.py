"""Answers: a deployment x a load x each strategy gives what fits, the step, TPOT and tok/s."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shadowkv_lab import facts
from shadowkv_lab.deployment import Deployment, published_deployment
from shadowkv_lab.errors import UnknownName
from shadowkv_lab.load import Load
from shadowkv_lab.provenance import Provenance, assumed
from shadowkv_lab.rules import can_run
from shadowkv_lab.steps.grid import casts_by_pool
from shadowkv_lab.steps.predict import predict
from shadowkv_lab.steps.rest import Rest, rest_of
from shadowkv_lab.steps.step import Step
from shadowkv_lab.strategies import STRATEGIES, Label, Strategy, parse

HYPOTHETICAL = "hypothetical: SGLang casts in its dense backends, and none reads chosen rows"
# Published whole steps of one stream: what is left beside the strategy's own is a rest.
ANCHORS = {
    "glm5-report": "the GLM-5 report: 8x RTX PRO 6000, full cast, 95.6 ms",
    "rtx6kpro": "rtx6kpro: GLM-5 on 8x RTX PRO 6000, BF16 pool, about 51 tok/s",
    "sglang-35291": "sglang #35291: DeepSeek-R1 on 8x H200, BF16 pool, 17.2 ms",
    "h200-server": "SGLang on one H200, 78 dense layers, BF16 pool, 7.0 ms",
}


@dataclass(frozen=True)
class Answer:
    """What one strategy makes of a load in a deployment.

    `running` of the load's requests run at once, as many as its pool holds; the others wait.
    `tpot_ms` is the step of the whole model over the tokens of each request that it is `accepted`
    for (1 without MTP), `tokens_per_s` those of all that run, `low` and `high` the ends of its
    range. A strategy that cannot run has a `reason` and no numbers.
    """

    strategy: Label
    kept_tokens: int = 0
    requests: int = 0  # of the load's context, that its pool holds
    running: int = 0
    step: Step | None = None
    rest_ms: float = 0.0
    tpot_ms: float = 0.0
    tokens_per_s: float = 0.0
    low_tokens_per_s: float = 0.0
    high_tokens_per_s: float = 0.0
    provenance: Provenance | None = None
    reason: str = ""
    untried: str = ""
    cut: bool = False  # the pool cut to what the load needs: --max-total-tokens
    accepted: float = 1.0

    @property
    def whole_ms(self) -> float:
        """The step of the whole model."""
        return self.tpot_ms * self.accepted

    @property
    def runs(self) -> bool:
        return self.step is not None

    def holds(self, load: Load) -> bool:
        """Whether all requests of the load run at once."""
        return self.running >= load.concurrency

    def ties(self, other: "Answer") -> bool:
        """Whether the lead of one over the other is within what is not known of their own steps.

        The rest is the same for both, so its range does not count.
        """
        if not (self.runs and other.runs) or self.running != other.running:
            return False
        (low, high), (other_low, other_high) = self.step.range_ms, other.step.range_ms
        return low <= other_high and other_low <= high


def answer(
    strategy: "Strategy | str",
    deployment: Deployment,
    load: Load,
    rest: Rest,
    *,
    pool_tokens: int | None = None,
    cut: bool = False,
    accepted: float = 1.0,
) -> Answer:
    """One strategy's answer. `pool_tokens` limits the pool, as --max-total-tokens does; `cut`
    takes the smallest pool that holds the load.

    Of the load's tokens per step `accepted` are kept (MTP); the rest is that of as many requests
    as there are tokens in a step, and drafting is left out.
    """
    strategy = parse(strategy)
    verdict = can_run(strategy, deployment)
    tag, untried = strategy.tag_at(load), verdict.untried
    if not verdict:
        return Answer(tag, reason=verdict.reason)
    if load.reads == "dsa" and strategy.casts_pool:
        untried = "; ".join(filter(None, (HYPOTHETICAL, untried)))
    page = deployment.page_size
    rows = deployment.rows(strategy)
    if pool_tokens is not None:
        rows = min(rows, max(page, pool_tokens // page * page))
    each = -(-int(load.context) // page) * page
    share = deployment.share(load)
    if cut:
        rows = min(rows, -(-int(share.context) // page) * page * share.concurrency)
    tokens = rows * deployment.decode_context_parallel
    requests = tokens // each * deployment.data_parallel
    running, held = min(load.concurrency, requests), tokens
    if (most := strategy.live_rows) is not None:  # the others wait, their rows in the pool
        held = min(tokens, most)
        running = min(running, most // int(load.context) * deployment.data_parallel)
    if not running:
        why = f"its {held:,} tokens do not hold one request of {int(load.context):,}"
        return Answer(tag, tokens, reason=why, untried=untried, cut=cut)
    at_once = replace(load, concurrency=running)
    step = predict(strategy, deployment, at_once, pool_tokens=rows)
    in_step = running * load.tokens_per_step
    rest_ms, whole_ms = rest(in_step), rest(in_step) + step.ms
    (low, high), (rest_low, rest_high) = step.range_ms, rest.range_ms(in_step)
    produced = 1000 * running * accepted
    return Answer(
        tag,
        tokens,
        requests,
        running,
        step,
        rest_ms,
        whole_ms / accepted,
        produced / whole_ms,
        produced / (high + rest_high),
        produced / (low + rest_low),
        step.provenance + rest.provenance,
        untried=untried,
        cut=cut,
        accepted=accepted,
    )


def answers(
    deployment: Deployment,
    load: Load,
    rest: Rest,
    *,
    pool_tokens: int | None = None,
    strategies: Iterable["Strategy | str"] | None = None,
    accepted: float = 1.0,
) -> list[Answer]:
    """Every strategy's answer, the fastest first, then those that cannot run.

    A strategy whose cast grows with the pool has a second answer, over a pool cut to the load.
    """
    found, more = [], {"pool_tokens": pool_tokens, "accepted": accepted}
    for strategy in map(parse, strategies or [kind() for kind in STRATEGIES.values()]):
        one = answer(strategy, deployment, load, rest, **more)
        found.append(one)
        if one.runs and casts_by_pool(strategy, deployment):
            cut = answer(strategy, deployment, load, rest, cut=True, **more)
            if cut.runs and cut.kept_tokens < one.kept_tokens:
                found.append(cut)
    return sorted(found, key=lambda a: (not a.runs, -a.tokens_per_s, a.strategy.order))


def anchored(anchor: str, deployment: Deployment, moe_backend: str | None = None) -> Rest:
    """The rest from one of `ANCHORS`: its TPOT less its strategy's own step, where it was seen.

    Always assumed: in another deployment the rest is another. Raises `UnknownName`.
    """
    entry = facts.find("published", "published result", anchor)
    if entry["name"] not in ANCHORS:
        raise UnknownName("anchor of the rest", anchor, ANCHORS)
    seen, there = entry["anchor"], published_deployment(anchor, page_size=1)
    context = facts.find("published", "published result", "glm5-report")["default_context"]
    step = predict(seen["strategy"], there, Load(1, context), pool_tokens=seen.get("pool_tokens"))
    return rest_of(deployment, seen["tpot_ms"], step.ms, moe_backend)


def own(tpot_ms: float, strategy: "Strategy | str", deployment: Deployment, load: Load) -> Rest:
    """The rest from one's own TPOT of a strategy at a load: what its step leaves of it."""
    step = predict(strategy, deployment, load)
    rest = rest_of(deployment, tpot_ms, step.ms)
    excess = rest(load.concurrency) - rest(1)
    how = assumed(f"{tpot_ms:.1f} ms of {step.strategy.title} at {load}, as typed")
    return Rest(
        rest.fixed_ms - excess,
        rest.expert_ms,
        rest.experts,
        rest.per_token,
        tuple((R, ms - excess) for R, ms in rest.table),
        tuple((R, low - excess, high - excess) for R, low, high in rest.spread),
        how,
    )

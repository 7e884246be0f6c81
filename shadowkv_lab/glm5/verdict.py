"""Table 6: the case's rest, each strategy's step and room on its card, and a sentence on each."""

import pandas as pd

from shadowkv_lab import machine
from shadowkv_lab.budget import budget
from shadowkv_lab.deployment import GIB, published_deployment
from shadowkv_lab.glm5 import case
from shadowkv_lab.load import Load
from shadowkv_lab.model import load_model
from shadowkv_lab.rules import can_run
from shadowkv_lab.steps import fit
from shadowkv_lab.steps.predict import at, predict_at
from shadowkv_lab.steps.rest import Rest, rest_from
from shadowkv_lab.steps.step import Step
from shadowkv_lab.strategies import parse

CONTENDERS = ("full_cast", "vector_cast", "bf16_pool", "shadow", "gather_cast", "fused_fp8")


def full_cast_of_case(
    card: str, context: int | None = None, fitted: "fit.Fit | None" = None
) -> Step:
    """Full cast's whole step on the case's own card: its cast calibrated, the others assumed."""
    published = case.published("case")
    context = published["default_context"] if context is None else context
    setting = at(published["model"], published["pool_tokens"], 1, context)
    return predict_at("full_cast", setting, card, fitted=fitted)


def case_rest(card: str, context: int | None = None, fitted: "fit.Fit | None" = None) -> Rest:
    """The case's rest: its TPOT less full cast's whole step at its pool and an assumed context.

    Raises `NoAnswer` where that step, with this context, is longer than the TPOT.
    """
    published = case.published("case")
    step = full_cast_of_case(card, context, fitted)
    return rest_from(
        published["before"]["tpot_ms"],
        step.ms,
        load_model(published["model"]),
        card,
        tensor_parallel=published["tensor_parallel"],
    )


def rest_over_context(
    card: str, contexts=(256, 1024, 8192, 32768, 131072), fitted=None
) -> pd.DataFrame:
    """What the unknown context does to the rest: attention grows, so the rest shrinks."""
    rows = []
    for context in contexts:
        step = full_cast_of_case(card, context, fitted)
        rest = case_rest(card, context, fitted)
        rows.append(
            dict(
                context=context,
                full_cast_ms=step.ms,
                attention_ms=step["attention"].ms,
                rest_ms=rest(1),
                provenance=str(rest.provenance),
            )
        )
    return pd.DataFrame(rows)


def verdict(
    card: str | None = None,
    context: int | None = None,
    concurrency: int = 1,
    *,
    rest: Rest | None = None,
    fitted: "fit.Fit | None" = None,
    strategies: tuple[str, ...] = CONTENDERS,
) -> pd.DataFrame:
    """Table 6: each strategy on the case's card, in the room that its KV cache had.

    Tokens are what the case's KV memory holds; GiB are those that the case's own pool of tokens
    would need, scratch included, and tokens/s per GiB are over these.
    """
    published = case.published("case")
    model, card = load_model(published["model"]), machine.card(card or published["gpu"][-1])
    context = published["default_context"] if context is None else context
    P = published["pool_tokens"]
    rest = rest or case_rest(card.name, context, fitted)
    report = published_deployment("case", card, page_size=1)
    room = budget(report, Load(concurrency, context), list(strategies))
    setting = at(model, P, concurrency, context)
    rows, steps = [], {}
    for name in strategies:
        strategy, capacity = parse(name), room.of(name)
        step = steps[name] = predict_at(strategy, setting, card, fitted=fitted)
        tpot = rest(concurrency) + step.ms
        scratch = strategy.scratch_bytes(model, P, concurrency * context)
        gib = (P * capacity.token_bytes + scratch) / GIB
        rate = 1000 * concurrency / tpot
        rows.append(
            dict(
                strategy=name,
                title=strategy.tag.title,
                colour=strategy.tag.colour,
                cast_ms=step["cast"].ms,
                step_ms=step.ms,
                tpot_ms=tpot,
                tokens_per_s=rate,
                gib_for_pool=gib,
                fits=gib + published["weights_gib"] <= card.memory_gib,
                tokens_that_fit=capacity.tokens,
                tokens_per_s_per_gib=rate / gib,
                provenance=str(step.provenance),
                how=step.how,
            )
        )
    table = pd.DataFrame(rows)
    return table.assign(verdict=[sentence(row, table, card, steps) for row in rows])


def sentence(row: dict, table: pd.DataFrame, card: machine.Card, steps: dict[str, Step]) -> str:
    """One row's verdict in one sentence, from the table's own numbers."""
    by = table.set_index("strategy")
    name, base = row["strategy"], by.loc["full_cast"] if "full_cast" in by.index else None
    untried = can_run(parse(name), published_deployment("case", card)).untried
    gain = f"{row['tokens_per_s'] / base.tokens_per_s - 1:+.0%}" if base is not None else ""
    if name == "full_cast":
        return (
            f"{row['cast_ms'] / row['tpot_ms']:.0%} of each token is a cast that one request pays."
        )
    if name == "vector_cast":
        floor = steps[name]["cast"].bytes / card.bandwidth_gb_per_s / 1e6
        return (
            f"{gain} tok/s and nothing else changes; at the card's full bandwidth its bytes "
            f"still take {floor:.0f} ms."
        )
    if name == "bf16_pool":
        return (
            f"{gain} tok/s with {row['tokens_that_fit'] / base.tokens_that_fit:.0%} of the "
            "tokens: take it wherever they are enough."
        )
    if name == "shadow" and "bf16_pool" in by.index:
        peer = by.loc["bf16_pool"]
        return (
            f"{gain} tok/s, not more than a BF16 pool's {peer.tokens_per_s:.1f}, and only "
            f"{row['tokens_that_fit'] / peer.tokens_that_fit:.0%} of its tokens."
        )
    if name == "gather_cast":
        return (
            f"{gain} tok/s with every token kept; its {row['step_ms']:.1f} ms grow with the "
            "live tokens, so it suits few and short requests."
        )
    if name == "fused_fp8":
        run = " It was never run on this card." if untried else ""
        return (
            f"{gain} tok/s with every token kept: a kernel that reads FP8 leaves cast and "
            f"shadow nothing to save.{run}"
        )
    return f"{gain} tok/s, {row['tokens_that_fit']:,} tokens."

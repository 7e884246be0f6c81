"""Table 6: the report's rest, each strategy's step and room on its card, and a sentence on each."""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from shadowkv_lab.deployment import GIB, Deployment, published_deployment
from shadowkv_lab.glm5.reported import REPORT, published
from shadowkv_lab.load import Load
from shadowkv_lab.provenance import assumed
from shadowkv_lab.steps.answer import Answer, answer, answers
from shadowkv_lab.steps.predict import predict
from shadowkv_lab.steps.rest import Rest, rest_of
from shadowkv_lab.steps.step import Step
from shadowkv_lab.strategies import parse

CONTENDERS = ("full_cast", "vector_cast", "bf16_pool", "shadow", "gather_cast", "fused_fp8")
SMALLER_POOLS = (16_384, 32_768, 131_072)
FLAG = "--max-total-tokens"


def report(card: str | None = None) -> Deployment:
    """The report's deployment; its KV sizes are those of pages of one slot, as it gives no other.

    Raises `UnknownName` for a card that the lab does not have.
    """
    return published_deployment(REPORT, card, page_size=1)


def full_cast_of_report(card: str | None = None, context: int | None = None) -> Step:
    """Full cast's whole step on a card of the report: its cast calibrated, the others assumed."""
    load = Load(1, published()["default_context"] if context is None else context)
    return predict("full_cast", report(card), load, pool_tokens=published()["pool_tokens"])


def report_rest(
    card: str | None = None, context: int | None = None, rest_ms: float | None = None
) -> Rest:
    """The report's rest: its TPOT less full cast's whole step at its pool and an assumed context.

    `rest_ms` at one request replaces that. The MoE backend is not reported, so the growth with the
    requests spans both that were published. Raises `NoAnswer` where the step, with this context,
    is longer than the TPOT.
    """
    step_ms = full_cast_of_report(card, context).ms
    if rest_ms is None:
        return rest_of(report(card), published()["before"]["tpot_ms"], step_ms)
    rest = rest_of(report(card), step_ms + rest_ms, step_ms)
    how = assumed(f"as typed: {rest.provenance.how}", rest.provenance.source)
    return replace(rest, provenance=how)


def rest_over_context(
    card: str | None = None, contexts: Sequence[int] = (256, 1024, 8192, 32768, 131072)
) -> pd.DataFrame:
    """What the unknown context does to the rest: attention grows, so the rest shrinks."""
    rows = []
    for context in contexts:
        step, rest = full_cast_of_report(card, context), report_rest(card, context)
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


def smaller_pools(
    card: str | None = None,
    context: int | None = None,
    sizes: Sequence[int] = SMALLER_POOLS,
    *,
    rest: Rest | None = None,
) -> pd.DataFrame:
    """The cheapest remedy, a flag: full cast over a pool that `--max-total-tokens` limits.

    One request, in the pools that hold it; the whole pool comes last.
    """
    at, load = report(card), Load(1, published()["default_context"] if context is None else context)
    rest = rest or report_rest(card, context)
    found = [
        answer("full_cast", at, load, rest, pool_tokens=size)
        for size in (*sizes, published()["pool_tokens"])
    ]
    return pd.DataFrame(
        [
            dict(
                pool_tokens=a.kept_tokens,
                cast_ms=a.step["cast"].ms,
                tpot_ms=a.tpot_ms,
                tokens_per_s=a.tokens_per_s,
                low_tokens_per_s=a.low_tokens_per_s,
                high_tokens_per_s=a.high_tokens_per_s,
                provenance=str(a.provenance),
            )
            for a in found
            if a.runs
        ]
    )


def flag_first(table: pd.DataFrame) -> str:
    """`smaller_pools` in a sentence."""
    *cut, whole = table.itertuples()
    if not cut:
        return f"No smaller pool of those tried holds the request; {whole.pool_tokens:,} tokens do."
    each = [f"{row.tokens_per_s:.0f} tok/s at {_k(row.pool_tokens)} tokens" for row in cut]
    return (
        f"The cheapest remedy is a flag. {FLAG} shrinks the pool, and the cast with it: "
        f"about {', '.join(each)}, instead of {whole.tokens_per_s:.1f} over the whole pool of "
        f"{whole.pool_tokens:,}."
    )


def _k(tokens: int) -> str:
    return f"{tokens / 1024:.0f}K" if tokens % 1024 == 0 else f"{tokens:,}"


def verdict(
    card: str | None = None,
    context: int | None = None,
    concurrency: int = 1,
    *,
    rest: Rest | None = None,
    strategies: Sequence[str] = CONTENDERS,
) -> pd.DataFrame:
    """Table 6: each strategy that can run on the report's card, in the room that its KV cache had.

    The rows are `answers`: tokens are what the report's KV memory holds, `running` of the requests
    run at once, tokens/s are theirs and have a range. A strategy that casts the whole pool has a
    second row, over a pool cut to the load. GiB are those that the report's own pool of tokens
    would need, scratch included, and tokens/s per GiB are over these.
    """
    at, load = (
        report(card),
        Load(concurrency, published()["default_context"] if context is None else context),
    )
    rest = rest or report_rest(at.card.name, context)
    found = [a for a in answers(at, load, rest, strategies=strategies) if a.runs]
    order = {parse(name).label: i for i, name in enumerate(strategies)}
    found.sort(key=lambda a: (order[a.strategy.label], a.cut))
    table = pd.DataFrame([_row(a, at, load) for a in found])
    return table.assign(verdict=[_sentence(a, table, at) for a in found])


def _row(a: Answer, at: Deployment, load: Load) -> dict:
    strategy = parse(a.strategy.label)
    P = a.kept_tokens if a.cut else published()["pool_tokens"]
    scratch = strategy.scratch_bytes(at.model, P, a.running * int(load.context))
    gib = (P * at.token_bytes(strategy) + scratch) / GIB
    room = at.card.memory_gib - at.before_weights_gib - at.checkpoint.weights_gib
    flag = f" {FLAG} {a.kept_tokens}" if a.cut else ""
    return dict(
        strategy=a.strategy.label + flag,
        title=a.strategy.title + (f", pool cut to {a.kept_tokens:,}" if a.cut else ""),
        colour=a.strategy.colour,
        cut=a.cut,
        running=a.running,
        cast_ms=a.step["cast"].ms,
        step_ms=a.step.ms,
        rest_ms=a.rest_ms,
        tpot_ms=a.tpot_ms,
        tokens_per_s=a.tokens_per_s,
        low_tokens_per_s=a.low_tokens_per_s,
        high_tokens_per_s=a.high_tokens_per_s,
        gib_for_pool=gib,
        fits=gib <= room,
        tokens_that_fit=a.kept_tokens,
        tokens_per_s_per_gib=a.tokens_per_s / gib,
        provenance=str(a.step.provenance),
        how=a.step.how,
    )


def about(low: float, high: float) -> str:
    """A range in words; whole tokens, as it is no surer than that.

    >>> about(28.2, 33.9), about(31.8, 32.3)
    ('about 28 to 34 tok/s', 'about 32 tok/s')
    """
    ends = dict.fromkeys((f"{low:.0f}", f"{high:.0f}"))
    return f"about {' to '.join(ends)} tok/s"


def _sentence(a: Answer, table: pd.DataFrame, at: Deployment) -> str:
    """One row's verdict in one sentence, from the table's own numbers."""
    by, name = table.set_index("strategy"), a.strategy.label
    base = by.loc["full_cast"] if "full_cast" in by.index else None
    rate = about(a.low_tokens_per_s, a.high_tokens_per_s)
    if base is not None and (a.cut or name != "full_cast"):
        rate += f" ({a.tokens_per_s / base.tokens_per_s - 1:+.0%})"
    if a.cut:
        return (
            f"{rate} with a smaller pool: {FLAG} {a.kept_tokens} holds "
            f"{'one request' if a.running == 1 else f'{a.running} requests'} and no more."
        )
    if name == "full_cast":
        who = "even for a single request" if a.running == 1 else f"for {a.running} requests"
        return (
            f"The cast takes {a.step['cast'].ms / a.tpot_ms:.0%} of the time per token, {who}: "
            f"{rate}."
        )
    if name == "vector_cast":
        floor = a.step["cast"].bytes / at.card.bandwidth_gb_per_s / 1e6
        return (
            f"{rate} and nothing else changes; at the card's full bandwidth its bytes still take "
            f"{floor:.0f} ms."
        )
    if name == "bf16_pool" and base is not None:
        return (
            f"{rate} with {a.kept_tokens / base.tokens_that_fit:.0%} of the tokens: take it "
            "wherever they are enough."
        )
    if name == "shadow" and "bf16_pool" in by.index:
        peer = by.loc["bf16_pool"]
        return (
            f"{rate}, not more than a BF16 pool's "
            f"{about(peer.low_tokens_per_s, peer.high_tokens_per_s)}, and only "
            f"{a.kept_tokens / peer.tokens_that_fit:.0%} of its tokens."
        )
    if name == "gather_cast":
        return (
            f"{rate} with every token kept; its {a.step.ms:.1f} ms grow with the live tokens, so "
            "it suits few and short requests."
        )
    if name == "fused_fp8":
        run = " It has never run on this card." if a.untried else ""
        return (
            f"{rate} with every token kept: a kernel that reads FP8 leaves nothing for a cast or a "
            f"shadow to save.{run}"
        )
    return f"{rate}, {a.kept_tokens:,} tokens."

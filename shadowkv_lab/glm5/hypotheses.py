"""Table 4: what could explain the time that the patch did not save. None of it is established."""

from collections.abc import Sequence
from fractions import Fraction

import pandas as pd

from shadowkv_lab import facts, machine
from shadowkv_lab.glm5.case import Server, published, server
from shadowkv_lab.steps import fit
from shadowkv_lab.steps.fit import Fit
from shadowkv_lab.steps.step import Step, frame, recorded

NEAR_MS = 0.15  # three published times, each rounded to 0.1 ms


def hypotheses(
    of: Server | None = None,
    cards: tuple[str, ...] | None = None,
    *,
    eager_ms: float | None = None,
    cast_share: float | None = None,
) -> pd.DataFrame:
    """One row a hypothesis; for each card, whether it fits and whether it is below its bandwidth.

    `of` is a user's server, or the case. `eager_ms` is what a recorded shadow step takes longer
    when it is launched eagerly than as a graph replay: the lower bound of a host-bound step.
    `cast_share` is the share of a card's bandwidth at which a plain kernel casts (recorded on
    another card): it adds one row a card, the only ones not solved for the reported TPOT.
    Columns: predicted TPOT, distance from the reported one, GiB needed beside the weights and
    their total, GB/s that the step's cast must then reach (NaN where it does not cast).
    """
    of = of or server()
    cards = cards or tuple(published("case")["gpu"])
    saved, still = of.before_ms - of.after_ms, of.still_ms
    bare, speed = of.before_ms - of.cast_ms, of.cast_gb / of.cast_ms * 1e3
    shadowed = min(of.layers, max(0, round(of.layers * saved / of.cast_ms)))
    kept = Fraction(min(1.0, max(0.0, still / of.cast_ms))).limit_denominator(100)
    fp8, bf16 = of.gib("fp8") + of.index_gib, of.gib("bf16")
    rows = [
        ("the shadow covers every layer", "no cast is left", bare, fp8 + bf16, None),
        (
            f"{shadowed} of {of.layers} layers shadowed",
            "the others are still cast in full, as fast",
            of.before_ms - of.cast_ms * shadowed / of.layers,
            fp8 + of.gib("bf16", layers=max(shadowed, 0)) if shadowed else fp8,
            speed if shadowed < of.layers else None,
        ),
        (
            f"the pool cut to {kept}",
            "a smaller pool is still cast in full, as fast",
            bare + of.cast_ms * float(kept),
            fp8 * float(kept),
            speed if kept else None,
        ),
        (
            "a full cast by a faster kernel",
            "every layer and slot, in the time that is left",
            bare + still,
            fp8,
            of.cast_gb / still * 1e3 if still > 0 else None,
        ),
    ]
    if eager_ms:
        rows.append(
            (
                "the step lost its CUDA graph",
                "no cast is left, but the host sets the pace; "
                f"{eager_ms:.1f} ms is what eager launches cost the lab's own step, a lower bound",
                bare + eager_ms,
                fp8 + bf16,
                None,
            )
        )
    for name in cards if cast_share else ():
        gb_per_s = cast_share * machine.card(name).bandwidth_gb_per_s
        rows.append(
            (
                f"the lab's vector cast on the {name.rsplit('-', 1)[-1]} card",
                f"every layer and slot at {cast_share:.0%} of its bandwidth, as recorded on an "
                "H200; not solved for the reported TPOT",
                bare + 1e3 * of.cast_gb / gb_per_s,
                fp8,
                gb_per_s,
            )
        )
    table = pd.DataFrame(rows, columns=["hypothesis", "assumes", "tpot_ms", "kv_gib", "gb_per_s"])
    table["off_ms"] = table.tpot_ms - of.after_ms
    table["total_gib"] = table.kv_gib + of.weights_gib
    for name in cards:
        card = machine.card(name)
        short = name.rsplit("-", 1)[-1]
        table[f"fits_{short}"] = table.total_gib <= card.memory_gib
        table[f"share_{short}"] = table.gb_per_s.astype(float) / card.bandwidth_gb_per_s
        # A step that does not cast asks nothing of the bandwidth, so it is under it.
        table[f"under_{short}"] = ~(table[f"share_{short}"] > 1)
    return table.assign(established=False)


def vector_cast_share(fitted: Fit, gpu: str = "h200") -> float | None:
    """Share of the datasheet's bandwidth that the lab's cast kernel reached, if recorded."""
    tables = [fitted.tables[k] for k in fitted.of("cast", "", gpu) if k.kernel == "vector_cast"]
    if not tables:
        return None
    sizes, ms = tables[0].rows[1]
    return float(max(sizes / ms / 1e6) / machine.card(gpu).bandwidth_gb_per_s)


def recorded_hypotheses(of: Server | None = None) -> pd.DataFrame:
    """`hypotheses` with what data/runs says about eager launches and the vector cast."""
    return hypotheses(
        of, eager_ms=host_bound_ms(recorded()), cast_share=vector_cast_share(fit.fit())
    )


def host_bound_ms(measured: Sequence[Step], strategy: str = "shadow") -> float | None:
    """What eager launches add to a recorded step, the smallest load's; None if not recorded."""
    runs = frame(measured)
    keys = ["card", "model", "pool_tokens", "concurrency", "context"]
    ours = runs[(runs.strategy == strategy) & (runs.model == published("case")["model"])]
    both = ours.pivot_table(index=keys, columns="mode", values="step_ms").dropna()
    if both.empty or not {"eager", "graph"} <= set(both.columns):
        return None
    smallest = both.sort_index(level=["concurrency", "context"]).iloc[0]
    return float(smallest.eager - smallest.graph)


def in_words(of: Server, table: pd.DataFrame) -> str:
    """How much of the cast is still there, and that no row is established."""
    gone = of.before_ms - of.after_ms
    if gone <= 0:
        return (
            f"The step did not become faster ({of.before_ms:.1f} to {of.after_ms:.1f} ms): nothing "
            "of the cast is seen to have gone, and no row here explains that."
        )
    if of.still_ms <= 0:
        return (
            f"{gone:.1f} ms went, all of the cast's {of.cast_ms:.1f} ms and {-of.still_ms:.1f} ms "
            "more: something else has changed as well."
        )
    near = table[table.off_ms.abs() <= NEAR_MS]
    free = near.hypothesis.str.contains("vector cast")
    solved = ", ".join(f"'{name}'" for name in near.hypothesis[~free])
    words = (
        f"{gone:.1f} of the cast's {of.cast_ms:.1f} ms went; by the step times {of.still_ms:.1f} "
        f"ms ({of.still_ms / of.cast_ms:.0%}) are still there. To within {NEAR_MS} ms of the step "
        f"after come: {solved}, each solved for it"
    )
    for row in near[free].itertuples():
        words += f"; and, not solved for it, '{row.hypothesis}' ({row.tpot_ms:.1f} ms)"
    return words + ". A match is no proof: none is established."


def same_class() -> pd.DataFrame:
    """A BF16 pool on the same class of machine beside the case's step without its cast."""
    peer, of = published("rtx6kpro"), server()
    bare = of.before_ms - of.cast_ms
    rates = peer["tokens_per_s"]
    return pd.DataFrame(
        [
            dict(
                what="the case without its cast",
                step_ms=bare,
                tokens_per_s=1000 / bare,
                source=f"{of.before_ms} - {of.cast_ms} ms",
            ),
            dict(
                what="a BF16 pool, whole step, same class of machine",
                step_ms=1000 * len(rates) / sum(rates),
                tokens_per_s=sum(rates) / len(rates),
                source=str(facts.source(peer)),
            ),
        ]
    )

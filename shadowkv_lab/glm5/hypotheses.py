"""Table 4: what could explain the time that the patch did not save. None of it is established.

Explanations are families over layers shadowed x pool tokens: every point of `line` gives the
reported TPOT. Whether one is possible is asked of the card: do pool, shadow and weights fit, and
is the cast that is left under its bandwidth?
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pandas as pd

from shadowkv_lab import facts, machine
from shadowkv_lab.deployment import GIB
from shadowkv_lab.glm5.reported import DERIVED, Server, published, server
from shadowkv_lab.provenance import Provenance, assumed
from shadowkv_lab.steps.fit import Fit, fit
from shadowkv_lab.steps.predict import at, predict_at

NEAR_MS = 0.15  # three published times, each rounded to 0.1 ms
CARD = " on the {} card"  # ends the name of an explanation that holds for one card alone


@dataclass(frozen=True)
class Predicted:
    """What the lab's evidence says of a server on the report's cards, by card; ms per step.

    `vector_cast` is (expected, low, high) of the cast by the lab's kernel, `static_gather` what
    gathering, casting and reading every row that a request may have takes longer than reading the
    assumed context, `static_gb_per_s` the speed of its cast. `host_ms` is what a host takes to
    launch the lab's own step eagerly: a lower bound, as a whole model launches more.
    """

    vector_cast: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    static_gather: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    static_gb_per_s: Mapping[str, float] = field(default_factory=dict)
    static_rows: int = 0
    host_ms: float | None = None
    host_how: str = ""


def line(of: Server, tpot_ms: float | None = None) -> pd.DataFrame:
    """The family of one TPOT (that after the patch): layers shadowed, pool tokens, GiB of KV.

    From no layer shadowed to the most that still leave a cast as long, over the whole pool.
    """
    left = ((of.after_ms if tpot_ms is None else tpot_ms) - of.bare_ms) / of.cast_ms
    shadowed = np.arange(of.layers)
    tokens = of.pool_tokens * left * of.layers / (of.layers - shadowed)
    table = pd.DataFrame({"layers": shadowed, "pool_tokens": tokens})
    table["kv_gib"] = [of.pool_gib(*row) for row in table.itertuples(index=False)]
    return table[(tokens > 0) & (tokens <= of.pool_tokens)]


def grid(of: Server, layers: Sequence[int], tokens: Sequence[int]) -> pd.DataFrame:
    """TPOT and GiB of KV for each number of shadowed layers x pool tokens."""
    return pd.DataFrame(
        [
            dict(layers=n, pool_tokens=P, tpot_ms=of.tpot_ms(n, P), kv_gib=of.pool_gib(n, P))
            for n in layers
            for P in tokens
        ]
    )


def hypotheses(
    of: Server | None = None,
    cards: tuple[str, ...] | None = None,
    predicted: Predicted | None = None,
) -> pd.DataFrame:
    """One row per explanation; for each card, whether it fits and is below its bandwidth.

    `of` is a user's server, or the report's. With `predicted` there are rows that are not solved
    for the reported TPOT. Columns: layers shadowed, pool tokens, TPOT with its range and distance
    from the reported one, whether it `reaches` that, GiB needed beside the weights and in all
    (CUDA graphs and activations come on top), GB/s that the cast must then reach (NaN without
    one), provenance. `fits_*` goes by what was free before the weights were loaded.
    """
    of = of or server()
    cards = cards or tuple(published()["gpu"])
    rows = [*_families(of, cards), *_kernels(of), *_predicted(of, cards, predicted or Predicted())]
    table = pd.DataFrame(rows)
    table["off_ms"] = table.tpot_ms - of.after_ms
    slack = of.after_ms + NEAR_MS * np.array([-1, 1])
    table["reaches"] = (table.low_ms <= slack[1]) & (table.high_ms >= slack[0])
    table["total_gib"] = table.kv_gib + of.weights_gib
    for name in cards:
        card, short = machine.card(name), _short(name)
        table[f"fits_{short}"] = table.kv_gib <= of.room_gib(card)
        table[f"share_{short}"] = table.gb_per_s.astype(float) / card.bandwidth_gb_per_s
        # A step that does not cast asks nothing of the bandwidth, so it is under it.
        table[f"under_{short}"] = ~(table[f"share_{short}"] > 1)
    return table.assign(established=False)


def _short(card: str) -> str:
    return card.rsplit("-", 1)[-1]


def _row(
    of: Server,
    name: str,
    assumes: str,
    layers: float = 0,
    tokens: float | None = None,
    *,
    ms: "float | tuple[float, float, float] | None" = None,
    gb_per_s: float | None = None,
    provenance: Provenance = DERIVED,
) -> dict:
    """An explanation; its TPOT follows from layers and tokens where it is not given."""
    tokens = of.pool_tokens if tokens is None else round(tokens)
    ms = of.tpot_ms(layers, tokens) if ms is None else ms
    expected, low, high = ms if isinstance(ms, tuple) else (ms, ms, ms)
    return dict(
        hypothesis=name,
        assumes=assumes,
        layers=layers,
        pool_tokens=tokens,
        tpot_ms=expected,
        low_ms=low,
        high_ms=high,
        kv_gib=of.pool_gib(layers, tokens),
        gb_per_s=gb_per_s,
        provenance=str(provenance),
        how=provenance.how,
    )


def _families(of: Server, cards: tuple[str, ...]) -> Iterator[dict]:
    """Layers shadowed x pool tokens: the corners, and where the line meets the memory."""
    every, speed = of.layers, of.cast_gb / of.cast_ms * 1e3
    gone, kv_gib = "no cast is left", of.kv_gib or of.pool_gib()
    held = int(kv_gib * GIB // of.token_bytes(every))
    yield _row(of, "every layer shadowed, over the whole pool", gone, every)
    yield _row(
        of,
        f"every layer shadowed, the pool cut to {held:,}",
        f"{gone}; what {kv_gib:.2f} GiB hold of both copies",
        every,
        held,
    )
    others = "the other layers are cast in full, as fast as before"
    part = min(every, max(0, round(every * (of.before_ms - of.after_ms) / of.cast_ms)))
    yield _row(
        of,
        f"{part} of {every} layers shadowed",
        f"over the whole pool; {others}",
        part,
        gb_per_s=speed if part < every else None,
    )
    solved = line(of)
    for row in _corners(of, solved, kv_gib, cards):
        n, P = int(row.layers), round(row.pool_tokens)
        yield _row(
            of,
            f"{n} of {every} layers shadowed, the pool cut to {P:,}",
            f"{row.kv_gib:.1f} GiB of KV; {others}",
            n,
            P,
            gb_per_s=speed,
        )
    if 0 < of.still_ms < of.cast_ms:
        share = Fraction(of.still_ms / of.cast_ms).limit_denominator(100)
        yield _row(
            of,
            f"no layer shadowed, the pool cut to {share}",
            "a smaller pool is cast in full, as fast as before",
            0,
            of.pool_tokens * share,
            gb_per_s=speed,
        )


def _corners(of: Server, solved: pd.DataFrame, kv_gib: float, cards: tuple[str, ...]) -> list:
    """Rows of the line on both sides of the pool's own memory, and the last that a card's whole
    memory holds beside the weights."""
    rows = list(solved[solved.layers > 0].itertuples())
    inside = [row for row in rows if row.kv_gib <= kv_gib]
    found = rows[max(0, len(inside) - 1) : len(inside) + 1] if inside else []
    whole = [machine.card(name).memory_gib - of.weights_gib for name in cards]
    held = [row for row in rows if whole and row.kv_gib <= min(whole)]
    return [*found, *(row for row in held[-1:] if row not in found)]


def _kernels(of: Server) -> Iterator[dict]:
    still = of.still_ms
    yield _row(
        of,
        "a full cast by a faster kernel",
        "every layer and slot, in the time that is left",
        ms=of.bare_ms + still,
        gb_per_s=of.cast_gb / still * 1e3 if still > 0 else None,
    )


def _predicted(of: Server, cards: tuple[str, ...], seen: Predicted) -> Iterator[dict]:
    for name in cards:
        if name in seen.vector_cast:
            yield _row(
                of,
                f"the lab's vector cast{CARD.format(_short(name))}",
                "every layer and slot, at the speed predicted for this card; not solved for the "
                "reported TPOT",
                ms=tuple(of.bare_ms + ms for ms in seen.vector_cast[name]),
                gb_per_s=1e3 * of.cast_gb / seen.vector_cast[name][0],
                provenance=assumed("the cast lent from the card on which it was recorded"),
            )
    for name in cards:
        if name in seen.static_gather:
            yield _row(
                of,
                f"a gather of static shape{CARD.format(_short(name))}",
                f"a CUDA graph that gathers, casts and reads all {seen.static_rows:,} rows that a "
                "request may have; not solved for the reported TPOT",
                ms=tuple(of.bare_ms + ms for ms in seen.static_gather[name]),
                gb_per_s=seen.static_gb_per_s[name],
                provenance=assumed("gather_cast at this context, lent from another card"),
            )
    if seen.host_ms is not None:
        per_layer, ours = 1000 / of.layers * np.array([of.after_ms, seen.host_ms])
        yield _row(
            of,
            "CUDA graphs lost",
            "no cast is left and the step is max(host, GPU), not their sum: the host would have to "
            f"take {per_layer:.0f} us per layer. The lab's own step takes {ours:.0f} "
            f"({seen.host_how}), a lower bound, and hides behind the GPU",
            of.layers,
            (of.kv_gib or of.pool_gib()) * GIB // of.token_bytes(of.layers),
            ms=max(of.bare_ms, seen.host_ms),
            provenance=assumed(seen.host_how),
        )


def predicted(of: Server, context: int | None = None, fitted: Fit | None = None) -> Predicted:
    """`Predicted` for a server on the report's cards, from data/runs and the published tables."""
    report, fitted = published(), fitted or fit()
    context = context or report["default_context"]
    scale = of.layers / of.model.layers
    rows = min(of.pool_tokens, of.model.max_positions)
    context = min(context, rows)
    setting = at(of.model, of.pool_tokens, 1, context)
    casts, gathers, speeds = {}, {}, {}
    for name in report["gpu"]:
        cast = predict_at("vector_cast", setting, name, fitted=fitted)["cast"]
        casts[name] = tuple(scale * ms for ms in (cast.ms, cast.low_ms, cast.high_ms))
        wide = at(of.model, of.pool_tokens, 1, rows)
        step = predict_at("gather_cast", wide, name, fitted=fitted)
        read = predict_at("full_cast", setting, name, fitted=fitted)["attention"].ms
        gathers[name] = tuple(scale * (ms - read) for ms in (step.ms, *step.range_ms))
        speeds[name] = step["cast"].bytes / step["cast"].ms / 1e6
    host = fitted.host("shadow", report["gpu"][-1], 1, context)
    return Predicted(casts, gathers, speeds, rows, of.layers * host.ms, host.provenance.how)


def recorded_hypotheses(of: Server | None = None, fitted: Fit | None = None) -> pd.DataFrame:
    """`hypotheses` with what the lab's evidence says about a vector cast, a static gather and a
    host without CUDA graphs."""
    of = of or server()
    return hypotheses(of, predicted=predicted(of, fitted=fitted))


def in_words(of: Server, table: pd.DataFrame) -> str:
    """How much of the cast is still there, and that no row is established."""
    gone = of.before_ms - of.after_ms
    if gone <= 0:
        return (
            f"The step did not become faster ({of.before_ms:.1f} to {of.after_ms:.1f} ms): the "
            "cast is still there, and no row explains why."
        )
    if of.still_ms <= 0:
        return (
            f"{gone:.1f} ms went, all of the cast's {of.cast_ms:.1f} ms and {-of.still_ms:.1f} ms "
            "more: something else has changed as well."
        )
    words = (
        f"{gone:.1f} of the cast's {of.cast_ms:.1f} ms went; by the step times {of.still_ms:.1f} "
        f"ms ({of.still_ms / of.cast_ms:.0%}) are still there. "
    )
    near = table[table.reaches]
    free = near.provenance == "assumed"
    solved = near[~free]
    if len(solved):
        possible = [judged(row, "fits") and judged(row, "under") for _, row in solved.iterrows()]
        fit_words = "" if None in possible else f", {sum(possible)} of them possible on the card"
        one = len(solved) == 1
        words += (
            f"{'1 explanation gives' if one else f'{len(solved)} explanations give'} the step "
            f"after, as {'it is' if one else 'they are'} solved for it{fit_words}: "
            + "; ".join(f"'{name}'" for name in solved.hypothesis)
            + ". "
        )
    if free.any():
        parts = [
            f"'{row.hypothesis}' ({row.low_ms:.0f} to {row.high_ms:.0f} ms)"
            for row in near[free].itertuples()
        ]
        words += f"Not solved for it, and with it in their range: {'; '.join(parts)}. "
    return words + "A match is no proof: none is established."


def judged(row: pd.Series, question: str) -> bool | None:
    """Whether an explanation "fits" (or is "under" the bandwidth of) the cards that it is about:
    one that names a card that card, any other all. None where it is not known."""
    known = {c.removeprefix(f"{question}_"): row[c] for c in row.index if c.startswith(question)}
    named = [c for c in known if row["hypothesis"].endswith(CARD.format(c))]
    return all(known[c] for c in named or known) if known else None


def same_class() -> pd.DataFrame:
    """A BF16 pool on the same class of machine beside the report's step without its cast."""
    peer, of = published("rtx6kpro"), server()
    rates = peer["tokens_per_s"]
    return pd.DataFrame(
        [
            dict(
                what="the GLM-5 report without its cast",
                step_ms=of.bare_ms,
                tokens_per_s=1000 / of.bare_ms,
                source=f"{of.before_ms} - {of.cast_ms} ms",
                provenance=str(DERIVED),
            ),
            dict(
                what="a BF16 pool, whole step, same class of machine",
                step_ms=1000 * len(rates) / sum(rates),
                tokens_per_s=sum(rates) / len(rates),
                source=str(facts.source(peer)),
                provenance="published",
            ),
        ]
    )

"""The rest of a step (GEMMs, MoE, all-reduce, host) as a function of the running requests."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from shadowkv_lab import facts, machine
from shadowkv_lab.deployment import Deployment
from shadowkv_lab.errors import NoAnswer, OutOfRange, UnknownName
from shadowkv_lab.model import Model
from shadowkv_lab.provenance import Provenance, assumed

# Expert weights stream at the share of the datasheet that a plain read reaches: H200's, measured.
LENDER = "h200"


def distinct_experts(experts: int, per_token: int, running: float) -> float:
    """Experts that `running` requests read a layer, if each picks `per_token` evenly at random."""
    return experts * (1 - (1 - per_token / experts) ** running)


@dataclass(frozen=True)
class Rest:
    """`rest(running)` in ms: `fixed_ms` plus the time to read the experts that they select.

    `expert_ms` is the time to read one expert of every MoE layer on one GPU. `table`, (requests,
    ms) pairs, replaces the formula where it was measured: interpolated linearly, at its last pace
    beyond. `spread`, (requests, low, high), is what is not known of it: by the formula the growth
    is at most that of requests that choose evenly, and at least none.
    """

    fixed_ms: float
    expert_ms: float = 0.0
    experts: int = 256
    per_token: int = 8
    table: tuple[tuple[float, float], ...] = ()
    spread: tuple[tuple[float, float, float], ...] = ()
    provenance: Provenance = field(default_factory=assumed)

    def __call__(self, running: float) -> float:
        if self.table:
            return _on(self.table, running)
        if not self.experts:
            return self.fixed_ms
        return self.fixed_ms + self.expert_ms * distinct_experts(
            self.experts, self.per_token, running
        )

    def range_ms(self, running: float) -> tuple[float, float]:
        """Between which times the rest lies, as far as its growth is not known."""
        if self.spread:
            low, high = ([(R, ends[i]) for R, *ends in self.spread] for i in (0, 1))
            return _on(low, running), _on(high, running)
        return min(self(1), self(running)), self(running)


def _on(line: Sequence[tuple[float, float]], at: float) -> float:
    """A line through points, held before the first, at the last pace after the last."""
    x, y = zip(*line, strict=True)
    if at > x[-1] and len(x) > 1:
        return y[-1] + max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2])) * (at - x[-1])
    return float(np.interp(at, x, y))


def moe_backends() -> list[str]:
    """The MoE backends whose growth with the requests was published (rtx6kpro)."""
    return sorted({row["moe_backend"] for row in whole_servers()})


@cache
def whole_servers() -> tuple[dict, ...]:
    """rtx6kpro's whole servers: MoE backend, requests, context (0: short), tok/s of each."""
    with open(facts.path("published", "tables", "rtx6kpro_glm5.csv"), encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def rest_of(
    there: Deployment, tpot_ms: float, step_ms: float, moe_backend: str | None = None
) -> Rest:
    """The rest of a deployment, anchored at one stream: a TPOT less its strategy's whole step.

    Its growth with the requests: as rtx6kpro's whole servers show it where the model, the card and
    the spread are theirs, of one MoE backend, or between both where it is not said; else by the
    experts that must be read (`rest_from`). Raises `OutOfRange`, `NoAnswer`, `UnknownName`.
    """
    known = moe_backends()
    if moe_backend is not None and moe_backend not in known:
        raise UnknownName("MoE backend", moe_backend, known)
    formula = rest_from(
        tpot_ms,
        step_ms,
        there.model,
        there.card,
        tensor_parallel=there.gpus // there.pipeline_parallel,
        expert_bits=there.checkpoint.expert_bits,
    )
    servers = facts.find("published", "published result", "rtx6kpro")
    same = (
        there.model.name == servers["model"]
        and there.card.name in servers["gpu"]
        and there.gpus == servers["tensor_parallel"]
    )
    if not same:
        return formula
    at_one, growth = tpot_ms - step_ms, {}
    for row in whole_servers():
        if row["context"] == "0":
            R, tpot = int(row["requests"]), 1000 * int(row["requests"]) / float(row["tokens_per_s"])
            growth.setdefault(row["moe_backend"], {})[R] = tpot
    lines = [
        {R: at_one + tpot - line[1] for R, tpot in line.items()}
        for name, line in growth.items()
        if moe_backend in (None, name)
    ]
    counts = sorted(set.intersection(*(set(line) for line in lines)))
    spread = tuple((R, min(x[R] for x in lines), max(x[R] for x in lines)) for R in counts)
    table = tuple((R, (low + high) / 2) for R, low, high in spread)
    backend = f"its {moe_backend} MoE backend" if moe_backend else f"between {' and '.join(growth)}"
    how = (
        f"{at_one:.1f} ms at one request; growing as rtx6kpro's whole servers do at short context, "
        f"{backend}"
    )
    return Rest(at_one, table=table, spread=spread, provenance=assumed(how, facts.source(servers)))


def rest_from(
    tpot_ms: float,
    step_ms: float,
    model: Model,
    card: "machine.Card | str",
    *,
    tensor_parallel: int = 8,
    expert_bits: float | None = None,
) -> Rest:
    """The rest anchored at one stream: `tpot_ms` less full cast's whole step there.

    Expert bytes: `3 x hidden x moe_intermediate` weights of `expert_bits` (NVFP4: 4 bits and an
    FP8 scale per 16, so 4.5; 16 where it is not said), split over the GPUs, at a plain read's
    share of the card's bandwidth. Raises `NoAnswer` where the step is longer than the TPOT.
    """
    for name, value in (("TPOT", tpot_ms), ("step", step_ms)):
        if not (math.isfinite(value) and value > 0):
            raise OutOfRange(f"A {name} of {value} ms", "a finite time above 0")
    at_one = float(tpot_ms - step_ms)
    if at_one < 0:
        raise NoAnswer(
            f"A TPOT of {tpot_ms:.1f} ms leaves {at_one:.1f} ms beside a step of {step_ms:.1f} ms: "
            "the cast alone is longer than the step",
            f"a TPOT above {step_ms:.1f} ms",
            "Check the pool, the layers and which GPU the TPOT comes from",
        )
    if not model.experts:
        return Rest(at_one, experts=0, provenance=assumed(f"{at_one:.1f} ms, as at one request"))
    bits = 16 if expert_bits is None else expert_bits
    card = machine.card(card) if isinstance(card, str) else card
    lender = machine.card(LENDER)
    share = lender.measured_read_gb_per_s / lender.bandwidth_gb_per_s
    weights = 3 * model.hidden_size * model.moe_intermediate_size * bits / 8
    layers = model.layers - model.dense_layers
    expert_ms = weights * layers / tensor_parallel / (card.bandwidth_gb_per_s * share) / 1e6
    # Experts cannot take more than all of the rest that was seen.
    expert_ms = min(expert_ms, at_one / max(1, model.experts_per_token))
    fixed = at_one - expert_ms * model.experts_per_token
    how = (
        f"{at_one:.1f} ms at one request; experts of {weights / 2**20:.1f} MiB at {share:.0%} of "
        f"{card.bandwidth_gb_per_s:.0f} GB/s, requests choosing evenly"
    )
    return Rest(fixed, expert_ms, model.experts, model.experts_per_token, provenance=assumed(how))

"""The rest of a step (GEMMs, MoE, all-reduce, host) as a function of the running requests."""

import math
from dataclasses import dataclass, field

import numpy as np

from shadowkv_lab import facts, machine
from shadowkv_lab.errors import NoAnswer, OutOfRange
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
    ms) pairs, replaces the formula where a user has measured it: interpolated linearly, held
    outside. It is assumed unless the numbers were fitted or measured.
    """

    fixed_ms: float
    expert_ms: float = 0.0
    experts: int = 256
    per_token: int = 8
    table: tuple[tuple[int, float], ...] = ()
    provenance: Provenance = field(default_factory=assumed)

    def __call__(self, running: float) -> float:
        if self.table:
            counts, times = zip(*self.table, strict=True)
            return float(np.interp(running, counts, times))
        if not self.experts:
            return self.fixed_ms
        return self.fixed_ms + self.expert_ms * distinct_experts(
            self.experts, self.per_token, running
        )


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

    Expert bytes: `3 x hidden x moe_intermediate` weights of `expert_bits` (the case's NVFP4: 4
    bits and an FP8 scale per 16), split over the GPUs, at a plain read's share of the card's
    bandwidth. Raises `NoAnswer` where the step is longer than the TPOT.
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
    case = facts.find("published", "published result", "case")
    bits = case["expert_bits_per_weight"] if expert_bits is None else expert_bits
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

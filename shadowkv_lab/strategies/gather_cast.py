"""Gather cast: keep FP8, gather and cast the live rows only, attend over the compact copy."""

from dataclasses import dataclass

from shadowkv_lab import kernels
from shadowkv_lab.strategies.base import Moves, Strategy, attention_bytes


@dataclass(frozen=True)
class GatherCast(Strategy):
    """O(live tokens) casts a step and no second copy of the pool.

    Use it where no kernel reads FP8 and there is no room for BF16: at one short request it costs
    next to nothing, at a full pool it moves more than a full cast. `kernel` "torch" gathers and
    casts in two ops; "triton" does both in one pass.
    """

    kernel: str = "torch"

    name = "gather_cast"
    title = "gather cast"
    compact = True

    def moves(self, model, P, L, R):
        return Moves(
            (model.row_bytes("fp8") + model.row_bytes("bf16")) * L,
            attention_bytes(model, "bf16", L),
            model.row_bytes("fp8") * R,
        )

    def scratch_rows(self, P, L):
        return L

    def cast(self, pool, layer, batch, scratch):
        gather_cast = kernels.mover("gather_cast", pool.device)
        gather_cast(pool.fp8[layer], batch.live_slots, scratch)

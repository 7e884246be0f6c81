"""Gather cast: keep FP8, gather and cast the live rows only, attend over the compact copy."""

from dataclasses import dataclass

from shadowkv_lab import kernels
from shadowkv_lab.strategies.base import Moves, Strategy


@dataclass(frozen=True)
class GatherCast(Strategy):
    """O(live tokens) casts per step and no second copy of the pool.

    Use it where no kernel reads FP8 and there is no room for BF16: at one short request it costs
    next to nothing, at a full pool it moves more than a full cast.
    """

    name = "gather_cast"
    title = "gather cast"
    order = 3
    compact = True

    def moves(self, model, P, L, R):
        return Moves(
            (model.row_bytes("fp8") + model.row_bytes("bf16")) * L,
            model.row_bytes("bf16") * L,
            model.row_bytes("fp8") * R,
        )

    def scratch_rows(self, P, L):
        return L

    def cast(self, step, layer):
        gather_cast = kernels.mover("gather_cast", step.pool.device)
        gather_cast(step.pool.fp8[layer], step.reading.live_slots, step.scratch[self])

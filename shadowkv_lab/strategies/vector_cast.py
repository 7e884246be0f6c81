"""Vector cast: full cast with a kernel that runs at copy speed."""

from dataclasses import dataclass

from shadowkv_lab import kernels
from shadowkv_lab.strategies.full_cast import FullCast


@dataclass(frozen=True)
class VectorCast(FullCast):
    """The same bytes as full cast, moved as fast as the card copies.

    Use it to see how much of a full cast's time was torch's copy kernel and how much the bytes:
    about three quarters on an H200, two fifths at the most on an RTX PRO 6000.
    """

    name = "vector_cast"
    title = "vector cast"
    order = 4
    needs = "cast"

    def cast(self, step, layer):
        cast = kernels.mover("cast", step.pool.device)
        cast(step.pool.fp8[layer], step.scratch[self])

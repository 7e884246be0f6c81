"""BF16 pool: keep 16 bits, read them as they are."""

from dataclasses import dataclass

from shadowkv_lab.strategies.base import Moves, Strategy


@dataclass(frozen=True)
class BF16Pool(Strategy):
    """`--kv-cache-dtype bfloat16`: no cast at all, half the tokens of an FP8 pool.

    Use it when the tokens fit. Its rows were never quantised, so it is also the most accurate.
    """

    name = "bf16_pool"
    title = "BF16 pool"
    order = 1
    kinds = ("bf16",)

    def moves(self, model, P, L, R):
        return Moves(0, model.row_bytes("bf16") * L, model.row_bytes("bf16") * R)

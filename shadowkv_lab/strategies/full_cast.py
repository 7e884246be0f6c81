"""Full cast: keep FP8, cast the whole pool to BF16 in every layer of every step."""

from dataclasses import dataclass

from shadowkv_lab.kernels import reference
from shadowkv_lab.strategies.base import Moves, Strategy


@dataclass(frozen=True)
class FullCast(Strategy):
    """`get_key_buffer(layer).to(q.dtype)`, as SGLang's flashinfer_mla and fa3 backends read.

    Use it as the baseline: it needs one layer of BF16 scratch and moves O(pool) bytes per step,
    however few tokens are live. The cast is torch's own copy kernel.
    """

    name = "full_cast"
    title = "full cast"
    order = 0
    casts_pool = True

    def moves(self, model, P, L, R):
        return Moves(
            (model.row_bytes("fp8") + model.row_bytes("bf16")) * P,
            model.row_bytes("bf16") * L,
            model.row_bytes("fp8") * R,
        )

    def scratch_rows(self, P, L):
        return P

    def cast(self, step, layer):
        reference.cast(step.pool.fp8[layer], step.scratch[self])

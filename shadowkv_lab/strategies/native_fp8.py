"""Native FP8: keep FP8, and let FlashInfer's own kernel read it. Hopper only."""

from dataclasses import dataclass

from shadowkv_lab.strategies.base import Moves, Strategy


@dataclass(frozen=True)
class NativeFP8(Strategy):
    """FlashInfer's FP8 KV for MLA (0.6.14 with fa3, 0.6.18 with fa2), with explicit scales of 1.

    Use it on SM90 where memory is short: it keeps one byte per value and moves half of BF16's
    bytes, but its kernel is slower than its own BF16 one. `shadowkv rules` says who can run it.
    """

    name = "native_fp8"
    title = "native FP8 (flashinfer)"
    order = 5
    reads = "native_fp8"
    backend = "flashinfer_native_fp8"

    def moves(self, model, P, L, R):
        return Moves(0, model.row_bytes("fp8") * L, model.row_bytes("fp8") * R)

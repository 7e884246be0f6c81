"""Fused FP8: keep FP8, and read it directly with the lab's own decode kernel."""

from dataclasses import dataclass

from shadowkv_lab.strategies.native_fp8 import NativeFP8


@dataclass(frozen=True)
class FusedFP8(NativeFP8):
    """One byte a value kept, half of BF16's bytes moved, queries in 16 bits.

    Use it where Triton runs: with it neither a cast nor a shadow has anything left to save.
    """

    name = "fused_fp8"
    title = "fused FP8 (this lab)"
    reads = "fused_fp8"
    needs = "decode"
    backend = None  # Triton compiles it for any card

    def untried(self, compute_capability):
        return compute_capability[0] != 9

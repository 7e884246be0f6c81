"""Fused FP8: keep FP8, and read it directly with the lab's own decode kernel."""

from dataclasses import dataclass

from shadowkv_lab import kernels
from shadowkv_lab.errors import UnknownName
from shadowkv_lab.strategies.native_fp8 import NativeFP8


@dataclass(frozen=True)
class FusedFP8(NativeFP8):
    """One byte per value kept, half of BF16's bytes moved, queries in 16 bits.

    Use it where Triton runs: it leaves nothing for a cast or a shadow to save. `query="fp8"` rounds
    queries to e4m3 first, as FlashMLA's FP8 decode and SGLang's Triton decode do: to compare with
    them like for like.
    """

    query: str = "bf16"

    name = "fused_fp8"
    title = "fused FP8 (this lab)"
    order = 6
    reads = "fused_fp8"
    needs = "decode"
    backend = "lab_fused_fp8"

    def __post_init__(self):
        if self.query not in kernels.QUERIES:
            raise UnknownName("query type", self.query, kernels.QUERIES)

    @property
    def tolerance(self) -> float:
        # Of rounded queries any; `check.output_error` compares with those itself.
        return float("inf") if self.query == "fp8" else NativeFP8.tolerance

"""Cast a whole layer from FP8 to BF16 at copy speed.

The reference is `reference.cast`, torch's `copy_`. That one converts value by value through a
generic element-wise loop and reaches a quarter of an H200's copy bandwidth; here every thread
reads 16 neighbouring bytes and writes 32.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048  # values a program: 4 warps x 16 bytes


@triton.jit
def cast_kernel(source, target, count, BLOCK: tl.constexpr):
    """target[i] = bf16(source[i]) for `count` values, flat."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    # Through float32, which is exact, so that Triton's interpreter can run it too.
    values = tl.load(source + at, mask=here).to(tl.float32)
    tl.store(target + at, values.to(tl.bfloat16), mask=here)


def cast(fp8: torch.Tensor, out: torch.Tensor) -> None:
    """`out` [S, D] (BF16) = `fp8` [S, D] (e4m3), both contiguous; exact."""
    count = fp8.numel()
    cast_kernel[(triton.cdiv(count, BLOCK),)](fp8, out, count, BLOCK=BLOCK, num_warps=4)

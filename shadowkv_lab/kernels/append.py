"""Append new rows in one launch a layer: FP8 row, shadow row, clip count, NaN flag.

The reference is `reference.append`, a dozen torch ops.
"""

import torch
import triton
import triton.language as tl

from shadowkv_lab.kernels.reference import FP8_MAX


@triton.jit
def append_kernel(
    rows,
    slots,
    fp8,
    bf16,
    counters,
    MAX: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_FP8: tl.constexpr,
    HAS_BF16: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program a row of D values, padded to WIDTH lanes."""
    r = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    inside = lane < D
    slot = tl.load(slots + r)
    raw = tl.load(rows + r * D + lane, mask=inside, other=0.0)
    value = raw.to(tl.float32)
    size = tl.abs(value)
    finite = size < float("inf")  # false for NaN as well
    unfinite = tl.sum((~finite).to(tl.int32))
    if unfinite > 0:
        tl.atomic_add(counters + 1, unfinite)
    if HAS_FP8:
        clipped = tl.sum((finite & (size > MAX)).to(tl.int32))
        if clipped > 0:
            tl.atomic_add(counters, clipped)
        # NaN stays NaN, as in the reference: the counters tell of it.
        kept = tl.minimum(tl.maximum(value, -MAX, tl.PropagateNan.ALL), MAX, tl.PropagateNan.ALL)
        stored = kept.to(tl.float8e4nv)
        tl.store(fp8 + slot * D + lane, stored, mask=inside)
        if HAS_BF16:
            shadow = stored.to(tl.float32).to(tl.bfloat16) if EXACT else raw
            tl.store(bf16 + slot * D + lane, shadow, mask=inside)
    else:
        tl.store(bf16 + slot * D + lane, raw, mask=inside)


def append(
    rows: torch.Tensor,
    slots: torch.Tensor,
    fp8: torch.Tensor | None,
    bf16: torch.Tensor | None,
    counters: torch.Tensor,
    exact: bool = True,
) -> None:
    """Write `rows` [R, D] (BF16) to `slots` [R] (int64) of `fp8` and/or `bf16` [S, D].

    As `reference.append`, in one launch and without a host sync.
    """
    count, width = rows.shape
    append_kernel[(count,)](
        rows,
        slots,
        fp8,
        bf16,
        counters,
        MAX=FP8_MAX,
        D=width,
        WIDTH=triton.next_power_of_2(width),
        HAS_FP8=fp8 is not None,
        HAS_BF16=bf16 is not None,
        EXACT=exact,
        num_warps=4,
    )

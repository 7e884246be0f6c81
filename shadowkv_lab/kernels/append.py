"""Append new rows in one launch per layer: FP8 row, shadow row, clip count, NaN flag.

The reference is `reference.append`, a dozen torch ops.
"""

import torch
import triton
import triton.language as tl

from shadowkv_lab.kernels import door
from shadowkv_lab.kernels.reference import FP8_MAX


@triton.jit
def append_kernel(
    rows,
    tail,
    slots,
    fp8,
    bf16,
    counters,
    stride,
    tail_stride,
    S,
    FIRST: tl.constexpr,
    MAX: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_FP8: tl.constexpr,
    HAS_BF16: tl.constexpr,
    EXACT: tl.constexpr,
    LOST: tl.constexpr,
):
    """One program per row of D values, padded to WIDTH lanes; rows are `stride` values apart.

    The first HEAD values of a row lie in `rows`, the others in `tail`. Where rows share a slot the
    last one is written and no other, so that both buffers keep the same one. A row for a slot
    outside the S rows is not written, but counted in counter LOST; one for a slot below FIRST is
    neither written nor counted.
    """
    r = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    slot = tl.load(slots + r).to(tl.int64)
    count = tl.num_programs(0)
    later = tl.zeros([], tl.int32)
    for start in tl.range(tl.program_id(0) + 1, count, WIDTH):
        other = tl.load(slots + start + lane, mask=start + lane < count, other=-1)
        later += tl.sum(((other == slot) & (start + lane < count)).to(tl.int32))
    known = (slot >= 0) & (slot < S)
    tl.atomic_add(counters + LOST, 1, mask=~known)
    inside = lane < D
    raw = tl.load(rows + r * stride + lane, mask=lane < HEAD, other=0.0)
    if HEAD < D:
        rest = tl.load(
            tail + r * tail_stride + lane - HEAD, mask=inside & (lane >= HEAD), other=0.0
        )
        raw = tl.where(lane < HEAD, raw, rest)
    value = raw.to(tl.float32)
    size = tl.abs(value)
    finite = size < float("inf")  # false for NaN as well
    unfinite = tl.sum((~finite).to(tl.int32))
    keeps = tl.where(known & (slot >= FIRST), later, 1)
    written = inside & (keeps + tl.zeros([WIDTH], tl.int32) == 0)
    if unfinite > 0:
        tl.atomic_add(counters + 1, unfinite)
    if HAS_FP8:
        clipped = tl.sum((finite & (size > MAX)).to(tl.int32))
        if clipped > 0:
            tl.atomic_add(counters, clipped)
        # NaN stays NaN, as in the reference: the counters tell of it.
        kept = tl.minimum(tl.maximum(value, -MAX, tl.PropagateNan.ALL), MAX, tl.PropagateNan.ALL)
        stored = kept.to(tl.float8e4nv)
        tl.store(fp8 + slot * D + lane, stored, mask=written)
        if HAS_BF16:
            shadow = stored.to(tl.float32).to(tl.bfloat16) if EXACT else raw
            tl.store(bf16 + slot * D + lane, shadow, mask=written)
    else:
        tl.store(bf16 + slot * D + lane, raw, mask=written)


def append(
    rows: torch.Tensor,
    slots: torch.Tensor,
    fp8: torch.Tensor | None,
    bf16: torch.Tensor | None,
    counters: torch.Tensor,
    exact: bool = True,
    tail: torch.Tensor | None = None,
    first: int = 0,
) -> None:
    """Write `rows` [R, D] (BF16) to `slots` [R] (int32 or int64) of `fp8` and/or `bf16` [S, D].

    As `reference.append`, in one launch and without a host sync; rows may lie apart, and their
    last values in `tail`. Of rows for one slot the last is kept. Rows for slots that do not exist
    are counted, in the third of `counters` where there are three, else with the values that are
    not finite. Raises `OutOfRange` for a tensor of another type, shape or stride.
    """
    parts = (rows,) if tail is None else (rows, tail)
    count, width = len(rows), sum(part.shape[1] for part in parts)
    buffers = [buffer for buffer in (fp8, bf16) if buffer is not None]
    for name, part in zip(("The rows", "Their tail"), parts, strict=False):
        if part.stride(1) != 1 or part.dtype != torch.bfloat16 or len(part) != count:
            door.need(name, part, (torch.bfloat16,), count, None)
    door.need("The list of slots", slots, door.INDICES, count)
    for buffer, kind in ((fp8, door.FP8), (bf16, torch.bfloat16)):
        if buffer is not None:
            door.need("The buffer", buffer, (kind,), len(buffers[0]), width)
    door.need("The counters", counters, (torch.int32,), None)
    door.room("The counters", len(counters), 2)
    if not count:
        return
    append_kernel[(count,)](
        rows,
        parts[-1],
        slots,
        fp8,
        bf16,
        counters,
        rows.stride(0),
        parts[-1].stride(0),
        len(buffers[0]),
        FIRST=first,
        MAX=FP8_MAX,
        HEAD=rows.shape[1],
        D=width,
        WIDTH=triton.next_power_of_2(width),
        HAS_FP8=fp8 is not None,
        HAS_BF16=bf16 is not None,
        EXACT=exact,
        LOST=min(2, len(counters) - 1),
        num_warps=4,
    )

"""The Triton kernel behind `rows.widen`: a number of slots that the device alone knows."""

import torch
import triton
import triton.language as tl

from shadowkv_lab.kernels.launch import multiprocessors

ROWS = 4  # rows a program and turn
PROGRAMS_PER_SM = 8


@triton.jit
def widen_kernel(
    pool,
    slots,
    target,
    count,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    DEVICE_COUNT: tl.constexpr,
    GATHER: tl.constexpr,
):
    """A fixed grid strides over `count` slots; a row of D values is read as WIDTH lanes."""
    total = tl.load(count) if DEVICE_COUNT else count
    lane = tl.arange(0, WIDTH)[None, :]
    for start in tl.range(tl.program_id(0) * ROWS, total, tl.num_programs(0) * ROWS):
        i = start + tl.arange(0, ROWS)
        inside = (i < total)[:, None] & (lane < D)
        slot = tl.load(slots + i, mask=i < total, other=0).to(tl.int64)
        value = tl.load(pool + slot[:, None] * D + lane, mask=inside, other=0)
        # Through float32, exactly, so that Triton's interpreter can run it too.
        wide = value.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.bfloat16)
        row = i.to(tl.int64) if GATHER else slot
        tl.store(target + row[:, None] * D + lane, wide, mask=inside)


def widen(
    pool: torch.Tensor,
    slots: torch.Tensor,
    target: torch.Tensor,
    count: torch.Tensor | None,
    gather: bool,
) -> None:
    """As `rows.widen`, in one launch whose grid depends on shapes alone."""
    width = pool.shape[-1]
    most = multiprocessors(pool.device) * PROGRAMS_PER_SM
    programs = max(1, min(triton.cdiv(len(slots), ROWS), most))
    widen_kernel[(programs,)](
        pool,
        slots,
        target,
        len(slots) if count is None else count,
        D=width,
        WIDTH=triton.next_power_of_2(width),
        ROWS=ROWS,
        DEVICE_COUNT=count is not None,
        GATHER=gather,
        num_warps=4,
    )

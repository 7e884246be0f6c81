"""FP8 rows to BF16: a whole layer, rows gathered by slot, or rows of a mirror that follow a write.

The references are `reference.cast`, `gather_cast` and `refresh`. torch's `copy_` converts value by
value through a generic element-wise loop and reaches a quarter of an H200's copy bandwidth; its
index_select writes the FP8 rows once more than is needed.
"""

import torch
import triton
import triton.language as tl

from shadowkv_lab.kernels.launch import multiprocessors

VALUES = 2048  # of a cast program: each thread of 4 warps reads 16 neighbouring bytes, writes 32
ROWS = 8  # of a program and turn: enough loads in flight to hide a random row's latency
PROGRAMS_PER_SM = 8  # of a fixed grid


@triton.jit
def cast_kernel(source, target, count, VALUES: tl.constexpr):
    """target[i] = bf16(source[i]) for `count` values, flat."""
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    here = at < count
    # Through float32, which is exact, so that Triton's interpreter can run it too.
    values = tl.load(source + at, mask=here).to(tl.float32)
    tl.store(target + at, values.to(tl.bfloat16), mask=here)


@triton.jit
def rows_kernel(
    source,
    slots,
    target,
    count,
    D: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    GATHER: tl.constexpr,
    DEVICE_COUNT: tl.constexpr,
):
    """target[i], or else target[slots[i]], = bf16(source[slots[i]]) for `count` slots.

    A row of D values is read as HEAD and TAIL lanes. The grid strides over the rows.
    """
    total = tl.load(count) if DEVICE_COUNT else count
    head = tl.arange(0, HEAD)[None, :]
    tail = HEAD + tl.arange(0, TAIL)[None, :]
    for start in tl.range(tl.program_id(0) * ROWS, total, tl.num_programs(0) * ROWS):
        i = start + tl.arange(0, ROWS)
        here = (i < total)[:, None]
        slot = tl.load(slots + i, mask=i < total, other=0).to(tl.int64)
        inside = here & (tail < D)
        first = tl.load(source + slot[:, None] * D + head, mask=here)
        last = tl.load(source + slot[:, None] * D + tail, mask=inside)
        row = (i.to(tl.int64) if GATHER else slot)[:, None] * D
        tl.store(target + row + head, first.to(tl.float32).to(tl.bfloat16), mask=here)
        tl.store(target + row + tail, last.to(tl.float32).to(tl.bfloat16), mask=inside)


def cast(fp8: torch.Tensor, out: torch.Tensor) -> None:
    """`out` [S, D] (BF16) = `fp8` [S, D] (e4m3), both contiguous; exact."""
    count = fp8.numel()
    cast_kernel[(triton.cdiv(count, VALUES),)](fp8, out, count, VALUES=VALUES, num_warps=4)


def gather_cast(
    fp8: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, count: torch.Tensor | None = None
) -> None:
    """`out[i]` (BF16) = `fp8[slots[i]]` (e4m3) for `slots` [L] (int32 or int64).

    `count` (int32 [1], on the device) says how many slots count, so that a captured graph serves
    any number of them.
    """
    _rows(fp8, slots, out, count, gather=True)


def refresh(
    fp8: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, count: torch.Tensor | None = None
) -> None:
    """`out[slots[i]]` (BF16) = `fp8[slots[i]]` (e4m3): a mirror follows the rows just written.

    A slot that comes twice is written twice with the same bits.
    """
    _rows(fp8, slots, out, count, gather=False)


def _rows(
    fp8: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    count: torch.Tensor | None,
    gather: bool,
) -> None:
    width, programs = fp8.shape[1], triton.cdiv(len(slots), ROWS)
    if count is not None:
        programs = min(programs, multiprocessors(fp8.device) * PROGRAMS_PER_SM)
    head = 1 << (width.bit_length() - 1)
    rows_kernel[(max(1, programs),)](
        fp8,
        slots,
        out,
        len(slots) if count is None else count,
        D=width,
        HEAD=head,
        TAIL=triton.next_power_of_2(max(width - head, 16)),
        ROWS=ROWS,
        GATHER=gather,
        DEVICE_COUNT=count is not None,
        num_warps=4,
    )

"""FP8 rows to BF16: a whole layer, rows gathered by slot, or rows of a mirror that follow a write.

The references are `reference.cast`, `gather_cast` and `refresh`. torch's `copy_` converts value by
value through a generic element-wise loop and reaches a quarter of an H200's copy bandwidth; its
index_select writes the FP8 rows once more than is needed.
"""

import torch
import triton
import triton.language as tl

from shadowkv_lab.kernels import door
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
    listed,
    S,
    D: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    GATHER: tl.constexpr,
    DEVICE_COUNT: tl.constexpr,
):
    """target[i], or else target[slots[i]], = bf16(source[slots[i]]) for `count` of `listed` slots.

    A row of D values is read as HEAD and TAIL lanes. The grid strides over the rows. Of a slot
    outside the S rows NaN is gathered, and nothing written back.
    """
    total = tl.minimum(tl.load(count), listed) if DEVICE_COUNT else count
    head = tl.arange(0, HEAD)[None, :]
    tail = HEAD + tl.arange(0, TAIL)[None, :]
    for start in tl.range(tl.program_id(0) * ROWS, total, tl.num_programs(0) * ROWS):
        i = start + tl.arange(0, ROWS)
        slot = tl.load(slots + i, mask=i < total, other=0).to(tl.int64)
        known = (slot >= 0) & (slot < S)
        here = ((i < total) & known)[:, None]
        row = slot[:, None] * D
        first = tl.load(source + row + head, mask=here).to(tl.float32)
        last = tl.load(source + row + tail, mask=here & (tail < D)).to(tl.float32)
        if GATHER:
            row = i.to(tl.int64)[:, None] * D
            here = (i < total)[:, None]
            first = tl.where(known[:, None], first, float("nan"))
            last = tl.where(known[:, None], last, float("nan"))
        tl.store(target + row + head, first.to(tl.bfloat16), mask=here)
        tl.store(target + row + tail, last.to(tl.bfloat16), mask=here & (tail < D))


@triton.jit
def packed_kernel(latent, scales, rope, slots, target, count, S, ROWS: tl.constexpr):
    """target[i] = the packed row slots[i], seen as e4m3, float32 and BF16, for `count` slots."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + i, mask=i < count, other=0).to(tl.int64)
    known = ((slot >= 0) & (slot < S))[:, None]
    here, row = (i < count)[:, None] & known, slot[:, None]
    value, turn = tl.arange(0, 512)[None, :], tl.arange(0, 64)[None, :]
    scale = tl.load(scales + row * 164 + 128 + value // 128, mask=here, other=float("nan"))
    first = tl.load(latent + row * 656 + value, mask=here).to(tl.float32) * scale
    last = tl.load(rope + row * 328 + 264 + turn, mask=here, other=float("nan"))
    first = tl.where(known, first, float("nan"))
    at = i.to(tl.int64)[:, None] * 576
    tl.store(target + at + value, first.to(tl.bfloat16), mask=(i < count)[:, None])
    tl.store(target + at + 512 + turn, last, mask=(i < count)[:, None])


def cast(fp8: torch.Tensor, out: torch.Tensor) -> None:
    """`out` [S, D] (BF16) = `fp8` [S, D] (e4m3), both contiguous; exact.

    Like its sisters it raises `OutOfRange` for a tensor of another type, shape or stride.
    """
    door.need("The source", fp8, (door.FP8,), None, None)
    door.need("The target", out, (torch.bfloat16,), *fp8.shape)
    count = fp8.numel()
    cast_kernel[(triton.cdiv(count, VALUES),)](fp8, out, count, VALUES=VALUES, num_warps=4)


def gather_cast(
    fp8: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, count: torch.Tensor | None = None
) -> None:
    """`out[i]` (BF16) = `fp8[slots[i]]` (e4m3) for `slots` [L] (int32 or int64).

    `count` (int32 [1], on the device) says how many slots count, so that a captured graph serves
    any number of them. The row of a slot that does not exist is NaN.
    """
    door.room("The target", len(out), len(slots))
    _rows(fp8, slots, out, count, gather=True)


def gather_packed(packed: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """`out[i]` (BF16) = the row of 656 bytes (fp8_ds_mla) at `packed[slots[i]]`, scaled.

    `packed` [S, 656] is uint8 or e4m3, `slots` [L] int32 or int64, `out` [L or more, 576]. The row
    of a slot that does not exist is NaN.
    """
    door.need("The packed source", packed, (torch.uint8, door.FP8), None, door.PACKED_ROW)
    door.need("The list of slots", slots, door.INDICES, None)
    door.need("The target", out, (torch.bfloat16,), None, 576)
    door.room("The target", len(out), len(slots))
    door.aligned("The packed source", packed, 4)
    packed_kernel[(max(1, triton.cdiv(len(slots), ROWS)),)](
        packed.view(door.FP8),
        packed.view(torch.float32),
        packed.view(torch.bfloat16),
        slots,
        out,
        len(slots),
        len(packed),
        ROWS=ROWS,
        num_warps=4,
    )


def refresh(
    fp8: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, count: torch.Tensor | None = None
) -> None:
    """`out[slots[i]]` (BF16) = `fp8[slots[i]]` (e4m3): a mirror follows the rows just written.

    A slot that comes twice is written twice with the same bits, one that does not exist not at
    all.
    """
    door.room("The target", len(out), len(fp8))
    _rows(fp8, slots, out, count, gather=False)


def _rows(
    fp8: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    count: torch.Tensor | None,
    gather: bool,
) -> None:
    door.need("The source", fp8, (door.FP8,), None, None)
    door.need("The list of slots", slots, door.INDICES, None)
    width, programs = fp8.shape[1], triton.cdiv(len(slots), ROWS)
    door.need("The target", out, (torch.bfloat16,), None, width)
    if count is not None:
        door.need("The count", count, (torch.int32,), 1)
    if count is not None:
        programs = min(programs, multiprocessors(fp8.device) * PROGRAMS_PER_SM)
    head = 1 << (width.bit_length() - 1)
    rows_kernel[(max(1, programs),)](
        fp8,
        slots,
        out,
        len(slots) if count is None else count,
        len(slots),
        len(fp8),
        D=width,
        HEAD=head,
        TAIL=triton.next_power_of_2(max(width - head, 16)),
        ROWS=ROWS,
        GATHER=gather,
        DEVICE_COUNT=count is not None,
        num_warps=4,
    )

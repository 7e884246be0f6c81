"""MLA decode that reads FP8 rows itself, for any number of heads: plan, split, combine.

Three kernels do the reading: `decode_words` and `decode_pairs` (Triton, any card), `decode_warps`
(CUDA, Hopper). The launch table says which one a head count, load and
page size take. The reference is `reference.attend`; `FusedDecode` plans and launches.
"""

from functools import cache
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shadowkv_lab.errors import OutOfRange, UnknownName
from shadowkv_lab.kernels import QUERIES, door, nvrtc
from shadowkv_lab.kernels.decode_pairs import pairs_kernel
from shadowkv_lab.kernels.decode_words import RANK, ROPE, words_kernel
from shadowkv_lab.kernels.launch import LaunchRow, launch_row, multiprocessors
from shadowkv_lab.load import Batch

COMBINE_VALUES = 4096  # of a combine program: 32 a thread
LOG2E = 1.4426950408889634
LONG = 1 << 30  # live tokens for the launch table where a graph is captured before they are known


@triton.jit
def combine_kernel(
    partial,
    stats,
    splits,
    out,
    out_scale,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    FINAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per request, head and COLUMNS output columns: merges the request's work items.

    `splits` [B + 1] says where each request's items begin; ROWS of them are merged at once. FINAL
    rounds to BF16; the interpreter cannot, and stores float32.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(splits + request), tl.load(splits + request + 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    merged = tl.zeros([COLUMNS], tl.float32)
    for start in range(begin, end, ROWS):
        item = start + tl.arange(0, ROWS)
        inside = item < end
        at = item * HEADS + head
        peaks = tl.load(stats + at * 2, mask=inside, other=float("-inf"))
        masses = tl.load(stats + at * 2 + 1, mask=inside, other=0.0)
        place = at.to(tl.int64)[:, None] * RANK + column[None, :]
        rows = tl.load(partial + place, mask=inside[:, None], other=0.0).to(tl.float32)
        highest = tl.maximum(peak, tl.max(peaks, 0))
        weight = masses * tl.exp2(peaks - highest)
        shrink = tl.exp2(peak - highest)
        merged = merged * shrink + tl.sum(weight[:, None] * rows, 0)
        total = total * shrink + tl.sum(weight, 0)
        peak = highest
    value = merged / total * out_scale
    at = out + (request * HEADS + head).to(tl.int64) * RANK + column
    tl.store(at, value.to(tl.bfloat16) if FINAL else value)


def split(lens: tuple[int, ...], block: int, target: int) -> list[tuple[int, int, int]]:
    """Work items (request, first token, end), in request order, about `target` of them.

    All items but a request's last are one length, a multiple of `block`: the shortest that keeps
    within `target` items, so that a grid of `target` programs runs as one full wave.
    """
    low, high = 1, max(1, -(-max(lens) // block))
    while low < high:  # blocks an item
        middle = (low + high) // 2
        if sum(-(-n // (middle * block)) for n in lens) <= target:
            high = middle
        else:
            low = middle + 1
    size = low * block
    return [(b, i, min(i + size, n)) for b, n in enumerate(lens) for i in range(0, n, size)]


class Listed(NamedTuple):
    """The part of a `Batch` that a plan looks at: requests over slots or pages listed in order."""

    lens: tuple[int, ...]
    pages: torch.Tensor  # int32
    page_size: int = 1


def slots_named(batch: Batch | Listed) -> int:
    """How many slots a pool needs for a batch's pages, spare ones included; syncs."""
    spare = batch.spare_pages.flatten() if isinstance(batch, Batch) else batch.pages[:0]
    low, high = torch.cat([batch.pages, spare]).aminmax()
    if low < 0:
        raise OutOfRange(f"Page {int(low)}", "0 or more")
    return (int(high) + 1) * batch.page_size


class FusedDecode:
    """`fused_fp8`'s attention: plan once for a batch, run once a layer, no host sync.

    `partials` holds one layer's partial results, by shape; decodes that never run at once may
    share them. With `query="fp8"` queries are rounded to e4m3, each head scaled by a power of two
    of its own, as FlashMLA's FP8 decode rounds them: scores then come from Hopper's FP8 matrix
    instructions where the CUDA kernel runs, and from FP16 ones elsewhere.
    """

    def __init__(
        self,
        partials: dict[tuple, tuple[torch.Tensor, torch.Tensor]] | None = None,
        query: str = "bf16",
    ):
        if query not in QUERIES:
            raise UnknownName("query type", query, QUERIES)
        self.partials = {} if partials is None else partials
        self.table, self.eight = None, query == "fp8"
        self.name = "lab_fused_fp8" + "(query=fp8)" * self.eight

    def plan(
        self,
        batch: Batch | Listed,
        heads: int,
        sm_scale: float,
        *,
        queries: int = 1,
        scaled: bool = False,
        packed: bool = False,
        row: LaunchRow | None = None,
        fixed: bool = False,
        **_: object,
    ) -> None:
        """Choose launch parameters (the table's, or `row`), cut the work, allocate partials.

        `queries` tokens per request attend, the last `queries` of its live tokens, each to those
        up to itself. `scaled` says that `run` will be given scales of groups, `packed` that rows
        of 656 bytes (fp8_ds_mla) have them inside. `fixed` makes grid and buffers depend on the
        number of requests alone: a captured graph stays valid when the same object is planned
        again for as many requests of other lengths. Work items to spare then repeat the first
        token of request 0, and nobody reads them.
        """
        device, lens = batch.pages.device, batch.lens
        if min(lens) < queries:
            raise OutOfRange(f"{queries} query tokens of {min(lens)} live ones", "live tokens")
        self.batch, self.heads, self.sm_scale = batch, heads, sm_scale
        self.queries, self.rows = queries, queries * heads
        live = LONG if fixed else sum(lens)
        # Of a fixed grid the pages come later, without a sync.
        self.slots = 0 if fixed else slots_named(batch)
        self.row = row or launch_row(
            device, self.rows, len(lens), live, page_size=batch.page_size, scaled=scaled or packed
        )
        if packed and self.row.kernel == "warps":
            raise OutOfRange("The CUDA kernel for packed rows", "a row of a Triton kernel")
        self.packed = packed
        self.tiles = triton.cdiv(self.rows, self.row.tile)
        programs = self.row.blocks_per_sm * multiprocessors(device)
        most = max(len(lens), programs // self.tiles)
        cut = split(lens, self.row.block, most)
        counts = [0] * (len(lens) + 1)
        for request, *_ in cut:
            counts[request + 1] += 1
        self.items = most if fixed else len(cut)
        items = [value for item in cut for value in (*item, lens[item[0]])]
        self._upload(
            device,
            items + [0, 0, 1, lens[0]] * (most - len(cut)),
            [*accumulate(counts)],
            [*accumulate((-(-n // batch.page_size) for n in lens), initial=0)],
            keep=fixed,
        )
        if (shape := (self.items, self.rows)) not in self.partials:
            self.partials[shape] = (
                torch.empty(*shape, RANK.value, device=device),
                torch.empty(*shape, 2, device=device),
            )
        self.partial, self.stats = self.partials[shape]
        # All of a request's items at once where they fit in registers: one round of loads.
        each = triton.cdiv(self.items, len(lens)) if fixed else max(counts)
        self.merged = min(256, triton.next_power_of_2(each))
        self.columns = min(RANK.value, max(16, COMBINE_VALUES // self.merged))
        # One item per request: its result is the output.
        self.direct = self.row.kernel == "warps" and not fixed and max(counts) == 1
        if self.row.kernel == "warps":  # no graph can be captured while it is compiled
            if batch.page_size & (batch.page_size - 1):
                raise OutOfRange(f"Page size {batch.page_size}", "a power of two")
            self.kernel = warps_kernel(self.row.tile, self.eight, device)

    def _upload(self, device: torch.device, *parts: list[int], keep: bool) -> None:
        """Work items, splits and page offsets in one copy that does not block; `keep` its place."""
        parts = [part + [0] * (-len(part) % 4) for part in parts]  # each begins at 16 bytes
        table = torch.tensor([*chain(*parts)], dtype=torch.int32)
        if not keep or self.table is None or self.table.shape != table.shape:
            self.table = torch.empty_like(table, device=device)
        self.work, self.splits, self.indptr = self.table.split([*map(len, parts)])
        # Pinned memory of torch's own is not used again before the copy out of it is done.
        self.table.copy_(table.pin_memory() if self.table.is_cuda else table, non_blocking=True)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        scale: float = 1.0,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Attend over FP8 `kv` [S, 576] into `out` [B, H, 512], or [B, queries, H, 512].

        `scale` is the pool's per-tensor scale. `scales` [S, 4] (float32) are scales of the latent
        part's groups of 128; the rope part then has none. Of a plan for packed rows `kv` is
        [S, 656], uint8 or e4m3, and has all that it needs. Raises `OutOfRange` for a tensor of
        another type, shape or stride, and for rows that the page table names and `kv` lacks.
        """
        self._check(q_nope, q_pe, kv, out, scales)
        latent_scale = 1.0 if scales is not None or self.packed else scale
        sm_log2e = self.sm_scale * latent_scale * LOG2E
        if self.direct:
            self._read(q_nope, q_pe, kv, scales, sm_log2e, out, latent_scale)
            return
        self._read(q_nope, q_pe, kv, scales, sm_log2e, self.partial, 1.0)
        pdl = dependent_launch(q_nope.device)
        combine_kernel[(len(self.batch.lens), self.rows, RANK.value // self.columns)](
            self.partial,
            self.stats,
            self.splits,
            out,
            latent_scale,
            HEADS=self.rows,
            COLUMNS=self.columns,
            ROWS=self.merged,
            FINAL=out.dtype == torch.bfloat16,
            PDL=pdl,
            num_warps=4,
            **({"launch_pdl": True} if pdl else {}),
        )

    def _check(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> None:
        requests = len(self.batch.lens)
        kinds, rows = (torch.bfloat16,), (self.heads,)
        if q_nope.dim() == 4:
            rows = self.queries, self.heads
        elif self.queries > 1:
            rows = (self.rows,)
        door.need("q_nope", q_nope, kinds, requests, *rows, RANK.value)
        door.need("q_pe", q_pe, kinds, requests, *rows, ROPE.value)
        door.need("The output", out, (*kinds, torch.float32), requests, *rows, RANK.value)
        if self.packed:
            door.need("The packed pool", kv, (torch.uint8, door.FP8), None, door.PACKED_ROW)
        else:
            door.need("The pool", kv, (door.FP8,), None, RANK.value + ROPE.value)
        door.room("The pool", len(kv), self.slots)
        for name, tensor in (("q_nope", q_nope), ("q_pe", q_pe), ("The pool", kv)):
            door.aligned(name, tensor, 16)  # copied 16 bytes at a time
        if scales is None:
            return
        if self.packed:
            raise OutOfRange("Scales beside packed rows", "None: these have their own")
        door.need("The scales", scales, (torch.float32,), len(kv), 4)
        if self.row.kernel == "warps":
            raise OutOfRange(
                "Rows have scales and the plan does not know", "plan(..., scaled=True)"
            )

    def _read(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv: torch.Tensor,
        scales: torch.Tensor | None,
        sm_log2e: float,
        result: torch.Tensor,
        out_scale: float,
    ) -> None:
        """Results of every work item, by the row's kernel."""
        row, pdl = self.row, dependent_launch(q_nope.device)
        grid, page_size = (self.tiles, self.items), self.batch.page_size
        buffers = result, self.stats, self.indptr, self.batch.pages, self.work
        if row.kernel == "warps":
            page_bits, bf16 = page_size.bit_length() - 1, int(result.dtype == torch.bfloat16)
            numbers = sm_log2e, self.rows, self.heads, page_bits, out_scale, bf16
            self.kernel.launch(grid, 384, q_nope, q_pe, kv, *buffers, *numbers)
            return
        if row.kernel == "pairs":
            kernel, unit = pairs_kernel, torch.int16
            options = {"STAGES": row.stages, "num_stages": row.stages}
        else:
            kernel, unit = words_kernel, torch.int32
            options = {"VECTOR": row.vector, "PIPE": row.pipe, "num_stages": 1}
        rope = None
        if self.packed:  # the same bytes as BF16, and as float32 from the first scale on
            rope, scales = kv.view(torch.bfloat16), kv.view(torch.float32)[:, RANK.value // 4 :]
        kernel[grid](
            q_nope,
            q_pe,
            kv.view(unit),
            rope,
            scales,
            *buffers,
            sm_log2e,
            HEADS=self.rows,
            QUERIES=self.queries,
            TILE=row.tile,
            BLOCK=row.block,
            PAGE=page_size,
            SCALED=scales is not None,
            PACKED=self.packed,
            EIGHT=self.eight,
            ASM=q_nope.is_cuda,  # Triton's interpreter, on a CPU, does not know inline PTX
            PDL=pdl,
            num_warps=row.warps,
            **options,
            **({"launch_pdl": True} if pdl else {}),
        )


@cache
def dependent_launch(device: torch.device) -> bool:
    """Programmatic dependent launch: the next kernel of a chain is set up while this one drains.

    It took a fifth off a short request's step.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def warps_kernel(tile: int, eight: bool, device: torch.device) -> nvrtc.Kernel:
    """`decode_warps.cu` for tiles of 8, 16 or 32 query rows, which `eight` rounds to FP8."""
    options = f"-DGROUP={tile // 8}", f"-DEIGHT={int(eight)}"
    return nvrtc.Kernel("decode_warps.cu", "warps_kernel", device, *options)

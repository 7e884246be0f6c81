"""MLA decode that reads FP8 rows itself, for any number of heads.

With 8 heads a GPU the usual order, heads as the 16 or 64 rows of a matrix tile, wastes half of it
or more. There a tile's rows are tokens: scores are `K q^T`, outputs `K^T p`, both full. From 16
heads up the heads fill the rows: `q K^T` and `p K`. One kernel does both; HEAD and TOKEN are the
axes of heads and of tokens (or latent values) in its tiles. A block of rows is read as 32-bit
words a block ahead, so that loads fly while the last block is multiplied, and widened to FP16,
which holds every e4m3 value exactly.

The reference is `reference.attend`; `FusedAttention` plans and launches.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shadowkv_lab.batch import Batch
from shadowkv_lab.kernels.launch import LaunchRow, launch_row, multiprocessors

RANK = tl.constexpr(512)
ROPE = tl.constexpr(64)
CHUNK = tl.constexpr(128)  # latent values a dot takes; also the group of a per-128 scale
WORDS = tl.constexpr(144)  # 32-bit words of a row of 576 bytes
COMBINE_VALUES = 4096  # of a combine program: 32 a thread
LOG2E = 1.4426950408889634


@triton.jit
def widen(words, ASM: tl.constexpr):
    """int32 [M, N] of four e4m3 each -> fp16 [M, 4 N], in order."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; .reg .b32 x, y; mov.b32 {lo, hi}, $4;"
            "cvt.rn.f16x2.e4m3x2 x, lo; cvt.rn.f16x2.e4m3x2 y, hi;"
            "mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        a = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        b = ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        c = ((words >> 16) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        d = ((words >> 24) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (words.shape[0], 4 * words.shape[1]))
    if ASM:
        # An opaque move keeps the compiler from converting again for each use of the tile.
        wide = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [wide], dtype=tl.float16, is_pure=False, pack=2
        )
    return wide


@triton.jit
def slots_of(pages, base, token, PAGE: tl.constexpr):
    """Slots of a request's tokens, by its page table."""
    if PAGE == 1:
        return tl.load(pages + base + token)
    return tl.load(pages + base + token // PAGE) * PAGE + token % PAGE


@triton.jit
def load_rows(kv, slot, word, rope_word):
    """The words of [BLOCK] rows: four chunks of the latent part, and the rope part."""
    row = (kv + slot.to(tl.int64) * WORDS)[:, None]
    first = row + word[None, :]
    c0, c1 = tl.load(first), tl.load(first + 32)
    c2, c3 = tl.load(first + 64), tl.load(first + 96)
    return c0, c1, c2, c3, tl.load(row + 128 + rope_word[None, :])


@triton.jit
def group_scales(scales, slot, SCALED: tl.constexpr):
    """[BLOCK] scales of the latent part's four groups, if rows have scales of their own."""
    if SCALED:
        at = scales + slot.to(tl.int64) * 4
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        return slot, slot, slot, slot  # not looked at


@triton.jit
def score(k, q, s, HEAD: tl.constexpr):
    """Scores `s` plus a chunk's: [BLOCK, TILE] where heads are columns, else [TILE, BLOCK]."""
    if HEAD == 0:
        return tl.dot(q, tl.trans(k), s)
    else:
        return tl.dot(k, q, s)


@triton.jit
def weigh(p, scale, k, o, shrink, HEAD: tl.constexpr, SCALED: tl.constexpr):
    """A chunk's output so far, `o` times `shrink`, plus rows `k` weighed by p (and their scale)."""
    if SCALED:
        p *= tl.expand_dims(scale, HEAD)
    p = p.to(tl.float16)
    if HEAD == 0:
        return tl.dot(p, k, o * shrink)
    else:
        return tl.dot(tl.trans(k), p, o * shrink)


@triton.jit
def zeros(COUNT: tl.constexpr, TILE: tl.constexpr, HEAD: tl.constexpr):
    """Float32 zeros for COUNT tokens or values and TILE heads."""
    if HEAD == 0:
        return tl.zeros([TILE, COUNT], tl.float32)
    else:
        return tl.zeros([COUNT, TILE], tl.float32)


@triton.jit
def decode_kernel(q_nope, q_pe, kv, scales, partial, stats, indptr, pages, work, sm_log2e,
                  HEADS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
                  PAGE: tl.constexpr, SCALED: tl.constexpr, VECTOR: tl.constexpr,
                  ASM: tl.constexpr, PDL: tl.constexpr, PIPE: tl.constexpr):  # fmt: skip
    """One program a work item (request, first token, end) and tile of TILE heads.

    Leaves its normalised output in `partial` [items, HEADS, 512] and the running maximum and sum
    of its softmax (base 2) in `stats` [items, HEADS, 2].
    """
    HEAD: tl.constexpr = 0 if TILE >= 16 else 1
    TOKEN: tl.constexpr = 1 - HEAD
    item = tl.program_id(1)  # tiles of one item run side by side and share its rows in L2
    request = tl.load(work + item * 4)
    first, end = tl.load(work + item * 4 + 1), tl.load(work + item * 4 + 2)
    base = tl.load(indptr + request)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    heads = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = tl.expand_dims(heads < HEADS, TOKEN)
    lane = tl.arange(0, BLOCK)
    # Written so that the compiler sees VECTOR words side by side and loads them at once.
    word, rope_word = tl.arange(0, 32), tl.arange(0, 16)
    word = (word // VECTOR) * VECTOR + word % VECTOR
    rope_word = (rope_word // VECTOR) * VECTOR + rope_word % VECTOR
    here = slots_of(pages, base, tl.minimum(first + lane, end - 1), PAGE)
    if PIPE:
        c0, c1, c2, c3, cp = load_rows(kv, here, word, rope_word)
        ahead = slots_of(pages, base, tl.minimum(first + BLOCK + lane, end - 1), PAGE)

    at = tl.expand_dims((request * HEADS + heads).to(tl.int64), TOKEN)
    value = tl.expand_dims(tl.arange(0, CHUNK), HEAD)
    q = q_nope + at * RANK + value
    q0 = tl.load(q, mask=real, other=0.0).to(tl.float32)
    q1 = tl.load(q + CHUNK, mask=real, other=0.0).to(tl.float32)
    q2 = tl.load(q + 2 * CHUNK, mask=real, other=0.0).to(tl.float32)
    q3 = tl.load(q + 3 * CHUNK, mask=real, other=0.0).to(tl.float32)
    rope = tl.expand_dims(tl.arange(0, ROPE), HEAD)
    qp = tl.load(q_pe + at * ROPE + rope, mask=real, other=0.0).to(tl.float32)
    # BF16 queries reach past FP16's 65,504: each head is scaled by the power of two that puts its
    # largest value just below 2^16, exactly, and its scores are scaled back in float32.
    top = tl.maximum(tl.maximum(tl.abs(q0), tl.abs(q1)), tl.maximum(tl.abs(q2), tl.abs(q3)))
    top = tl.maximum(tl.max(top, TOKEN), tl.max(tl.abs(qp), TOKEN))
    exponent = tl.minimum(tl.maximum((top.to(tl.int32, bitcast=True) >> 23) & 255, 30), 254)
    up = tl.expand_dims(((269 - exponent) << 23).to(tl.float32, bitcast=True), TOKEN)
    # Past 2^93 softmax is one-hot whatever the scale; the cap keeps its scores finite.
    back = ((tl.minimum(exponent, 220) - 15) << 23).to(tl.float32, bitcast=True) * sm_log2e
    back = tl.expand_dims(back, TOKEN)
    q0, q1 = (q0 * up).to(tl.float16), (q1 * up).to(tl.float16)
    q2, q3 = (q2 * up).to(tl.float16), (q3 * up).to(tl.float16)
    qp = (qp * up).to(tl.float16)

    peak = tl.full([TILE], float("-inf"), tl.float32)
    mass = zeros(BLOCK, TILE, HEAD)
    o0, o1 = zeros(CHUNK, TILE, HEAD), zeros(CHUNK, TILE, HEAD)
    o2, o3 = zeros(CHUNK, TILE, HEAD), zeros(CHUNK, TILE, HEAD)
    for start in tl.range(first, end, BLOCK, num_stages=1):
        if not PIPE:
            c0, c1, c2, c3, cp = load_rows(kv, here, word, rope_word)
            ahead = slots_of(pages, base, tl.minimum(start + BLOCK + lane, end - 1), PAGE)
        k0, k1, k2, k3 = widen(c0, ASM), widen(c1, ASM), widen(c2, ASM), widen(c3, ASM)
        kp = widen(cp, ASM)
        g0, g1, g2, g3 = group_scales(scales, here, SCALED)
        here = ahead
        if PIPE:
            c0, c1, c2, c3, cp = load_rows(kv, here, word, rope_word)
            ahead = slots_of(pages, base, tl.minimum(start + 2 * BLOCK + lane, end - 1), PAGE)
        s = score(kp, qp, zeros(BLOCK, TILE, HEAD), HEAD)
        if SCALED or TILE < 32:  # sums of their own, not one chain: the matrix units need not wait
            s0 = score(k0, q0, zeros(BLOCK, TILE, HEAD), HEAD)
            s1 = score(k1, q1, zeros(BLOCK, TILE, HEAD), HEAD)
            s2 = score(k2, q2, zeros(BLOCK, TILE, HEAD), HEAD)
            s3 = score(k3, q3, zeros(BLOCK, TILE, HEAD), HEAD)
            if SCALED:  # in float32, outside the dots: nothing is rounded
                s0, s1 = s0 * tl.expand_dims(g0, HEAD), s1 * tl.expand_dims(g1, HEAD)
                s2, s3 = s2 * tl.expand_dims(g2, HEAD), s3 * tl.expand_dims(g3, HEAD)
            s = (s + (s0 + s1)) + (s2 + s3)
        else:  # registers are short with many heads
            s = score(k1, q1, score(k0, q0, s, HEAD), HEAD)
            s = score(k3, q3, score(k2, q2, s, HEAD), HEAD)
        s = tl.where(tl.expand_dims(start + lane < end, HEAD), s * back, float("-inf"))
        bound = s
        if SCALED:  # the peak is that of weight times largest scale, so that FP16 holds these
            largest = tl.maximum(tl.maximum(g0, g1), tl.maximum(g2, g3))
            bound += tl.expand_dims(tl.log2(tl.maximum(largest, 1e-18)), HEAD)
        highest = tl.maximum(peak, tl.max(bound, TOKEN))
        # Weights up to 2^15, not 1: FP16 then keeps eleven bits of far smaller ones.
        p = tl.exp2(s - tl.expand_dims(highest, TOKEN) + 15.0)
        shrink = tl.expand_dims(tl.exp2(peak - highest), TOKEN)
        mass = mass * shrink + p
        o0 = weigh(p, g0, k0, o0, shrink, HEAD, SCALED)
        o1 = weigh(p, g1, k1, o1, shrink, HEAD, SCALED)
        o2 = weigh(p, g2, k2, o2, shrink, HEAD, SCALED)
        o3 = weigh(p, g3, k3, o3, shrink, HEAD, SCALED)
        peak = highest
    total = tl.sum(mass, TOKEN)
    mark = stats + (item * HEADS + heads) * 2
    tl.store(mark, peak, mask=heads < HEADS)
    tl.store(mark + 1, total, mask=heads < HEADS)
    inverse = tl.expand_dims(1.0 / total, TOKEN)
    at = tl.expand_dims((item * HEADS + heads).to(tl.int64), TOKEN)
    out = partial + at * RANK + value
    tl.store(out, o0 * inverse, mask=real)
    tl.store(out + CHUNK, o1 * inverse, mask=real)
    tl.store(out + 2 * CHUNK, o2 * inverse, mask=real)
    tl.store(out + 3 * CHUNK, o3 * inverse, mask=real)


@triton.jit
def combine_kernel(partial, stats, splits, out, out_scale, HEADS: tl.constexpr,
                   COLUMNS: tl.constexpr, ROWS: tl.constexpr, FINAL: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """One program a request, head and COLUMNS output columns: merges the request's work items.

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


class FusedAttention:
    """`fused_fp8`'s attention: plan once for a batch, run once a layer, no host sync."""

    name = "lab_fused_fp8"

    def plan(self, batch: Batch, heads: int, sm_scale: float, *, row: LaunchRow | None = None,
             **_: object) -> None:  # fmt: skip
        """Choose launch parameters (the table's, or `row`), cut the work, allocate partials."""
        device = batch.pages.device
        self.batch, self.heads, self.sm_scale = batch, heads, sm_scale
        self.row = row or launch_row(device, heads, batch.concurrency, batch.live_tokens)
        self.tiles = triton.cdiv(heads, self.row.tile)
        programs = self.row.blocks_per_sm * multiprocessors(device)
        items = split(batch.lens, self.row.block, max(1, programs // self.tiles))
        counts = torch.bincount(torch.tensor([b for b, *_ in items]), minlength=len(batch.lens))
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.splits = starts.int().to(device)
        self.work = torch.tensor([(*item, 0) for item in items], dtype=torch.int32).to(device)
        shape = len(items), heads, RANK.value
        self.partial = torch.empty(shape, dtype=torch.float32, device=device)
        self.stats = torch.empty(*shape[:2], 2, dtype=torch.float32, device=device)
        # All of a request's items at once where they fit in registers: one round of loads.
        self.rows = min(256, triton.next_power_of_2(int(counts.max())))
        self.columns = min(128, max(16, COMBINE_VALUES // self.rows))

    def run(self, q_nope: torch.Tensor, q_pe: torch.Tensor, kv: torch.Tensor, out: torch.Tensor,
            scale: float = 1.0, scales: torch.Tensor | None = None) -> None:  # fmt: skip
        """Attend over FP8 `kv` [S, 576] into `out` [B, H, 512].

        `scale` is the pool's per-tensor scale. `scales` [S, 4] (float32) are scales of the latent
        part's groups of 128; the rope part then has none.
        """
        # Programmatic dependent launch: the next kernel of the chain is set up while this one
        # drains. It took a fifth off a short request's step.
        row, on_gpu = self.row, q_nope.is_cuda
        PDL = on_gpu and torch.cuda.get_device_capability(q_nope.device) >= (9, 0)
        # Triton's interpreter, on a CPU, knows neither inline PTX nor dependent launches.
        latent_scale = 1.0 if scales is not None else scale
        words = kv.view(torch.int32)
        decode_kernel[(self.tiles, len(self.work))](
            q_nope, q_pe, words, scales, self.partial, self.stats, self.batch.indptr,
            self.batch.pages, self.work, self.sm_scale * latent_scale * LOG2E,
            HEADS=self.heads, TILE=row.tile, BLOCK=row.block, PAGE=self.batch.page_size,
            SCALED=scales is not None, VECTOR=row.vector, ASM=on_gpu, PDL=PDL, PIPE=row.pipe,
            num_warps=row.warps, num_stages=1, **({"launch_pdl": True} if PDL else {}),
        )  # fmt: skip
        combine_kernel[(len(self.batch.lens), self.heads, RANK.value // self.columns)](
            self.partial, self.stats, self.splits, out, latent_scale, HEADS=self.heads,
            COLUMNS=self.columns, ROWS=self.rows, FINAL=out.dtype == torch.bfloat16, PDL=PDL,
            num_warps=4, **({"launch_pdl": True} if PDL else {}),
        )  # fmt: skip

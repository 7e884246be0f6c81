"""The decode kernel for many heads on Hopper, in Gluon: some warps widen rows, others multiply.

Up to 64 query rows are the 64 rows of Hopper's wgmma. Four warps read FP8 rows, widen them to
FP16 and leave them in shared memory, once for all heads and for both products, a block ahead of
the eight warps that multiply: scores of 64 tokens, then each half of them adds up half of the
latent values. FP16 holds every e4m3 value exactly.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROWS = gl.constexpr(64)  # query rows of a program
BLOCK = gl.constexpr(64)  # tokens
RANK = gl.constexpr(512)
ROPE = gl.constexpr(64)
CHUNK = gl.constexpr(128)  # latent values read and widened at once
WORDS = gl.constexpr(144)  # 32-bit words of a row of 576 bytes
STAGES = gl.constexpr(2)  # blocks in shared memory
WARPS = 8  # that multiply


@gluon.jit
def widen(words):
    """int32 [M, N] of four e4m3 each -> fp16 [M, 4 N], in order."""
    a, b, c, d = gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; .reg .b32 x, y; mov.b32 {lo, hi}, $4;"
        "cvt.rn.f16x2.e4m3x2 x, lo; cvt.rn.f16x2.e4m3x2 y, hi;"
        "mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }",
        "=h,=h,=h,=h,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    wide = gl.join(gl.join(a, c), gl.join(b, d))
    return wide.reshape([words.shape[0], 4 * words.shape[1]])


@gluon.jit
def load_words(kv, slot, first, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """COUNT words of [BLOCK] rows, from word `first` on."""
    word = gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(kv + (slot.to(gl.int64) * WORDS)[:, None] + (first + word)[None, :])


@gluon.jit
def slots_of(pages, base, start, end, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Slots of a block's tokens; past the end, the last token's. A block lies in one page."""
    lane = gl.arange(0, BLOCK, layout=LAYOUT)
    token = gl.minimum(start + lane, end - 1)
    if PAGE == 1:
        return gl.load(pages + base + token)
    else:
        begin = gl.minimum(start, end - 1)
        return gl.load(pages + base + begin // PAGE) * PAGE + token % PAGE


@gluon.jit
def producer(kv, pages, base, first, end, latent, rope, full, empty, PAGE: gl.constexpr):
    """Four warps: rows of [BLOCK] tokens to FP16 in shared memory, three chunks of loads ahead."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    SLOTS: gl.constexpr = gl.SliceLayout(1, WIDE)
    slot = slots_of(pages, base, first, end, PAGE, SLOTS)
    c0 = load_words(kv, slot, 0, 32, WIDE)
    c1 = load_words(kv, slot, 32, 32, WIDE)
    c2 = load_words(kv, slot, 64, 32, WIDE)
    ahead = slots_of(pages, base, first + BLOCK, end, PAGE, SLOTS)
    stage = 0
    phase = 1
    for start in range(first, end, BLOCK):
        mbarrier.wait(empty.index(stage), phase)
        here = latent.index(stage)
        here.slice(0, CHUNK, dim=1).store(widen(c0))
        c3 = load_words(kv, slot, 96, 32, WIDE)
        here.slice(CHUNK, CHUNK, dim=1).store(widen(c1))
        cp = load_words(kv, gl.convert_layout(slot, gl.SliceLayout(1, NARROW)), 128, 16, NARROW)
        slot = ahead
        here.slice(2 * CHUNK, CHUNK, dim=1).store(widen(c2))
        c0 = load_words(kv, slot, 0, 32, WIDE)
        here.slice(3 * CHUNK, CHUNK, dim=1).store(widen(c3))
        c1 = load_words(kv, slot, 32, 32, WIDE)
        rope.index(stage).store(widen(cp))
        c2 = load_words(kv, slot, 64, 32, WIDE)
        ahead = slots_of(pages, base, start + 2 * BLOCK, end, PAGE, SLOTS)
        hopper.fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def consumer(
    query,
    query_rope,
    weights,
    latent,
    rope,
    full,
    empty,
    back,
    limit,
    first,
    end,
    partial,
    stats,
    item,
    row0,
    rows,
):
    """Eight warps: scores, softmax and outputs of a block at a time."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    OUTPUTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUTS)
    peak = gl.full([ROWS], -1e30, gl.float32, BY_ROW)
    mass = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    out = gl.zeros([ROWS, RANK], gl.float32, OUTPUTS)
    nothing = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    lane = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SCORES))
    stage = 0
    phase = 0
    for start in range(first, end, BLOCK):
        mbarrier.wait(full.index(stage), phase)
        s = hopper.warpgroup_mma(
            query_rope, rope.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        s = hopper.warpgroup_mma(query, latent.index(stage).permute((1, 0)), s, is_async=True)
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        seen = (start + lane)[None, :] < limit[:, None]
        s = gl.where(seen, s * back[:, None], float("-inf"))
        highest = gl.maximum(peak, gl.max(s, 1))
        # Weights up to 2^15, not 1: FP16 then keeps eleven bits of far smaller ones.
        p = gl.exp2(s - highest[:, None] + 15.0)
        shrink = gl.exp2(peak - highest)
        mass = mass * shrink[:, None] + p
        peak = highest
        weights.store(p.to(gl.float16))
        out = out * gl.convert_layout(shrink, OUT_ROW)[:, None]
        hopper.fence_async_shared()
        gl.thread_barrier()
        out = hopper.warpgroup_mma(weights, latent.index(stage), out, is_async=True)
        out = hopper.warpgroup_mma_wait(0, deps=[out])
        mbarrier.arrive(empty.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    total = gl.sum(mass, 1)
    row = row0 + gl.arange(0, ROWS, layout=BY_ROW)
    mark = stats + (item * rows + row) * 2
    gl.store(mark, peak, mask=row < rows)
    gl.store(mark + 1, total, mask=row < rows)
    inverse = gl.where(total > 0, 1.0 / total, 0.0)
    row = row0 + gl.arange(0, ROWS, layout=OUT_ROW)
    value = gl.arange(0, RANK, layout=gl.SliceLayout(0, OUTPUTS))
    at = partial + (item * rows + row).to(gl.int64)[:, None] * RANK + value[None, :]
    gl.store(at, out * gl.convert_layout(inverse, OUT_ROW)[:, None], mask=(row < rows)[:, None])


@gluon.jit
def load_query(at, real, up, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    value = gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(at[:, None] + value[None, :], mask=real[:, None], other=0.0).to(gl.float32)


@gluon.jit
def wide_kernel(
    q_nope,
    q_pe,
    kv,
    partial,
    stats,
    indptr,
    pages,
    work,
    sm_log2e,
    rows,
    heads,
    PAGE: gl.constexpr,
    PDL: gl.constexpr,
):
    """One program per work item (request, first token, end, tokens) and ROWS query rows.

    Leaves its normalised output in `partial` [items, rows, 512] and the maximum and sum of its
    softmax (base 2) in `stats` [items, rows, 2].
    """
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    item = gl.program_id(1)  # tiles of one item run side by side and share its rows in L2
    request = gl.load(work + item * 4)
    first, end = gl.load(work + item * 4 + 1), gl.load(work + item * 4 + 2)
    tokens = gl.load(work + item * 4 + 3)
    base = gl.load(indptr + request)
    row0 = gl.program_id(0) * ROWS
    query = gl.allocate_shared_memory(gl.float16, [ROWS, RANK], SHARED)
    query_rope = gl.allocate_shared_memory(gl.float16, [ROWS, ROPE], SHARED)
    latent = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK, RANK], SHARED)
    rope = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK, ROPE], SHARED)
    weights = gl.allocate_shared_memory(gl.float16, [ROWS, BLOCK], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    # Queries, scaled into FP16: each row by the power of two that puts its largest value just
    # below 2^16, exactly; its scores are scaled back in float32.
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    QP: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    row = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, Q))
    real = row < rows
    at = q_nope + (request * rows + row).to(gl.int64) * RANK
    q0 = load_query(at, real, 1, CHUNK, Q)
    q1 = load_query(at + CHUNK, real, 1, CHUNK, Q)
    q2 = load_query(at + 2 * CHUNK, real, 1, CHUNK, Q)
    q3 = load_query(at + 3 * CHUNK, real, 1, CHUNK, Q)
    top = gl.maximum(gl.maximum(gl.abs(q0), gl.abs(q1)), gl.maximum(gl.abs(q2), gl.abs(q3)))
    row_p = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, QP))
    at_p = q_pe + (request * rows + row_p).to(gl.int64) * ROPE
    qp = load_query(at_p, row_p < rows, 1, ROPE, QP)
    top_p = gl.convert_layout(gl.max(gl.abs(qp), 1), gl.SliceLayout(1, Q))
    top = gl.maximum(gl.max(top, 1), top_p)
    exponent = gl.minimum(gl.maximum((top.to(gl.int32, bitcast=True) >> 23) & 255, 30), 254)
    up = ((269 - exponent) << 23).to(gl.float32, bitcast=True)
    # Past 2^93 softmax is one-hot whatever the scale; the cap keeps its scores finite.
    back = ((gl.minimum(exponent, 220) - 15) << 23).to(gl.float32, bitcast=True) * sm_log2e
    query.slice(0, CHUNK, dim=1).store((q0 * up[:, None]).to(gl.float16))
    query.slice(CHUNK, CHUNK, dim=1).store((q1 * up[:, None]).to(gl.float16))
    query.slice(2 * CHUNK, CHUNK, dim=1).store((q2 * up[:, None]).to(gl.float16))
    query.slice(3 * CHUNK, CHUNK, dim=1).store((q3 * up[:, None]).to(gl.float16))
    up_p = gl.convert_layout(up, gl.SliceLayout(1, QP))
    query_rope.store((qp * up_p[:, None]).to(gl.float16))
    hopper.fence_async_shared()
    gl.thread_barrier()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    back = gl.convert_layout(back, BY_ROW)
    # Query token i of q sees all but the last q - 1 - i tokens.
    own = gl.minimum(row0 + gl.arange(0, ROWS, layout=BY_ROW), rows - 1)
    limit = gl.minimum(end, tokens - (rows - 1 - own) // heads)
    gl.warp_specialize(
        [
            (
                consumer,
                (
                    query,
                    query_rope,
                    weights,
                    latent,
                    rope,
                    full,
                    empty,
                    back,
                    limit,
                    first,
                    end,
                    partial,
                    stats,
                    item,
                    row0,
                    rows,
                ),
            ),
            (producer, (kv, pages, base, first, end, latent, rope, full, empty, PAGE)),
        ],
        [4],
        [104],
    )

"""The decode kernel for many heads on Hopper, in Gluon: some warps widen rows, others multiply.

Up to 64 query rows are the 64 rows of Hopper's wgmma. Four warps copy FP8 rows into shared memory,
two blocks of 64 tokens ahead, and widen them there to FP16, once for all heads and for both
products. Eight warps multiply: scores of 64 tokens, then each half of them adds up half of the
latent values. There is room for one block in FP16: it is handed over in chunks of 128 values, and
refilled chunk by chunk while the outputs of the last ones are still being added up. FP16 holds
every e4m3 value exactly.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

ROWS = gl.constexpr(64)  # query rows of a program
BLOCK = gl.constexpr(64)  # tokens
RANK = gl.constexpr(512)
ROPE = gl.constexpr(64)
CHUNK = gl.constexpr(128)  # latent values read and widened at once
WORDS = gl.constexpr(144)  # 32-bit words of a row of 576 bytes
CHUNKS = gl.constexpr(4)
STAGES = gl.constexpr(2)  # blocks of FP8 rows in shared memory
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
def copy_words(kv, slot, first, target, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """COUNT words of [BLOCK] rows, from word `first` on, into shared memory; does not wait."""
    word = gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    row = gl.convert_layout(slot, gl.SliceLayout(1, LAYOUT)).to(gl.int64) * WORDS
    async_copy.async_copy_global_to_shared(target, kv + row[:, None] + (first + word)[None, :])


@gluon.jit
def copy_block(kv, slot, latent8, rope8, stage):
    """All words of [BLOCK] rows, as one group of copies."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    for j in gl.static_range(CHUNKS):
        copy_words(kv, slot, j * 32, latent8.index(stage * CHUNKS + j), 32, WIDE)
    copy_words(kv, slot, 128, rope8.index(stage), 16, NARROW)
    async_copy.commit_group()


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
def hand_over(words, target, full, empty, phase):
    """Widened words into a chunk of shared memory, once it is free."""
    wide = widen(words)
    mbarrier.wait(empty, phase)
    target.store(wide)
    hopper.fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def producer(
    kv, pages, base, first, end, latent8, rope8, latent, rope, full, empty, PAGE: gl.constexpr
):
    """Four warps: FP8 rows into shared memory, and from there to FP16."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    SLOTS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
    copy_block(kv, slots_of(pages, base, first, end, PAGE, SLOTS), latent8, rope8, 0)
    copy_block(kv, slots_of(pages, base, first + BLOCK, end, PAGE, SLOTS), latent8, rope8, 1)
    ahead = slots_of(pages, base, first + 2 * BLOCK, end, PAGE, SLOTS)
    stage = 0
    phase = 1
    for start in range(first, end, BLOCK):
        async_copy.wait_group(1)
        gl.thread_barrier()
        hand_over(rope8.index(stage).load(NARROW), rope, full.index(4), empty.index(4), phase)
        for j in gl.static_range(CHUNKS):
            words = latent8.index(stage * CHUNKS + j).load(WIDE)
            hand_over(words, latent.index(j), full.index(j), empty.index(j), phase)
        copy_block(kv, ahead, latent8, rope8, stage)
        ahead = slots_of(pages, base, start + 3 * BLOCK, end, PAGE, SLOTS)
        stage ^= 1
        phase ^= 1
    async_copy.wait_group(0)


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
    OUTPUTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUTS)
    peak = gl.full([ROWS], -1e30, gl.float32, BY_ROW)
    mass = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    o0 = gl.zeros([ROWS, CHUNK], gl.float32, OUTPUTS)
    o1, o2, o3 = o0, o0, o0
    nothing = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    lane = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SCORES))
    phase = 0
    for start in range(first, end, BLOCK):
        mbarrier.wait(full.index(4), phase)
        s = hopper.warpgroup_mma(
            query_rope, rope.permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        for j in gl.static_range(CHUNKS):
            mbarrier.wait(full.index(j), phase)
            k = latent.index(j).permute((1, 0))
            s = hopper.warpgroup_mma(query.index(j), k, s, is_async=True)
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(empty.index(4), count=1)
        seen = (start + lane)[None, :] < limit[:, None]
        s = gl.where(seen, s * back[:, None], float("-inf"))
        highest = gl.maximum(peak, gl.max(s, 1))
        # Weights up to 2^15, not 1: FP16 then keeps eleven bits of far smaller ones.
        p = gl.exp2(s - highest[:, None] + 15.0)
        shrink = gl.exp2(peak - highest)
        mass = mass * shrink[:, None] + p
        peak = highest
        weights.store(p.to(gl.float16))
        shrink = gl.convert_layout(shrink, OUT_ROW)[:, None]
        hopper.fence_async_shared()
        gl.thread_barrier()
        o0 = hopper.warpgroup_mma(weights, latent.index(0), o0 * shrink, is_async=True)
        o1 = hopper.warpgroup_mma(weights, latent.index(1), o1 * shrink, is_async=True)
        o2 = hopper.warpgroup_mma(weights, latent.index(2), o2 * shrink, is_async=True)
        o3 = hopper.warpgroup_mma(weights, latent.index(3), o3 * shrink, is_async=True)
        o0 = hopper.warpgroup_mma_wait(3, deps=[o0])
        mbarrier.arrive(empty.index(0), count=1)
        o1 = hopper.warpgroup_mma_wait(2, deps=[o1])
        mbarrier.arrive(empty.index(1), count=1)
        o2 = hopper.warpgroup_mma_wait(1, deps=[o2])
        mbarrier.arrive(empty.index(2), count=1)
        o3 = hopper.warpgroup_mma_wait(0, deps=[o3])
        mbarrier.arrive(empty.index(3), count=1)
        phase ^= 1
    total = gl.sum(mass, 1)
    row = row0 + gl.arange(0, ROWS, layout=BY_ROW)
    mark = stats + (item * rows + row) * 2
    gl.store(mark, peak, mask=row < rows)
    gl.store(mark + 1, total, mask=row < rows)
    inverse = gl.where(total > 0, 1.0 / total, 0.0)
    row = row0 + gl.arange(0, ROWS, layout=OUT_ROW)
    value = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, OUTPUTS))
    at = partial + (item * rows + row).to(gl.int64)[:, None] * RANK + value[None, :]
    inverse = gl.convert_layout(inverse, OUT_ROW)[:, None]
    real = (row < rows)[:, None]
    gl.store(at, o0 * inverse, mask=real)
    gl.store(at + CHUNK, o1 * inverse, mask=real)
    gl.store(at + 2 * CHUNK, o2 * inverse, mask=real)
    gl.store(at + 3 * CHUNK, o3 * inverse, mask=real)


@gluon.jit
def load_query(at, real, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
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
    REGISTERS: gl.constexpr = 104,
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
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    query = gl.allocate_shared_memory(gl.float16, [CHUNKS, ROWS, CHUNK], SHARED)
    query_rope = gl.allocate_shared_memory(gl.float16, [ROWS, ROPE], SHARED)
    latent = gl.allocate_shared_memory(gl.float16, [CHUNKS, BLOCK, CHUNK], SHARED)
    rope = gl.allocate_shared_memory(gl.float16, [BLOCK, ROPE], SHARED)
    weights = gl.allocate_shared_memory(gl.float16, [ROWS, BLOCK], SHARED)
    latent8 = gl.allocate_shared_memory(gl.int32, [STAGES * CHUNKS, BLOCK, 32], PLAIN)
    rope8 = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK, 16], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CHUNKS + 1):  # the last is the rope part's
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
    q0 = load_query(at, real, CHUNK, Q)
    q1 = load_query(at + CHUNK, real, CHUNK, Q)
    q2 = load_query(at + 2 * CHUNK, real, CHUNK, Q)
    q3 = load_query(at + 3 * CHUNK, real, CHUNK, Q)
    top = gl.maximum(gl.maximum(gl.abs(q0), gl.abs(q1)), gl.maximum(gl.abs(q2), gl.abs(q3)))
    row_p = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, QP))
    at_p = q_pe + (request * rows + row_p).to(gl.int64) * ROPE
    qp = load_query(at_p, row_p < rows, ROPE, QP)
    top_p = gl.convert_layout(gl.max(gl.abs(qp), 1), gl.SliceLayout(1, Q))
    top = gl.maximum(gl.max(top, 1), top_p)
    exponent = gl.minimum(gl.maximum((top.to(gl.int32, bitcast=True) >> 23) & 255, 30), 254)
    up = ((269 - exponent) << 23).to(gl.float32, bitcast=True)
    # Past 2^93 softmax is one-hot whatever the scale; the cap keeps its scores finite.
    back = ((gl.minimum(exponent, 220) - 15) << 23).to(gl.float32, bitcast=True) * sm_log2e
    query.index(0).store((q0 * up[:, None]).to(gl.float16))
    query.index(1).store((q1 * up[:, None]).to(gl.float16))
    query.index(2).store((q2 * up[:, None]).to(gl.float16))
    query.index(3).store((q3 * up[:, None]).to(gl.float16))
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
            (
                producer,
                (
                    kv,
                    pages,
                    base,
                    first,
                    end,
                    latent8,
                    rope8,
                    latent,
                    rope,
                    full,
                    empty,
                    PAGE,
                ),
            ),
        ],
        [4],
        [REGISTERS],
    )

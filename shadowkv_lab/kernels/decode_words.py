"""The decode kernel that widens rows on their way into shared memory.

With 8 heads per GPU the usual order, heads as the 16 or 64 rows of a matrix tile, wastes half of it
or more. There a tile's rows are tokens: scores are `K q^T`, outputs `K^T p`, both full. From 16
heads up the heads fill the rows: `q K^T` and `p K`. One kernel does both; HEAD and TOKEN are the
axes of heads and of tokens (or latent values) in its tiles. A block of rows is read as 32-bit
words a block ahead, so that loads fly while the last block is multiplied, and widened to FP16,
which holds every e4m3 value exactly.

It starts fastest, so most short loads take it; and it alone feeds Hopper's wgmma (64 heads), which
wants FP16 in shared memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

RANK = tl.constexpr(512)
ROPE = tl.constexpr(64)
CHUNK = tl.constexpr(128)  # latent values a dot takes; also the group of a per-128 scale
WORDS = tl.constexpr(144)  # 32-bit words of a row of 576 bytes
# A packed row (fp8_ds_mla): 512 bytes of e4m3, four float32 scales, 64 BF16 values.
PACKED_WORDS = tl.constexpr(164)
PACKED_ROPE = tl.constexpr(264)  # BF16 values in front of the rope part


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
def slots_of(pages, base, start, lane, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Slots of a block's tokens, by the request's page table; past the end, the last token's.

    Items begin at multiples of BLOCK, so that a block lies in one page of BLOCK or more tokens.
    """
    token = tl.minimum(start + lane, end - 1)
    if PAGE == 1:
        slot = tl.load(pages + base + token)
    elif PAGE % BLOCK == 0:
        slot = tl.load(pages + base + tl.minimum(start, end - 1) // PAGE) * PAGE + token % PAGE
    else:
        slot = tl.load(pages + base + token // PAGE) * PAGE + token % PAGE
    return slot


@triton.jit
def seen_by(heads, tokens, end, HEADS: tl.constexpr, QUERIES: tl.constexpr):
    """Where the tokens end that each query row sees: query token i of q not the last q - 1 - i."""
    own = tl.minimum(heads, HEADS - 1) // (HEADS // QUERIES)
    return tl.minimum(end, tokens - (QUERIES - 1) + own)


@triton.jit
def load_rows(kv, rope, slot, word, rope_word, PACKED: tl.constexpr):
    """The words of [BLOCK] rows: four chunks of the latent part, and the rope part."""
    row = (kv + slot.to(tl.int64) * (PACKED_WORDS if PACKED else WORDS))[:, None]
    first = row + word[None, :]
    c0, c1 = tl.load(first), tl.load(first + 32)
    c2, c3 = tl.load(first + 64), tl.load(first + 96)
    cp = load_rope(rope, slot) if PACKED else tl.load(row + 128 + rope_word[None, :])
    return c0, c1, c2, c3, cp


@triton.jit
def load_rope(rope, slot):
    """The BF16 rope parts [BLOCK, 64] of packed rows."""
    row = rope + slot.to(tl.int64) * (2 * PACKED_WORDS) + PACKED_ROPE
    return tl.load(row[:, None] + tl.arange(0, ROPE)[None, :])


@triton.jit
def group_scales(scales, slot, SCALED: tl.constexpr, PACKED: tl.constexpr):
    """[BLOCK] scales of the latent part's four groups, if rows have scales of their own."""
    if SCALED:
        at = scales + slot.to(tl.int64) * (PACKED_WORDS if PACKED else 4)
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        return slot, slot, slot, slot  # not looked at


@triton.jit
def inverse_of(total, QUERIES: tl.constexpr):
    """1 / total; 0 for a row that saw no token, which is then weighed with 0."""
    inverse = 1.0 / total
    if QUERIES > 1:
        inverse = tl.where(total > 0, inverse, 0.0)
    return inverse


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
def query_scales(top, sm_log2e, EIGHT: tl.constexpr):
    """What heads with largest values `top` are scaled by, up into FP16, and their scores by, back.

    BF16 queries reach past FP16's 65,504: each head is scaled by the power of two that puts its
    largest value just below 2^16, exactly, and its scores are scaled back in float32. For EIGHT,
    queries in FP8, it is put below 2^8 of e4m3's 448.
    """
    LESS: tl.constexpr = 8 if EIGHT else 0
    exponent = tl.minimum(tl.maximum((top.to(tl.int32, bitcast=True) >> 23) & 255, 30), 254)
    up = ((269 - LESS - exponent) << 23).to(tl.float32, bitcast=True)
    # Past 2^93 softmax is one-hot whatever the scale; the cap keeps its scores finite.
    back = ((tl.minimum(exponent, 220) - 15 + LESS) << 23).to(tl.float32, bitcast=True)
    return up, back * sm_log2e


@triton.jit
def scaled(q, up, EIGHT: tl.constexpr):
    """Queries times `up` in float32; with EIGHT rounded to e4m3's values, to nearest, ties to even.

    By hand, as Triton's interpreter converts to e4m3 wrongly: the 20 last bits of a mantissa go,
    and below 2^-6 what is finer than 2^-9.
    """
    q *= up
    if EIGHT:
        bits = q.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        tiny = (q + 24576.0) - 24576.0
        q = tl.where(tl.abs(q) < 0.015625, tiny, bits.to(tl.float32, bitcast=True))
    return q


@triton.jit
def words_kernel(
    q_nope,
    q_pe,
    kv,
    rope,
    scales,
    partial,
    stats,
    indptr,
    pages,
    work,
    sm_log2e,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    SCALED: tl.constexpr,
    PACKED: tl.constexpr,
    EIGHT: tl.constexpr,
    VECTOR: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
    PIPE: tl.constexpr,
):
    """One program per work item (request, first token, end) and tile of TILE heads.

    Leaves its normalised output in `partial` [items, HEADS, 512] and the running maximum and sum
    of its softmax (base 2) in `stats` [items, HEADS, 2]. `rope` are PACKED rows as BF16: their rope
    parts, and the queries for them, are multiplied in BF16.
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
    limit = seen_by(heads, tl.load(work + item * 4 + 3), end, HEADS, QUERIES)
    lane = tl.arange(0, BLOCK)
    # Written so that the compiler sees VECTOR words side by side and loads them at once.
    word, rope_word = tl.arange(0, 32), tl.arange(0, 16)
    word = (word // VECTOR) * VECTOR + word % VECTOR
    rope_word = (rope_word // VECTOR) * VECTOR + rope_word % VECTOR
    here = slots_of(pages, base, first, lane, end, PAGE, BLOCK)
    if PIPE:
        c0, c1, c2, c3, cp = load_rows(kv, rope, here, word, rope_word, PACKED)
        ahead = slots_of(pages, base, first + BLOCK, lane, end, PAGE, BLOCK)

    at = tl.expand_dims((request * HEADS + heads).to(tl.int64), TOKEN)
    value = tl.expand_dims(tl.arange(0, CHUNK), HEAD)
    q = q_nope + at * RANK + value
    q0 = tl.load(q, mask=real, other=0.0).to(tl.float32)
    q1 = tl.load(q + CHUNK, mask=real, other=0.0).to(tl.float32)
    q2 = tl.load(q + 2 * CHUNK, mask=real, other=0.0).to(tl.float32)
    q3 = tl.load(q + 3 * CHUNK, mask=real, other=0.0).to(tl.float32)
    rope_value = tl.expand_dims(tl.arange(0, ROPE), HEAD)
    qp = tl.load(q_pe + at * ROPE + rope_value, mask=real, other=0.0).to(tl.float32)
    top = tl.maximum(tl.maximum(tl.abs(q0), tl.abs(q1)), tl.maximum(tl.abs(q2), tl.abs(q3)))
    top = tl.maximum(tl.max(top, TOKEN), tl.max(tl.abs(qp), TOKEN))
    up, back = query_scales(top, sm_log2e, EIGHT)
    up, back = tl.expand_dims(up, TOKEN), tl.expand_dims(back, TOKEN)
    q0, q1 = scaled(q0, up, EIGHT).to(tl.float16), scaled(q1, up, EIGHT).to(tl.float16)
    q2, q3 = scaled(q2, up, EIGHT).to(tl.float16), scaled(q3, up, EIGHT).to(tl.float16)
    # The interpreter multiplies BF16 wrongly, and scaling by a power of two is exact in BF16.
    ROPE_KIND: tl.constexpr = (tl.bfloat16 if ASM else tl.float32) if PACKED else tl.float16
    qp = scaled(qp, up, EIGHT).to(ROPE_KIND)

    # A query row may see none of an item's tokens, if the request has several.
    peak = tl.full([TILE], float("-inf") if QUERIES == 1 else -1e30, tl.float32)
    mass = zeros(BLOCK, TILE, HEAD)
    o0, o1 = zeros(CHUNK, TILE, HEAD), zeros(CHUNK, TILE, HEAD)
    o2, o3 = zeros(CHUNK, TILE, HEAD), zeros(CHUNK, TILE, HEAD)
    for start in tl.range(first, end, BLOCK, num_stages=1):
        if not PIPE:
            c0, c1, c2, c3, cp = load_rows(kv, rope, here, word, rope_word, PACKED)
            ahead = slots_of(pages, base, start + BLOCK, lane, end, PAGE, BLOCK)
        k0, k1, k2, k3 = widen(c0, ASM), widen(c1, ASM), widen(c2, ASM), widen(c3, ASM)
        kp = cp.to(ROPE_KIND) if PACKED else widen(cp, ASM)
        g0, g1, g2, g3 = group_scales(scales, here, SCALED, PACKED)
        here = ahead
        if PIPE:
            c0, c1, c2, c3, cp = load_rows(kv, rope, here, word, rope_word, PACKED)
            ahead = slots_of(pages, base, start + 2 * BLOCK, lane, end, PAGE, BLOCK)
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
        if QUERIES == 1:
            seen = tl.expand_dims(start + lane < end, HEAD)
        else:
            seen = tl.expand_dims(start + lane, HEAD) < tl.expand_dims(limit, TOKEN)
        s = tl.where(seen, s * back, float("-inf"))
        bound = s
        if SCALED:  # the peak is that of weight times largest scale, so that FP16 holds these
            largest = tl.maximum(tl.maximum(g0, g1), tl.maximum(g2, g3))
            largest = tl.expand_dims(tl.log2(tl.maximum(largest, 1e-18)), HEAD)
            bound += largest
        highest = tl.maximum(peak, tl.max(bound, TOKEN))
        # Weights up to 2^15, not 1: FP16 then keeps eleven bits of far smaller ones.
        p = s - tl.expand_dims(highest, TOKEN) + 15.0
        if SCALED:  # the bound of a huge score has lost the scale in rounding
            p = tl.minimum(p, 15.0 - largest)
        p = tl.exp2(p)
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
    inverse = tl.expand_dims(inverse_of(total, QUERIES), TOKEN)
    at = tl.expand_dims((item * HEADS + heads).to(tl.int64), TOKEN)
    out = partial + at * RANK + value
    tl.store(out, o0 * inverse, mask=real)
    tl.store(out + CHUNK, o1 * inverse, mask=real)
    tl.store(out + 2 * CHUNK, o2 * inverse, mask=real)
    tl.store(out + 3 * CHUNK, o3 * inverse, mask=real)

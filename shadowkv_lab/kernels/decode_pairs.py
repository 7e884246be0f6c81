"""The decode kernel that keeps rows in FP8 in shared memory, and widens them on their way out.

What limits the word kernel on an H200 is the shared memory pipe (85 % busy in ncu): rows pass it
as FP16, once in and twice out. Here rows are copied there as they are, without passing registers,
as int16 pairs of values: matrix operands move in units of 16 bits, so that a pair can be read in
either order, by rows and transposed. Then its even and its odd value are widened to FP16, exactly,
and multiplied on their own; the order of a sum does not matter, and even and odd outputs are
interleaved once at the end. Heads are the rows of the matrix tiles; 8 heads fill half of one, and
it still pays.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shadowkv_lab.kernels.decode_words import (
    CHUNK,
    PACKED_WORDS,
    RANK,
    ROPE,
    group_scales,
    inverse_of,
    load_rope,
    query_scales,
    scaled,
    seen_by,
    slots_of,
)

PAIRS = tl.constexpr(288)  # pairs of values in a row of 576 bytes


@triton.jit
def even(pairs, ASM: tl.constexpr):
    """The first value of each int16 pair of e4m3, as fp16 (exact)."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $1, 0, 0x4420; mov.b32 {lo, hi}, t;"
            "cvt.rn.f16x2.e4m3x2 $0, lo; }",
            "=r,r",
            [pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def odd(pairs, ASM: tl.constexpr):
    """The second value of each pair."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $1, 0, 0x4431; mov.b32 {lo, hi}, t;"
            "cvt.rn.f16x2.e4m3x2 $0, lo; }",
            "=r,r",
            [pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def load_query(at, real):
    """A chunk of queries as float32: its even and its odd values."""
    first = tl.load(at, mask=real, other=0.0).to(tl.float32)
    return first, tl.load(at + 1, mask=real, other=0.0).to(tl.float32)


@triton.jit
def largest(q, r):
    """Largest absolute value of each head in two tiles."""
    return tl.max(tl.maximum(tl.abs(q), tl.abs(r)), 1)


@triton.jit
def score(qe, qo, pairs, s, ASM: tl.constexpr):
    """Scores s [TILE, BLOCK] plus a chunk's."""
    s = tl.dot(qe, tl.trans(even(pairs, ASM)), s)
    return tl.dot(qo, tl.trans(odd(pairs, ASM)), s)


@triton.jit
def weigh(p, scale, pairs, oe, oo, shrink, SCALED: tl.constexpr, ASM: tl.constexpr):
    """A chunk's outputs so far times `shrink`, plus its rows weighed by p (and their scale)."""
    if SCALED:
        p *= scale[None, :]
    p = p.to(tl.float16)
    oe = tl.dot(p, even(pairs, ASM), oe * shrink)
    return oe, tl.dot(p, odd(pairs, ASM), oo * shrink)


@triton.jit
def store_pairs(at, oe, oo, real, TILE: tl.constexpr):
    """Even and odd values of a chunk, side by side again."""
    tl.store(at, tl.reshape(tl.join(oe, oo), (TILE, CHUNK)), mask=real)


@triton.jit
def pairs_kernel(
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
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per work item (request, first token, end) and tile of TILE heads.

    Leaves its normalised output in `partial` [items, HEADS, 512] and the running maximum and sum
    of its softmax (base 2) in `stats` [items, HEADS, 2]. `rope` are PACKED rows as BF16: their rope
    parts, and the queries for them, are multiplied in BF16.
    """
    item = tl.program_id(1)  # tiles of one item run side by side and share its rows in L2
    request = tl.load(work + item * 4)
    first, end = tl.load(work + item * 4 + 1), tl.load(work + item * 4 + 2)
    base = tl.load(indptr + request)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    heads = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = (heads < HEADS)[:, None]
    limit = seen_by(heads, tl.load(work + item * 4 + 3), end, HEADS, QUERIES)
    lane = tl.arange(0, BLOCK)
    slot = slots_of(pages, base, first, lane, end, PAGE, BLOCK)
    pair, rope_pair = tl.arange(0, CHUNK // 2)[None, :], tl.arange(0, ROPE // 2)[None, :]

    at = (request * HEADS + heads).to(tl.int64)[:, None]
    q = q_nope + at * RANK + 2 * pair
    e0, d0 = load_query(q, real)
    e1, d1 = load_query(q + CHUNK, real)
    e2, d2 = load_query(q + 2 * CHUNK, real)
    e3, d3 = load_query(q + 3 * CHUNK, real)
    if PACKED:
        rope_value = tl.arange(0, ROPE)[None, :]
        ep = tl.load(q_pe + at * ROPE + rope_value, mask=real, other=0.0).to(tl.float32)
        dp = ep
    else:
        ep, dp = load_query(q_pe + at * ROPE + 2 * rope_pair, real)
    top = tl.maximum(tl.maximum(largest(e0, d0), largest(e1, d1)), largest(ep, dp))
    top = tl.maximum(tl.maximum(largest(e2, d2), largest(e3, d3)), top)
    up, back = query_scales(top, sm_log2e, EIGHT)
    up, back = up[:, None], back[:, None]
    e0, d0 = scaled(e0, up, EIGHT).to(tl.float16), scaled(d0, up, EIGHT).to(tl.float16)
    e1, d1 = scaled(e1, up, EIGHT).to(tl.float16), scaled(d1, up, EIGHT).to(tl.float16)
    e2, d2 = scaled(e2, up, EIGHT).to(tl.float16), scaled(d2, up, EIGHT).to(tl.float16)
    e3, d3 = scaled(e3, up, EIGHT).to(tl.float16), scaled(d3, up, EIGHT).to(tl.float16)
    # The interpreter multiplies BF16 wrongly, and scaling by a power of two is exact in BF16.
    ROPE_KIND: tl.constexpr = (tl.bfloat16 if ASM else tl.float32) if PACKED else tl.float16
    ep, dp = scaled(ep, up, EIGHT).to(ROPE_KIND), scaled(dp, up, EIGHT).to(ROPE_KIND)

    # A query row may see none of an item's tokens, if the request has several.
    peak = tl.full([TILE], float("-inf") if QUERIES == 1 else -1e30, tl.float32)
    mass = tl.zeros([TILE, BLOCK], tl.float32)
    a0 = tl.zeros([TILE, CHUNK // 2], tl.float32)
    b0, a1, b1, a2, b2, a3, b3 = a0, a0, a0, a0, a0, a0, a0
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        PITCH: tl.constexpr = 2 * PACKED_WORDS if PACKED else PAIRS
        row = (kv + slot.to(tl.int64) * PITCH)[:, None] + pair
        k0, k1 = tl.load(row), tl.load(row + CHUNK // 2)
        k2, k3 = tl.load(row + CHUNK), tl.load(row + CHUNK // 2 * 3)
        if PACKED:
            kp = load_rope(rope, slot)
        else:
            kp = tl.load((kv + slot.to(tl.int64) * PITCH + RANK // 2)[:, None] + rope_pair)
        g0, g1, g2, g3 = group_scales(scales, slot, SCALED, PACKED)
        slot = slots_of(pages, base, start + BLOCK, lane, end, PAGE, BLOCK)
        zero = tl.zeros([TILE, BLOCK], tl.float32)
        if SCALED:  # in float32, outside the dots: nothing is rounded
            if PACKED:
                s = tl.dot(ep, tl.trans(kp.to(ROPE_KIND)), zero)
            else:
                s = score(ep, dp, kp, zero, ASM)
            s += score(e0, d0, k0, zero, ASM) * g0[None, :]
            s += score(e1, d1, k1, zero, ASM) * g1[None, :]
            s += score(e2, d2, k2, zero, ASM) * g2[None, :]
            s += score(e3, d3, k3, zero, ASM) * g3[None, :]
        else:  # two chains, so that the matrix units need not wait for one
            s = score(e1, d1, k1, score(e0, d0, k0, score(ep, dp, kp, zero, ASM), ASM), ASM)
            s += score(e3, d3, k3, score(e2, d2, k2, zero, ASM), ASM)
        if QUERIES == 1:
            seen = (start + lane < end)[None, :]
        else:
            seen = (start + lane)[None, :] < limit[:, None]
        s = tl.where(seen, s * back, float("-inf"))
        bound = s
        if SCALED:  # the peak is that of weight times largest scale, so that FP16 holds these
            most = tl.maximum(tl.maximum(g0, g1), tl.maximum(g2, g3))
            most = tl.log2(tl.maximum(most, 1e-18))[None, :]
            bound += most
        highest = tl.maximum(peak, tl.max(bound, 1))
        # Weights up to 2^15, not 1: FP16 then keeps eleven bits of far smaller ones.
        p = s - highest[:, None] + 15.0
        if SCALED:  # the bound of a huge score has lost the scale in rounding
            p = tl.minimum(p, 15.0 - most)
        p = tl.exp2(p)
        shrink = tl.exp2(peak - highest)[:, None]
        mass = mass * shrink + p
        a0, b0 = weigh(p, g0, k0, a0, b0, shrink, SCALED, ASM)
        a1, b1 = weigh(p, g1, k1, a1, b1, shrink, SCALED, ASM)
        a2, b2 = weigh(p, g2, k2, a2, b2, shrink, SCALED, ASM)
        a3, b3 = weigh(p, g3, k3, a3, b3, shrink, SCALED, ASM)
        peak = highest
    total = tl.sum(mass, 1)
    mark = stats + (item * HEADS + heads) * 2
    tl.store(mark, peak, mask=heads < HEADS)
    tl.store(mark + 1, total, mask=heads < HEADS)
    inverse = inverse_of(total, QUERIES)[:, None]
    out = partial + (item * HEADS + heads).to(tl.int64)[:, None] * RANK
    out += tl.arange(0, CHUNK)[None, :]
    store_pairs(out, a0 * inverse, b0 * inverse, real, TILE)
    store_pairs(out + CHUNK, a1 * inverse, b1 * inverse, real, TILE)
    store_pairs(out + 2 * CHUNK, a2 * inverse, b2 * inverse, real, TILE)
    store_pairs(out + 3 * CHUNK, a3 * inverse, b3 * inverse, real, TILE)

"""A DSA index's work in one launch each: new keys in, scores out, the slots of the highest.

Run on an H200, where scores take 1.04 to 1.17 times what DeepGEMM's take; compiled for SM100 and
SM120 too. Nothing is tuned, and the top-k is torch's: it takes most of the time. The references
are `index.write`, `index.scores` and `index.take`.
"""

import torch
import triton
import triton.language as tl

from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.kernels import door
from shadowkv_lab.kernels.index import PAGE, SMALLEST
from shadowkv_lab.kernels.reference import FP8_MAX
from shadowkv_lab.load import Batch

TOKENS = 128  # of a program: the smallest tile of SM100's matrix units
PLACES = 1024  # of a program that looks up slots


@triton.jit
def write_kernel(
    fresh,
    slots,
    keys,
    scales,
    stride,
    MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program per new key: its e4m3 values and its scale, into the page of its slot.

    `keys` and `scales` are the same pages, `stride` bytes apart, each with KEYS keys.
    """
    r = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    slot = tl.load(slots + r).to(tl.int64)
    held, place = slot // KEYS * stride, slot % KEYS
    value = tl.load(fresh + r * WIDTH + lane).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), 0), SMALLEST)
    scale = tl.div_rn(largest, MAX)
    stored = tl.div_rn(value, tl.zeros([WIDTH], tl.float32) + scale)
    stored = tl.minimum(tl.maximum(stored, -MAX), MAX)
    tl.store(keys + held + place * WIDTH + lane, stored.to(tl.float8e4nv))
    tl.store(scales + (held + KEYS * WIDTH) // 4 + place, scale)


@triton.jit
def take_kernel(
    places, pages, indptr, taken, ends, most, SLOTS: tl.constexpr, PLACES: tl.constexpr
):
    """The slots of `most` places a request, as many as `ends` has room for, into `taken`."""
    request = tl.program_id(1)
    i = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    first = tl.load(ends + request)
    inside = i < tl.load(ends + request + 1) - first
    token = tl.load(places + request.to(tl.int64) * most + i, mask=inside, other=0).to(tl.int32)
    page = tl.load(pages + tl.load(indptr + request) + token // SLOTS, mask=inside, other=0)
    tl.store(taken + first + i, page * SLOTS + token % SLOTS, mask=inside)


@triton.jit
def scores_kernel(
    q,
    weights,
    keys,
    scales,
    out,
    pages,
    indptr,
    lens,
    stride,
    longest,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`TOKENS` tokens of one request: out[request, token] = scale * sum of w * relu(q . k).

    `keys` and `scales` are the same pages seen as e4m3 and as float32, `stride` bytes apart, each
    with KEYS keys; `pages` the page table of the request's rows, of SLOTS slots a page.
    """
    request = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < tl.load(lens + request)
    start = tl.load(indptr + request)
    page = tl.load(pages + start + token // SLOTS, mask=live, other=0).to(tl.int64)
    slot = page * SLOTS + token % SLOTS
    held = slot // KEYS * stride
    lane = tl.arange(0, WIDTH)
    at = held + slot % KEYS * WIDTH
    head = tl.arange(0, HEADS)
    query = tl.load(q + (request * HEADS + head)[None, :] * WIDTH + lane[:, None])
    key = tl.load(keys + at[:, None] + lane[None, :], mask=live[:, None], other=0.0)
    # Triton's interpreter multiplies no FP8.
    product = tl.dot(key.to(tl.float32), query.to(tl.float32)) if WIDE else tl.dot(key, query)
    weight = tl.load(weights + request * HEADS + head)
    total = tl.sum(tl.maximum(product, 0.0) * weight[None, :], 1)
    scale = tl.load(scales + (held + KEYS * WIDTH) // 4 + slot % KEYS, mask=live, other=0.0)
    tl.store(out + request.to(tl.int64) * longest + token, total * scale, mask=live)


def scores(
    q: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor, batch: Batch, out: torch.Tensor
) -> None:
    """As `index.scores`, with `out` float32 [B, longest or more]; no host sync.

    q [B, H, D] e4m3, weights [B, H] float32, kept [n, 64 * (D + 4)] uint8. Raises `OutOfRange` for
    a tensor of another type, shape or stride, and for fewer than 16 heads or a width that is no
    power of two.
    """
    requests, heads, width = len(batch.lens), q.shape[1], q.shape[2]
    door.need("The queries", q, (door.FP8,), requests, None, None)
    door.need("The weights", weights, (torch.float32,), requests, heads)
    door.need("The pages", kept, (torch.uint8,), None, PAGE * (width + 4))
    door.need("The scores", out, (torch.float32,), requests, None)
    door.room("A row of scores", out.shape[1], max(batch.lens))
    for name, size in (("index heads", heads), ("values of a key", width)):
        if size < 16 or size & (size - 1):
            raise OutOfRange(f"{size} {name}", "a power of two, 16 or more")
    scores_kernel[(triton.cdiv(max(batch.lens), TOKENS), requests)](
        q,
        weights,
        kept.view(door.FP8),
        kept.view(torch.float32),
        out,
        batch.pages,
        batch.indptr,
        batch.kv_len,
        kept.shape[1],
        out.shape[1],
        HEADS=heads,
        WIDTH=width,
        TOKENS=TOKENS,
        SLOTS=batch.page_size,
        KEYS=PAGE,
        WIDE=not q.is_cuda,
        num_warps=4,
    )


def write(kept: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """As `index.write`, of keys [R, D] (BF16 or float32) for `slots` [R]; no host sync.

    Slots have to differ. Raises `OutOfRange` for a tensor of another type, shape or stride.
    """
    count, width = keys.shape
    door.need("The keys", keys, (torch.bfloat16, torch.float32), count, width)
    door.need("The list of slots", slots, door.INDICES, count)
    door.need("The pages", kept, (torch.uint8,), None, PAGE * (width + 4))
    write_kernel[(count,)](
        keys,
        slots,
        kept.view(door.FP8),
        kept.view(torch.float32),
        kept.shape[1],
        MAX=FP8_MAX,
        SMALLEST=SMALLEST,
        WIDTH=width,
        KEYS=PAGE,
        num_warps=1,
    )


def take(found: torch.Tensor, batch: Batch, chosen: Batch) -> None:
    """As `index.take`: torch's top-k, and its places as slots in one launch; no host sync."""
    most = max(chosen.lens)
    # Live places come first only where they are sorted: it matters to a request that has too few.
    best = torch.topk(found, most, dim=1, sorted=min(chosen.lens) < most)
    take_kernel[(triton.cdiv(most, PLACES), len(batch.lens))](
        best.indices,
        batch.pages,
        batch.indptr,
        chosen.pages,
        chosen.indptr,
        most,
        SLOTS=batch.page_size,
        PLACES=PLACES,
        num_warps=4,
    )

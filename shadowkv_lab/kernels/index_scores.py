"""Index scores in one launch a layer: FP8 pages in, one float32 per live token out.

Not yet run on a GPU: compiled for SM90, SM100 and SM120, and run in Triton's interpreter. Nothing
is tuned. The reference is `index.scores`.
"""

import torch
import triton
import triton.language as tl

from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.kernels import door
from shadowkv_lab.kernels.index import PAGE
from shadowkv_lab.load import Batch

TOKENS = 128  # of a program: the smallest tile of SM100's matrix units


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

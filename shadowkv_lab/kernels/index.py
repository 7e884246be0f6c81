"""The specification of a DSA index: keys in pages, scores, and the rows that are chosen.

By the public reference code of DeepSeek-V3.2, which GLM-5 follows: the score of a live token is
`I = sum over index heads of w_h * relu(q_h . k * D^-0.5)`, `w = weights_proj(x) * H^-0.5`, and
attention reads the `index_topk` highest. Keys and queries are e4m3 with one float32 scale for
their D = 128 values. A query's scale and both constants are factors above 0, so they may stand in
its weights; a key's scale is a factor of the sum. SGLang keeps a page of 64 keys as 64 x 128 B of
values, then 64 x 4 B of scales; page and place of a slot are `slot // 64` and `slot % 64`.

Each Triton kernel is tested against the functions here. Nothing here syncs but what says so.
"""

import torch

from shadowkv_lab.kernels.reference import FP8, FP8_MAX, bits, to_fp8
from shadowkv_lab.load import Batch

PAGE = 64  # keys of a page
SMALLEST = 1e-4  # a row of zeros has a scale too


def pages(slots: int, width: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Empty pages [n, 64 * (width + 4)] (uint8) for the keys of `slots` slots."""
    return torch.zeros(-(-slots // PAGE), PAGE * (width + 4), dtype=torch.uint8, device=device)


def parts(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of pages: the keys' bytes [n, 64, width] (uint8) and their scales [n, 64] (float32)."""
    values = kept.shape[1] - 4 * PAGE
    keys = kept[:, :values].unflatten(1, (PAGE, -1))
    return keys, kept[:, values:].view(torch.float32)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [..., width] as e4m3 and a float32 scale [...]: the largest becomes 448."""
    values = values.float()
    scale = values.abs().amax(-1).clamp(min=SMALLEST) / FP8_MAX
    return to_fp8(values / scale[..., None]), scale


def query(
    q: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries [B, H, D] as e4m3, and [B, H] weights with every constant factor in them.

    `weights` are `weights_proj(x)` [B, H], without a factor.
    """
    heads, width = q.shape[-2:]
    stored, scale = quantise(q)
    factor = (heads * width) ** -0.5
    return stored, weights.to(dtype) * scale.to(dtype) * factor


def write(kept: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Store index keys [R, D] of `slots` [R], each with its scale."""
    put(kept, slots, *quantise(keys))


def put(kept: torch.Tensor, slots: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor) -> None:
    """Store e4m3 keys [R, D] and their scales [R], as `get` gives them."""
    values, scales = parts(kept)
    where = slots // PAGE, slots % PAGE
    values[where] = bits(stored)
    scales[where] = scale


def get(kept: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the keys of `slots` [R]: e4m3 [R, D] and scales [R]."""
    values, scales = parts(kept)
    where = slots // PAGE, slots % PAGE
    return values[where].view(FP8), scales[where]


def scores(
    q: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor, batch: Batch, out: torch.Tensor
) -> None:
    """Scores of every live token into `out` [B, n or more]; what lies past a request stays.

    q [B, H, D] e4m3 and weights [B, H] as `query` gives them. The arithmetic is in out's dtype.
    """
    for b, n in enumerate(batch.lens):
        keys, scale = get(kept, batch.slots(b))
        sums = torch.relu(q[b].to(out.dtype) @ keys.to(out.dtype).T).T @ weights[b].to(out.dtype)
        out[b, :n] = sums * scale.to(out.dtype)


def choose(found: torch.Tensor, topk: int) -> torch.Tensor:
    """int32 [B, topk]: the places of the highest scores [B, n], -1 where fewer are live.

    A place that holds no token has the score -inf. Live ones come first, the highest before the
    others.
    """
    best, places = torch.topk(found, min(topk, found.shape[1]), dim=1)
    places = places.int().masked_fill(best == float("-inf"), -1)
    return torch.nn.functional.pad(places, (0, topk - places.shape[1]), value=-1)


def take(found: torch.Tensor, batch: Batch, chosen: Batch) -> None:
    """The slots of the highest scores [B, n] into `chosen.pages`, request by request.

    `chosen` is a batch of page size 1 that reads `chosen.lens[b]` rows of request b.
    """
    places, at = choose(found, max(chosen.lens)).long(), chosen.token_offsets()
    for b, n in enumerate(chosen.lens):
        chosen.pages[at[b] : at[b] + n] = batch.slots(b)[places[b, :n]].int()

"""A DSA index at work beside a step: its scores, and the batch of the rows that it chooses."""

from dataclasses import replace

import torch

from shadowkv_lab import kernels
from shadowkv_lab.errors import OutOfRange, WrongResult
from shadowkv_lab.kernels import index
from shadowkv_lab.load import Batch
from shadowkv_lab.pool import Pool

TIED = 1e-3  # scores nearer than this share of the largest may change places


class Index:
    """What a batch asks of a pool's index keys, and what it reads by them.

    Static buffers, no host sync. `q` [layers, B, H, D] (e4m3), `weights` [layers, B, H] and `keys`
    [layers, B, D] (BF16, those of the new tokens) are of the layers that choose, in order;
    `scores` [B, longest] (float32) is one buffer for all. `chosen` is a batch of page size 1 over
    the chosen slots, the same tensors for every layer: a layer that does not choose reads what the
    last one chose. Of a request with fewer live tokens than `index_topk` all are chosen. Raises
    `OutOfRange` for a pool without index keys.
    """

    def __init__(self, pool: Pool, batch: Batch, seed: int = 0):
        device, model, layers = pool.device, pool.model, len(pool.index)
        if not layers:
            raise OutOfRange("A pool without index keys", "Pool(..., index=True)")
        generator = torch.Generator(device).manual_seed(seed + 1)
        B, H, D = batch.concurrency, model.index_heads, model.index_head_dim

        def noise(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, device=device).normal_(generator=generator)

        self.pool, self.batch = pool, batch
        self.place = {layer: i for i, layer in enumerate(pool.index)}
        self.q, self.weights = index.query(noise(layers, B, H, D).bfloat16(), noise(layers, B, H))
        self.keys = noise(layers, B, D).bfloat16()
        self.scores = torch.full((B, max(batch.lens)), float("-inf"), device=device)
        lens = tuple(min(model.index_topk, n) for n in batch.lens)
        slots = torch.cat([batch.slots(b)[:n] for b, n in enumerate(lens)]).int()
        ends = torch.tensor(lens, device=device).cumsum(0)
        self.chosen = Batch(
            page_size=1,
            lens=lens,
            pages=slots,
            indptr=torch.cat([ends.new_zeros(1), ends]).int(),
            kv_len=torch.tensor(lens, dtype=torch.int32, device=device),
            live_slots=slots,
            new_slots=batch.new_slots,
            spare_pages=slots[None, :0],
            held_pages=torch.empty(0, dtype=torch.int64),
        )

    def score(self, layer: int) -> None:
        """Write the new tokens' keys, then score every live token."""
        i, pages = self.place[layer], self.pool.index[layer]
        self.pool.write_keys_unchecked(layer, self.batch.new_slots, self.keys[i])
        scores = kernels.indexing(pages.device).scores
        scores(self.q[i], self.weights[i], pages, self.batch, self.scores)

    def choose(self) -> None:
        """The slots of the highest scores into `chosen`."""
        kernels.indexing(self.scores.device).take(self.scores, self.batch, self.chosen)

    def require_right(self, layer: int) -> None:
        """Raise `WrongResult` unless the layer's choice is that of float64 scores (syncs).

        `layer` must be the last that chose. Tokens that are tied with the last chosen one, to
        `TIED` of the largest score, may stand for each other.
        """
        i, offsets = self.place[layer], self.chosen.token_offsets()
        for b, n in enumerate(self.batch.lens):
            slots = self.batch.slots(b)
            alone = replace(self.batch, lens=(n,), live_slots=slots)
            exact = torch.empty(1, n, dtype=torch.float64, device=slots.device)
            q, weights = self.q[i, b : b + 1], self.weights[i, b : b + 1]
            index.scores(q, weights, self.pool.index[layer], alone, exact)
            chosen = self.chosen.pages[offsets[b] : offsets[b + 1]].long()
            is_chosen = torch.isin(slots, chosen)
            if int(is_chosen.sum()) != len(chosen):
                raise WrongResult(f"Layer {layer}, request {b}: chosen rows are not its own")
            edge = exact[0].topk(len(chosen)).values[-1]
            off = float(edge - exact[0][is_chosen].min())
            if off > TIED * float(exact.abs().max()):
                raise WrongResult(
                    f"Layer {layer}, request {b}: a chosen row's score is {off:.2e} too low",
                    f"the {len(chosen)} highest of {n}",
                )

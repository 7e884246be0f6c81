"""A DSA index at work beside a step: its keys, its scores, and the batch of the rows it chooses."""

from dataclasses import replace

import torch

from shadowkv_lab import kernels
from shadowkv_lab.errors import WrongResult
from shadowkv_lab.kernels import index
from shadowkv_lab.load import Batch
from shadowkv_lab.model import Model

CHUNK_ROWS = 1 << 18  # keys that are made at a time: 128 MiB of float32
TIED = 1e-3  # scores nearer than this share of the largest may change places


class Index:
    """Index keys of every slot of a pool, and what a batch reads by them.

    Static buffers, no host sync. `kept[layer]` are pages of keys, for the layers that choose; `q`
    [layers, B, H, D] (e4m3), `weights` [layers, B, H] and `keys` [layers, B, D] (BF16) are theirs
    in order; `scores` [B, longest] (float32) is one buffer for all. `chosen` is a batch of page
    size 1 over the chosen slots, the same tensors for every layer: a layer that does not choose
    reads what the last one chose. Of a request with fewer live tokens than `index_topk` all are
    chosen.
    """

    def __init__(self, model: Model, slots: int, batch: Batch, seed: int = 0):
        device, choosing = batch.pages.device, model.choosing
        generator = torch.Generator(device).manual_seed(seed + 1)
        B, H, D = batch.concurrency, model.index_heads, model.index_head_dim

        def noise(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, device=device).normal_(generator=generator)

        self.model, self.batch = model, batch
        self.place = {layer: i for i, layer in enumerate(choosing)}
        self.kept = {layer: index.pages(slots, D, device) for layer in choosing}
        for pages in self.kept.values():
            for start in range(0, slots, CHUNK_ROWS):
                there = torch.arange(start, min(start + CHUNK_ROWS, slots), device=device)
                index.write(pages, there, noise(len(there), D))
        q = noise(len(choosing), B, H, D).bfloat16()
        self.q, self.weights = index.query(q, noise(len(choosing), B, H))
        self.keys = noise(len(choosing), B, D).bfloat16()
        longest = max(batch.lens)
        self.scores = torch.full((B, longest), float("-inf"), device=device)
        self.lens = tuple(min(model.index_topk, n) for n in batch.lens)
        # Where each request's tokens begin, and which places of [B, topk] hold a choice.
        self.starts = torch.tensor(batch.token_offsets()[:-1], device=device)[:, None]
        held = [b * max(self.lens) + i for b, n in enumerate(self.lens) for i in range(n)]
        self.held = torch.tensor(held, device=device)
        slots_now = torch.cat([batch.slots(b)[:n] for b, n in enumerate(self.lens)]).int()
        ends = torch.tensor(self.lens, device=device).cumsum(0)
        self.chosen = Batch(
            page_size=1,
            lens=self.lens,
            pages=slots_now,
            indptr=torch.cat([ends.new_zeros(1), ends]).int(),
            kv_len=torch.tensor(self.lens, dtype=torch.int32, device=device),
            live_slots=slots_now,
            new_slots=batch.new_slots,
            spare_pages=slots_now[None, :0],
            held_pages=torch.empty(0, dtype=torch.int64),
        )

    @property
    def kept_bytes(self) -> int:
        return sum(pages.nbytes for pages in self.kept.values())

    def score(self, layer: int) -> None:
        """Write the new tokens' keys, then score every live token."""
        i, pages = self.place[layer], self.kept[layer]
        index.write(pages, self.batch.new_slots, self.keys[i])
        scores = kernels.scorer(pages.device)
        scores(self.q[i], self.weights[i], pages, self.batch, self.scores)

    def choose(self) -> None:
        """The slots of the highest scores into `chosen`."""
        places = index.choose(self.scores, max(self.lens)).long()
        slots = self.batch.live_slots[self.starts + places.clamp(min=0)]
        self.chosen.pages.copy_(slots.flatten()[self.held])

    def require_right(self, layer: int) -> None:
        """Raise `WrongResult` unless the layer's choice is that of float64 scores.

        `layer` must be the last that chose. Tokens that are tied with the last chosen one, to
        `TIED` of the largest score, may stand for each other.
        """
        i, batch = self.place[layer], self.batch
        exact = torch.full(self.scores.shape, float("-inf"), dtype=torch.float64)
        pages, q, weights = (x.cpu() for x in (self.kept[layer], self.q[i], self.weights[i]))
        index.scores(q, weights, pages, replace(batch, live_slots=batch.live_slots.cpu()), exact)
        offsets = self.chosen.token_offsets()
        for b, n in enumerate(batch.lens):
            slots = self.chosen.pages[offsets[b] : offsets[b + 1]].cpu().long()
            own = {slot: at for at, slot in enumerate(batch.slots(b).tolist())}
            at = [own.get(slot, -1) for slot in slots.tolist()]
            if -1 in at or len(set(at)) < len(at):
                raise WrongResult(f"Layer {layer}, request {b}: chosen rows are not its own")
            edge = exact[b, :n].topk(len(at)).values[-1]
            off = edge - exact[b, at].min()
            if off > TIED * exact[b, :n].abs().max():
                raise WrongResult(
                    f"Layer {layer}, request {b}: a chosen row's score is {off:.2e} too low",
                    f"the {len(at)} highest of {n}",
                )

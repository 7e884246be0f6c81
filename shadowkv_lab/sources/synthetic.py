"""Synthetic pools: seeded rows that look like latents, streamed layer by layer."""

from collections.abc import Callable

import torch

from shadowkv_lab.pool import Pool

CHUNK_ROWS = 32768  # 75 MB of float32 at 576 values per row
KEY_ROWS = 1 << 18  # 128 MiB at 128 values per key
ROPE_GAIN = 4.0  # the rope part is not normalised, and larger than the latent
HEAVY = 1.5  # sigma of the log-normal channel gains: a few channels carry most of a row


def fill(pool: Pool, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> None:
    """Write every slot of every layer, the dummy page included, through the pool's write path.

    Each layer has heavy-tailed channel gains; the latent part of a row is RMS-normalised over its
    values, as kv_a_layernorm leaves it. Rows depend on seed, layer and slot order only, so
    strategies filled alike hold the same rows. `progress(done, total)` counts layers.
    """
    model, device = pool.model, pool.device
    total = pool.pool_tokens + pool.page_size
    buffer = torch.empty(min(CHUNK_ROWS, total), model.row, device=device)
    slots = torch.arange(total, device=device)
    for layer in range(pool.layers):
        generator = torch.Generator(device).manual_seed(seed * 100_003 + layer)
        gains = torch.empty(model.row, device=device).normal_(generator=generator)
        gains = (gains * HEAVY).exp_()
        gains[model.kv_lora_rank :].fill_(ROPE_GAIN)
        for start in range(0, total, len(buffer)):
            rows = buffer[: min(len(buffer), total - start)]
            rows.normal_(generator=generator).mul_(gains)
            latent = rows[:, : model.kv_lora_rank]
            latent.div_(latent.pow(2).mean(1, keepdim=True).add_(1e-6).sqrt_())
            pool.write_unchecked(layer, slots[start : start + len(rows)], rows.bfloat16())
        if progress:
            progress(layer + 1, pool.layers)


def fill_index(pool: Pool, seed: int = 0) -> None:
    """An index key of noise for every slot of the layers that have an index, whatever their rows.

    Keys, as queries, are rotated by a Hadamard matrix before they are stored, which leaves no
    channel heavier than another.
    """
    total, width = pool.pool_tokens + pool.page_size, pool.model.index_head_dim
    slots = torch.arange(total, device=pool.device)
    for layer in pool.index:
        generator = torch.Generator(pool.device).manual_seed(seed * 100_003 + 50_000 + layer)
        for part in slots.split(KEY_ROWS):
            keys = torch.empty(len(part), width, device=pool.device).normal_(generator=generator)
            pool.write_keys_unchecked(layer, part, keys)

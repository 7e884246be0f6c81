"""Model error: next-token predictions with the cache kept each way, on a model run whole."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from shadowkv_lab.accuracy.attention import divergence
from shadowkv_lab.accuracy.storage import STORAGES, calibrated_scale, round_trip
from shadowkv_lab.errors import CannotRun, OutOfRange
from shadowkv_lab.files import read_text
from shadowkv_lab.machine import version_of
from shadowkv_lab.sources import capture, checkpoint

Progress = Callable[[str, float], None]


class ModelError(NamedTuple):
    """Predictions with one storage against those with the model's own cache."""

    storage: str
    kl: float  # mean KL(own || storage) of the next token, nats
    worst_kl: float  # of the worst position
    top1: float  # share of positions whose most probable token is the same
    perplexity: float  # over the text
    perplexity_difference: float  # minus the perplexity with the model's own cache
    tokens: int  # predicted


def quantised_cache(config, storage: str, scales: Sequence[float] | None = None):
    """A transformers cache that keeps every latent row as `storage` keeps it.

    A row is quantised before the first query sees it, its own position's included, as in an
    engine that reads its decode step's new row back from the pool. `scales` are the layers' own
    for "fp8_scaled".
    """
    from transformers import DynamicCache

    class QuantisedCache(DynamicCache):
        def update(self, latent, k_rope, layer_idx, *args, **options):
            rank = config.kv_lora_rank
            if latent.shape[-1] != rank:
                raise CannotRun(
                    f"transformers {version_of('transformers')} caches expanded keys, no latents",
                    remedy="pip install 'transformers>=5.18'",
                )
            rows = torch.cat([latent, k_rope], -1).flatten(0, -2)
            scale = scales[layer_idx] if scales else None
            stored = round_trip(rows, storage, rank, scale).to(latent.dtype)
            stored = stored.view(*latent.shape[:-1], -1)
            return super().update(
                stored[..., :rank], stored[..., rank:], layer_idx, *args, **options
            )

    return QuantisedCache(config=config)


@torch.no_grad()
def model_errors(
    checkpoint_dir: Path | str,
    text: str | Path,
    storages: Sequence[str] = tuple(STORAGES),
    *,
    chunk_tokens: int = 512,
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    progress: Progress = lambda text, done: None,
) -> list[ModelError]:
    """The model error of each storage over a text.

    In float32 the unquantised cache is float32, so that BF16 has an error of its own; in BF16, as
    served, it has none. Scales of "fp8_scaled" are calibrated on the same text.
    """
    from transformers import DynamicCache

    directory = Path(checkpoint_dir)
    if isinstance(text, Path):
        text = read_text(text)
    ids = capture.tokenise(directory, text)[:max_tokens]
    if len(ids) < 2:
        raise OutOfRange(
            f"A text of {len(ids)} tokens", "2 or more", "Nothing is predicted otherwise"
        )
    loaded = checkpoint.load_model(
        directory,
        head=True,
        dtype=dtype,
        device=device,
        progress=lambda t, done: progress(t, 0.2 * done),
    )
    capture.check_tokens(len(ids), loaded.shape)
    share = 0.8 / (len(storages) + 1)

    def predict(cache, run: int, name: str) -> torch.Tensor:
        found, argument = [], capture.cache_argument(loaded.model)
        for start in range(0, len(ids), chunk_tokens):
            progress(f"{name}: token {start} of {len(ids)}", 0.2 + share * (run + start / len(ids)))
            chunk = ids[None, start : start + chunk_tokens].to(device)
            logits = loaded.model(input_ids=chunk, use_cache=True, **{argument: cache}).logits[0]
            found.append(logits.double().log_softmax(-1).cpu())
        return torch.cat(found)[:-1]

    own_cache = DynamicCache(config=loaded.model.config)
    own = predict(own_cache, 0, "own cache")
    scales = [calibrated_scale(torch.cat([c.keys, c.values], -1)) for c in own_cache.layers]
    found = []
    for run, storage in enumerate(storages, 1):
        cache = quantised_cache(loaded.model.config, storage, scales)
        found.append(compare(storage, own, predict(cache, run, storage), ids[1:]))
    progress("done", 1.0)
    return found


def compare(
    storage: str, own: torch.Tensor, ours: torch.Tensor, next_ids: torch.Tensor
) -> ModelError:
    """Log-probabilities [T, V] of two runs, and the tokens [T] that did follow."""
    kl = divergence(own, ours)
    ours_ppl, own_ppl = (
        math.exp(-float(p.gather(1, next_ids[:, None]).mean())) for p in (ours, own)
    )
    same = (own.argmax(-1) == ours.argmax(-1)).double().mean()
    return ModelError(
        storage,
        float(kl.mean()),
        float(kl.max()),
        float(same),
        ours_ppl,
        ours_ppl - own_ppl,
        len(next_ids),
    )

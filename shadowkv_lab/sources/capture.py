"""Real latents and queries: a text run through a checkpoint's first layers, chunk by chunk."""

import hashlib
import inspect
import logging
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from shadowkv_lab.errors import BadFile, OutOfRange, WrongResult, whole
from shadowkv_lab.files import read_text, ready
from shadowkv_lab.machine import version_of
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.sources import checkpoint, formats, poolfile

STORAGE = {torch.bfloat16: "bf16", torch.float32: "f32"}
# Largest relative L2 distance of the absorbed form from the model's own attention output. BF16
# rounds queries, keys, values and probabilities along two different ways; float32 hardly does.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
Progress = Callable[[str, float], None]
log = logging.getLogger("shadowkv_lab.sources")


WATCHING = threading.Lock()


@dataclass(frozen=True)
class Captured:
    """What one text leaves in the cache of a model's layers. Rows are in the model's dtype."""

    layers: tuple[int, ...]
    rows: list[torch.Tensor]  # per layer [T, rank + rope]
    index_keys: list[torch.Tensor | None]  # per layer [T, index_head_dim]
    queries: list[torch.Tensor]  # per layer [Q, H, rank + rope], absorbed: q_nope W_UK, then q_pe
    query_positions: torch.Tensor  # int64 [Q]; a query attends to its own position and before
    attention_check: float  # worst relative L2 distance from the model's own attention output


def capture(
    checkpoint_dir: Path | str,
    text: str | Path,
    out: Path | str,
    *,
    layers: str = "0-2",
    chunk_tokens: int = 512,
    queries: int = 16,
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    progress: Progress = lambda text, done: None,
) -> poolfile.PoolFile:
    """Run a text through the first layers of a checkpoint and write their cache to a pool file.

    `text` is the text, or a path that holds it; `layers` such as "0-2" or "0,2". Prefill runs in
    chunks, so that scores take chunk x T and not T x T. No code of the folder is run. Raises
    `OutOfRange`, `BadFile`, `WrongResult`, and `CannotWrite` before anything is loaded.
    """
    directory = Path(checkpoint_dir)
    ready(out)
    for name, value in (("Chunks of", chunk_tokens), ("Queries:", queries)):
        whole(value, name)
    if max_tokens is not None:
        whole(max_tokens, "max_tokens:")
    if isinstance(text, Path):
        text = read_text(text)
    shape = load_model(directory)
    wanted = parse_layers(layers, shape.layers)
    ids = tokenise(directory, text)[:max_tokens]
    check_tokens(len(ids), shape)
    loaded = checkpoint.load_model(
        directory,
        max(wanted) + 1,
        dtype=dtype,
        device=device,
        progress=lambda t, done: progress(t, 0.4 * done),
    )
    found = run(
        loaded.model,
        ids,
        wanted,
        chunk_tokens=chunk_tokens,
        queries=queries,
        progress=lambda t, done: progress(t, 0.4 + 0.5 * done),
    )
    extras = {f"queries.{n}": q for n, q in zip(wanted, found.queries, strict=True)}
    extras |= {
        f"index_keys.{n}": k for n, k in zip(wanted, found.index_keys, strict=True) if k is not None
    }
    header = {
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "model_sha256": loaded.sha256,
        "shards": ", ".join(loaded.shards),
        "attention_check": f"{found.attention_check:.3e}",
        "weights": getattr(loaded.model.config, "shadowkv_weights", "as published"),
        "transformers": version_of("transformers"),
        "torch": torch.__version__,
    }
    return poolfile.write(
        out,
        shape,
        STORAGE[dtype],
        wanted,
        len(ids),
        lambda i: found.rows[i],
        source=f"capture of {directory.name}, {len(ids)} tokens in chunks of {chunk_tokens}",
        extras={**extras, "query_positions": found.query_positions},
        header=header,
        progress=lambda t, done: progress(t, 0.9 + 0.1 * done),
    )


def parse_layers(text: str, total: int) -> tuple[int, ...]:
    """Layer numbers from "0-2" or "0,2,5-7", in order; raises `OutOfRange`."""
    found: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part, re.A)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, -1)
        if not first <= last < total:  # before a range of any size is made
            raise OutOfRange(f"Layers {text[:60]!r}", f"0 to {total - 1}, such as 0-2 or 0,2")
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def tokenise(directory: Path, text: str) -> torch.Tensor:
    """int64 [T] token ids by the checkpoint's own tokenizer; raises `BadFile`."""
    from transformers import AutoTokenizer

    for name in ("config.json", "tokenizer_config.json"):
        if (path := directory / name).is_file():
            checkpoint.require_no_code(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of tokenizers' own kinds too
        raise BadFile(
            f"{directory.name} has no tokenizer that transformers can read ({error})",
            remedy="Copy tokenizer.json and tokenizer_config.json into it",
        ) from None
    return torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)


def check_tokens(count: int, shape: Model) -> None:
    """Raise `OutOfRange` for a text of no tokens, or of more than the model has positions for."""
    if not 1 <= count <= shape.max_positions:
        raise OutOfRange(
            f"A text of {count} tokens for {shape.name}",
            f"1 to {shape.max_positions} tokens",
            "Give a longer text" if count < 1 else "Cut it with max_tokens",
        )


@torch.no_grad()
def run(
    model: torch.nn.Module,
    ids: torch.Tensor,
    layers: Sequence[int],
    *,
    chunk_tokens: int = 512,
    queries: int = 16,
    progress: Progress = lambda text, done: None,
) -> Captured:
    """Prefill `ids` [T] in chunks and take the latent cache and some queries of `layers`.

    Queries are taken at `queries` positions over the second half of the text, the last included.
    """
    from transformers import DynamicCache

    if chunk_tokens < 1 or queries < 1:
        raise OutOfRange(f"Chunks of {chunk_tokens} tokens, {queries} queries", "1 or more of each")
    device, total = next(model.parameters()).device, len(ids)
    positions = (
        torch.linspace(total // 2, total - 1, min(queries, total - total // 2)).long().unique()
    )
    cache = DynamicCache(config=model.config)
    tap = _Tap(set(layers), positions.tolist(), model.config.kv_lora_rank)
    argument = cache_argument(model.model)
    with tap.installed(model):
        for start in range(0, total, chunk_tokens):
            progress(f"prefill {start} of {total} tokens", start / total)
            chunk = ids[None, start : start + chunk_tokens].to(device)
            tap.start, tap.length = start, chunk.shape[1]
            model.model(input_ids=chunk, use_cache=True, **{argument: cache})
    rows = [tap.rows(n, cache.layers[n]).cpu() for n in layers]
    index = [getattr(cache.layers[n], "indexer_keys", None) for n in layers]
    for n, r in zip(layers, rows, strict=True):
        formats.check_finite(r, f"Layer {n}")
    worst = max(tap.check(n, r.to(device)) for n, r in zip(layers, rows, strict=True))
    log.info("absorbed attention is within %.1e of the model's own", worst)
    if not worst <= TOLERANCE[rows[0].dtype]:
        raise WrongResult(
            f"Attention from the captured rows is off by {worst:.1e} from the model's own",
            f"up to {TOLERANCE[rows[0].dtype]:.0e}",
            "The model differs from what the lab knows of it; its rows are not written",
        )
    return Captured(
        tuple(layers),
        rows,
        [None if k is None else k[0].cpu() for k in index],
        [torch.cat([s.absorbed for s in tap.samples[n]]).to(rows[0].dtype).cpu() for n in layers],
        positions,
        worst,
    )


def cache_argument(model: torch.nn.Module) -> str:
    """What the model calls its cache: `cache` from transformers 5.24 on, before it the old name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@dataclass(frozen=True)
class _Sample:
    """Queries of one chunk at their positions, and what the model's attention made of them."""

    absorbed: torch.Tensor  # float32 [q, H, rank + rope]
    masked: torch.Tensor  # bool [q, T so far], True where the query must not look
    out: torch.Tensor  # [q, H, v], the model's own
    w_uv: torch.Tensor  # [H, v, rank]
    scaling: float


@dataclass
class _Tap:
    """Stands in for transformers' "sdpa" function, calls it, and keeps some queries.

    There the queries have been rotated by the model's own RoPE, whichever kind it is, and the
    model's softmax scale and mask (the indexer's choice included) are arguments. It also watches
    `expand_kv`, for versions whose cache holds no latents.
    """

    layers: set[int]
    positions: list[int]
    rank: int  # kv_lora_rank
    start: int = 0  # the position of the running chunk's first token
    length: int = 0  # its tokens
    samples: dict[int, list[_Sample]] = field(default_factory=dict)

    latents: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # of each chunk

    @contextmanager
    def installed(self, model: torch.nn.Module):
        """Watch a model's attention for as long as the context lasts, one model at a time: the
        function that is watched is transformers', the whole process's."""
        with WATCHING:
            yield from self._watched(model)

    def _watched(self, model: torch.nn.Module):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        original = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def attention(module, query, key, value, mask, **options):
            out, weights = original(module, query, key, value, mask, **options)
            if module.layer_idx in self.layers:
                self._take(module, query, key, mask, out, options["scaling"])
            return out, weights

        watched = [model.model.layers[n].self_attn for n in sorted(self.layers)]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
        for module in watched:
            module.expand_kv = partial(self._expand, module.layer_idx, module.expand_kv)
        try:
            yield
        finally:
            del ALL_ATTENTION_FUNCTIONS["sdpa"]
            for module in watched:
                del module.expand_kv  # the instance's; the class has its own

    def _expand(self, layer: int, expand: Callable, latent: torch.Tensor, k_rope: torch.Tensor):
        if latent.shape[2] == self.length:  # the chunk's own, not a whole cache of latents
            self.latents.setdefault(layer, []).append(torch.cat([latent, k_rope], -1)[0, 0])
        return expand(latent, k_rope)

    def rows(self, layer: int, kept) -> torch.Tensor:
        """A layer's latent rows [T, rank + rope]: what its cache layer `kept` holds.

        transformers 5.16 and 5.17 cache expanded keys for DSA models, and expand each chunk's own
        latents; from 5.18 on every MLA model caches latents and expands them all.
        """
        if kept.keys.shape[1] == 1 and kept.keys.shape[3] == self.rank:
            return torch.cat([kept.keys, kept.values], -1)[0, 0]
        return torch.cat(self.latents[layer])

    def _take(self, module, query, key, mask, out, scaling) -> None:
        at = [p - self.start for p in self.positions if 0 <= p - self.start < query.shape[2]]
        if not at:
            return
        q_nope, q_pe = (
            query[0, :, at]
            .float()
            .transpose(0, 1)
            .split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
        )
        up = module.kv_b_proj.weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))
        w_uk, w_uv = up.split([module.qk_nope_head_dim, module.v_head_dim], 1)
        absorbed = torch.cat([torch.einsum("qhd,hdr->qhr", q_nope, w_uk.float()), q_pe], -1)
        if mask is None:
            ends = torch.tensor(at, device=key.device)[:, None] + self.start
            masked = torch.arange(key.shape[2], device=key.device) > ends
        else:
            rows = mask[0, 0, at]
            masked = ~rows if rows.dtype == torch.bool else rows < 0
        sample = _Sample(absorbed, masked, out[0, at], w_uv, scaling)
        self.samples.setdefault(module.layer_idx, []).append(sample)

    def check(self, layer: int, rows: torch.Tensor) -> float:
        """Worst relative L2 distance of float64 absorbed attention from the model's own output."""
        worst = 0.0
        for s in self.samples[layer]:
            kv = rows[: s.masked.shape[1]].double()
            scores = torch.einsum("qhr,tr->qht", s.absorbed.double(), kv) * s.scaling
            weights = scores.masked_fill(s.masked[:, None], float("-inf")).softmax(-1)
            latent = weights @ kv[:, : s.w_uv.shape[-1]]
            exact = torch.einsum("qhr,hvr->qhv", latent, s.w_uv.double())
            off = (s.out.double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
            worst = max(worst, float(off.max()))
        return worst

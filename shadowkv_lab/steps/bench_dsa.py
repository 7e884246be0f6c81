"""`shadowkv bench dsa`: what a DSA step adds, kernel by kernel, beside its peers, all in one run.

Every time is a CUDA-graph replay over all layers, each with queries, keys and rows of its own, L2
flushed before each replay.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from shadowkv_lab import kernels
from shadowkv_lab.errors import LabError
from shadowkv_lab.kernels import index
from shadowkv_lab.kernels.deepgemm import DeepGEMM
from shadowkv_lab.kernels.flashmla import FlashMLASparse
from shadowkv_lab.load import Batch
from shadowkv_lab.model import Model
from shadowkv_lab.pool import Pool
from shadowkv_lab.sources import synthetic
from shadowkv_lab.steps import bench
from shadowkv_lab.strategies.index import Index

# The most telling first: a run that is stopped keeps what it has.
LOADS = (
    *((1, 131_072), (32, 8192), (1, 8192), (8, 32_768), (1, 32_768), (1, 2048)),
    *((4, 131_072), (8, 8192), (32, 2048)),
)
READERS = (1, 32, 8)  # requests whose attention over chosen rows is timed
HEADS = (8, 64)
PAGE = 64
POOL = 524_288
ROWS = 131_072  # slots of the pool that is attended over: chosen rows lie anywhere in it


@dataclass(frozen=True)
class Row:
    """One kernel at one load, all layers. `bytes` are the least that it must move; `ratio` is our
    kernel's time over this one's (1 for ours). `error` is against float64: of scores the largest,
    as a share of the largest score, of attention the worst relative L2 of a (request, head)."""

    kernel: str
    load: str
    heads: int  # 0 where queries have no part in it
    ms: float
    spread_ms: float
    bytes: int
    gb_per_s: float
    ratio: float
    error: float | None = None


def run(
    model: Model,
    device: torch.device,
    heads: tuple[int, ...] = HEADS,
    pool_tokens: int = POOL,
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> Iterator[Row]:
    """Rows of scores, choice and key writes at each load, then of attention over chosen rows.

    Ours first and then each peer that runs here. Raises `CannotRun` on a machine without a GPU,
    and for a model without an index.
    """
    bench.check(device)
    parts = {
        "scores and choice": lambda: _choices(model, device, pool_tokens),
        "attention over chosen rows": lambda: _reads(model, device, heads),
    }
    for i, (text, groups) in enumerate(parts.items()):
        progress(text, i / len(parts))
        for group in groups():
            ours = group[0][3].median_ms
            for name, load, count, found, size, error in group:
                ms = found.median_ms
                rate = size / ms / 1e6
                yield Row(name, load, count, ms, found.spread_ms, size, rate, ours / ms, error)
        torch.cuda.empty_cache()
    progress("done", 1.0)


@contextmanager
def _optional(name: str):
    """A peer may be missing, or fail in ways of its own; what is ours may not."""
    try:
        yield
    except LabError as missing:
        warnings.warn(str(missing), stacklevel=2)
    except Exception as error:
        warnings.warn(f"{name} failed: {error!r:.400}", stacklevel=2)


def _choices(model: Model, device: torch.device, pool_tokens: int) -> Iterator[list[tuple]]:
    """Groups (ours, peer) of scores, and of the choice, which has no peer that installs alone."""
    layers = len(model.choosing)
    one = replace(model, layers=1, index_at=(0,))  # rows of one layer, index keys of all
    pool = Pool(one, pool_tokens, [("fp8",)], page_size=PAGE, device=device, order="random")
    pool.index = {
        i: index.pages(pool_tokens + PAGE, model.index_head_dim, device) for i in range(layers)
    }
    pool.write_keys = kernels.indexing(device).write
    synthetic.fill_index(pool)
    own, peer = kernels.indexing(device), None
    for requests, context in LOADS:
        if requests * context > pool_tokens:
            continue
        batch = pool.batch(requests, context)
        of, shape = Index(pool, batch), f"{requests} x {context}"

        def ours(i: int, of=of, batch=batch) -> None:
            own.scores(of.q[i], of.weights[i], pool.index[i], batch, of.scores)

        moved = layers * (model.row_bytes("index") + 4) * batch.live_tokens
        found = bench.time_layers(pool, ours, layers)
        group = [("index_scores", shape, 0, found, moved, _off(of, of.scores, layers - 1))]
        with _optional("deep_gemm"):
            peer = peer or DeepGEMM(device)
            peer.plan(batch)
            out = [torch.empty(0)] * layers

            def theirs(i: int, of=of, out=out, peer=peer) -> None:
                out[i] = peer.scores(of.q[i], of.weights[i], pool.index[i])

            found = bench.time_layers(pool, theirs, layers)
            group.append((peer.name, shape, 0, found, moved, _off(of, out[-1], layers - 1)))
        yield group
        chosen = of.chosen.live_tokens
        found = bench.time_layers(pool, lambda i, of=of: of.choose(), layers)
        yield [("choose", shape, 0, found, 4 * layers * (batch.live_tokens + chosen), None)]
        keys = of.keys
        found = bench.time_layers(
            pool,
            lambda i, keys=keys, to=batch.new_slots: own.write(pool.index[i], to, keys[i]),
            layers,
        )
        yield [("index_write", shape, 0, found, layers * requests * model.row_bytes("index"), None)]
        pool.release(batch)


def _off(of: Index, scores: torch.Tensor, layer: int) -> float:
    """The largest error of a layer's scores, as a share of its largest score, against float64."""
    exact = torch.zeros(of.scores.shape, dtype=torch.float64, device=scores.device)
    index.scores(of.q[layer], of.weights[layer], of.pool.index[layer], of.batch, exact)
    off = max(
        float((scores[b, :n] - exact[b, :n]).abs().max()) for b, n in enumerate(of.batch.lens)
    )
    return off / float(exact.abs().max())


def _reads(model: Model, device: torch.device, heads: Sequence[int]) -> Iterator[list[tuple]]:
    """Groups (ours, peers) of attention over `index_topk` rows of each request."""
    from shadowkv_lab.kernels.decode import FusedDecode

    pool = bench.make_pool(model, device, ROWS, ("fp8", "bf16"), page_size=PAGE)
    for count, requests in itertools.product(heads, READERS):
        batch = _chosen(pool, requests, model.index_topk)

        def row(name, stored, kernel, count=count, batch=batch) -> tuple:
            found, error, _ = bench.time_attention(pool, kernel, batch, count)
            moved = model.layers * batch.live_tokens * model.row_bytes(stored)
            load = f"{len(batch.lens)} x {model.index_topk} chosen"
            return name, load, count, found, moved, error

        group = [row("fused_fp8", "fp8", FusedDecode())]
        for stored in ("bf16", "packed"):
            name = f"flashmla_sparse {stored}"
            with _optional(name):
                group.append(row(name, stored, FlashMLASparse(stored, device)))
        yield group


def _chosen(pool: Pool, requests: int, topk: int) -> Batch:
    """A batch of page size 1 over slots that lie anywhere in the pool, none of them twice."""
    slots = torch.randperm(pool.pool_tokens, device=pool.device)[: requests * topk] + pool.page_size
    lens = (topk,) * requests
    ends = torch.arange(requests + 1, dtype=torch.int32, device=pool.device) * topk
    return Batch(
        page_size=1,
        lens=lens,
        pages=slots.int(),
        indptr=ends,
        kv_len=torch.tensor(lens, dtype=torch.int32, device=pool.device),
        live_slots=slots,
        new_slots=slots[:requests],
        spare_pages=slots.int()[None, :0],
        held_pages=torch.empty(0, dtype=torch.int64),
    )

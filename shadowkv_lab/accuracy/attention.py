"""Attention error: what a storage or a strategy does to real scores, against float64.

The reference is float64 attention over the rows as they came, with the model's own absorbed
queries and softmax scale, dense as everywhere in the lab. A strategy's distance from it splits into
the error of what it stores (float64 over its stored rows) and that of its kernel (its output
against float64 over the same stored rows).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from shadowkv_lab.accuracy.storage import STORAGES, round_trip
from shadowkv_lab.errors import BadFile
from shadowkv_lab.load import make_batch
from shadowkv_lab.pool import Pool
from shadowkv_lab.sources.poolfile import PoolFile
from shadowkv_lab.strategies import FullCast, Shadow, Strategy
from shadowkv_lab.strategies.step import DecodeStep

Progress = Callable[[str, float], None]


class AttentionError(NamedTuple):
    """How far attention is from float64 over the rows as they came, one layer.

    Outputs are compared as relative L2 over all queries and heads, in latent space, before W_UV:
    channels with large values dominate it, also where W_UV turns them down again. KL has no such
    weighting.
    """

    name: str  # a storage, or a strategy's label
    layer: int
    kept_bytes: int  # per token and layer
    output: float  # the whole error; of a storage alone it equals `storage_output`
    storage_output: float  # float64 attention over the stored rows
    kernel_output: float  # the kernel against float64 over the same rows; 0 for a storage alone
    kl: float  # mean KL divergence of the softmax, nats
    worst_kl: float  # of the worst query and head


class Coherence(NamedTuple):
    """What a shadow promises, and what a mirror of the unquantised rows gives up."""

    exact_equals_full_cast: bool  # every bit of every output
    exact_survives_restore: bool  # outputs are the same after the rows came back from FP8
    original_gain: float  # error of full_cast / error of shadow(mirror=original)
    original_restored: float  # relative L2 between outputs before and after such a restore


class _Exact(NamedTuple):
    """Float64 attention of Q queries over one layer's rows."""

    out: torch.Tensor  # [Q, H, rank]
    log_p: torch.Tensor  # [Q, H, T], -inf where a query does not look


def exact(
    q: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, scale: float, rank: int
) -> _Exact:
    """Queries [Q, H, row] over rows [T, row]; the query at position p sees rows 0 to p."""
    rows = rows.double()
    scores = torch.einsum("qhr,tr->qht", q.double(), rows) * scale
    later = torch.arange(len(rows), device=rows.device) > positions[:, None]
    log_p = scores.masked_fill(later[:, None], float("-inf")).log_softmax(-1)
    return _Exact(log_p.exp() @ rows[:, :rank], log_p)


def relative(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """|out - wanted| / |wanted| over everything."""
    return float((out.double() - wanted).norm() / wanted.norm())


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats over the last dimension."""
    return (log_p.exp() * (log_p - log_q).nan_to_num(nan=0.0)).sum(-1)


def storage_attention(
    file: PoolFile, storages: Sequence[str] = tuple(STORAGES)
) -> list[AttentionError]:
    """What each storage alone does to attention, layer by layer; no kernel is involved."""
    found, rank = [], file.model.kv_lora_rank
    for index, layer in enumerate(file.layers):
        q, positions = _queries(file, index)
        rows = file.rows(index)
        wanted = exact(q, rows, positions, file.model.softmax_scale, rank)
        for name in storages:
            ours = exact(q, round_trip(rows, name, rank), positions, file.model.softmax_scale, rank)
            kept = file.model.row_bytes(STORAGES[name].row_bytes)
            off, kl = relative(ours.out, wanted.out), divergence(wanted.log_p, ours.log_p)
            found.append(
                AttentionError(name, layer, kept, off, off, 0.0, float(kl.mean()), float(kl.max()))
            )
    return found


def attention_errors(
    file: PoolFile,
    strategies: Sequence[Strategy],
    *,
    device: str | torch.device = "cpu",
    backend: str = "auto",
    progress: Progress = lambda text, done: None,
) -> list[AttentionError]:
    """Each strategy's attention error on each layer, by its own write path and its own kernels."""
    found = []
    for done, strategy in enumerate(strategies):
        progress(f"{strategy.label}: attention error", done / len(strategies))
        step = prepared(file, strategy, device, backend)
        step.run("cast", "attend")
        for index, layer in enumerate(file.layers):
            found.append(_error(file, strategy, step, index, layer))
    progress("done", 1.0)
    return found


def _error(file: PoolFile, strategy: Strategy, step: DecodeStep, index: int, layer: int):
    model, pool = file.model, step.pool
    positions, rank = file.extra("query_positions"), model.kv_lora_rank
    q = torch.cat([step.q_nope[index], step.q_pe[index]], -1).cpu()
    kept = pool.fp8[index] if pool.bf16[index] is None else pool.bf16[index]
    stored = kept[pool.page_size : pool.page_size + file.tokens].cpu()
    wanted = exact(q, file.rows(index), positions, model.softmax_scale, rank)
    ours = exact(q, stored, positions, model.softmax_scale, rank)
    out, kl = step.out[index].cpu(), divergence(wanted.log_p, ours.log_p)
    return AttentionError(
        strategy.label,
        layer,
        model.row_bytes("+".join(strategy.at(index).kinds)),
        relative(out, wanted.out),
        relative(ours.out, wanted.out),
        relative(out, ours.out),
        float(kl.mean()),
        float(kl.max()),
    )


def prepared(
    file: PoolFile, strategy: Strategy, device: str | torch.device = "cpu", backend: str = "auto"
) -> DecodeStep:
    """A decode step over the file's rows in slots 1 to T, each query at its own position.

    The queries share slots, as requests with a common prefix do. Rows go through the pool's write
    path as BF16, as an engine writes them.
    """
    layers = len(file.layers)
    model = replace(file.model, layers=layers, index_layers=0)
    pool = Pool(
        model,
        file.tokens,
        strategy.storage(model),
        device=device,
        mirror=getattr(strategy, "mirror", "exact"),
    )
    slots = pool.allocate(file.tokens)
    for index in range(layers):
        pool.write(index, slots, file.rows(index).bfloat16().to(device))
    q, positions = _queries(file, 0)
    seen = [slots[: p + 1].cpu() for p in positions.tolist()]
    last = torch.stack([s[-1] for s in seen])[None, :]
    batch = make_batch(seen, [len(s) for s in seen], last, 1, pool.device)
    step = DecodeStep(strategy, pool, batch, q.shape[1], backend=backend)
    for index in range(layers):
        q, _ = _queries(file, index)
        step.q_nope[index].copy_(q[..., : model.kv_lora_rank])
        step.q_pe[index].copy_(q[..., model.kv_lora_rank :])
    return step


def _queries(file: PoolFile, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed queries [Q, H, row] of a layer and their positions [Q]."""
    queries, positions = file.extra("queries", index), file.extra("query_positions")
    if queries is None or positions is None:
        raise BadFile(
            f"{file.name} has no queries",
            "pool files that shadowkv capture wrote",
            "Attention error needs real queries; a server's snapshot has rows alone",
        )
    return queries, positions


def coherence(
    file: PoolFile, *, device: str | torch.device = "cpu", backend: str = "auto"
) -> Coherence:
    """Run full_cast and both shadows, then restore their rows from FP8 and run them again."""
    strategies = FullCast(), Shadow(), Shadow(mirror="original")
    fresh, again = [], []
    for strategy in strategies:
        step = prepared(file, strategy, device, backend)
        step.run("cast", "attend")
        fresh.append(step.out.clone())
        slots = torch.arange(1, file.tokens + 1, device=step.pool.device)
        step.pool.load(slots, step.pool.save(slots))  # as after a retraction or a HiCache hit
        step.run("cast", "attend")
        again.append(step.out.clone())
    wanted = torch.stack(
        [
            exact(
                *_queries(file, i)[:1],
                file.rows(i),
                _queries(file, i)[1],
                file.model.softmax_scale,
                file.model.kv_lora_rank,
            ).out
            for i in range(len(file.layers))
        ]
    )
    off = [relative(out.cpu(), wanted) for out in fresh]
    return Coherence(
        exact_equals_full_cast=torch.equal(fresh[0], fresh[1]),
        exact_survives_restore=torch.equal(fresh[1], again[1]),
        original_gain=off[0] / off[2],
        original_restored=relative(again[2], fresh[2].double()),
    )

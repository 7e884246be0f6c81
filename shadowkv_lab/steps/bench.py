"""`shadowkv bench kernels`: each kernel beside its peers and its ceiling, all in one run.

Every time is a CUDA-graph replay over all layers of a pool, each with rows of its own, random
slots, L2 flushed before each replay.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from shadowkv_lab.errors import CannotRun, LabError
from shadowkv_lab.kernels import reference
from shadowkv_lab.kernels.flashinfer import FlashInferAttention
from shadowkv_lab.load import Batch
from shadowkv_lab.model import Model
from shadowkv_lab.pool import Pool
from shadowkv_lab.sources import synthetic
from shadowkv_lab.steps import timing
from shadowkv_lab.steps.measure import bandwidth

SHAPES = ((1, 1024), (1, 8192), (1, 131_072), (32, 8192), (64, 2048))
CASTS = (8192, 65_536, 495_616)
GATHERS = (1024, 65_536, 131_072)
APPENDS = (1, 64)
CHECKED = 1e-2


@dataclass(frozen=True)
class Row:
    """One kernel at one shape. `bytes` are what a step must move over all layers at the least;
    `of_copy` is the share of this run's copy bandwidth that they make; `ratio` is our kernel's
    time over this one's, at the same shape (1 for ours)."""

    kernel: str
    shape: str
    heads: int
    ms: float
    spread_ms: float
    bytes: int
    gb_per_s: float
    of_copy: float
    error: float | None
    ratio: float


def bench(
    model: Model,
    device: torch.device,
    pool_tokens: int = 495_616,
    heads: tuple[int, ...] = (8, 16, 64),
    order: str = "random",
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> Iterator[Row]:
    """Rows of cast, append, gather_cast and decode, ours first and then each peer.

    Takes a pool of FP8 and BF16 rows (1,728 B a slot and layer). Raises `CannotRun` on a
    machine without a GPU.
    """
    if device.type != "cuda":
        raise CannotRun(f"Kernels cannot be timed on {device}", "an NVIDIA GPU")
    peak = bandwidth(device).copy_gb_per_s
    progress("filling the pool", 0.0)
    pool = make_pool(model, device, pool_tokens, ("fp8", "bf16"), order)
    stages = [
        (_movers, "cast, append, gather", ()),
        *((_decodes, f"decode, {h} heads", (h,)) for h in heads),
    ]
    for i, (stage, text, arguments) in enumerate(stages):
        progress(text, (i + 1) / (len(stages) + 1))
        for group in stage(pool, *arguments):
            ours = group[0][1].median_ms
            for name, found, size, error, shape in group:
                rate = size / found.median_ms / 1e6
                yield Row(
                    name,
                    shape,
                    arguments[0] if arguments else 0,
                    found.median_ms,
                    found.spread_ms,
                    size,
                    rate,
                    rate / peak,
                    error,
                    ours / found.median_ms,
                )
    progress("done", 1.0)


def make_pool(
    model: Model,
    device: torch.device,
    pool_tokens: int,
    kinds: tuple[str, ...],
    order: str = "random",
) -> Pool:
    """A pool of random rows, with layers that all keep the same kinds."""
    from shadowkv_lab import kernels

    pool = Pool(
        model,
        pool_tokens,
        [kinds] * model.layers,
        device=device,
        order=order,
        append=kernels.mover("append", device),
    )
    synthetic.fill(pool)
    return pool


def _time(pool: Pool, layer_fn: Callable[[int], object]) -> timing.Timing:
    """All layers of `layer_fn` as one graph."""
    replay = timing.capture(lambda: [layer_fn(i) for i in range(pool.layers)], pool.device)
    return timing.sample(replay, pool.device, budget_s=0.15)


def _movers(pool: Pool) -> Iterator[list[tuple]]:
    """Groups (ours, peers ...) of the kernels that move rows."""
    from shadowkv_lab.kernels import append, widen

    model, device = pool.model, pool.device
    size, layers = model.row_bytes("fp8+bf16"), pool.layers
    scratch = torch.empty(len(pool.fp8[0]), model.row, dtype=torch.bfloat16, device=device)
    compiled = torch.compile(lambda source, target: target.copy_(source))
    for n in (n for n in CASTS if n <= len(pool.fp8[0])):
        out = scratch[:n]
        candidates = {"cast": widen.cast, "torch copy_": reference.cast, "torch.compile": compiled}
        yield [
            (
                name,
                _time(pool, lambda i, fn=fn, out=out, n=n: fn(pool.fp8[i][:n], out)),
                layers * n * size,
                None,
                f"{n} slots",
            )
            for name, fn in candidates.items()
        ]
    for n in APPENDS:
        rows = torch.randn(n, model.row, device=device).bfloat16()
        slots = pool.allocate(n)
        ours = _time(
            pool,
            lambda i, r=rows, s=slots: append.append(
                r, s, pool.fp8[i], pool.bf16[i], pool.counters
            ),
        )

        def plain(i: int, rows=rows, slots=slots) -> None:
            """What an engine's write path does in torch, without counting or flagging."""
            stored = reference.to_fp8(rows)
            reference.bits(pool.fp8[i]).index_copy_(0, slots, reference.bits(stored))
            pool.bf16[i].index_copy_(0, slots, stored.to(torch.bfloat16))

        shape, moved = f"{n} new rows, FP8 and shadow", layers * n * 5 * model.row
        yield [
            ("append", ours, moved, None, shape),
            ("torch ops", _time(pool, plain), moved, None, shape),
        ]
        pool.free(slots)
    for n in (n for n in GATHERS if n <= pool.pool_tokens):
        slots = pool.allocate(n)
        fp8 = torch.empty(n, model.row, dtype=reference.FP8, device=device)
        shape, moved = f"{n} live rows", layers * n * size
        ours = _time(pool, lambda i, s=slots: widen.gather_cast(pool.fp8[i], s, scratch))
        theirs = _time(
            pool,
            lambda i, s=slots, f=fp8, n=n: reference.gather_cast(
                pool.fp8[i], s, scratch[:n], gathered=f
            ),
        )
        yield [
            ("gather_cast", ours, moved, None, shape),
            ("torch index_select + to", theirs, moved, None, shape),
        ]
        pool.free(slots)


def _decodes(pool: Pool, heads: int) -> Iterator[list[tuple]]:
    """Groups (fused_fp8, flashinfer ...) of decode attention at each shape that fits."""
    from shadowkv_lab.kernels.decode import FusedDecode

    for requests, context in SHAPES:
        if requests * context > pool.pool_tokens:
            continue
        batch = pool.batch(requests, context)
        peers: dict[str, Callable] = {"fused_fp8": FusedDecode}
        for reads, variant in itertools.product(("bf16", "native_fp8"), ("fa2", "fa3")):
            peers[f"flashinfer {reads} {variant}"] = lambda v=variant, r=reads: FlashInferAttention(
                v, r, pool.device
            )
        group = []
        for name, make in peers.items():
            try:
                kernel = make()
                found, error = time_attention(pool, kernel, batch, heads)
            except LabError:
                if name == "fused_fp8":
                    raise
                continue  # a peer that this GPU cannot run
            stored = "bf16" if "bf16" in name else "fp8"
            moved = pool.layers * batch.live_tokens * pool.model.row_bytes(stored)
            group.append((name, found, moved, error, f"{requests} x {context}"))
        yield group
        pool.release(batch)


def time_attention(
    pool: Pool, kernel, batch: Batch, heads: int, **plan: object
) -> tuple[timing.Timing, float]:
    """Time of an attention kernel over all layers, and its worst error on one of them."""
    model, device = pool.model, pool.device
    rank, rope = model.kv_lora_rank, model.qk_rope_head_dim
    shape = pool.layers, batch.concurrency, heads
    q_nope = torch.randn(*shape, rank, dtype=torch.bfloat16, device=device)
    q_pe = torch.randn(*shape, rope, dtype=torch.bfloat16, device=device)
    out = torch.full_like(q_nope, float("nan"))
    kernel.plan(batch, heads, model.softmax_scale, rank=rank, rope=rope, **plan)
    rows = pool.bf16 if getattr(kernel, "reads", "fp8") == "bf16" else pool.fp8
    found = _time(pool, lambda i: kernel.run(q_nope[i], q_pe[i], rows[i], out[i]))
    layer = int(torch.randint(pool.layers, ()))
    exact = reference.attend(
        q_nope[layer], q_pe[layer], rows[layer], batch, model.softmax_scale, torch.float64
    )
    error = (out[layer].double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return found, float(error.nan_to_num(nan=float("inf")).max())


def as_dicts(rows: list[Row]) -> list[dict]:
    """Rows for a table or JSON."""
    return [asdict(row) for row in rows]

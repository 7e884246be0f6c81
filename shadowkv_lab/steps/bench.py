"""`shadowkv bench kernels`: each kernel beside its peers and its ceiling, all in one run.

Every time is a CUDA-graph replay over all layers of a pool, each with rows of its own, random
slots, L2 flushed before each replay.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy
import torch

from shadowkv_lab import facts
from shadowkv_lab.errors import CannotRun, LabError
from shadowkv_lab.kernels import reference
from shadowkv_lab.kernels.flashinfer import FlashInferAttention
from shadowkv_lab.kernels.flashmla import FlashMLA
from shadowkv_lab.load import Batch, make_batch
from shadowkv_lab.model import Model
from shadowkv_lab.pool import Pool
from shadowkv_lab.sources import synthetic
from shadowkv_lab.steps import timing
from shadowkv_lab.steps.measure import bandwidth

# What is reported; `tune` has shapes of its own. MIXED requests have prompts of the Azure trace.
SHAPES = (
    *((1, 1024), (1, 8192), (1, 32_768), (1, 131_072)),
    *((8, 16_384), (32, 8192), (64, 2048), (128, 4096)),
)
MIXED = 64
PAGES = (64, 1)
HEADS = (8, 16, 32, 64, 128)
CASTS = (8192, 65_536, 495_616)
GATHERS = (1024, 65_536, 131_072)
APPENDS = (1, 64)
CHECKED = 1e-2


@dataclass(frozen=True)
class Row:
    """One kernel at one shape. `bytes` are the least that a step must move, all layers; `of_copy`
    is the share of this run's copy bandwidth that they make; `ratio` is our kernel's time over
    this one's, at the same shape (1 for ours). `plan_ms` is the host's time to plan a batch, once,
    and no part of `ms`. `page_size` is 0 where no pages are read."""

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
    page_size: int = 0
    plan_ms: float | None = None


def bench(
    model: Model,
    device: torch.device,
    pool_tokens: int = 524_288,
    heads: tuple[int, ...] = HEADS,
    order: str = "random",
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> Iterator[Row]:
    """Rows of cast, append, gather_cast and decode, ours first and then each peer.

    Takes a pool of FP8 and BF16 rows (1,728 B per slot and layer), for each page size in turn.
    Raises `CannotRun` on a machine without a GPU.
    """
    if device.type != "cuda":
        raise CannotRun(f"Kernels cannot be timed on {device}", "an NVIDIA GPU")
    peak = bandwidth(device).copy_gb_per_s
    done, stages = 0, len(PAGES) * (1 + len(heads))
    for page in PAGES:
        progress(f"filling the pool, page size {page}", done / stages)
        pool = make_pool(model, device, pool_tokens, ("fp8", "bf16"), order, page_size=page)
        for count in (0, *heads):
            text = f"decode, {count} heads, page size {page}" if count else "cast, append, gather"
            progress(text, done / stages)
            done += 1
            if not count and page > 1:
                continue  # they take slots, whatever page these lie in
            for group in _decodes(pool, count) if count else _movers(pool):
                ours = group[0][1].median_ms
                for name, found, size, error, shape, *plan_ms in group:
                    rate = size / found.median_ms / 1e6
                    yield Row(
                        name,
                        shape,
                        count,
                        found.median_ms,
                        found.spread_ms,
                        size,
                        rate,
                        rate / peak,
                        error,
                        ours / found.median_ms,
                        page if count else 0,
                        *plan_ms,
                    )
        del pool
    progress("done", 1.0)


def make_pool(
    model: Model,
    device: torch.device,
    pool_tokens: int,
    kinds: tuple[str, ...],
    order: str = "random",
    page_size: int = 1,
) -> Pool:
    """A pool of random rows, with layers that all keep the same kinds."""
    from shadowkv_lab import kernels

    pool = Pool(
        model,
        pool_tokens,
        [kinds] * model.layers,
        page_size=page_size,
        device=device,
        order=order,
        append=kernels.mover("append", device),
    )
    synthetic.fill(pool)
    return pool


def prompts(count: int) -> list[int]:
    """Lengths of `count` requests: evenly spaced quantiles of the Azure trace's prompts."""
    quantiles = facts.find("traffic", "traffic", "azure-conversation")["prompt_tokens"]
    shares, tokens = zip(*quantiles, strict=True)
    wanted = (numpy.arange(count) + 0.5) / count
    return numpy.interp(wanted, shares, tokens).astype(int).tolist()


def mixed(pool: Pool, lens: list[int]) -> Batch:
    """A batch of requests of these lengths; `Pool.release` frees it."""
    pages = [pool.allocator.allocate_pages(-(-n // pool.page_size)) for n in lens]
    spares = torch.stack([p[-1] for p in pages])[None, :]
    return make_batch(pages, lens, spares, pool.page_size, pool.device)


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

    peers: dict[str, Callable] = {"fused_fp8": FusedDecode}
    for reads in ("bf16", "native_fp8"):
        for variant in ("fa2", "fa3"):
            peers[f"flashinfer {reads} {variant}"] = lambda v=variant, r=reads: FlashInferAttention(
                v, r, pool.device
            )
        peers[f"flashmla {reads}"] = lambda r=reads: FlashMLA(r, pool.device)
    shapes = {f"{n} x {context}": [context] * n for n, context in SHAPES}
    shapes[f"{MIXED} of the Azure trace"] = prompts(MIXED)
    for shape, lens in shapes.items():
        if sum(lens) > pool.pool_tokens:
            continue
        batch = mixed(pool, lens)
        group = []
        for name, make in peers.items():
            try:
                kernel = make()
                found, error, plan_ms = time_attention(pool, kernel, batch, heads)
            except LabError:
                if name == "fused_fp8":
                    raise
                continue  # a peer that this GPU cannot run
            stored = "bf16" if "bf16" in name else "fp8"
            moved = pool.layers * batch.live_tokens * pool.model.row_bytes(stored)
            group.append((name, found, moved, error, shape, plan_ms))
        yield group
        pool.release(batch)


def time_attention(
    pool: Pool, kernel, batch: Batch, heads: int, **plan: object
) -> tuple[timing.Timing, float, float]:
    """Time of an attention kernel over all layers, its worst error on one of them, and the host's
    time to plan it (ms), the second time."""
    model, device = pool.model, pool.device
    rank, rope = model.kv_lora_rank, model.qk_rope_head_dim
    shape = pool.layers, batch.concurrency, heads
    q_nope = torch.randn(*shape, rank, dtype=torch.bfloat16, device=device)
    q_pe = torch.randn(*shape, rope, dtype=torch.bfloat16, device=device)
    out = [torch.full_like(q, float("nan")) for q in q_nope]
    for _ in range(2):  # the first time compiles
        begun = time.perf_counter()
        kernel.plan(batch, heads, model.softmax_scale, rank=rank, rope=rope, **plan)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        plan_ms = (time.perf_counter() - begun) * 1e3
    rows = pool.bf16 if getattr(kernel, "reads", "fp8") == "bf16" else pool.fp8
    if hasattr(kernel, "pack"):  # takes queries in a form of its own, returns its own output
        q = [kernel.pack(*both) for both in zip(q_nope, q_pe, strict=True)]

        def attend(i: int) -> None:
            out[i] = kernel.run(q[i], rows[i])
    else:

        def attend(i: int) -> None:
            kernel.run(q_nope[i], q_pe[i], rows[i], out[i])

    found = _time(pool, attend)
    layer = int(torch.randint(pool.layers, ()))
    exact = reference.attend(
        q_nope[layer], q_pe[layer], rows[layer], batch, model.softmax_scale, torch.float64
    )
    error = (out[layer].double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return found, float(error.nan_to_num(nan=float("inf")).max()), plan_ms


def as_dicts(rows: list[Row]) -> list[dict]:
    """Rows for a table or JSON."""
    return [asdict(row) for row in rows]

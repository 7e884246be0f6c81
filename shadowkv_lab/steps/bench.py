"""`shadowkv bench kernels`: each kernel beside its peers and its ceiling, all in one run.

Every time is a CUDA-graph replay over all layers of a pool, each with rows of its own, random
slots, L2 flushed before each replay.
"""

import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy
import torch

from shadowkv_lab import facts
from shadowkv_lab.errors import CannotRun, OutOfRange
from shadowkv_lab.files import read_json, write
from shadowkv_lab.kernels import reference
from shadowkv_lab.kernels.flashinfer import FlashInferAttention
from shadowkv_lab.kernels.flashmla import FlashMLA
from shadowkv_lab.kernels.sglang_triton import SGLangTriton
from shadowkv_lab.load import Batch, make_batch
from shadowkv_lab.model import Model
from shadowkv_lab.pool import Pool
from shadowkv_lab.sources import formats, synthetic
from shadowkv_lab.steps import timing
from shadowkv_lab.steps.measure import bandwidth, named, release
from shadowkv_lab.steps.step import Origin

# What is reported; `tune` has shapes of its own. MIXED requests have prompts of the Azure trace.
TABLE = ((1, 1024), (1, 8192), (1, 131_072), (32, 8192), (64, 2048))  # what is aimed at
SHAPES = (*TABLE, (1, 32_768), (8, 16_384), (128, 4096))
MIXED = 64
PAGES = (64, 1)
HEADS = (8, 16, 64, 128, 32)
CASTS = (8192, 65_536, 495_616)
GATHERS = (1024, 65_536, 131_072)
APPENDS = (1, 64)
CHECKED = 1e-2
PACKED = "fused_fp8, packed rows"
SPAN = 65_536  # rows packed at once


@dataclass(frozen=True)
class Row:
    """One kernel at one shape. `bytes` are the least that a step must move, all layers; `of_copy`
    is the share of this run's copy bandwidth that they make; `ratio` is our kernel's time over
    this one's, at the same shape (1 for ours, None where ours failed). `plan_ms` is the host's
    time to plan a batch, once, and no part of `ms`. `page_size` is 0 where no pages are read.
    `queries` are the query tokens of each request."""

    kernel: str
    shape: str
    heads: int
    ms: float
    spread_ms: float
    bytes: int
    gb_per_s: float
    of_copy: float
    error: float | None
    ratio: float | None
    page_size: int = 0
    plan_ms: float | None = None
    queries: int = 1


@dataclass(frozen=True)
class Failure:
    """A kernel that gave no time at a shape, and why."""

    kernel: str
    shape: str
    heads: int
    page_size: int
    queries: int
    reason: str


@dataclass(frozen=True)
class Cell:
    """What is timed at once: ours and each peer at one shape. No heads: kernels that move rows."""

    page_size: int = 0
    heads: int = 0
    shape: str = ""
    queries: int = 1


def cells(
    heads: tuple[int, ...], pages: tuple[int, ...] = PAGES, queries: tuple[int, ...] = (1,)
) -> list[Cell]:
    """In the order of their weight, so that a run cut short has what matters most.

    The shapes of the table at the first page size come first, then its others, the movers, and
    the other page sizes and query tokens.
    """
    table = [f"{n} x {context}" for n, context in TABLE]
    others = [f"{n} x {context}" for n, context in SHAPES if (n, context) not in TABLE]
    others.append(f"{MIXED} of the Azure trace")
    found = []
    for q, page in itertools.product(queries, pages):
        for shapes in (table, others):
            found += [Cell(page, count, shape, q) for count in heads for shape in shapes]
        if not any(cell.heads == 0 for cell in found):
            found.append(Cell())
    return found


def bench(
    model: Model,
    device: torch.device,
    pool_tokens: int = 524_288,
    todo: list[Cell] | None = None,
    limit_s: float = float("inf"),
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> Iterator[tuple[Cell, list[Row | Failure]]]:
    """Each cell with the rows of ours and then of each peer, as they are measured.

    Takes one pool of FP8 and BF16 rows (1,728 B per slot and layer) for all page sizes. No cell
    begins after `limit_s` seconds. A peer that cannot run, or fails, becomes a `Failure` and ends
    nothing, unless it leaves the GPU broken. Raises `CannotRun` then, and on a machine without a
    GPU, and `DoesNotFit`.
    """
    check(device)
    begun, todo = time.monotonic(), cells(HEADS) if todo is None else todo
    with named(device):
        peak = bandwidth(device).copy_gb_per_s
        with _compiling(model, device, pool_tokens, [cell for cell in todo if cell.heads]):
            progress("filling the pool", 0.0)
            pool = make_pool(model, device, pool_tokens, ("fp8", "bf16"), page_size=max(PAGES))
        for i, cell in enumerate(todo):
            if time.monotonic() - begun > limit_s:
                return
            progress(f"{cell.shape or 'cast, append, gather'}, {cell.heads} heads", i / len(todo))
            found = []
            for group in _decode(pool, cell) if cell.heads else _movers(pool):
                ours = None if isinstance(group[0], Failure) else group[0][1].median_ms
                found += [
                    timed if isinstance(timed, Failure) else _row(cell, timed, ours, peak)
                    for timed in group
                ]
            yield cell, found
    progress("done", 1.0)


def check(device: torch.device) -> None:
    """Raise `CannotRun` on a machine without a GPU."""
    if device.type != "cuda":
        raise CannotRun(f"Kernels cannot be timed on {device}", "an NVIDIA GPU")


class Log:
    """What a benchmark has found, in a file that is whole after each cell.

    A file of the same device, revision and libraries is gone on with: `cells` are what it holds.
    """

    def __init__(self, origin: Origin, path: Path | None = None):
        self.path, self.cells = path, []
        self.entry = {"schema": 1, "origin": asdict(origin), "rows": [], "failed": [], "cells": []}
        if path and path.exists() and path.stat().st_size:
            before = read_json(path)
            same = ("device", "torch", "triton", "flashinfer", "git_revision")
            if all(before.get("origin", {}).get(n) == getattr(origin, n) for n in same):
                self.entry |= {n: before.get(n, []) for n in ("rows", "failed", "cells")}
                self.cells = [Cell(**cell) for cell in self.entry["cells"]]

    def add(self, cell: Cell, found: list[Row | Failure]) -> None:
        """A cell's rows, and the file anew."""
        self.entry["cells"].append(asdict(cell))
        for each in found:
            self.entry["failed" if isinstance(each, Failure) else "rows"].append(asdict(each))
        if self.path:
            write(self.path, self.text + "\n")

    @property
    def text(self) -> str:
        """All of it as JSON."""
        return json.dumps(self.entry, indent=1)


def _row(cell: Cell, timed: tuple, ours: float | None, peak: float) -> Row:
    name, found, size, error, shape, *plan_ms = timed
    rate = size / found.median_ms / 1e6
    return Row(
        name,
        shape,
        cell.heads,
        found.median_ms,
        found.spread_ms,
        size,
        rate,
        rate / peak,
        error,
        None if ours is None else ours / found.median_ms,
        cell.page_size,
        *(plan_ms or [None]),
        cell.queries,
    )


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


def lengths(shape: str) -> list[int]:
    """Live tokens of each request of a cell's shape; raises `OutOfRange`."""
    if shape.endswith("of the Azure trace"):
        return prompts(int(shape.split()[0]))
    try:
        requests, context = map(int, shape.split(" x "))
    except ValueError:
        raise OutOfRange(f"Shape {shape!r}", "such as 32 x 8192") from None
    return [context] * requests


def scattered(slots: int, lens: list[int], page_size: int, device: torch.device) -> Batch:
    """Requests of these lengths over random pages of `slots` slots, page 0 left out.

    Nothing is allocated: whatever lies in the slots is read, and a batch of any page size may be
    laid over the same pool.
    """
    counts = [-(-n // page_size) for n in lens]
    order = torch.randperm(slots // page_size - 1, generator=torch.Generator().manual_seed(0)) + 1
    pages = [*order[: sum(counts)].split(counts)]
    spares = torch.stack([p[-1] for p in pages])[None, :]
    return make_batch(pages, lens, spares, page_size, device)


def time_layers(
    pool: Pool, layer_fn: Callable[[int], object], layers: int | None = None
) -> timing.Timing:
    """All layers of `layer_fn` as one graph; `layers` where they are not as many as the pool's."""
    each = range(pool.layers if layers is None else layers)
    replay = timing.capture(lambda: [layer_fn(i) for i in each], pool.device)
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
                time_layers(pool, lambda i, fn=fn, out=out, n=n: fn(pool.fp8[i][:n], out)),
                layers * n * size,
                None,
                f"{n} slots",
            )
            for name, fn in candidates.items()
        ]
    for n in APPENDS:
        rows = torch.randn(n, model.row, device=device).bfloat16()
        slots = scattered(len(pool.fp8[0]), [n], 1, device).live_slots
        ours = time_layers(
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
            ("torch ops", time_layers(pool, plain), moved, None, shape),
        ]
    for n in (n for n in GATHERS if n <= pool.pool_tokens):
        slots = scattered(len(pool.fp8[0]), [n], 1, device).live_slots
        fp8 = torch.empty(n, model.row, dtype=reference.FP8, device=device)
        shape, moved = f"{n} live rows", layers * n * size
        ours = time_layers(pool, lambda i, s=slots: widen.gather_cast(pool.fp8[i], s, scratch))
        theirs = time_layers(
            pool,
            lambda i, s=slots, f=fp8, n=n: reference.gather_cast(
                pool.fp8[i], s, scratch[:n], gathered=f
            ),
        )
        yield [
            ("gather_cast", ours, moved, None, shape),
            ("torch index_select + to", theirs, moved, None, shape),
        ]


def _peers(device: torch.device) -> dict[str, Callable]:
    """Makers of decode attention by name, ours first."""
    from shadowkv_lab.kernels.decode import FusedDecode

    class Packed(FusedDecode):
        reads = "packed"

        def plan(self, *batch, **options) -> None:
            super().plan(*batch, packed=True, **options)

    peers: dict[str, Callable] = {
        "fused_fp8": FusedDecode,
        "fused_fp8(query=fp8)": lambda: FusedDecode(query="fp8"),
        PACKED: Packed,
    }
    for reads in ("bf16", "native_fp8"):
        peers[f"flashmla {reads}"] = lambda r=reads: FlashMLA(r, device)
        for variant in ("fa2", "fa3"):
            peers[f"flashinfer {reads} {variant}"] = lambda v=variant, r=reads: FlashInferAttention(
                v, r, device
            )
        peers[f"sglang triton {reads}"] = lambda r=reads: SGLangTriton(r, device)
    return peers


def _decode(pool: Pool, cell: Cell, names: tuple[str, ...] = ("",)) -> Iterator[list]:
    """The one group (fused_fp8, flashinfer ...) of decode attention at a cell, if it fits: those
    whose names begin with one of `names`."""
    lens, page, device = lengths(cell.shape), cell.page_size, pool.device
    if sum(-(-n // page) for n in lens) * page > pool.pool_tokens:
        return
    batch, group = scattered(len(pool.fp8[0]), lens, page, device), []
    for name, make in _peers(device).items():
        if not name.startswith(names):
            continue
        try:
            found, error, plan_ms = time_attention(
                pool, make(), batch, cell.heads, queries=cell.queries
            )
            if not error < float("inf"):
                raise ArithmeticError("its output is not finite")
        except Exception as failed:  # whatever it is, the others still count
            reason = f"{type(failed).__name__}: {failed}"[:400]
            group.append(Failure(name, cell.shape, cell.heads, page, cell.queries, reason))
            release(device)
            continue
        stored = "packed" if name == PACKED else "bf16" if " bf16" in name else "fp8"
        moved = pool.layers * batch.live_tokens * pool.model.row_bytes(stored)
        group.append((name, found, moved, error, cell.shape, plan_ms))
    yield group


@contextmanager
def _compiling(
    model: Model, device: torch.device, pool_tokens: int, todo: list[Cell]
) -> Iterator[None]:
    """What the cells will run is compiled in processes side by side, and kept in caches on disk.

    FlashInfer's four kernels take 20 s each and more, and Triton's as much for each head count.
    """
    groups: dict[tuple, list[Cell]] = {}
    for cell in todo:
        groups.setdefault((cell.page_size, cell.heads, cell.queries), []).append(cell)
    if not todo:
        yield
        return
    count = min(os.cpu_count() or 1, 4 + len(groups), 14)
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as workers:
        both = itertools.product(("fa2", "fa3"), ("bf16", "native_fp8"))
        asked = [workers.submit(_planned, *each, str(device)) for each in both]
        small = replace(model, layers=1, index_layers=1)
        asked += [
            workers.submit(_warmed, group, small, str(device), pool_tokens)
            for group in groups.values()
        ]
        yield
        for each in asked:
            with suppress(Exception):  # it comes up again, and is named, where it is timed
                each.result()


def _warmed(group: list[Cell], model: Model, device: str, pool_tokens: int) -> None:
    where, ours = torch.device(device), "fused_fp8"
    pool = make_pool(model, where, pool_tokens, ("fp8", "bf16"), page_size=max(PAGES))
    for i, cell in enumerate(group):  # SGLang's code is the same at every shape
        for _ in _decode(pool, cell, (ours, "sglang") if i == 0 else (ours,)):
            pass


def _planned(variant: str, reads: str, device: str) -> None:
    where = torch.device(device)
    batch = scattered(1024, [64], 1, where)
    kernel = FlashInferAttention(variant, reads, where)
    kernel.plan(batch, 8, 1.0, rank=512, rope=64)


def _packed(pool: Pool) -> list[torch.Tensor]:
    """The pool's BF16 rows as packed ones [S, 656], made once: 656 B more per slot and layer."""
    if (PACKED, 0) not in pool.beside:
        rank = pool.model.kv_lora_rank
        pool.beside[(PACKED, 0)] = {
            str(layer): torch.cat([formats.pack(part, rank) for part in rows.split(SPAN)])
            for layer, rows in enumerate(pool.bf16)
        }
    return [*pool.beside[(PACKED, 0)].values()]


def time_attention(
    pool: Pool, kernel, batch: Batch, heads: int, queries: int = 1, **plan: object
) -> tuple[timing.Timing, float, float]:
    """Time of an attention kernel over all layers, its worst error on one of them, and the host's
    time to plan it (ms), the second time. Each request has `queries` query tokens."""
    model, device = pool.model, pool.device
    rank, rope = model.kv_lora_rank, model.qk_rope_head_dim
    shape = pool.layers, batch.concurrency, queries * heads
    q_nope = torch.randn(*shape, rank, dtype=torch.bfloat16, device=device)
    q_pe = torch.randn(*shape, rope, dtype=torch.bfloat16, device=device)
    out = [torch.full_like(q, float("nan")) for q in q_nope]
    if queries > 1:
        plan["queries"] = queries
    for _ in range(2):  # the first time compiles
        begun = time.perf_counter()
        kernel.plan(batch, heads, model.softmax_scale, rank=rank, rope=rope, **plan)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        plan_ms = (time.perf_counter() - begun) * 1e3
    reads = getattr(kernel, "reads", "fp8")
    rows = pool.bf16 if reads == "bf16" else _packed(pool) if reads == "packed" else pool.fp8
    if hasattr(kernel, "pack"):  # takes queries in a form of its own, returns its own output
        q = [kernel.pack(*both) for both in zip(q_nope, q_pe, strict=True)]

        def attend(i: int) -> None:
            out[i] = kernel.run(q[i], rows[i])
    else:

        def attend(i: int) -> None:
            kernel.run(q_nope[i], q_pe[i], rows[i], out[i])

    found = time_layers(pool, attend)
    layer = int(torch.randint(pool.layers, ()))
    stored = formats.unpack(rows[layer], rank, rope) if reads == "packed" else rows[layer]
    exact = reference.attend(
        *(q_nope[layer], q_pe[layer], stored, batch, model.softmax_scale, torch.float64), queries
    )
    return found, reference.relative_error(out[layer], exact), plan_ms

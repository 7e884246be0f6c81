"""`shadowkv bench kernels --tune`: measure this GPU's launch rows and write its table."""

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from shadowkv_lab import machine
from shadowkv_lab.errors import CannotRun, DoesNotFit, OutOfRange
from shadowkv_lab.kernels import launch
from shadowkv_lab.kernels.launch import LaunchRow
from shadowkv_lab.model import Model
from shadowkv_lab.pool import Pool
from shadowkv_lab.steps import bench as kernels

Progress = Callable[[str, float], None]

# None of the shapes that `bench` reports: what is tuned on a shape looks better there.
SHAPES = ((1, 1536), (1, 6144), (1, 98_304), (24, 6144), (48, 3072))


def tune(
    model: Model,
    device: torch.device,
    heads: Sequence[int] | None = None,
    progress: Progress = lambda text, done: None,
) -> str:
    """Measure the decode's launch rows on this GPU, and write its architecture's table.

    For every head count (or those of `heads`) and kind of load: each candidate at the shapes of
    that load, the smallest geometric mean wins. Returns the table's path. Raises
    `CannotRun` without a GPU, `DoesNotFit`, and `OutOfRange` for a head count that has
    no row.
    """
    if device.type != "cuda":
        raise CannotRun(f"Launch rows cannot be measured on {device}", "an NVIDIA GPU")
    rows, sms = launch.rows(launch.architecture(device)), launch.multiprocessors(device)
    known = sorted({row.heads for row in rows})
    if unknown := set(heads or known) - set(known):
        raise OutOfRange(f"No launch row for {sorted(unknown)} heads", f"some of {known}")
    largest = max(c * n for c, n in SHAPES)
    fits = machine.memory(device).free_bytes // (model.layers * model.row_bytes("fp8"))
    if fits < largest:
        raise DoesNotFit(f"{fits} FP8 slots fit", f"{largest:,} or more")
    todo = [row for row in rows if row.heads in (heads or known)]
    progress("compiling", 0.0)
    built = compiled({_code(c) for row in todo for c in candidates(row)}, model, device)
    table, pool = {row: row for row in rows}, None
    for i, row in enumerate(sorted(todo, key=lambda row: row.page)):
        if pool is None or pool.page_size != row.page:
            pool = None  # before the next one is made
            pool = kernels.make_pool(model, device, largest, ("fp8",), page_size=row.page)
        progress(f"{row.heads} heads, {row.load}", (i + 1) / (len(todo) + 1))
        shapes = [
            s for s in SHAPES if launch.load_of(s[0], s[0] * s[1], sms, row.heads) == row.load
        ]
        if shapes:
            choices = [c for c in candidates(row) if _code(c) in built]
            table[row] = _best(pool, row, choices, shapes)
    progress("done", 1.0)
    return str(launch.save(launch.own_architecture(device), list(table.values())))


def _best(
    pool: Pool, row: LaunchRow, choices: list[LaunchRow], shapes: list[tuple[int, int]]
) -> LaunchRow:
    """The fastest of `choices`, saying what was measured; `row` if none gives right outputs."""
    from shadowkv_lab.kernels.decode import FusedDecode

    means = dict.fromkeys(choices, 1.0)
    for requests, context in shapes:
        batch = pool.batch(requests, context)
        for choice in choices:
            found, error, _ = kernels.time_attention(
                pool, FusedDecode(), batch, row.heads, row=choice
            )
            right = error < kernels.CHECKED
            means[choice] *= found.median_ms ** (1 / len(shapes)) if right else float("inf")
        pool.release(batch)
    best = min(means, key=means.get, default=row)
    if means.get(best, float("inf")) == float("inf"):
        return row
    where = " and ".join(f"{c} x {n:,}" for c, n in shapes)
    mean = "geometric mean of " if len(shapes) > 1 else ""
    title = machine.device_title(pool.device)
    return replace(best, measured=f"{means[best]:.2f} ms, {mean}{where}; one {title}, tuned")


def candidates(row: LaunchRow) -> Iterator[LaunchRow]:
    """The choices worth a try for a row: of the word, the pair and the CUDA kernel.

    A row for scales of their own is timed without them, as before: what they add is the same work
    for each candidate. The CUDA kernel does not compile off Hopper.
    """
    if not row.scaled:
        for tile, blocks in itertools.product((8, 16, 32), (2, 4, 8)):
            # A block is what so many warps take at once.
            yield replace(
                row,
                kernel="warps",
                tile=tile,
                block=16 * blocks,
                warps=8,
                vector=0,
                pipe=False,
                stages=0,
                blocks_per_sm=1,
            )
    tiles = sorted({min(8, row.heads), min(16, row.heads), row.heads})
    for tile, (block, warps), pipe, blocks in itertools.product(
        tiles, ((16, 2), (32, 2), (32, 4), (64, 4), (32, 8), (64, 8)), (True, False), (1, 2, 4)
    ):
        if (tile > 16) == (warps == 8):  # large tiles need the registers of eight warps
            yield replace(
                row,
                tile=tile,
                block=block,
                warps=warps,
                pipe=pipe,
                blocks_per_sm=blocks,
                vector=2,
                stages=0,
                kernel="words",
            )
    for tile, (block, warps), stages, blocks in itertools.product(
        tiles[:2], ((32, 2), (32, 4), (64, 4)), (2, 3), (1, 2, 4)
    ):
        yield replace(
            row,
            tile=tile,
            block=block,
            warps=warps,
            stages=stages,
            blocks_per_sm=blocks,
            kernel="pairs",
        )


def _code(row: LaunchRow) -> LaunchRow:
    """What of a row decides its machine code."""
    vector, pipe = (row.vector, row.pipe) if row.kernel == "words" else (0, False)
    return replace(row, load="", blocks_per_sm=1, measured="", vector=vector, pipe=pipe)


def compiled(codes: set[LaunchRow], model: Model, device: torch.device) -> set[LaunchRow]:
    """Those that compile and run here.

    In processes side by side, which leave the code in Triton's cache: compiling takes far longer
    than timing.
    """
    workers = min(16, os.cpu_count() or 1, len(codes))
    small, order = replace(model, layers=1, index_layers=1), list(codes)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        good = pool.map(_runs, order, itertools.repeat(small), itertools.repeat(str(device)))
        return set(itertools.compress(order, good))


def _runs(row: LaunchRow, model: Model, device: str) -> bool:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    from shadowkv_lab.kernels.decode import FusedDecode

    where = torch.device(device)
    if row.kernel == "warps" and not launch.hopper(where):
        return False
    pool = kernels.make_pool(model, where, 1024, ("fp8",), page_size=row.page)
    try:
        kernels.time_attention(pool, FusedDecode(), pool.batch(2, 256), row.heads, row=row)
    except (CompilationError, OutOfResources, PTXASError):  # too little shared memory, registers
        return False
    return True

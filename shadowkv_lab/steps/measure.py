"""Decode steps measured: each strategy in turn, phases and whole, and checked before reported."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

import torch

from shadowkv_lab import kernels, machine
from shadowkv_lab.deployment import GIB, Setting
from shadowkv_lab.errors import CannotRun, DoesNotFit, UnknownName, whole
from shadowkv_lab.load import Load
from shadowkv_lab.model import Model
from shadowkv_lab.pool import SEEDS, Pool, check_fits, check_load, check_size
from shadowkv_lab.provenance import measured
from shadowkv_lab.sources import synthetic
from shadowkv_lab.steps import step as steps
from shadowkv_lab.steps import timing
from shadowkv_lab.steps.step import Phase, Step
from shadowkv_lab.strategies import Strategy, parse
from shadowkv_lab.strategies.check import require_right, worst_error
from shadowkv_lab.strategies.step import DecodeStep

CHECKED_LAYERS = 3
TOKENS = 16  # of a step and request, at most


class Cancelled(Exception):
    """A measurement that was told to stop; what it had finished stays."""


@dataclass(frozen=True)
class Bench:
    """What one series of measurements has in common.

    `heads` are query heads on this GPU. `fill` puts rows into a pool. `progress(text, done)` gets
    what is being done and the share of it that is done; `cancelled()` is asked between samples.
    `reads` is a `Load`'s: with "dsa" attention reads the rows that the model's index chooses.
    `tokens_per_step` too: the tokens that each request writes and that attend, several with MTP.
    """

    model: Model
    heads: int
    device: torch.device
    backend: str = "auto"
    page_size: int = 1
    order: str = "random"
    seed: int = 0
    source: str = "synthetic"
    fill: Callable[[Pool, int], None] = synthetic.fill
    modes: tuple[str, ...] = ("graph", "eager")
    budget_s: float = 0.2
    reads: str = "dense"
    tokens_per_step: int = 1
    progress: Callable[[str, float], None] = lambda text, done: None
    cancelled: Callable[[], bool] = lambda: False

    def load(self, concurrency: int, context: int) -> Load:
        """`concurrency` requests of `context` live tokens, read and written as the bench says."""
        return Load(concurrency, context, self.tokens_per_step, self.reads)

    def _stop_if_cancelled(self) -> None:
        if self.cancelled():
            raise Cancelled


@cache
def bandwidth(device: torch.device) -> timing.Bandwidth:
    """The device's copy and read bandwidth, measured once a process."""
    return timing.measure_bandwidth(device)


def measure(
    bench: Bench,
    strategies: Sequence[Strategy],
    pool_tokens: Sequence[int],
    loads: Sequence[tuple[int, int]],
) -> Iterator[Step]:
    """Steps of every strategy at every pool size and load (concurrency, context) that fits.

    Everything is checked at once, before anything is allocated. Strategies run one after another,
    each freeing its buffers before the next. Where several pools or loads are asked for, those that
    exceed a pool are left out; a single one raises, and so do loads of which none fits.

    Raises `WrongResult`, `Cancelled`, `DoesNotFit` (also where memory runs out on the way), and
    `CannotRun` where the device fails.
    """
    return _measured(bench, _cells(bench, strategies, pool_tokens, loads))


def _cells(
    bench: Bench,
    strategies: Sequence[Strategy],
    pool_tokens: Sequence[int],
    loads: Sequence[tuple[int, int]],
) -> list[tuple[Strategy, int, list[tuple[int, int]]]]:
    """Each strategy and pool with the loads that fit; raises what would stop any of them."""
    for P in pool_tokens:
        check_size(P, bench.page_size, bench.order)
    if unknown := [mode for mode in bench.modes if mode not in steps.MODES] or not bench.modes:
        raise UnknownName("mode", unknown[0] if bench.modes else "", steps.MODES)
    whole(bench.seed, "Seed", 0, SEEDS)
    whole(bench.heads, "Heads")
    bench.model.read_tokens(Load(reads=bench.reads))  # raises for a model without an index
    if whole(bench.tokens_per_step, "Tokens per step", 1, TOKENS) > 1 and bench.reads == "dsa":
        raise CannotRun(
            "Several tokens per step, each with rows of its own choice",
            "one token per step with DSA",
            'Ask for reads="dense"',
        )
    for concurrency, context in loads:
        whole(concurrency, "Concurrency")
        whole(context, "Context", bench.tokens_per_step)
    cells = [
        (s, P, _fitting(bench, P, loads, len(pool_tokens) > 1))
        for s in strategies
        for P in sorted(set(pool_tokens))
    ]
    if not any(fitting for *_, fitting in cells):
        raise DoesNotFit(
            f"No load fits a pool of {max(pool_tokens, default=0)} tokens",
            f"concurrency x context up to the pool's tokens, and context up to "
            f"{bench.model.max_positions} for {bench.model.name}",
            "Ask for a shorter context, fewer requests or a larger pool",
        )
    for s, P, fitting in cells:
        check(bench, s, P, fitting)
    return cells


@contextmanager
def named(device: torch.device):
    """Say in the lab's words that memory ran out or the device failed; memory is given back."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free = f"{machine.memory(device).free_bytes / GIB:.2f} GiB are free on {device} now"
        said = str(error).partition("\n")[0].partition(". GPU ")[0]
        raise DoesNotFit(
            f"The memory ran out in the middle ({said})",
            free,
            "Another process may have taken some: measure a smaller pool, or stop it",
        ) from None
    except getattr(torch, "AcceleratorError", ()) as error:
        raise CannotRun(
            f"{device} failed ({str(error).partition(chr(10))[0]})",
            remedy="Start the process anew: CUDA takes no more work from this one",
        ) from None


def _measured(bench: Bench, cells: Sequence[tuple]) -> Iterator[Step]:
    with named(bench.device):
        try:
            yield from _each(bench, cells)
        finally:
            release(bench.device)


def _each(bench: Bench, cells: Sequence[tuple]) -> Iterator[Step]:
    total, done = sum(len(fitting) for *_, fitting in cells), 0
    bandwidth(bench.device)
    for s, P, fitting in cells:
        if not fitting:
            continue
        bench.progress(f"{s.label}: filling {P} slots", done / total)
        before = _allocated(bench.device)
        pool = make_pool(bench, s, P)
        for concurrency, context in fitting:
            bench.progress(f"{s.label}: {P} slots, {concurrency} x {context}", done / total)
            load = bench.load(concurrency, context)
            yield from _measure_load(bench, s, pool, load, before)
            done += 1
        pool.check_integrity()  # compares only where a layer keeps both copies
        del pool
        release(bench.device)
    bench.progress("done", 1.0)


def measure_step(
    strategy: "Strategy | str", setting: Setting, device: "str | torch.device | None" = None
) -> Step:
    """One strategy's step at one setting, measured on this machine and checked against float64.

    A CUDA graph's replay on a GPU, eager on a CPU. Raises what `measure` does.
    """
    bench = Bench(
        setting.model,
        setting.heads,
        machine.as_device(device),
        page_size=setting.page_size,
        order=setting.order,
        modes=("graph",),
        reads=setting.load.reads,
        tokens_per_step=setting.load.tokens_per_step,
    )
    load = setting.load.concurrency, int(setting.load.context)
    return next(measure(bench, [parse(strategy)], [setting.pool_tokens], [load]))


def _fitting(bench: Bench, P: int, loads: Sequence[tuple[int, int]], many_pools: bool):
    if len(loads) == 1 and not many_pools:
        check_load(bench.model, P, *loads[0], bench.page_size)
        return list(loads)
    page = bench.page_size  # a request takes whole pages
    return [
        (c, n) for c, n in loads if c * -(-n // page) * page <= P and n <= bench.model.max_positions
    ]


def check(bench: Bench, strategy: Strategy, P: int, loads: Sequence[tuple[int, int]]) -> None:
    """Raise the named error of anything that would stop a measurement, before it allocates."""
    model, device = bench.model, bench.device
    for s in {strategy.at(layer) for layer in range(model.layers)}:
        kernels.check(s.reads, device, bench.backend, model, bench.heads, bench.page_size)
        if s.needs:
            kernels.require(s.needs, device)
    asked = [bench.load(c, n) for c, n in loads]
    strategy.require_rows(max((load.live_tokens for load in asked), default=0))
    L = int(max(map(model.read_tokens, asked), default=0))
    R = max((load.new_tokens for load in asked), default=0)
    queries = model.layers * R * bench.heads * 2 * 2 * model.row
    keys = 0
    if bench.reads == "dsa":
        keys = len(model.choosing) * model.row_bytes("index")
        queries += 4 * int(max((load.live_tokens for load in asked), default=0))  # its scores
    scratch = strategy.scratch_bytes(model, 0, L)  # what does not grow with the pool
    a_token = strategy.scratch_bytes(model, 1, L) - scratch
    check_fits(
        model,
        P,
        strategy.storage(model),
        bench.page_size,
        device,
        extra_bytes=scratch + strategy.fixed_bytes(model) + queries,
        extra_token_bytes=a_token + keys,
    )


def make_pool(bench: Bench, strategy: Strategy, pool_tokens: int) -> Pool:
    """A filled pool with the buffers that the strategy keeps."""
    pool = Pool(
        bench.model,
        pool_tokens,
        strategy.storage(bench.model),
        page_size=bench.page_size,
        device=bench.device,
        order=bench.order,
        seed=bench.seed,
        mirror=getattr(strategy, "mirror", "exact"),
        append=kernels.mover("append", bench.device),
        index=bench.reads == "dsa",
        write_keys=kernels.indexing(bench.device).write,
    )
    bench.fill(pool, bench.seed)
    synthetic.fill_index(pool, bench.seed)
    pool.check_counters()
    return pool


def _measure_load(
    bench: Bench, strategy: Strategy, pool: Pool, load: Load, before_bytes: int
) -> Iterator[Step]:
    device = bench.device
    batch = pool.batch(load.concurrency, load.context, load.tokens_per_step)
    options = dict(backend=bench.backend, seed=bench.seed, reads=load.reads)
    step = DecodeStep(strategy, pool, batch, bench.heads, **options)
    plan = timing.sample(
        lambda: step.plan(bench.heads), torch.device("cpu"), max_samples=3, warmup=1
    )
    setting = Setting(
        pool.model, bench.heads, pool.pool_tokens, load, bench.page_size, bench.order, bench.source
    )
    known = machine.detect_card(device)
    try:
        for mode in bench.modes if device.type == "cuda" else ("eager",):
            whole, fn, parts = _times(bench, step, mode)
            error = check_output(step, fn, bench.seed)
            taken = max(0, _allocated(device) - before_bytes - step.kept_bytes)
            yield Step(
                strategy=strategy.tag_at(load),
                setting=setting,
                card=known.name if known else machine.device_title(device),
                phases=phases(strategy, setting, step.backend, parts),
                ms=whole.median_ms,
                kept_bytes=step.kept_bytes,
                scratch_bytes=taken if device.type == "cuda" else step.scratch_bytes,
                mode=mode,
                backend=step.backend,
                spread_ms=whole.spread_ms,
                samples=whole.samples,
                plan_ms=plan.median_ms,
                error=error,
                clipped=pool.clipped,
                origin=steps.origin(device, *bandwidth(device)),
            )
    finally:
        pool.release(batch)


def phases(
    strategy: Strategy, setting: Setting, backend: str, times_ms: dict[str, float]
) -> tuple[Phase, ...]:
    """Measured phases with their bytes, and the curves that they belong to."""
    one = strategy.at(0)
    alike = one == strategy.at(setting.model.layers - 1)  # else a time belongs to no one kernel
    curves = {"cast": one.cast_curve, "attention": backend, "write": one.write_curve}
    return tuple(
        Phase(name, times_ms[name], size, curves.get(name) if alike and size else None, measured())
        for name, size in strategy.moves_at(setting).items()
        if size or times_ms[name]
    )


def _times(
    bench: Bench, step: DecodeStep, mode: str
) -> tuple[timing.Timing, Callable[[], object], dict[str, float]]:
    """The whole step's timing, the callable that was timed, and the median ms of each phase."""

    def sample(fn: Callable[[], object]) -> timing.Timing:
        return timing.sample(
            fn,
            bench.device,
            before=step.advance,
            min_samples=5,
            warmup=1,
            budget_s=bench.budget_s,
            cancelled=bench._stop_if_cancelled,
        )

    if mode == "eager":
        parts = timing.sample_phases(step.run, step.phases, bench.device, before=step.advance)
        return sample(step.step), step.step, _named(parts)

    def graph(*names: str) -> Callable[[], None]:
        return timing.capture(lambda: step.run(*names), bench.device)

    parts = {name: sample(graph(name)).median_ms for name in step.phases[:-2]} | {"cast": 0.0}
    # With an index a strategy may cast without scratch: into copies that it keeps.
    if step.scratch or (step.chooser and any(type(s).cast is not Strategy.cast for s in step.at)):
        parts["cast"] = sample(graph("cast")).median_ms
    if step.scratch:
        # Attention reads scratch that the cast has just written, so it is timed behind the cast
        # and the cast taken off: alone, every layer would find the last one's rows in L2.
        parts["attend"] = max(0.0, sample(graph("cast", "attend")).median_ms - parts["cast"])
    else:
        parts["attend"] = sample(graph("attend")).median_ms
    replay = graph(*step.phases)
    return sample(replay), replay, _named(parts)


def _named(parts: dict[str, float]) -> dict[str, float]:
    """Times by the names that tables use: what a step calls "attend" is the attention."""
    return {"attention" if name == "attend" else name: ms for name, ms in parts.items()}


def check_output(step: DecodeStep, run: Callable[[], object], seed: int) -> float:
    """Worst relative L2 error of a (request, head) against float64 over the stored rows.

    Runs the timed callable once more, with poisoned outputs and on fresh slots, then looks at a
    few random layers; also that the new rows have arrived. Raises `WrongResult`.
    """
    generator = torch.Generator().manual_seed(seed)
    step.out.fill_(float("nan"))
    step.advance(len(step.batch.spare_pages) // 2)
    run()
    layers = torch.randperm(step.pool.layers, generator=generator)[:CHECKED_LAYERS].tolist()
    # With an index the outputs are those of the timed run, and the choices are made once more.
    worst = worst_error(step, ("index", "top_k") if step.chooser else (), layers)
    require_right(step, worst)
    return worst


def release(device: torch.device) -> None:
    """Give freed buffers back, so that the next strategy's check sees them as free."""
    if device.type == "cuda":
        with suppress(getattr(torch, "AcceleratorError", ())):  # named where it came up
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

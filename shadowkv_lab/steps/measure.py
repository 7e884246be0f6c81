"""Decode steps measured: each strategy in turn, phases and whole, and checked before reported."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from shadowkv_lab import kernels
from shadowkv_lab.errors import WrongResult
from shadowkv_lab.kernels import reference
from shadowkv_lab.kernels.reference import bits
from shadowkv_lab.model import Model
from shadowkv_lab.pool import Pool, check_fits, check_load
from shadowkv_lab.sources import synthetic
from shadowkv_lab.steps import records, timing
from shadowkv_lab.strategies import Strategy
from shadowkv_lab.strategies.step import DecodeStep

TOLERANCE = 1e-2  # relative L2 of BF16 outputs from BF16 probabilities; kernels reach 3e-3
CHECKED_LAYERS = 3
PHASES = ("write", "cast", "attend")


class Cancelled(Exception):
    """A measurement that was told to stop; what it had finished stays."""


@dataclass(frozen=True)
class Bench:
    """What one series of measurements has in common.

    `heads` are query heads on this GPU. `fill` puts rows into a pool. `progress(text, done)` gets
    what is being done and the share of it that is done; `cancelled()` is asked between samples.
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
    progress: Callable[[str, float], None] = lambda text, done: None
    cancelled: Callable[[], bool] = lambda: False

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
) -> Iterator[records.Run]:
    """Runs of every strategy at every pool size and load (concurrency, context) that fits.

    Everything is checked before anything is allocated. Strategies run one after another, each
    freeing its buffers before the next. Where several pools or loads are asked for, those that
    exceed a pool are left out; a single one raises. Raises `WrongResult`, `Cancelled`.
    """
    cells = [
        (s, P, _fitting(bench, P, loads, len(pool_tokens) > 1))
        for s in strategies
        for P in sorted(set(pool_tokens))
    ]
    for s, P, fitting in cells:
        check(bench, s, P, fitting)
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
            yield from _measure_load(bench, s, pool, concurrency, context, before)
            done += 1
        if s.kinds == ("fp8", "bf16"):
            pool.check_integrity()
        del pool
        release(bench.device)
    bench.progress("done", 1.0)


def _fitting(bench: Bench, P: int, loads: Sequence[tuple[int, int]], many_pools: bool):
    if len(loads) == 1 and not many_pools:
        check_load(bench.model, P, *loads[0], bench.page_size)
        return list(loads)
    return [(c, n) for c, n in loads if c * n <= P and n <= bench.model.max_positions]


def check(bench: Bench, strategy: Strategy, P: int, loads: Sequence[tuple[int, int]]) -> None:
    """Raise the named error of anything that would stop a measurement, before it allocates."""
    model, device = bench.model, bench.device
    for s in {strategy.at(layer) for layer in range(model.layers)}:
        kernels.check(s.reads, device, bench.backend, model, bench.heads, bench.page_size)
        if s.needs:
            kernels.require(s.needs, device)
    L = max((c * n for c, n in loads), default=0)
    R = max((c for c, _ in loads), default=0)
    queries = model.layers * R * bench.heads * 2 * 2 * model.row
    fixed = strategy.scratch_bytes(model, 0, L)  # what does not grow with the pool
    a_token = strategy.scratch_bytes(model, 1, L) - fixed
    check_fits(
        model,
        P,
        strategy.storage(model),
        bench.page_size,
        device,
        extra_bytes=fixed + queries,
        extra_token_bytes=a_token,
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
    )
    bench.fill(pool, bench.seed)
    pool.check_counters()
    return pool


def _measure_load(
    bench: Bench, strategy: Strategy, pool: Pool, concurrency: int, context: int, before_bytes: int
) -> Iterator[records.Run]:
    device = bench.device
    batch = pool.batch(concurrency, context)
    step = DecodeStep(strategy, pool, batch, bench.heads, backend=bench.backend, seed=bench.seed)
    plan = timing.sample(
        lambda: step.plan(bench.heads), torch.device("cpu"), max_samples=3, warmup=1
    )
    try:
        for mode in bench.modes if device.type == "cuda" else ("eager",):
            whole, parts = _times(bench, step, mode)
            error = check_output(step, whole.fn, bench.seed)
            yield records.Run(
                strategy=strategy.label,
                model=bench.model.name,
                layers=pool.layers,
                heads=bench.heads,
                pool_tokens=pool.pool_tokens,
                concurrency=concurrency,
                context=context,
                live_tokens=batch.live_tokens,
                new_tokens=concurrency,
                page_size=bench.page_size,
                slot_order=bench.order,
                source=bench.source,
                backend=step.backend,
                mode=mode,
                step_ms=whole.timing.median_ms,
                step_spread_ms=whole.timing.spread_ms,
                cast_ms=parts["cast"],
                attention_ms=parts["attend"],
                write_ms=parts["write"],
                residual_ms=whole.timing.median_ms - sum(parts.values()),
                plan_ms=plan.median_ms,
                samples=whole.timing.samples,
                kept_bytes=pool.kept_bytes,
                allocated_bytes=_allocated(device) - before_bytes
                if device.type == "cuda"
                else pool.kept_bytes + sum(t.nbytes for t in step.scratch.values()),
                error=error,
                clipped=pool.clipped,
                origin=records.origin(device, *bandwidth(device)),
            )
    finally:
        pool.release(batch)


@dataclass(frozen=True)
class _Whole:
    """The whole step: its timing, and the callable that was timed."""

    timing: timing.Timing
    fn: Callable[[], object]


def _times(bench: Bench, step: DecodeStep, mode: str) -> tuple[_Whole, dict[str, float]]:
    """Whole-step timing and the median ms of each phase."""

    def sample(fn: Callable[[], object]) -> timing.Timing:
        return timing.sample(
            fn,
            bench.device,
            before=step.batch.advance,
            min_samples=5,
            warmup=1,
            budget_s=bench.budget_s,
            cancelled=bench._stop_if_cancelled,
        )

    if mode == "eager":
        parts = timing.sample_phases(step.run, PHASES, bench.device, before=step.batch.advance)
        return _Whole(sample(step.step), step.step), parts

    def graph(*phases: str) -> Callable[[], None]:
        return timing.capture(lambda: step.run(*phases), bench.device)

    parts = {"write": sample(graph("write")).median_ms, "cast": 0.0}
    if step.scratch:
        # Attention reads scratch that the cast has just written, so it is timed behind the cast
        # and the cast taken off: alone, every layer would find the last one's rows in L2.
        parts["cast"] = sample(graph("cast")).median_ms
        parts["attend"] = sample(graph("cast", "attend")).median_ms - parts["cast"]
    else:
        parts["attend"] = sample(graph("attend")).median_ms
    replay = graph(*PHASES)
    return _Whole(sample(replay), replay), parts


def check_output(step: DecodeStep, run: Callable[[], object], seed: int) -> float:
    """Worst relative L2 error of a (request, head) against float64 over the stored rows.

    Runs the timed callable once more, with poisoned outputs and on fresh slots, then looks at a
    few random layers; also that the new rows have arrived. Raises `WrongResult`.
    """
    pool, batch = step.pool, step.batch
    generator = torch.Generator().manual_seed(seed)
    step.out.fill_(float("nan"))
    batch.advance(len(batch.spare_pages) // 2)
    run()
    worst = 0.0
    for layer in torch.randperm(pool.layers, generator=generator)[:CHECKED_LAYERS].tolist():
        kept = pool.fp8[layer] if pool.bf16[layer] is None else pool.bf16[layer]
        ours = pool.fp8[layer] if pool.fp8[layer] is not None else kept
        wanted = (
            step.rows[layer] if ours.dtype == torch.bfloat16 else reference.to_fp8(step.rows[layer])
        )
        if not torch.equal(bits(ours)[batch.new_slots], bits(wanted)):
            raise WrongResult(f"{step.strategy.label}: layer {layer} lacks its new rows")
        exact = reference.attend(
            step.q_nope[layer],
            step.q_pe[layer],
            kept,
            batch,
            pool.model.softmax_scale,
            torch.float64,
        )
        error = (step.out[layer].double() - exact).norm(dim=-1) / exact.norm(dim=-1)
        worst = max(worst, float(error.nan_to_num(nan=float("inf")).max()))
    if not worst <= TOLERANCE:
        raise WrongResult(
            f"{step.strategy.label} with {step.backend} is off by {worst:.2e} from float64",
            f"a relative L2 error up to {TOLERANCE:.0e}",
            "No time is reported for a wrong result",
        )
    return worst


def release(device: torch.device) -> None:
    """Give freed buffers back, so that the next strategy's check sees them as free."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

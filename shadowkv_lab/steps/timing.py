"""Times of a step: CUDA events over graph replays or eager calls, a wall clock on a CPU."""

import statistics
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch

FLUSH_BYTES = 256 << 20  # more than the largest L2 of data/gpus (128 MB), twice over
CPU_FLUSH_BYTES = 64 << 20


class Timing(NamedTuple):
    """One timed thing. `spread_ms` is the range of the middle half of the samples."""

    median_ms: float
    spread_ms: float
    samples: int


class Bandwidth(NamedTuple):
    """Measured ceilings of a device, in decimal GB/s; copy counts bytes read plus written."""

    copy_gb_per_s: float
    read_gb_per_s: float


def sample(
    fn: Callable[[], object],
    device: torch.device,
    *,
    before: Callable[[int], object] | None = None,
    min_samples: int = 7,
    max_samples: int = 50,
    budget_s: float = 0.4,
    warmup: int = 2,
    cancelled: Callable[[], None] | None = None,
) -> Timing:
    """Median time of `fn` after `warmup` calls, within about `budget_s` seconds.

    `before(i)` runs untimed before sample i; then L2 is flushed. At least `min_samples` are
    taken. `cancelled` is asked between samples and may raise.
    """
    times: list[float] = []
    for i in range(-warmup, max_samples):
        if cancelled:
            cancelled()
        if before:
            before(i + warmup)
        flush_cache(device)
        elapsed = _timed(fn, device)
        if i >= 0:
            times.append(elapsed)
            if len(times) >= min_samples and sum(times) > budget_s * 1000:
                break
    if len(times) < 4:
        return Timing(statistics.median(times), max(times) - min(times), len(times))
    low, _, high = statistics.quantiles(times, n=4)
    return Timing(statistics.median(times), high - low, len(times))


def _timed(fn: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call of `fn`."""
    start = _stamp(device)
    fn()
    end = _stamp(device)
    if device.type == "cuda":
        end.synchronize()
    return _between(start, end)


def sample_phases(
    run: Callable[..., object],
    phases: tuple[str, ...],
    device: torch.device,
    *,
    before: Callable[[int], object],
    samples: int = 3,
) -> dict[str, float]:
    """Median ms of each phase inside eager steps; `run(*phases, mark=...)` marks each one's end."""
    collected: dict[str, list[float]] = {phase: [] for phase in phases}
    for i in range(samples + 1):
        before(i)
        flush_cache(device)
        stamps: list[tuple[str, object]] = [("", _stamp(device))]
        run(*phases, mark=lambda phase, stamps=stamps: stamps.append((phase, _stamp(device))))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i == 0:
            continue  # a warm-up
        for phase in phases:
            collected[phase].append(
                sum(_between(a[1], b[1]) for a, b in pairwise(stamps) if b[0] == phase)
            )
    return {phase: statistics.median(times) for phase, times in collected.items()}


def _stamp(device: torch.device) -> object:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: object, end: object) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


@cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    size = FLUSH_BYTES if device.type == "cuda" else CPU_FLUSH_BYTES
    return torch.zeros(size, dtype=torch.uint8, device=device)


def flush_cache(device: torch.device) -> None:
    """Write over more memory than the last-level cache holds."""
    _flush_buffer(device).add_(1)


def capture(fn: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """`fn` as a CUDA graph, warmed up on a side stream first; returns its replay."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def measure_bandwidth(device: torch.device) -> Bandwidth:
    """Copy (4 GiB device-to-device `copy_`, read + written) and read (a float32 sum) bandwidth.

    Takes a quarter of the free memory where that is less; 256 MiB on a CPU.
    """
    from shadowkv_lab import machine

    wanted = 4 << 30 if device.type == "cuda" else 256 << 20
    size = min(wanted, machine.memory(device).free_bytes // 4) // 4
    source = torch.rand(size, device=device)
    target = torch.empty_like(source)
    copy = sample(lambda: target.copy_(source), device, max_samples=20)
    read = sample(lambda: source.sum(), device, max_samples=20)
    return Bandwidth(2 * source.nbytes / copy.median_ms / 1e6, source.nbytes / read.median_ms / 1e6)

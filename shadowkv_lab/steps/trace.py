"""torch.profiler over one decode step: which kernel takes the time, by its real name."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shadowkv_lab import facts, machine
from shadowkv_lab.errors import BadFile
from shadowkv_lab.steps import measure as decode
from shadowkv_lab.steps.step import origin as origin_of
from shadowkv_lab.strategies import Strategy, parse
from shadowkv_lab.strategies.step import DecodeStep

SCHEMA = 1
RECORDED = facts.RUNS / "h200_profile.json"
FUNCTORS = ("direct_copy_kernel_cuda", "bfloat16_copy_kernel_cuda", "float8_copy_kernel_cuda")


@dataclass(frozen=True)
class Profile:
    """Time by kernel (on a CPU: by operator) of one eager step. `kernels`: name, calls, ms."""

    strategy: str
    model: str
    device: str
    pool_tokens: int
    concurrency: int
    context: int
    provenance: str
    kernels: tuple[tuple[str, int, float], ...]

    @property
    def total_ms(self) -> float:
        return sum(ms for *_, ms in self.kernels)

    def table(self, most: int = 6) -> pd.DataFrame:
        """The kernels with the largest shares, and the others as one row."""
        rows = sorted(self.kernels, key=lambda k: -k[2])
        rows, others = rows[:most], rows[most:]
        if others:
            rows.append((f"{len(others)} others", *(sum(k[i] for k in others) for i in (1, 2))))
        table = pd.DataFrame(rows, columns=["kernel", "calls", "ms"])
        table.insert(0, "strategy", self.strategy)
        return table.assign(share=table.ms / self.total_ms, provenance=self.provenance)


def profile_step(
    bench: decode.Bench,
    strategy: "Strategy | str",
    pool_tokens: int,
    concurrency: int,
    context: int,
    trace: str | Path | None = None,
) -> Profile:
    """Profile one eager step after a warm-up; `trace` is written for Perfetto (.json.gz)."""
    strategy = parse(strategy)
    decode.check(bench, strategy, pool_tokens, [(concurrency, context)])
    pool = decode.make_pool(bench, strategy, pool_tokens)
    batch = pool.batch(concurrency, context)
    step = DecodeStep(strategy, pool, batch, bench.heads, backend=bench.backend, seed=bench.seed)
    gpu = bench.device.type == "cuda"
    step.step()
    batch.advance(0)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities) as seen, record_function(f"step: {strategy.label}"):
        step.step()
        if gpu:
            torch.cuda.synchronize(bench.device)
    if trace is not None:
        Path(trace).parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(trace))
    found = []
    for event in seen.key_averages():
        on_gpu = event.device_type != torch.autograd.DeviceType.CPU
        us = event.self_device_time_total if gpu else event.self_cpu_time_total
        # The step's own range is no kernel; on a GPU, operators only launch kernels.
        if us > 0 and on_gpu == gpu and not event.key.startswith("step: "):
            found.append((event.key, event.count, us / 1e3))
    pool.release(batch)
    kernels = tuple(sorted(found, key=lambda k: -k[2]))
    del pool, step
    decode.release(bench.device)
    return Profile(
        strategy.label,
        bench.model.name,
        machine.device_title(bench.device),
        pool_tokens,
        concurrency,
        context,
        "measured",
        kernels,
    )


def record(
    bench: decode.Bench,
    pool_tokens: int,
    context: int,
    path: str | Path,
    strategies: Sequence[str] = ("full_cast", "shadow"),
) -> Path:
    """Profile one request in each strategy, and keep that as a recorded run; returns its file."""
    path = Path(path)
    profiles = [profile_step(bench, name, pool_tokens, 1, context) for name in strategies]
    command = (
        f"profiled.record(reproduce.bench_here('{bench.device}'), {pool_tokens}, {context}, path)"
    )
    origin = origin_of(bench.device, *decode.bandwidth(bench.device), command)
    entry = dict(schema=SCHEMA, origin=asdict(origin), profiles=[asdict(p) for p in profiles])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entry, indent=1) + "\n")
    return path


def recorded(path: str | Path | None = None) -> list[Profile]:
    """Profiles of a file, by default the recorded one. Raises `BadFile`."""
    path = Path(path or RECORDED)
    try:
        entry = json.loads(path.read_text())
        if entry["schema"] != SCHEMA:
            raise BadFile(f"{path.name} has schema {entry['schema']}", f"schema {SCHEMA}")
        return [
            Profile(**{**p, "provenance": "recorded", "kernels": tuple(map(tuple, p["kernels"]))})
            for p in entry["profiles"]
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BadFile(
            f"{path.name} is no file of profiles ({error!r})",
            remedy="Record one: profiled.record(reproduce.bench_here(), 495616, 1024, path)",
        ) from None


def short_name(kernel: str, width: int = 60) -> str:
    """A kernel's name without namespaces and template arguments; a copy's functor is kept."""
    functor = next((f for f in FUNCTORS if f in kernel), None)
    name = kernel.removeprefix("void ")
    if "::" in name and not name.startswith("aten::"):
        name = name.split("<")[0].split("(")[0].split("::")[-1]
    name = f"{name}<{functor}>" if functor and functor not in name else name
    return name if len(name) <= width else name[: width - 1] + "…"

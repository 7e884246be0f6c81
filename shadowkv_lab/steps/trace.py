"""Where a step's time goes, kernel by kernel: profiled here, or read from a server's Chrome trace.

A server's trace marks its steps. SGLang writes `step[DECODE bs=1]`; with speculative decoding the
target's steps are `step[TARGET_VERIFY ...]` (`step[VERIFY ...]` since 0.5.2x) and the draft's
`step[DRAFT...]`. vLLM writes `execute_context_N(tokens)_generation_M(tokens)`. Read in SGLang
0.5.23's `srt/utils/profile_utils.py` and in traces of its H200 server.
"""

import math
import re
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shadowkv_lab import facts, files, machine
from shadowkv_lab.errors import BadFile
from shadowkv_lab.steps import measure as decode
from shadowkv_lab.steps.step import origin as origin_of
from shadowkv_lab.strategies import Strategy, parse
from shadowkv_lab.strategies.step import DecodeStep

SCHEMA = 1
RECORDED = facts.RUNS / "h200_profile.json"
# Torch's copy kernels cast, and copy much else: only launches long enough for a pool count.
COPIES = ("direct_copy_kernel_cuda", "bfloat16_copy_kernel_cuda", "float8_copy_kernel_cuda")
OURS = ("cast_kernel", "widen_kernel")  # the lab's own, which do nothing else

SGLANG_MARK = re.compile(r"step\[([A-Z]\w*)")
VLLM_MARK = re.compile(r"execute_(?:context|new)_(\d+)(?:\(\d+\))?_(?:generation|cached)_(\d+)")
TARGET, DRAFT, OTHER, OUTSIDE = "target", "draft", "other", "outside"


@dataclass(frozen=True)
class Trace:
    """GPU time of one server's trace by kernel name: (launches, microseconds).

    `launches_us` are the launches of kernels that may be casts, within the target's decode steps,
    `draft_us` those within a draft model's, `outside_us` those under no mark. `steps` and
    `draft_steps` count the marks, `steps` None where there are none; `left_out` counts marks of
    other steps (prefill), which are in none of the three.
    """

    name: str
    device: str | None
    kernels: dict[str, tuple[int, float]]
    launches_us: dict[str, list[float]]
    steps: int | None
    draft_us: dict[str, list[float]] = field(default_factory=dict)
    outside_us: dict[str, list[float]] = field(default_factory=dict)
    draft_steps: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    def casts(self, shortest_us: float = 0.0, of: str = TARGET) -> dict[str, float]:
        """ms in all of casts by kernel name, without launches too short to cast a pool.

        `of` says whose: the target's, the draft's, or those outside all marks.
        """
        launches = {TARGET: self.launches_us, DRAFT: self.draft_us, OUTSIDE: self.outside_us}[of]
        sums = {
            name: sum(t for t in each if t >= shortest_us or name in OURS) / 1e3
            for name, each in launches.items()
        }
        return {name: ms for name, ms in sums.items() if ms > 0}


def read_trace(path: str | Path) -> Trace:
    """A profiler trace in Chrome's JSON, gzip or not, of one GPU.

    Raises `BadFile` for a file that is cut short, holds no GPU kernels, or only prefill steps.
    """
    path = Path(path)
    content = files.read_json(path, dict | list, unique=False)
    events = content if isinstance(content, list) else content.get("traceEvents")
    if not isinstance(events, list):
        raise BadFile(f"{path.name} is no trace in Chrome's JSON: it lacks traceEvents", TRACES)
    kernels: dict[str, list] = defaultdict(lambda: [0, 0.0])
    launches, marks, calls = [], [], {}
    for event in events:
        kind = event.get("cat") if isinstance(event, dict) else None
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            name, took = str(event.get("name")), _duration(event, path.name)
            kernels[name][0] += 1
            kernels[name][1] += took
            if name in OURS or any(copy in name for copy in COPIES):
                launches.append((name, took, event))
        elif kind in ("user_annotation", "gpu_user_annotation"):
            if stage := _stage(str(event.get("name"))):
                start, end = _start(event), _start(event) + _duration(event, path.name)
                marks.append((stage, start, end, kind == "gpu_user_annotation", _lane(event)))
        elif kind in ("cuda_runtime", "cuda_driver") and isinstance(event.get("args"), dict):
            calls[_key(event["args"].get("correlation"))] = event
    if not kernels:
        raise BadFile(
            f"{path.name} holds no GPU kernels",
            "traces with GPU activities",
            "Profile with --profile-activities GPU",
        )
    if any(stage == "VERIFY" for stage, *_ in marks):  # older releases mark the draft's as DECODE
        marks = [("DRAFT" if m[0] == "DECODE" else m[0], *m[1:]) for m in marks]
    of_host = [m for m in marks if not m[3]] or marks
    counts = Counter(stage for stage, *_ in of_host)
    steps = counts["DECODE"] + counts["VERIFY"]
    if marks and not steps:
        raise BadFile(
            f"{path.name} holds other steps than decoding ({', '.join(counts)})",
            "traces with decode steps",
            "Profile with --profile-by-stage",
        )
    found: dict[str, dict[str, list[float]]] = {
        whose: defaultdict(list) for whose in (TARGET, DRAFT, OTHER, OUTSIDE)
    }
    owner = _owners(marks, calls)
    for name, took, event in launches:
        found[owner(event)][name].append(took)
    devices = content.get("deviceProperties") if isinstance(content, dict) else None
    first = devices[0] if isinstance(devices, list) and devices else {}
    return Trace(
        path.name,
        first.get("name") if isinstance(first, dict) else None,
        {k: tuple(v) for k, v in kernels.items()},
        dict(found[TARGET]),
        steps or None,
        dict(found[DRAFT]),
        dict(found[OUTSIDE]),
        counts["DRAFT"],
        {s: n for s, n in counts.items() if s not in ("DECODE", "VERIFY", "DRAFT", "IDLE")},
    )


TRACES = "torch.profiler's trace.json or trace.json.gz"


def _stage(name: str) -> str | None:
    """What a mark says of its step: DECODE, VERIFY (the target's), DRAFT, or another's name."""
    if match := SGLANG_MARK.match(name):
        stage = match[1]
        if stage.startswith("DRAFT"):
            return "DRAFT"
        return "VERIFY" if stage == "TARGET_VERIFY" else stage
    if match := VLLM_MARK.match(name):
        context, generation = int(match[1]), int(match[2])
        return "PREFILL" if context else "DECODE" if generation else "IDLE"
    return None


def _start(event: dict) -> float:
    start = event.get("ts", 0)
    return float(start) if isinstance(start, int | float) and abs(start) < 1e300 else 0.0


def _duration(event: dict, file: str) -> float:
    took = event.get("dur")
    if not (isinstance(took, int | float) and 0 <= took < 1e300):
        raise BadFile(
            f"{file}: {short_name(str(event.get('name')))!r} lasts {took!r} us",
            "a time of 0 or more",
            "Was the trace cut short or edited? Profile again",
        )
    return float(took)


def _lane(event: dict) -> tuple:
    return _key(event.get("pid")), _key(event.get("tid"))


def _key(value: object) -> int | str | None:
    return value if isinstance(value, int | str) else None


def _owners(marks: list[tuple], calls: dict):
    """A function that says which model's decode step a launch belongs to.

    A launch is found in the GPU's own marks on its stream, else by the host's call that launched
    it (a CUDA graph's kernels all lead to one call), else by its own time. Where all steps are of
    one kind nothing needs to be looked up.
    """
    kinds = {"DECODE": TARGET, "VERIFY": TARGET, "DRAFT": DRAFT}
    seen = {kinds.get(stage, OTHER) for stage, *_ in marks} or {TARGET}
    if len(seen) == 1:
        only = seen.pop()
        return lambda event: only
    lanes: dict[object, list] = defaultdict(list)
    for stage, start, end, on_gpu, lane in marks:
        for key in (("gpu", *lane), "gpu") if on_gpu else ("host",):
            lanes[key].append((start, end, kinds.get(stage, OTHER)))
    starts = {key: sorted(each) for key, each in lanes.items()}

    def at(key: object, time: float) -> str | None:
        spans = starts.get(key, [])
        for start, end, kind in reversed(spans[: bisect_right(spans, (time, math.inf, ""))]):
            if time <= end:
                return kind
            if time - start > 60e6:  # a minute: no step is that long
                break
        return None

    def owner(event: dict) -> str:
        middle = _start(event) + float(event["dur"]) / 2
        args = event.get("args")
        call = calls.get(_key(args.get("correlation"))) if isinstance(args, dict) else None
        places = [(("gpu", *_lane(event)), middle)]
        places += [("host", _start(call))] if call else []
        places += [("gpu", middle), ("host", middle)]
        return next((kind for place in places if (kind := at(*place))), OUTSIDE)

    return owner


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
    if trace is not None:
        files.ready(trace)
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
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / "trace.json.gz"  # torch packs what is called so
            seen.export_chrome_trace(str(whole))
            files.write(trace, whole.read_bytes())
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
    profiles = [profile_step(bench, name, pool_tokens, 1, context) for name in strategies]
    command = (
        f"trace.record(reproduce.bench_here('{bench.device}'), {pool_tokens}, {context}, path)"
    )
    origin = origin_of(bench.device, *decode.bandwidth(bench.device), command)
    entry = dict(schema=SCHEMA, origin=asdict(origin), profiles=[asdict(p) for p in profiles])
    return files.write_json(path, entry)


def recorded(path: str | Path | None = None) -> list[Profile]:
    """Profiles of a file, by default the recorded one. Raises `BadFile`."""
    path = Path(path or RECORDED)
    try:
        entry = files.read_json(path)
        if entry.get("schema") != SCHEMA:
            raise BadFile(f"{path.name} has schema {entry.get('schema')}", f"schema {SCHEMA}")
        return [
            Profile(**{**p, "provenance": "recorded", "kernels": tuple(map(tuple, p["kernels"]))})
            for p in entry["profiles"]
        ]
    except (BadFile, KeyError, TypeError) as error:
        raise BadFile(
            f"{path.name} is no file of profiles ({error})",
            remedy="Record one: trace.record(reproduce.bench_here(), 495616, 1024, path)",
        ) from None


def short_name(kernel: str, width: int = 60) -> str:
    """A kernel's name without namespaces and template arguments; a copy's functor is kept."""
    functor = next((f for f in COPIES if f in kernel), None)
    name = kernel.removeprefix("void ")
    if "::" in name and not name.startswith("aten::"):
        name = name.split("<")[0].split("(")[0].split("::")[-1]
    name = f"{name}<{functor}>" if functor and functor not in name else name
    return name if len(name) <= width else name[: width - 1] + "…"

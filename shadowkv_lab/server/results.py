"""Readers of what SGLang's benchmarks and profiler write: JSONL result files, Chrome traces.

Fields differ by release, so each reader takes what is there. Read in the source of SGLang 0.5.23:
`sglang.benchmark.serving`, `.one_batch_server`, `.one_batch`, and `srt/utils/profile_utils.py`.
"""

import gzip
import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from shadowkv_lab.errors import BadFile

# Torch's copy kernels cast, and copy much else: only launches long enough for a pool count.
COPIES = ("direct_copy_kernel_cuda", "bfloat16_copy_kernel_cuda", "float8_copy_kernel_cuda")
OURS = ("cast_kernel", "widen_kernel")  # the lab's own, which do nothing else


@dataclass(frozen=True)
class Result:
    """One line of a result file. `load` is (requests at once, input tokens, output tokens).

    Times are ms a token; None where the benchmark does not say. `server` holds the server's own
    arguments, where the benchmark kept them.
    """

    benchmark: str
    load: tuple
    tpot_ms: float
    tokens_per_s: float
    how: str  # which fields the TPOT comes from
    p50_ms: float | None = None
    p99_ms: float | None = None
    server: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """GPU time by kernel name: (launches, microseconds); `steps` are decode steps, if marked."""

    name: str
    device: str | None
    kernels: dict[str, tuple[int, float]]
    launches_us: dict[str, list[float]]  # each launch of the kernels that may be casts
    steps: int | None

    def casts(self, shortest_us: float = 0.0) -> dict[str, float]:
        """ms in all of casts by kernel name, without launches too short to cast a pool."""
        sums = {
            name: sum(t for t in each if t >= shortest_us or name in OURS) / 1e3
            for name, each in self.launches_us.items()
        }
        return {name: ms for name, ms in sums.items() if ms > 0}


def read_results(path: str | Path) -> list[Result]:
    """Every line of a result file of bench_serving, bench_one_batch_server or bench_one_batch.

    Raises `BadFile` naming file and line for one that is cut short or of another benchmark.
    """
    path = Path(path)
    lines = [(i, x) for i, x in enumerate(_text(path).splitlines(), 1) if x.strip()]
    if not lines:
        raise BadFile(f"{path.name} is empty", remedy="Did the benchmark finish?")
    return [parse_line(line, f"{path.name}, line {number}") for number, line in lines]


def parse_line(line: str, where: str = "this line") -> Result:
    """One line of a result file; raises `BadFile`."""
    try:
        entry = json.loads(line)
    except ValueError:
        raise BadFile(
            f"{where} was cut short, or is not JSON",
            "one JSON object a line",
            "Run the benchmark again into a new file",
        ) from None
    if not isinstance(entry, dict):
        raise BadFile(f"{where} holds {type(entry).__name__}", "one JSON object a line")
    if "median_decode_latency" in entry or "prefill_latency" in entry:
        return _one_batch(entry, where)
    if "last_gen_throughput" in entry or {"batch_size", "latency"} <= entry.keys():
        return _one_batch_server(entry, where)
    if {"mean_tpot_ms", "mean_itl_ms", "request_throughput"} & entry.keys():
        return _serving(entry, where)
    raise BadFile(
        f"{where} is of no benchmark that the lab reads: it has "
        f"{', '.join(list(entry)[:6]) or 'no field'}",
        "bench_serving, bench_one_batch_server, bench_one_batch",
    )


def _serving(entry: dict, where: str) -> Result:
    name = next((n for n in ("mean_tpot_ms", "mean_itl_ms") if _is(entry.get(n))), None)
    if name is None:
        raise BadFile(
            f"{where} has no mean_tpot_ms and no mean_itl_ms above 0",
            remedy="Ask for more than one output token a request",
        )
    load = (
        entry.get("max_concurrency") or entry.get("concurrency"),
        entry.get("random_input_len"),
        entry.get("random_output_len"),
    )
    if not entry.get("max_concurrency") and _is(load[0]):
        load = (round(load[0], 1), *load[1:])
    percentiles = [entry.get(name.replace("mean", p)) for p in ("median", "p99")]
    return Result(
        "bench_serving",
        load,
        entry[name],
        _number(entry, "output_throughput", where),
        name,
        *percentiles,
        server=entry.get("server_info") or {},
    )


def _one_batch_server(entry: dict, where: str) -> Result:
    rate, size = (_number(entry, name, where) for name in ("output_throughput", "batch_size"))
    load = (size, entry.get("input_len"), entry.get("output_len"))
    return Result(
        "bench_one_batch_server",
        load,
        1000 * size / rate,
        rate,
        "1000 x batch_size / output_throughput",
        server=entry.get("server_info") or {},
    )


def _one_batch(entry: dict, where: str) -> Result:
    seconds = _number(entry, "median_decode_latency", where)
    size = entry.get("batch_size") or 1
    load = (size, entry.get("input_len"), entry.get("output_len"))
    return Result("bench_one_batch", load, 1000 * seconds, size / seconds, "median_decode_latency")


def _is(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _number(entry: dict, name: str, where: str) -> float:
    if not _is(entry.get(name)):
        raise BadFile(f"{where}: {name} is {entry.get(name)!r}", "a number above 0")
    return entry[name]


def read_trace(path: str | Path) -> Trace:
    """A profiler trace in Chrome's JSON, gzip or not; one GPU's, of decode steps only.

    Raises `BadFile` for a file that is cut short, holds no GPU kernels, or prefill steps too.
    """
    path = Path(path)
    try:
        content = json.loads(_text(path))
        events = content["traceEvents"] if isinstance(content, dict) else content
        kernels: dict[str, list] = defaultdict(lambda: [0, 0.0])
        maybe, marks = defaultdict(list), []
        for event in events:
            kind, name = event.get("cat"), event.get("name", "")
            if kind == "user_annotation" and name.startswith("step["):
                marks.append(name)
            if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
                took = float(event["dur"])
                kernels[name][0] += 1
                kernels[name][1] += took
                if name in OURS or any(copy in name for copy in COPIES):
                    maybe[name].append(took)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFile(
            f"{path.name} was cut short, or is no trace in Chrome's JSON ({type(error).__name__})",
            "torch.profiler's trace.json or trace.json.gz",
            "Wait for the server to finish writing it, and copy it again",
        ) from None
    if not kernels:
        raise BadFile(
            f"{path.name} holds no GPU kernels",
            "traces with GPU activities",
            "Profile with --profile-activities GPU",
        )
    if prefill := [m for m in marks if not m.startswith("step[DECODE")]:
        raise BadFile(
            f"{path.name} holds other steps than decoding ({prefill[0]}])",
            "decode steps only",
            "Profile with --profile-by-stage",
        )
    device = (
        next(iter(content.get("deviceProperties") or []), {}) if isinstance(content, dict) else {}
    )
    return Trace(
        path.name,
        device.get("name"),
        {k: tuple(v) for k, v in kernels.items()},
        dict(maybe),
        len(marks) or None,
    )


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError, gzip.zlib.error) as error:
        raise BadFile(
            f"{path.name} cannot be read whole: {error}", remedy="Copy it again from the server"
        ) from None

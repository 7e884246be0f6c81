"""Readers of benchmark results: SGLang's JSONL files and the JSON that `vllm bench serve` writes.

Fields differ by release, so each reader takes what is there. Read in the source of SGLang 0.5.23
(`sglang.benchmark.serving`, `.one_batch_server`, `.one_batch`) and in vLLM's `benchmarks/serve.py`.
"""

import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from shadowkv_lab import files
from shadowkv_lab.errors import BadFile

BENCHMARKS = "bench_serving, vllm bench serve, bench_one_batch_server, bench_one_batch"
KEPT_UP = 0.8  # of the arrivals served, or of the requests allowed running: the rate is the limit
ACCEPTED = ("accept_length", "acc_length", "spec_decode_acceptance_length", "acceptance_length")


@dataclass(frozen=True)
class Result:
    """One run of one load: `requests` at once, `input_tokens` and `output_tokens` per request.

    Times are ms; None where the benchmark does not say. A step gives `accept_length` tokens of a
    request (more than 1 with speculative decoding). `arrivals` says in words why `requests` is a
    result and not a setting, and is empty where it is one; `measured` names the numbers of the
    load that are averages. `run` is the id of a run of several servers on one card. `server` holds
    the server's own arguments, where the benchmark kept them; `notes` are for the reader.
    """

    benchmark: str
    requests: float | None
    input_tokens: int | None
    output_tokens: int | None
    tpot_ms: float
    tokens_per_s: float
    how: str  # which fields the TPOT comes from
    p50_ms: float | None = None
    p99_ms: float | None = None
    accept_length: float = 1.0
    arrivals: str = ""
    measured: tuple[str, ...] = ()
    failed: int = 0
    completed: int | None = None
    warm_up: bool = False
    run: str = ""
    server: dict = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def load(self) -> tuple:
        """(requests at once, input tokens, output tokens)."""
        return self.requests, self.input_tokens, self.output_tokens

    @property
    def step_ms(self) -> float:
        """One step of the target model, drafts included: the TPOT times the tokens it gives."""
        return self.tpot_ms * self.accept_length

    def same_load(self, other: "Result") -> bool:
        """Whether both ran the same load: settings equal, averages to within 2 %.

        Output lengths that are averages are no part of it: they end where the model ends.
        """
        if self.benchmark != other.benchmark or bool(self.arrivals) != bool(other.arrivals):
            return False
        loose = {*self.measured, *other.measured}
        for name, slack in (("requests", 0.1), ("input", 0.02), ("output", math.inf)):
            one, two = (dict(zip(LOAD, r.load, strict=True))[name] for r in (self, other))
            if one == two:
                continue
            if one is None or two is None or name not in loose:
                return False
            if abs(one - two) > slack * max(one, two):
                return False
        return True


LOAD = ("requests", "input", "output")


def read_results(path: str | Path) -> list[Result]:
    """Every result of a file: one JSON object a line, or one JSON value in the whole file.

    A last line that was cut short is skipped with a warning that names it. Raises `BadFile` naming
    file and line for one that is broken or of another benchmark.
    """
    path = Path(path)
    text = files.read_text(path)
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise BadFile(f"{path.name} is empty", remedy="Did the benchmark finish?")
    if len(lines) == 1 or lines[0][1].strip() in ("{", "["):
        value = _json(text, path.name if len(lines) > 1 else f"{path.name}, line {lines[0][0]}")
        entries = [(path.name, v) for v in (value if isinstance(value, list) else [value])]
    else:
        entries = []
        for number, line in lines:
            where = f"{path.name}, line {number}"
            try:
                entries.append((where, _json(line, where)))
            except BadFile:
                if number < lines[-1][0] or not entries or text.endswith("\n"):
                    raise
                warnings.warn(f"{where} was cut short and is skipped", stacklevel=2)
    return [parse_entry(entry, where) for where, entry in entries]


def parse_line(line: str, where: str = "this line") -> Result:
    """One line of a result file; raises `BadFile`."""
    return parse_entry(_json(line, where), where)


def _json(text: str, where: str) -> object:
    try:  # SGLang writes an unlimited rate as Infinity
        return files.parse(text, dict | list, where, unique=False)
    except BadFile as error:
        raise BadFile(
            f"{where} was cut short, or is no JSON object ({error.what})",
            "one JSON object a line, or one in the file",
            "Run the benchmark again into a new file",
        ) from None


def parse_entry(entry: object, where: str = "this result") -> Result:
    """One result from its JSON object; raises `BadFile`."""
    if not isinstance(entry, dict):
        raise BadFile(f"{where} holds {type(entry).__name__}", "one JSON object a line")
    if "median_decode_latency" in entry or "prefill_latency" in entry:
        return _one_batch(entry, where)
    if "last_gen_throughput" in entry or {"batch_size", "latency"} <= entry.keys():
        return _one_batch_server(entry, where)
    if {"mean_tpot_ms", "median_tpot_ms", "mean_itl_ms", "request_throughput"} & entry.keys():
        return _serving(entry, where)
    raise BadFile(
        f"{where} is of no benchmark that the lab reads: it has "
        f"{', '.join(list(entry)[:6]) or 'no field'}",
        BENCHMARKS,
    )


def is_result(entry: object) -> bool:
    """Whether a JSON value looks like a result of one of the benchmarks."""
    return isinstance(entry, dict) and any(
        name in entry
        for name in ("mean_tpot_ms", "mean_itl_ms", "request_throughput", "prefill_latency")
    )


def _serving(entry: dict, where: str) -> Result:
    rate = _number(entry, "output_throughput", where)
    server = _server(entry)
    load, measured = _load(entry)
    requests, arrivals = load[0], _arrivals(entry, load)
    accepted = _accepted(entry, server)
    notes = []
    interval = server.get("stream_interval")
    chunk = interval if isinstance(interval, int) and interval > 1 else 1
    if chunk > 1:
        notes.append(f"an inter-token latency (ITL) holds {chunk} tokens: stream_interval {chunk}")
    # Where requests come and go, a mean holds the stalls of others' prefills.
    names = ["mean_tpot_ms", "mean_itl_ms", "median_tpot_ms", "median_itl_ms"]
    if arrivals:
        names.insert(0, names.pop())
    name = next((n for n in names if entry.get(n) is not None), None)
    if name is None or not _is(entry[name]):
        raise BadFile(
            f"{where} has no mean_tpot_ms and no mean_itl_ms above 0",
            remedy="Ask for more than one output token a request",
        )
    tpot, how = entry[name], name
    if "itl" in name and chunk > 1:
        tpot, how = tpot / chunk, f"{name} / {chunk} tokens of each chunk"
    kind = "itl" if "itl" in name else "tpot"
    failed, completed = _failed(entry)
    return Result(
        "vllm bench serve" if "model_id" in entry else "bench_serving",
        requests,
        *load[1:],
        tpot_ms=tpot,
        tokens_per_s=rate,
        how=how,
        p50_ms=entry.get(f"median_{kind}_ms"),
        p99_ms=entry.get(f"p99_{kind}_ms"),
        accept_length=accepted,
        arrivals=arrivals,
        measured=measured,
        failed=failed,
        completed=completed,
        warm_up=entry.get("warm_up") is True,
        run=str(entry.get("run") or ""),
        server=server,
        notes=tuple(notes),
    )


def _server(entry: dict) -> dict:
    """The server's arguments: SGLang's `server_info`; what vLLM's file says beside its results."""
    server = entry.get("server_info")
    server = dict(server) if isinstance(server, dict) else {}
    states = server.get("decode")  # of a disaggregated server, the decoding one
    if isinstance(states, list) and states and isinstance(states[0], dict):
        server = {**server, **states[0]}
    for theirs, ours in VLLM.items():
        if entry.get(theirs) is not None:
            server.setdefault(ours, _plain(entry[theirs]))
    return server


# What users add with `vllm bench serve --metadata`, beside the model.
VLLM = {
    "model_id": "model_path",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "dcp": "dcp_size",
    "decode_context_parallel_size": "dcp_size",
    "kv_cache_dtype": "kv_cache_dtype",
    "version": "version",
}


def _plain(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _load(entry: dict) -> tuple[tuple, tuple[str, ...]]:
    """(requests, input, output), and which of them are averages of what came."""
    measured = []
    requests = entry.get("max_concurrency")
    if not _is(requests):
        requests = entry.get("concurrency") or entry.get("max_concurrent_requests")
        requests = round(requests, 1) if _is(requests) else None
        measured.append("requests")
    found = [requests]
    for name in ("input", "output"):
        tokens = entry.get(f"random_{name}_len")
        if not _is(tokens) or entry.get("dataset_name") in ("sharegpt", "custom"):
            total, count = entry.get(f"total_{name}_tokens"), entry.get("completed")
            tokens = round(total / count) if _is(total) and _is(count) else None
            measured.append(name)
        found.append(tokens)
    return tuple(found), tuple(measured)


def _arrivals(entry: dict, load: tuple) -> str:
    """Why the number of running requests is a result; empty where it is a setting.

    A rate beside a `max_concurrency` that is always reached limits nothing.
    """
    rate, cap = entry.get("request_rate"), entry.get("max_concurrency")
    at_once = f" ({load[0]:g} ran at once)" if load[0] else ""
    if rate == "trace":
        return f"requests came by a trace{at_once}"
    if not _is(rate):  # "inf", Infinity or none
        return ""
    if not _is(cap):
        return f"{rate:g} requests/s and no max_concurrency{at_once}"
    served = entry.get("request_throughput")
    if not _is(served) and _is(load[2]):
        served = entry["output_throughput"] / load[2]
    running = entry.get("concurrency")
    slow = _is(served) and served >= KEPT_UP * rate
    if slow or (_is(running) and running < KEPT_UP * cap):
        seen = f", {running:.1f} ran at once" if _is(running) else ""
        return f"{rate:g} requests/s do not fill max_concurrency {cap:g}{seen}"
    return ""


def _accepted(entry: dict, server: dict) -> float:
    states = server.get("internal_states")
    state = states[0] if isinstance(states, list) and states else {}
    places = [entry.get(name) for name in ACCEPTED]
    places.append(state.get("avg_spec_accept_length") if isinstance(state, dict) else None)
    return float(next((value for value in places if _is(value) and value >= 1), 1.0))


def _failed(entry: dict) -> tuple[int, int | None]:
    completed, failed = entry.get("completed"), entry.get("failed")
    completed = completed if isinstance(completed, int) else None
    if isinstance(failed, int) and failed >= 0:
        return failed, completed
    errors = entry.get("errors")
    if isinstance(errors, list):
        return sum(bool(error) for error in errors), completed
    asked = entry.get("num_prompts")
    if isinstance(asked, int) and completed is not None:
        return max(0, asked - completed), completed
    return 0, completed


def _one_batch_server(entry: dict, where: str) -> Result:
    rate, size = (_number(entry, name, where) for name in ("output_throughput", "batch_size"))
    server = _server(entry)
    return Result(
        "bench_one_batch_server",
        size,
        entry.get("input_len"),
        entry.get("output_len"),
        1000 * size / rate,
        rate,
        "1000 x batch_size / output_throughput",
        accept_length=_accepted(entry, server),
        server=server,
    )


def _one_batch(entry: dict, where: str) -> Result:
    seconds = _number(entry, "median_decode_latency", where)
    size = entry.get("batch_size") or 1
    return Result(
        "bench_one_batch",
        size,
        entry.get("input_len"),
        entry.get("output_len"),
        1000 * seconds,
        size / seconds,
        "median_decode_latency",
        server=_server(entry),
    )


def _is(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )


def _number(entry: dict, name: str, where: str) -> float:
    if not _is(entry.get(name)):
        raise BadFile(f"{where}: {name} is {entry.get(name)!r}", "a number above 0")
    return entry[name]

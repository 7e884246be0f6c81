"""Recorded traffic, told apart by its header or its first lines.

| format | what a line is |
|---|---|
| Azure CSV, 2023 and 2024 | `TIMESTAMP,ContextTokens,GeneratedTokens` |
| Vidur CSV | `arrived_at,num_prefill_tokens,num_decode_tokens`, in seconds |
| BurstGPT CSV | `Timestamp,...,Request tokens,Response tokens,...`, in seconds |
| Mooncake JSONL | `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512 tokens |
| bench_serving, `vllm bench serve` | a run: `input_lens`, `output_lens`, perhaps `start_times` |
| SGLang's log, `--log-requests` | `Finish: obj=...`, or `request.finished` as JSON |
| vLLM's log, `--enable-log-requests` | `Received request ...`, `Generated response ...` |
"""

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shadowkv_lab.errors import BadFile
from shadowkv_lab.files import parse, read_text
from shadowkv_lab.serving.traffic import Traffic, gaps

Numbered = list[tuple[int, str]]  # lines that are not blank, with their numbers


class Format(NamedTuple):
    """A table of requests: its columns for time, prompt and output, and how its time reads."""

    title: str
    columns: tuple[str, str, str]
    seconds: Callable[[object], float]
    failures: bool = False  # whether requests without an answer are in it, which are passed over
    blocks: str = ""  # the column of block hashes
    block_tokens: int = 0


class Entry(NamedTuple):
    """One request of a trace, and the line that it stands on."""

    line: int
    at_s: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


def clock_s(text: object) -> float:
    """Seconds of "2023-11-16 18:15:46.6805900"; datetime itself would cut the 7th decimal.

    >>> clock_s("2000-01-01 00:00:10.25")
    10.25
    """
    whole, _, fraction = str(text).strip().replace(",", ".").partition(".")
    digits = fraction[: len(fraction) - len(fraction.lstrip("0123456789"))]
    at = datetime.fromisoformat(whole + fraction[len(digits) :])
    since = at - datetime(2000, 1, 1, tzinfo=at.tzinfo)
    return since.days * 86400 + since.seconds + (float("0." + digits) if digits else 0.0)


AZURE = Format("Azure CSV", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), clock_s)
VIDUR = Format("Vidur CSV", ("arrived_at", "num_prefill_tokens", "num_decode_tokens"), float)
BURSTGPT = Format("BurstGPT CSV", ("Timestamp", "Request tokens", "Response tokens"), float, True)
MOONCAKE = Format(
    "Mooncake JSONL",
    ("timestamp", "input_length", "output_length"),
    lambda ms: float(ms) / 1000,
    blocks="hash_ids",
    block_tokens=512,
)
FORMATS = (AZURE, VIDUR, BURSTGPT, MOONCAKE)
BENCHMARK = ("input_lens", "output_lens")
SGLANG_DONE = re.compile(r'Finish: obj=|"event": "request\.finished"')
VLLM_CAME = re.compile(r"Received request ")


def load(path: "str | Path") -> Traffic:
    """Traffic from a recorded file, gzip or not; the first request arrives at 0 s.

    Where prompts share prefixes (Mooncake's `hash_ids`), the traffic has `blocks`. A request that
    failed, without a token, is passed over where the format holds such, and `source` counts them.
    Raises `BadFile` with file and line.
    """
    name, text = Path(path).name, read_text(path)
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise BadFile(f"{name} is empty", "a header and one request, or more")
    first = lines[0][1].strip()
    if first == "{":  # one object over many lines
        lines = [(1, text)]
    if first.startswith("{"):
        keys = parse(lines[0][1], dict, f"{name}, line {lines[0][0]}")
        if "event" in keys:
            return _sglang(name, lines)
        if "output_throughput" in keys or set(BENCHMARK) <= set(keys):
            return _benchmark(name, lines)
        return _table(name, *_from_json(name, lines, keys))
    head = "\n".join(line for _, line in lines[:10_000])
    if SGLANG_DONE.search(head):
        return _sglang(name, lines)
    if VLLM_CAME.search(head):
        return _vllm(name, lines)
    return _table(name, *_from_csv(name, lines))


# Tables


def recognise(name: str, columns: Iterable[str]) -> Format:
    """The format that has these columns; raises `BadFile` naming the nearest and what it lacks."""
    columns = list(columns)
    for kind in FORMATS:
        if set(kind.columns) <= set(columns):
            return kind
    lower = {str(c).strip().lower() for c in columns}
    nearest = max(FORMATS, key=lambda kind: len(lower & {c.lower() for c in kind.columns}))
    missing = ", ".join(c for c in nearest.columns if c not in columns)
    raise BadFile(
        f"{name} has the columns {', '.join(map(str, columns[:8]))}; nearest is {nearest.title}, "
        f"of which {missing} is missing",
        "; ".join(f"{kind.title} ({','.join(kind.columns)})" for kind in FORMATS)
        + "; bench_serving's JSONL; a log of SGLang or vLLM with its requests",
        "Rename the columns",
    )


def _from_csv(name: str, lines: Numbered) -> tuple[Format, Iterator]:
    header = [column.strip() for column in next(csv.reader([lines[0][1]]))]
    kind = recognise(name, header)
    places = [header.index(column) for column in kind.columns]

    def records():
        for (i, _), row in zip(lines[1:], csv.reader(line for _, line in lines[1:]), strict=False):
            if len(row) <= max(places):
                raise BadFile(f"{name}, line {i}: {len(row)} fields", f"{len(header)}")
            yield i, *(row[place] for place in places), ()

    return kind, records()


def _from_json(name: str, lines: Numbered, keys: dict) -> tuple[Format, Iterator]:
    kind = recognise(name, keys)

    def records():
        for i, line in lines:
            entry = parse(line, dict, f"{name}, line {i}")
            yield i, *map(entry.get, kind.columns), _ids(entry, kind, name, i)

    return kind, records()


def _ids(entry: dict, kind: Format, name: str, line: int) -> tuple[int, ...]:
    ids = entry.get(kind.blocks) or ()
    if not isinstance(ids, list | tuple) or not all(type(id) is int for id in ids):
        raise BadFile(f"{name}, line {line}: {kind.blocks} is {ids!r:.60}", "whole numbers")
    return tuple(ids)


def _table(name: str, kind: Format, records: Iterator) -> Traffic:
    entries, failed = [], 0
    for i, time, prompt, output, blocks in records:
        try:
            at = kind.seconds(time)
        except (TypeError, ValueError):
            what = "no time" if time in (None, "") else f"the time {time!r}"
            allowed = f"a {kind.columns[0]} of {kind.title}"
            raise BadFile(f"{name}, line {i}: {what}", allowed) from None
        if not math.isfinite(at):
            raise BadFile(f"{name}, line {i}: the time {time!r}", "a finite time")
        if entries and at < entries[-1].at_s:
            raise BadFile(
                f"{name}, line {i}: earlier than the line before it",
                "rising times",
                "Sort the file by time",
            )
        if kind.failures and 0 in (_whole(prompt), _whole(output)):
            failed += 1
            continue
        prompt = _length(name, i, kind.columns[1], prompt)
        output = _length(name, i, kind.columns[2], output)
        hashes = tuple(blocks[: prompt // kind.block_tokens]) if blocks else ()
        entries.append(Entry(i, at, prompt, output, hashes))
    return _traffic(name, kind.title, entries, failed, kind.block_tokens)


def _traffic(
    name: str, title: str, entries: list[Entry], failed: int = 0, block_tokens: int = 0
) -> Traffic:
    if not entries:
        raise BadFile(f"{name} has no request", "1 or more")
    _, at, prompt, output, blocks = zip(*entries, strict=True)
    source = f"{title} {name}" + (f"; {failed} without an answer passed over" if failed else "")
    return Traffic(
        name,
        np.array(at) - at[0],
        np.array(prompt),
        np.array(output),
        source=source,
        blocks=blocks if any(blocks) else None,
        block_tokens=block_tokens,
    )


def _whole(value: object) -> int | None:
    """A whole number, or None."""
    try:
        return None if isinstance(value, float | bool) else int(value)
    except (TypeError, ValueError):
        return None


def _length(name: str, line: int, column: str, value: object) -> int:
    tokens = _whole(value)
    if tokens is None or tokens < 1:
        raise BadFile(f"{name}, line {line}: {column} is {value!r}", "a whole number, 1 or more")
    return tokens


# Benchmarks


def _benchmark(name: str, lines: Numbered) -> Traffic:
    """The last run of a file: its arrivals, or the loop or rate that it was sent with."""
    line, text = lines[-1]
    where = f"{name}, line {line}"
    run = parse(text, dict, where)
    if not all(isinstance(run.get(key), list) for key in BENCHMARK):
        raise BadFile(
            f"{where} has the run's means, and not its requests",
            ", ".join(BENCHMARK),
            "Run bench_serving with --output-details, vllm bench serve with --save-detailed",
        )
    prompts, outputs, errors = run["input_lens"], run["output_lens"], run.get("errors") or []
    times = run.get("start_times")
    if not isinstance(errors, list) or not isinstance(times, list | None):
        raise BadFile(f"{where}: errors or start_times are no lists", f"{len(prompts)} of each")
    if len(prompts) != len(outputs) or (times is not None and len(times) != len(prompts)):
        raise BadFile(f"{where}: lists of different lengths", f"{len(prompts)} of each")
    kept, failed = [], 0
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if output == 0 or (i < len(errors) and errors[i]):
            failed += 1
            continue
        prompt = _length(name, line, f"input_lens[{i}]", prompt)
        output = _length(name, line, f"output_lens[{i}]", output)
        at = times[i] if times is not None else 0.0
        if isinstance(at, bool) or not isinstance(at, int | float):
            raise BadFile(f"{where}: start_times[{i}] is {at!r}", "seconds")
        kept.append(Entry(line, float(at), prompt, output))
    if times is not None:
        kept.sort(key=lambda entry: entry.at_s)
    title = "the last run of" if len(lines) > 1 else "the run of"
    made = _traffic(name, title, kept, failed)
    return made if times is not None else _sent(made, run)


def _sent(made: Traffic, run: dict) -> Traffic:
    """Arrivals that a run's options stand for, where it did not keep their times."""
    rate, loop = run.get("request_rate"), run.get("max_concurrency")
    if loop:
        said = f"a closed loop of {loop}, as it was sent"
        return replace(made, concurrency=_whole(loop), source=f"{made.source}; {said}")
    try:
        rate = float(rate)
    except (TypeError, ValueError):
        rate = math.inf
    if not 0 < rate < math.inf:
        return replace(made, source=f"{made.source}; all sent at once")
    cv = 1 / math.sqrt(float(run.get("burstiness") or 1))
    drawn = gaps(rate, cv, len(made), np.random.default_rng(0)).cumsum()
    said = f"arrivals drawn anew at its {rate:g} requests/s"
    return replace(made, arrival_s=drawn - drawn[0], source=f"{made.source}; {said}")


# Logs

_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_FIELD = r"'{}': (-?[\d.]+(?:[eE][+-]?\d+)?)"
_META = {
    key: re.compile(_FIELD.format(key))
    for key in ("prompt_tokens", "completion_tokens", "e2e_latency", "request_received_ts")
}


def _sglang(name: str, lines: Numbered) -> Traffic:
    """Requests that finished; each arrived when it was received, or its latency before that line.

    A log without `request_received_ts` (it needs --enable-metrics) tells times to the second as
    text, and to the microsecond as JSON.
    """
    found, failed = [], 0
    for i, line in lines:
        if not SGLANG_DONE.search(line):
            continue
        meta, clock = _meta(name, i, line)
        if not meta.get("completion_tokens"):
            failed += 1
            continue
        try:
            ended = clock_s(clock)
            came = ended - float(meta["e2e_latency"])
            prompt, output = (int(meta[k]) for k in ("prompt_tokens", "completion_tokens"))
        except (KeyError, TypeError, ValueError) as error:
            raise BadFile(
                f"{name}, line {i}: a finished request without its time and lengths ({error})",
                "prompt_tokens, completion_tokens and e2e_latency in meta_info",
            ) from None
        found.append((meta.get("request_received_ts"), Entry(i, came, prompt, output)))
    if all(received for received, _ in found):
        found = [(at, entry._replace(at_s=float(at))) for at, entry in found]
    entries = sorted((entry for _, entry in found), key=lambda entry: entry.at_s)
    return _traffic(name, "SGLang's log", entries, failed)


def _meta(name: str, i: int, line: str) -> tuple[dict, str]:
    """A finished request's meta_info, and the clock of its line."""
    if '"event"' in line:
        event = parse(line[line.index("{") :], dict, f"{name}, line {i}")
        out = event.get("out")
        meta = out.get("meta_info") if isinstance(out, dict) else None
        return meta if isinstance(meta, dict) else {}, str(event.get("timestamp"))
    _, _, told = line.rpartition("'meta_info': {")  # after all that a user may have written
    meta = {key: match[1] for key, field in _META.items() if (match := field.search(told))}
    meta["completion_tokens"] = int(meta.get("completion_tokens", 0))
    clock = _CLOCK.search(line)
    return meta, clock[1] if clock else ""


_CAME = re.compile(r"Received request (\S+?): ")
_DETAILS = re.compile(r"Request (\S+?) details: ")
_DONE = re.compile(r"Generated response (\S+?)( \(streaming (?:delta|complete)\))?: ")
_PROMPT = re.compile(r"prompt_token_ids: ([\[(].*?[\])]|None)")
_ANSWER = re.compile(r"output_token_ids: ([\[(].*?[\])]|None)")
_MOST = re.compile(r"max_tokens=(\d+)")
_VLLM_CLOCK = re.compile(r"(\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)")


def _vllm(name: str, lines: Numbered) -> Traffic:
    """Requests as they were received, to the second; answers by their tokens where those are
    logged (--enable-log-outputs), else by their max_tokens."""
    came, prompts, answers, most = {}, {}, {}, {}
    for i, line in lines:
        if match := _CAME.search(line):
            clock = _VLLM_CLOCK.search(line)
            if not clock:
                raise BadFile(f"{name}, line {i}: a request without a time", "INFO 12-02 18:15:46")
            came[match[1]] = i, clock_s(f"2000-{clock[1]}")
            most[match[1]] = int((_MOST.findall(line) or [0])[-1])
        if match := match or _DETAILS.search(line):
            ids = _PROMPT.findall(line)
            prompts[match[1]] = _count(ids[-1]) if ids else prompts.get(match[1], 0)
        elif match := _DONE.search(line):
            ids = _count((_ANSWER.findall(line) or ["None"])[-1])
            if match[2] and "delta" in match[2]:
                ids += answers.get(match[1], 0)
            answers[match[1]] = max(ids, answers.get(match[1], 0))
    entries, asked = [], 0
    for id, (i, at) in came.items():
        if not prompts.get(id):
            raise BadFile(
                f"{name}, line {i}: request {id} without its prompt_token_ids",
                "the ids of each prompt",
                "Log with --enable-log-requests, VLLM_LOGGING_LEVEL=DEBUG and no --max-log-len",
            )
        # A completion's prompts are numbered, its answer is not.
        output = answers.get(id) or answers.get(re.sub(r"-\d+$", "", id))
        asked += not output
        entries.append(
            Entry(i, at, prompts[id], _length(name, i, "max_tokens", output or most[id]))
        )
    entries.sort(key=lambda entry: entry.at_s)
    made = f"; {asked} answers as long as their max_tokens" if asked else ""
    return _traffic(name, f"vLLM's log{made}", entries)


def _count(ids: str) -> int:
    """Elements of a printed list."""
    inside = ids[1:-1].strip(" ,")
    return 0 if ids == "None" or not inside else inside.count(",") + 1

"""Recorded traffic: the Azure CSV and the Mooncake JSONL, told apart by their first line."""

import csv
import itertools
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shadowkv_lab.errors import BadFile
from shadowkv_lab.files import parse, read_text
from shadowkv_lab.serving.traffic import Traffic


class Format(NamedTuple):
    """One trace format: its columns for time, prompt and output, and how its time reads."""

    title: str
    columns: tuple[str, str, str]
    seconds: Callable[[object], float]


def _clock_s(text: object) -> float:
    """Seconds of "2023-11-16 18:15:46.6805900"; datetime itself would cut the 7th decimal."""
    whole, _, fraction = str(text).strip().partition(".")
    digits = fraction[: len(fraction) - len(fraction.lstrip("0123456789"))]
    at = datetime.fromisoformat(whole + fraction[len(digits) :])
    since = at - datetime(2000, 1, 1, tzinfo=at.tzinfo)
    return since.days * 86400 + since.seconds + (float("0." + digits) if digits else 0.0)


AZURE = Format("Azure CSV", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _clock_s)
MOONCAKE = Format(
    "Mooncake JSONL",
    ("timestamp", "input_length", "output_length"),
    lambda ms: float(ms) / 1000,  # type: ignore[arg-type]
)
FORMATS = (AZURE, MOONCAKE)


def load(path: "str | Path") -> Traffic:
    """Traffic from a trace file, gzip or not.

    Azure: `TIMESTAMP,ContextTokens,GeneratedTokens`. Mooncake: an object a line with `timestamp`
    (ms), `input_length`, `output_length`; its shared prefixes (`hash_ids`) are not used. The
    first request arrives at 0 s. Raises `BadFile` with file and line.
    """
    return _read(Path(path).name, read_text(path).split("\n"))


def _read(name: str, lines: Iterable[str]) -> Traffic:
    numbered = ((i, line) for i, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise BadFile(f"{name} is empty", "a header and one request, or more")
    if first[1].lstrip().startswith("{"):
        kind, records = _from_json(name, first, numbered)
    else:
        kind, records = _from_csv(name, first, numbered)
    times, prompts, outputs = [], [], []
    for i, (time, prompt, output) in records:
        try:
            at = kind.seconds(time)
        except (TypeError, ValueError):
            what = "no time" if time in (None, "") else f"the time {time!r}"
            raise BadFile(
                f"{name}, line {i}: {what}", f"a {kind.columns[0]} of {kind.title}"
            ) from None
        if not np.isfinite(at):
            raise BadFile(f"{name}, line {i}: the time {time!r}", "a finite time")
        if times and at < times[-1]:
            remedy = "Sort the file by time"
            raise BadFile(
                f"{name}, line {i}: earlier than the line before it", "rising times", remedy
            )
        times.append(at)
        prompts.append(_length(name, i, kind.columns[1], prompt))
        outputs.append(_length(name, i, kind.columns[2], output))
    if not times:
        raise BadFile(f"{name} has a header and no request", "1 or more")
    arrival = np.array(times) - times[0]
    return Traffic(
        name, arrival, np.array(prompts), np.array(outputs), None, f"{kind.title} {name}"
    )


def _length(name: str, line: int, column: str, value: object) -> int:
    try:
        tokens = int(value) if not isinstance(value, float | bool) else None  # type: ignore[call-overload]
    except (TypeError, ValueError):
        tokens = None
    if tokens is None or tokens < 1:
        raise BadFile(f"{name}, line {line}: {column} is {value!r}", "a whole number, 1 or more")
    return tokens


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
        "; ".join(f"{kind.title} ({','.join(kind.columns)})" for kind in FORMATS),
        "Rename the columns",
    )


def _from_csv(name, first, numbered) -> tuple[Format, Iterator]:
    header = [column.strip() for column in next(csv.reader([first[1]]))]
    kind = recognise(name, header)
    places = [header.index(column) for column in kind.columns]

    def records():
        for i, line in numbered:
            row = next(csv.reader([line]))
            if len(row) <= max(places):
                raise BadFile(f"{name}, line {i}: {len(row)} fields", f"{len(header)}")
            yield i, [row[place] for place in places]

    return kind, records()


def _from_json(name, first, numbered) -> tuple[Format, Iterator]:
    kind = recognise(name, parse(first[1], dict, f"{name}, line {first[0]}"))

    def records():
        for i, line in itertools.chain([first], numbered):
            yield i, list(map(parse(line, dict, f"{name}, line {i}").get, kind.columns))

    return kind, records()

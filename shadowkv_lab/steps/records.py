"""Recorded runs: one measured strategy in one mode is one line of JSON under data/runs."""

import json
import math
import os
import shlex
import sys
import warnings
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import torch

from shadowkv_lab import facts, machine
from shadowkv_lab.errors import BadFile

SCHEMA = 1


@dataclass(frozen=True)
class Origin:
    """Where a run's numbers come from: machine, state, versions, and how to repeat it."""

    device: str
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    power_w: float | None
    driver: str | None
    torch: str
    triton: str | None
    flashinfer: str | None
    copy_gb_per_s: float
    read_gb_per_s: float
    git_revision: str
    date: str
    command: str


@dataclass(frozen=True)
class Run:
    """One strategy measured at one setting in one mode ("graph" or "eager").

    Times are medians in ms a step (all layers); `residual_ms` is the step less its phases.
    `error` is the worst relative L2 error of a (request, head) against float64 attention over the
    stored rows. `allocated_bytes` is what the device's allocator gave out for the strategy.
    """

    strategy: str
    model: str
    layers: int
    heads: int
    pool_tokens: int
    concurrency: int
    context: int
    live_tokens: int
    new_tokens: int
    page_size: int
    slot_order: str
    source: str
    backend: str
    mode: str
    step_ms: float
    step_spread_ms: float
    cast_ms: float
    attention_ms: float
    write_ms: float
    residual_ms: float
    plan_ms: float
    samples: int
    kept_bytes: int
    allocated_bytes: int
    error: float
    clipped: int
    origin: Origin
    schema: int = SCHEMA


NOISE = 0.25
NOISY = (
    "the samples spread over more than a quarter of the step, or its phases do not add up to it: "
    "other work ran, or the host sets the pace. Measure again on a quiet machine"
)


def noisy(runs: pd.DataFrame) -> list[str]:
    """The strategies whose times are too disturbed to be compared; `NOISY` says it in words."""
    rows = zip(runs.strategy, runs.step_ms, runs.step_spread_ms, runs.residual_ms, strict=True)
    return list(
        dict.fromkeys(
            strategy
            for strategy, step, spread, residual in rows
            if max(spread, abs(residual)) > NOISE * step
        )
    )


def origin(
    device: torch.device, copy_gb_per_s: float, read_gb_per_s: float, command: str | None = None
) -> Origin:
    """The origin of a run made now on `device`."""
    clocks = machine.clocks(device)
    return Origin(
        device=machine.device_title(device),
        **clocks._asdict(),
        torch=torch.__version__,
        triton=machine.version_of("triton"),
        flashinfer=machine.version_of("flashinfer-python"),
        copy_gb_per_s=round(copy_gb_per_s, 1),
        read_gb_per_s=round(read_gb_per_s, 1),
        git_revision=machine.git_revision(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command or f"{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip(),
    )


def append(path: str | Path, run: Run) -> None:
    """Add a run to a file and push it to the disk, so that a later crash keeps it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write(("\n" if torn else "") + json.dumps(asdict(run)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: str | Path | None = None) -> pd.DataFrame:
    """All runs of a file, or of data/runs; `origin.*` columns say where each comes from.

    A last line that was cut short is skipped with a warning that names it. Raises `BadFile`
    for any other line that is no run, and for another schema version.
    """
    paths = sorted(facts.RUNS.glob("*.jsonl")) if path is None else [Path(path)]
    lines: list[dict] = []
    for file in paths:
        lines += _lines(file)
    frame = pd.json_normalize(lines)
    if frame.empty:
        names = [f.name for f in fields(Run)]
        return pd.DataFrame(columns=[*names, *(f"origin.{f.name}" for f in fields(Origin))])
    return frame


def _lines(file: Path) -> list[dict]:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"Cannot read {file}: {error}", "a JSONL file of runs") from None
    found = []
    complete = text.endswith("\n")
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file.name}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError:
            if number == len(lines) or not complete:
                warnings.warn(f"{where} was cut short and is skipped", stacklevel=3)
                continue
            raise BadFile(f"{where} is not JSON", remedy="Remove that line") from None
        found.append(_checked(entry, where))
    return found


def _checked(entry: object, where: str) -> dict:
    if not isinstance(entry, dict) or "schema" not in entry:
        raise BadFile(f"{where} is not a run: it has no schema version", f"schema {SCHEMA}")
    if entry["schema"] != SCHEMA:
        raise BadFile(
            f"{where} has schema {entry['schema']}", f"schema {SCHEMA}", "Record the run again"
        )
    missing = {f.name for f in fields(Run)} - set(entry)
    if missing:
        raise BadFile(f"{where} lacks {', '.join(sorted(missing))}", "whole runs")
    times = [entry[name] for name in ("step_ms", "cast_ms", "attention_ms", "write_ms")]
    if not all(isinstance(t, int | float) and math.isfinite(t) for t in times):
        raise BadFile(f"{where} has a time that is no number", "finite milliseconds")
    return entry

"""A step: one decode step of one strategy at one setting, measured, recorded or predicted."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch

from shadowkv_lab import facts, files, machine
from shadowkv_lab.deployment import Setting
from shadowkv_lab.errors import BadFile, OutOfRange
from shadowkv_lab.provenance import Provenance
from shadowkv_lab.provenance import recorded as recorded_by
from shadowkv_lab.strategies import Label

SCHEMA = 2
PHASES = ("cast", "attention", "write")
DSA_PHASES = (*PHASES, "index", "top_k")


@dataclass(frozen=True)
class Origin:
    """Where a measured step comes from: machine, state, versions, and how to repeat it."""

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
class Phase:
    """One phase of a step, over all layers: one of `DSA_PHASES`.

    `bytes` are those that the strategy's `moves` gives; `curve` names the kernel whose times it
    belongs to, None where the layers differ. In a record file every phase is "recorded". Of a
    prediction, four in five times lie between `low_ms` and `high_ms`.
    """

    name: str
    ms: float
    bytes: int
    curve: str | None = None
    provenance: Provenance = field(default_factory=recorded_by)
    low_ms: float | None = None
    high_ms: float | None = None

    @property
    def range_ms(self) -> tuple[float, float]:
        """Between which times it lies; the time itself where it was measured."""
        return (
            self.ms if self.low_ms is None else self.low_ms,
            self.ms if self.high_ms is None else self.high_ms,
        )

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.ms / 1e6 if self.ms > 0 else 0.0


@dataclass(frozen=True)
class Step:
    """One decode step of one strategy at one setting.

    `card` is a name of data/gpus, or what the device calls itself where no file has it. Times are
    ms over all layers: medians where measured, with `spread_ms` the range of the middle half of
    `samples`; `plan_ms` is the attention kernels' host work per batch, no part of the step. `mode`
    is "graph" (CUDA graph replay, which predictions are of) or "eager". `error` is the worst
    relative L2 error of a (request, head) against float64 attention over the stored rows.
    `kept_bytes` stay between steps; `scratch_bytes` are needed besides. `origin` is None for a
    prediction.
    """

    strategy: Label
    setting: Setting
    card: str
    phases: tuple[Phase, ...]
    ms: float
    kept_bytes: int
    scratch_bytes: int = 0
    mode: str = "graph"
    backend: str = ""
    spread_ms: float = 0.0
    samples: int = 0
    plan_ms: float = 0.0
    error: float | None = None
    clipped: int = 0
    origin: Origin | None = None

    def __getitem__(self, phase: str) -> Phase:
        return next(p for p in self.phases if p.name == phase)

    @property
    def provenance(self) -> Provenance:
        """The weakest of its phases that take time."""
        return sum(p.provenance for p in self.phases if p.ms) or self.phases[-1].provenance

    @property
    def range_ms(self) -> tuple[float, float]:
        """Between which times the step lies, as sure as its phases are."""
        beside = self.ms - sum(p.ms for p in self.phases)
        low, high = (sum(ends) for ends in zip(*(p.range_ms for p in self.phases), strict=True))
        return low + beside, high + beside

    @property
    def how(self) -> str:
        """The analogies behind assumed phases, in words; empty where there are none."""
        parts = [p for p in self.phases if str(p.provenance) == "assumed"]
        return "; ".join(f"{p.name}: {p.provenance.how}" for p in parts)

    @property
    def noisy(self) -> bool:
        """Whether other work disturbed it too much to be compared: see `NOISY`."""
        residual = self.ms - sum(p.ms for p in self.phases)
        return max(self.spread_ms, abs(residual)) > NOISE * self.ms


COLUMNS = [
    *("strategy", "title", "colour", "order", "model", "layers", "heads", "pool_tokens"),
    *("concurrency", "context", "mode", "card", "backend", "step_ms", "noisy", "provenance"),
    *(f"{name}_ms" for name in DSA_PHASES),
    *(f"origin.{name}" for name in Origin.__dataclass_fields__),
]  # of a frame without rows
NOISE = 0.25
NOISY = (
    "the samples spread over more than a quarter of the step, or its phases do not add up to it: "
    "other work ran, or the host sets the pace. Measure again on a quiet machine"
)


def noisy(steps: pd.DataFrame) -> list[str]:
    """The strategies of a frame that are too disturbed to be compared; `NOISY` says it in words."""
    return list(dict.fromkeys(steps[steps.noisy].strategy))


def origin(
    device: torch.device, copy_gb_per_s: float, read_gb_per_s: float, command: str | None = None
) -> Origin:
    """The origin of a step measured now on `device`."""
    return Origin(
        device=machine.device_title(device),
        **machine.clocks(device)._asdict(),
        torch=torch.__version__,
        triton=machine.version_of("triton"),
        flashinfer=machine.version_of("flashinfer-python"),
        copy_gb_per_s=round(copy_gb_per_s, 1),
        read_gb_per_s=round(read_gb_per_s, 1),
        git_revision=machine.git_revision(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command or f"{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip(),
    )


def frame(steps: Iterable[Step]) -> pd.DataFrame:
    """One row per step, for tables and figures; `origin.*` columns say where each comes from.

    Columns: `strategy` (its label), `title`, `colour`, `order`; the setting, flat; `step_ms`,
    `step_spread_ms`, and per phase `*_ms`, `*_gb`; `residual_ms` is the step less its phases.
    """
    rows = []
    for s in steps:
        at, load, phases = s.setting, s.setting.load, {p.name: p for p in s.phases}
        row = dict(
            strategy=s.strategy.label,
            title=s.strategy.title,
            colour=s.strategy.colour,
            order=s.strategy.order,
            model=at.model.name,
            layers=at.model.layers,
            heads=at.heads,
            reads=load.reads,
            pool_tokens=at.pool_tokens,
            concurrency=load.concurrency,
            context=load.context,
            live_tokens=load.live_tokens,
            new_tokens=load.new_tokens,
            page_size=at.page_size,
            slot_order=at.order,
            rows=at.rows,
            card=s.card,
            backend=s.backend,
            mode=s.mode,
            step_ms=s.ms,
            step_spread_ms=s.spread_ms,
        )
        for name in DSA_PHASES:
            phase = phases.get(name)
            row[f"{name}_ms"] = phase.ms if phase else 0.0
            row[f"{name}_gb"] = phase.bytes / 1e9 if phase else 0.0
        row |= dict(
            residual_ms=s.ms - sum(p.ms for p in s.phases),
            plan_ms=s.plan_ms,
            samples=s.samples,
            kept_bytes=s.kept_bytes,
            scratch_bytes=s.scratch_bytes,
            error=s.error,
            clipped=s.clipped,
            provenance=str(s.provenance),
            how=s.how,
            noisy=s.noisy,
        )
        of = s.origin
        row |= {f"origin.{n}": getattr(of, n) if of else None for n in Origin.__dataclass_fields__}
        rows.append(row)
    return pd.DataFrame(rows, columns=None if rows else COLUMNS)


def latest(steps: Iterable[Step]) -> list[Step]:
    """The newest step of each cell: strategy, setting, card, attention kernel and mode."""
    cells: dict[tuple, Step] = {}
    for s in sorted(steps, key=lambda s: s.origin.date if s.origin else ""):
        cells[(s.strategy.label, s.setting, s.card, s.backend, s.mode)] = s
    return list(cells.values())


def replays(steps: Iterable[Step]) -> list[Step]:
    """The newest CUDA-graph replay of each cell."""
    return [s for s in latest(steps) if s.mode == "graph"]


def append(path: str | Path, step: Step) -> None:
    """Add a measured step to a record file and push it to the disk, so that a crash keeps it."""
    files.append_line(path, to_dict(step))


def to_dict(step: Step) -> dict:
    """A step as JSON values, as a record file keeps it: without what is a default."""
    without = {"phases": {"__all__": {"provenance"}}, "setting": {"model": {"source"}}}
    entry = files.reader(Step).dump_python(
        step, mode="json", exclude=without, exclude_defaults=True
    )
    return {"schema": SCHEMA, **entry}


def read(path: str | Path) -> list[Step]:
    """All steps of a record file.

    A line that was cut short is skipped with a warning that names it. Raises `BadFile` for any
    other line that is no measured step, and for another schema version.
    """
    for number, line in enumerate(files.read_bytes(path).split(b"\n"), 1):
        told = SCHEMA_OF.search(line)
        if told and told[1] != str(SCHEMA).encode():
            raise BadFile(
                f"{path}, line {number} has schema {told[1][:20].decode('ascii', 'replace')}",
                f"schema {SCHEMA}",
                "Record the run again",
            )
    return files.read_lines(path, _kept())


@cache
def _kept():
    from pydantic import AfterValidator

    return Annotated[Step, AfterValidator(_measured)]


def _measured(step: Step) -> Step:
    """A step as a record file may hold it; raises `OutOfRange` naming the field."""
    at, of = step.setting, step.origin
    if of is None:
        raise OutOfRange("origin is not there", "where each step was measured")
    try:
        datetime.fromisoformat(of.date)
    except ValueError:
        raise OutOfRange(f"origin.date is {of.date!r}", "a date such as 2026-12-01") from None
    counts = {"heads": at.heads, "pool_tokens": at.pool_tokens, "page_size": at.page_size}
    counts |= {"load.concurrency": at.load.concurrency, "load.context": at.load.context}
    counts |= {"load.tokens_per_step": at.load.tokens_per_step}
    sizes = ("layers", "heads", "kv_lora_rank", "hidden_size", "max_positions")
    counts |= {f"model.{name}": getattr(at.model, name) for name in sizes}
    least = {f"setting.{name}": (value, 1) for name, value in counts.items()}
    others = ("kept_bytes", "scratch_bytes", "spread_ms", "samples", "plan_ms", "clipped", "error")
    least |= {name: (getattr(step, name) or 0, 0) for name in others}
    least |= {"origin.copy_gb_per_s": (of.copy_gb_per_s, 0)}
    least |= {"origin.read_gb_per_s": (of.read_gb_per_s, 0)}
    for i, phase in enumerate(step.phases):
        least |= {f"phases.{i}.ms": (phase.ms, 0), f"phases.{i}.bytes": (phase.bytes, 0)}
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise OutOfRange(f"{name} is {value}", f"{smallest} or more")
    if step.ms <= 0:
        raise OutOfRange(f"ms is {step.ms}", "above 0")
    names = [phase.name for phase in step.phases]
    if not names or len(set(names)) < len(names) or not set(names) <= set(DSA_PHASES):
        raise OutOfRange(f"phases are {names}", f"each of {', '.join(DSA_PHASES)} once at most")
    if step.mode not in MODES:
        raise OutOfRange(f"mode is {step.mode!r}", ", ".join(MODES))
    if not COLOUR.fullmatch(step.strategy.colour):
        raise OutOfRange(f"strategy.colour is {step.strategy.colour!r}", "such as #D55E00, or red")
    return step


MODES = ("graph", "eager")
COLOUR = re.compile(r"#[0-9a-fA-F]{3,8}|[a-zA-Z]+")
SCHEMA_OF = re.compile(rb'"schema"\s*:\s*"?(\w+)')


def recorded() -> list[Step]:
    """All steps under data/runs, read again when a file changes."""
    return list(_recorded(facts.stamps("runs", "*.jsonl")))


@cache
def _recorded(stamps: tuple) -> tuple[Step, ...]:
    found = facts.each((path for path, _ in stamps), read)
    return tuple(step for _, steps in found for step in steps)

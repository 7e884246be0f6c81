"""What a sweep does with a cell: it is measured, predicted, or traffic is served."""

import fcntl
import io
import itertools
import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from shadowkv_lab import files, machine
from shadowkv_lab.deployment import Deployment, Setting
from shadowkv_lab.errors import CannotRun, CannotWrite, DoesNotFit, LabError, NoAnswer
from shadowkv_lab.load import Load
from shadowkv_lab.serving.contenders import contenders, engine
from shadowkv_lab.serving.replicas import simulate_replicas
from shadowkv_lab.serving.traffic import Traffic
from shadowkv_lab.steps import measure as decode
from shadowkv_lab.steps import step as steps
from shadowkv_lab.steps.answer import anchored, answer
from shadowkv_lab.steps.step import Step
from shadowkv_lab.strategies import parse
from shadowkv_lab.sweep import cluster, grid
from shadowkv_lab.sweep.grid import Grid

CHUNK = 4096  # predicted cells of one task, and of one Parquet part: some seconds of one core
Progress = Callable[[str, float], None]


class Tally(NamedTuple):
    """Cells (or parts of a map) in all, those that were there before, made now, and failed."""

    cells: int
    before: int
    made: int
    failed: int
    failures: Path  # the file that says why


@contextmanager
def _alone(path: Path):
    """Hold a results file, so that two sweeps do not both add a cell; it is made if need be."""
    with open(files.ready(path), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotWrite(
                f"Another sweep writes {path}", remedy="Wait for it, or name another file"
            ) from None
        yield


def _run(
    client,
    work: Callable,
    cells: Mapping[Hashable, object],
    done: Iterable[Hashable],
    keep: Callable[[object, object], None],
    failures: Path,
    unfit: Mapping[str, LabError],
    progress: Progress,
    **options,
) -> Tally:
    """Every cell that is not done, kept or put among the failures; those are tried again."""
    before = cells.keys() & set(done)
    todo = {key: cell for key, cell in cells.items() if key not in before}
    old = files.read_lines(failures) if failures.exists() else []
    again = {*map(str, cells), *unfit}
    kept = [row for row in old if row["cell"] not in again]
    if kept != old:
        files.write(failures, "".join(f"{json.dumps(row)}\n" for row in kept))

    def fail(key: Hashable, error: str, reason: str, worker: str = "") -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        row = {"cell": str(key), "error": error, "reason": reason, "worker": worker, "date": now}
        files.append_line(failures, row)

    for key, error in unfit.items():
        fail(key, type(error).__name__, str(error))
    made, failed, total = 0, len(unfit), len(cells) + len(unfit)
    for key, outcome in cluster.each(client, work, todo, **options):
        if outcome.error:
            fail(key, outcome.error, outcome.reason, outcome.worker)
            failed += 1
        else:
            keep(cells[key], outcome.value)
            made += 1
        at = len(before) + made + failed
        progress(f"{at:,} of {total:,}" + (f", {failed:,} failed" if failed else ""), at / total)
    return Tally(total, len(before), made, failed, failures)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.stem}.failed.jsonl")


# Measured


class Cell(NamedTuple):
    """What is measured once: a strategy at a setting of one GPU, on a card."""

    strategy: str  # its label
    setting: Setting
    card: str
    mode: str

    @classmethod
    def of(cls, step: Step) -> "Cell":
        return cls(step.strategy.label, step.setting, step.card, step.mode)

    def __str__(self) -> str:
        at = self.setting
        spread = f"{at.heads} heads, page size {at.page_size}"
        return f"{self.strategy}, {at}, {spread}, {self.mode}, on {self.card}"


def measure(client, swept: Grid, record: str | Path, progress: Progress = lambda *_: None) -> Tally:
    """Measure each cell on a worker of its card, one at a time per GPU, into a record file.

    A deployment that names no card is measured on each that the workers have. What failed is in
    `NAME.failed.jsonl`. Raises `CannotRun`, `BadFile`, `CannotWrite`, and what a grid's
    deployments raise.
    """
    record = Path(record)
    hosts = cluster.survey(client)
    cluster.require_slots(client)
    cells, unfit = _cells(swept, hosts)
    with _alone(record):
        done = [Cell.of(step) for step in steps.read(record)]
        return _run(
            client,
            measured,
            cells,
            done,
            lambda cell, step: steps.append(record, step),
            _beside(record),
            unfit,
            progress,
            hosts=lambda cell: hosts[cell.card] if len(hosts) > 1 else None,
            resources={cluster.RESOURCE: 1},
        )


def _cells(swept: Grid, cards: Iterable[str]) -> tuple[dict[Cell, Cell], dict[str, LabError]]:
    """The cells on the workers' cards, each once, and what has no pool to measure."""
    cells, unfit = {}, {}
    for entry in swept.entries:
        wanted = machine.card(entry["card"]).name if "card" in entry else None
        if wanted not in (None, *cards):
            raise CannotRun(f"No worker has {wanted}", ", ".join(cards), "Predict it: --predict")
        for card in [wanted] if wanted else cards:
            known = machine.card_of(card)
            there = grid.made(entry, known.name if known else None)
            modes = swept.modes if known or not card.startswith("CPU") else ("eager",)
            for label in swept.strategies:
                try:
                    pools = swept.pool_tokens or (there.rows(parse(label)),)
                except (DoesNotFit, NoAnswer) as error:
                    unfit[f"{label}, {grid.title(entry)}, on {card}"] = error
                    continue
                loads = itertools.product(pools, swept.concurrency, swept.context, modes)
                for P, R, n, mode in loads:
                    at = there.setting(Load(R, n), P)
                    at = replace(at, load=replace(at.load, context=int(at.load.context)))
                    cell = Cell(label, at, card, mode)
                    cells[cell] = cell
    return cells, unfit


def measured(cell: Cell) -> Step:
    """A cell on this machine, checked against float64. Raises what `steps.measure` does."""
    at = cell.setting
    bench = decode.Bench(
        at.model,
        at.heads,
        cluster.own_device(),
        page_size=at.page_size,
        order=at.order,
        modes=(cell.mode,),
    )
    load = at.load.concurrency, at.load.context
    (step,) = decode.measure(bench, [parse(cell.strategy)], [at.pool_tokens], [load])
    return step


# Predicted


@dataclass(frozen=True)
class Part:
    """`count` cells of a map from `first` on; the last axis moves fastest.

    `axes` are deployments (name, itself, slots of its pool or None), strategies, concurrency and
    context.
    """

    axes: tuple[tuple, ...]
    rest: str
    first: int
    count: int

    @property
    def cells(self) -> Iterable[tuple]:
        end = self.first + self.count
        return itertools.islice(itertools.product(*self.axes), self.first, end)


def predict(
    client,
    swept: Grid,
    folder: str | Path,
    rest: str = "glm5-report",
    progress: Progress = lambda *_: None,
    chunk: int = CHUNK,
) -> Tally:
    """Predict each cell into Parquet files of `chunk` cells; those that are there stay.

    A cell that has no answer is a row with its reason. Raises `CannotWrite` for a folder that
    holds another grid, or parts of another revision.
    """
    folder = Path(folder)
    cluster.require("pyarrow")
    cluster.survey(client)
    named = [
        (f"{grid.title(entry)}{f', a pool of {P}' if P else ''}", grid.made(entry), P)
        for entry in swept.entries
        for P in swept.pool_tokens or (None,)
    ]
    axes = tuple(named), swept.strategies, swept.concurrency, swept.context
    count = -(-math.prod(map(len, axes)) // chunk)
    paths = {f"part {i}": folder / f"part-{i:05}.parquet" for i in range(count)}
    told = json.loads(json.dumps(asdict(swept)))
    told |= {"rest": rest, "chunk": chunk, "revision": machine.git_revision()}
    manifest = folder / "_grid.json"  # readers of Parquet folders pass over names with a _
    with _alone(folder / "_lock"):
        if manifest.exists() and (there := files.read_json(manifest)) != told:
            differ = [name for name in told if there.get(name) != told[name]]
            raise CannotWrite(
                f"{folder} holds another map (other {', '.join(differ)})", remedy="Name a new one"
            )
        files.write_json(manifest, told)
        return _run(
            client,
            predicted,
            {key: Part(axes, rest, i * chunk, chunk) for i, key in enumerate(paths)},
            [key for key, path in paths.items() if path.exists()],
            lambda part, raw: files.write(paths[f"part {part.first // chunk}"], raw),
            folder / "_failed.jsonl",
            {},
            progress,
        )


def predicted(part: Part) -> bytes:
    """A part's answers as a Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    text, number, whole = pa.dictionary(pa.int32(), pa.string()), pa.float64(), pa.int64()
    columns = {"deployment": text, "strategy": text, "concurrency": whole, "context": whole}
    columns |= dict.fromkeys(("kept_tokens", "running"), whole)
    times = ("step_ms", "rest_ms", "tpot_ms", "tokens_per_s")
    columns |= dict.fromkeys((*times, "low_tokens_per_s", "high_tokens_per_s"), number)
    columns |= {"provenance": text, "reason": text}
    rows = [_row(part.rest, *cell) for cell in part.cells]
    table = pa.Table.from_pylist(rows, pa.schema(columns.items()))
    sink = io.BytesIO()
    parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _row(rest: str, there: tuple[str, Deployment, int | None], label: str, R: int, n: int) -> dict:
    name, deployment, pool = there
    row = {"deployment": name, "strategy": label, "concurrency": R, "context": n}
    try:
        found = answer(label, deployment, Load(R, n), _rest(rest, deployment), pool_tokens=pool)
    except LabError as error:
        return row | {"reason": str(error)}
    if not found.runs:
        return row | {"kept_tokens": found.kept_tokens, "running": 0, "reason": found.reason}
    names = "kept_tokens running rest_ms tpot_ms tokens_per_s low_tokens_per_s high_tokens_per_s"
    row |= {name: getattr(found, name) for name in names.split()}
    return row | {"step_ms": found.step.ms, "provenance": str(found.provenance)}


@lru_cache(maxsize=256)
def _rest(anchor: str, deployment: Deployment):
    return anchored(anchor, deployment)


def winners(folder: str | Path):
    """The strategy with most tokens/s of each deployment and load of a map, one row each."""
    import pandas as pd

    cluster.require("pyarrow")
    columns = ["deployment", "concurrency", "context", "strategy", "tokens_per_s", "provenance"]
    cells = pd.read_parquet(folder, columns=columns).dropna(subset="tokens_per_s")
    best = cells.groupby(columns[:3], observed=True).tokens_per_s.idxmax()
    return cells.loc[best].reset_index(drop=True)


# Simulated


def simulate(
    client,
    swept: Grid,
    load: Traffic,
    record: str | Path,
    rest: str = "glm5-report",
    progress: Progress = lambda *_: None,
) -> Tally:
    """Serve traffic in simulated time on each deployment, strategy, rate and number of replicas.

    Each line of `record` is a summary with what was served; `files.read_lines` gives them back.
    """
    record = Path(record)
    cluster.survey(client)
    named = [(grid.title(entry), grid.made(entry)) for entry in swept.entries]
    cells = {}
    axes = named, swept.strategies, swept.rates, swept.replicas
    for (name, there), label, rate, replicas in itertools.product(*axes):
        at = {"deployment": name, "strategy": label, "rate": float(rate), "replicas": replicas}
        at |= {"traffic": f"{load.source}, {len(load):,} requests", "rest": rest}
        cells[_key(at)] = at, there, load
    with _alone(record):
        done = [_key(row) for row in files.read_lines(record)]
        return _run(
            client,
            simulated,
            cells,
            done,
            lambda cell, row: files.append_line(record, row),
            _beside(record),
            {},
            progress,
        )


def _key(at: dict) -> str:
    names = ("deployment", "strategy", "rate", "replicas", "traffic", "rest")
    return ", ".join(f"{name} {at.get(name)}" for name in names)


def simulated(cell: tuple[dict, Deployment, Traffic]) -> dict:
    """The summary of one simulation, as a line of JSON can hold it."""
    at, there, load = cell
    (one,) = contenders(there, [at["strategy"]], anchor=at["rest"])
    scaled = load.scaled(rate=at["rate"])
    ran = simulate_replicas(engine(one), scaled, at["replicas"], overload=True)
    row = ran.summary()
    row |= {name: None for name, value in row.items() if value != value}  # of no request
    return at | row

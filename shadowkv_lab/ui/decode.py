"""The decode lab: pool size and concurrency to step times, measured here or recorded."""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch

from shadowkv_lab import facts, files, machine
from shadowkv_lab.errors import NoAnswer, OutOfRange
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.steps import measure as measuring
from shadowkv_lab.steps import step as steps
from shadowkv_lab.steps.step import Step
from shadowkv_lab.strategies import STRATEGIES, parse
from shadowkv_lab.ui import charts
from shadowkv_lab.ui.app import Cancelled, View, Work
from shadowkv_lab.ui.application import application
from shadowkv_lab.ui.controls import Menu, Several, Slider, Tick, models, named, powers
from shadowkv_lab.ui.plots import Figures

files.reader(Step)  # built when the lab is imported, not in its first view: 50 ms
HEADS = (8, 16, 32, 64, 128)
SYNTHETIC = "synthetic"
CPU_POOL_TOKENS = 16384  # slots at which a CPU re-measures in seconds
HERE_POOL_TOKENS = 2048  # a CPU's pool where nobody chose one: four strategies in some seconds
PHASES = {f"{name}_ms": (name, opacity) for name, opacity in charts.OPACITY.items()}
INDEX = {f"{n}_ms": (charts.NAMES.get(n, n), o) for n, o in charts.DSA_OPACITY.items()}
TABLE = (
    *("strategy", "pool_tokens", "concurrency", "context", "step_ms", "cast_ms", "attention_ms"),
    *("write_ms", "residual_ms", "step_spread_ms", "kept_bytes", "error", "provenance"),
)


# Figures: a frame of steps in, a finished figure out; each title states a finding.


def step_by_phase(frame: pd.DataFrame) -> go.Figure:
    """Stacked bars: one per strategy, its phases in it; its total beside it.

    Cast, attention and write, and of steps that read by an index also its scores and top-k.
    """
    frame = frame.sort_values("step_ms", kind="stable")
    parts = PHASES | (INDEX if (frame[[*INDEX]] > 0).any(axis=None) else {})
    moved = {column: _moved(frame, column) for column in parts}
    # Phases are timed one by one, so on a busy machine they may add up to more than the step.
    ends = frame[[*parts]].sum(axis=1).clip(lower=frame.step_ms)
    texts = [f"{ms:,.2f} ms, {word}" for ms, word in frame[["step_ms", "provenance"]].values]
    return charts.figure(
        _ratio_title(frame),
        charts.phases(frame, parts, moved, form=".3f"),
        "step, all layers (ms)",
        **charts.totals(frame.title, ends, texts, widest=1.5),
    )


def _ratio_title(frame: pd.DataFrame) -> str:
    where = f"pool {_same(frame.pool_tokens)}, {_same(frame.concurrency)} x {_same(frame.context)}"
    if frame.noisy.any():
        names = ", ".join(dict.fromkeys(frame.title[frame.noisy]))
        return charts.heading(f"Measured while other work ran: {names} cannot be compared", where)
    by_name = frame.set_index("strategy").step_ms
    hypothetical = (frame.reads == "dsa").any()  # a full cast beside an index
    if {"full_cast", "shadow"} <= set(by_name.index) and not hypothetical:
        ratio = by_name["full_cast"] / by_name["shadow"]
        said = f"The shadow's step is {ratio:.1f} times shorter than full cast's"
        return charts.heading(said, where)
    best = frame.loc[frame.step_ms.idxmin()]
    return charts.heading(f"{best.title} takes the shortest step, {best.step_ms:.2f} ms", where)


def _same(values: pd.Series) -> str:
    low, high = values.min(), values.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _moved(frame: pd.DataFrame, column: str) -> list[str]:
    """Each step's bytes and GB/s in one phase, in words."""
    texts = []
    for gb, ms in zip(frame[column.replace("_ms", "_gb")], frame[column], strict=True):
        rate = f" at {1000 * gb / ms:,.0f} GB/s" if gb and ms > 0 else ""
        texts.append(f"{gb:,.3f} GB moved{rate}")
    return texts


def against_pool(frame: pd.DataFrame) -> go.Figure:
    """Step time over pool size at one load: full cast climbs, the others do not."""
    finding = "Step time against pool size"
    if grown := _growth(frame, "full_cast"):
        finding = f"From the smallest pool to the largest, full cast's step grows {grown:.1f} times"
        other = _growth(frame, "shadow")
        finding += f", the shadow's {other:.2f}" if other else ""
    load = f"{_same(frame.concurrency)} x {_same(frame.context)} live tokens"
    return _against(frame, charts.heading(finding, load), "pool_tokens", "pool (slots)")


def _growth(frame: pd.DataFrame, strategy: str) -> float | None:
    ours = frame.loc[frame.strategy == strategy, ["pool_tokens", "step_ms"]].to_numpy()
    if len(set(ours[:, 0])) < 2:
        return None
    return ours[ours[:, 0].argmax(), 1] / ours[ours[:, 0].argmin(), 1]


def against_concurrency(frame: pd.DataFrame) -> go.Figure:
    """Step time over running requests at one pool and context."""
    finding = "Step time against concurrency"
    many = frame[frame.concurrency == frame.concurrency.max()]
    if len(many) and frame.concurrency.nunique() > 1:
        best = many.loc[many.step_ms.idxmin()]
        finding = f"At {charts.requests(best.concurrency)} {best.title} is fastest: "
        finding += f"{best.step_ms:.2f} ms per step"
    where = f"pool {_same(frame.pool_tokens)}, context {_same(frame.context)}"
    return _against(frame, charts.heading(finding, where), "concurrency", "running requests")


def _against(frame: pd.DataFrame, title: str, x: str, axis: str) -> go.Figure:
    hover = (
        "%{x:,}: %{y:.3f} ms per step, %{customdata[0]}<br>"
        "cast %{customdata[1]:.3f}, attention %{customdata[2]:.3f} ms"
    )
    columns = ["provenance", "cast_ms", "attention_ms"]
    kinds = ", ".join(sorted(set(frame.provenance)))
    ordered = frame.iloc[frame.order.argsort(kind="stable")]
    return charts.figure(
        title,
        charts.lines(ordered, x, "step_ms", hover, columns),
        axis,
        "step (ms)",
        log_x=True,
        log_y=True,
        legend={"title": {"text": f"{kinds}: "}},
        xaxis=charts.ticks(frame[x]),
    )


def memory_kept(frame: pd.DataFrame) -> go.Figure:
    """Bars: GiB that each strategy keeps for the pool, and its scratch."""
    frame = frame.sort_values("kept_bytes", kind="stable", ascending=False)
    frame = frame.assign(pool=frame.kept_bytes / 2**30, scratch=frame.scratch_bytes / 2**30)
    finding = f"The pool takes {frame.pool.min():.2f} to {frame.pool.max():.2f} GiB, scratch not "
    where = f"pool {_same(frame.pool_tokens)}, {_same(frame.layers)} layers"
    parts = {"pool": ("pool", 0.9), "scratch": ("scratch and batch", 0.35)}
    return charts.figure(
        charts.heading(finding + "counted", where),
        charts.phases(frame, parts, unit=" GiB"),
        "memory (GiB)",
        **charts.totals(
            frame.title,
            frame.pool + frame.scratch,
            [f"{g:.2f} GiB" for g in frame.pool],
            widest=1.3,
        ),
    )


# Views: steps recorded, or measured here.


def recorded(model: str, heads: int, mode: str = "graph") -> pd.DataFrame:
    """The newest recorded steps of a model at a head count, dense ones. Raises `NoAnswer`."""
    return _recorded(facts.stamps("runs", "*.jsonl"), model, heads, mode)


@lru_cache(maxsize=16)
def _recorded(stamps: tuple, model: str, heads: int, mode: str) -> pd.DataFrame:
    """`recorded`, made again when a file of `stamps` has changed; a slider asks at each step."""
    dense = (s for s in steps.recorded() if s.setting.load.reads == "dense")
    seen = [s for s in dense if s.mode == mode]
    newest = {}
    for s in sorted(seen, key=lambda s: s.origin.date):
        if s.setting.model.name == model and s.setting.heads == heads:
            newest[s.strategy.label, s.setting.pool_tokens, s.setting.load, s.card] = s
    if not newest:
        have = sorted({f"{s.setting.model.name}, {s.setting.heads} heads" for s in seen})
        raise NoAnswer(
            f"No recorded run of {model} with {heads} heads",
            "; ".join(have) or "none is recorded yet",
            "Measure on this machine, or record one with shadowkv measure --record",
        )
    return _plain(steps.frame(newest.values()))


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    # Arrow's strings are slow to take one by one, and every figure takes them so.
    words = frame.select_dtypes("str").columns
    return frame.astype(dict.fromkeys(words, object))


def nearest(frame: pd.DataFrame, pool_tokens: int, concurrency: int, context: int) -> pd.Series:
    """The recorded cell (pool, concurrency, context) nearest in log space."""
    cells = frame[["pool_tokens", "concurrency", "context"]].drop_duplicates()
    asked = np.log(np.array([pool_tokens, concurrency, context], float))
    return cells.iloc[np.abs(np.log(cells.to_numpy()) - asked).sum(axis=1).argmin()]


def views(cell: pd.DataFrame, around: pd.DataFrame) -> View:
    """The four figures: one cell's steps, and the steps `around` it along each axis."""
    at = cell.iloc[0]
    pools = around[(around.concurrency == at.concurrency) & (around.context == at.context)]
    loads = around[(around.pool_tokens == at.pool_tokens) & (around.context == at.context)]
    drawn = Figures(
        lambda: step_by_phase(cell),
        lambda: against_pool(pools),
        lambda: against_concurrency(loads),
        lambda: memory_kept(cell),
    )
    return View(drawn, _note(cell), cell.sort_values("step_ms"), TABLE)


def _note(cell: pd.DataFrame) -> str:
    at = cell.iloc[0]
    disturbed = steps.noisy(cell)
    return (
        f"<b>{at.provenance}</b> on {at['origin.device']}, {at['origin.date'][:10]}, "
        f"torch {at['origin.torch']}, attention: {', '.join(sorted(set(cell.backend)))}; pool "
        f"{at.pool_tokens:,}, {at.concurrency} x {at.context:,}; worst relative error "
        f"against float64 {cell.error.max():.1e}"
        + (f". Noisy: {', '.join(disturbed)}; {steps.NOISY}" if disturbed else "")
    )


@lru_cache(maxsize=128)
def _recorded_view(
    stamps: tuple,
    model: str,
    heads: int,
    pool_tokens: int,
    concurrency: int,
    context: int,
    strategies: tuple[str, ...],
) -> View:
    """The recorded steps nearest to a setting, and their neighbours along each axis.

    Remembered: a slider goes to and fro, and nobody changes a view's figures.
    """
    if min(pool_tokens, concurrency, context) < 1:
        raise OutOfRange(f"A pool of {pool_tokens}, {concurrency} x {context}", "1 or more of each")
    frame = _recorded(stamps, model, heads, "graph")
    frame = frame[frame.strategy.isin(strategies)]
    if frame.empty:
        raise NoAnswer(
            f"No recorded run of {', '.join(strategies) or 'no strategy'}",
            remedy="Choose at least one strategy that was recorded",
        )
    cell = nearest(frame, pool_tokens, concurrency, context)
    at_cell = (frame.pool_tokens == cell.pool_tokens) & (frame.concurrency == cell.concurrency)
    at_cell &= frame.context == cell.context
    # One card: that of the newest run of the cell, where a user's own runs lie beside the lab's.
    newest = frame[at_cell].sort_values("origin.date").card.iloc[-1]
    frame, at_cell = frame[frame.card == newest], at_cell[frame.card == newest]
    view = views(frame[at_cell], frame)
    if (pool_tokens, concurrency, context) == tuple(cell[:3]):
        return view
    asked = f"Nearest recorded run to a pool of {pool_tokens:,}, {concurrency} x {context:,}. "
    return dataclasses.replace(view, note=asked + view.note)


def measured_view(
    bench: measuring.Bench,
    pool_tokens: int,
    concurrency: int,
    context: int,
    strategies: tuple[str, ...],
    seen: Sequence[Step] = (),
) -> View:
    """Measure a setting here; `seen` are this session's earlier steps, drawn as its neighbours."""
    if not strategies:
        raise OutOfRange("No strategy is chosen", "one or more", "Choose some in the list")
    chosen = [parse(s) for s in strategies]
    try:
        new = list(measuring.measure(bench, chosen, [pool_tokens], [(concurrency, context)]))
    except measuring.Cancelled:
        raise Cancelled from None
    labels, around = {s.label for s in chosen}, {}
    for s in (*seen, *new):
        at = s.setting
        if s.strategy.label in labels and (at.model, at.heads) == (bench.model, bench.heads):
            around[s.strategy.label, at.pool_tokens, at.load] = s
    if isinstance(seen, list):
        seen.extend(new)
    return views(_plain(steps.frame(new)), _plain(steps.frame(around.values())))


def measure_here(
    model: str = "glm-5",
    pool_tokens: int = 495_616,
    concurrency: int = 1,
    context: int = 1024,
    strategies: tuple[str, ...] = ("full_cast", "bf16_pool", "shadow", "gather_cast"),
) -> View:
    """Measure a setting on this machine; on a CPU at a pool that takes seconds."""
    if machine.default_device().type == "cpu":
        pool_tokens = min(pool_tokens, HERE_POOL_TOKENS)
        context = min(context, pool_tokens // concurrency)
    load = dict(concurrency=concurrency, context=context)
    return step_view(model, pool_tokens, **load, strategies=strategies, live=True)


# The application.


def _chosen(settings: dict) -> list[str]:
    """Every strategy that is defined, the user's too, and those chosen with options."""
    chosen = (parse(s).label for s in settings["strategies"])
    return [*dict.fromkeys([*STRATEGIES, *chosen])]


@lru_cache(maxsize=4)
def _grid(stamps: tuple) -> pd.DataFrame:
    """The settings of recorded replays, one a row."""
    seen = [s.setting for s in steps.recorded() if s.mode == "graph"]
    rows = [
        (s.model.name, s.heads, s.pool_tokens, s.load.concurrency, s.load.context) for s in seen
    ]
    columns = ["model", "heads", "pool_tokens", "concurrency", "context"]
    return pd.DataFrame(rows, columns=columns).drop_duplicates()


def _offered(name: str, settings: dict, live: Sequence) -> list:
    """Positions of a control: `live` ones when measuring here, else those of recorded runs.

    Another model has other heads, and both have other pools and loads.
    """
    if settings["live"]:
        return [*live]
    found = _grid(facts.stamps("runs", "*.jsonl"))
    for within in ("model", "heads"):
        if within == name:
            break
        found = found[found[within] == settings[within]]
    return sorted(found[name].unique().tolist())


def _models(settings: dict) -> list[str]:
    return [*dict.fromkeys([*_offered("model", settings, models(settings)), settings["model"]])]


def _heads(settings: dict) -> list[int]:
    own = _own_heads(load_model(settings["model"]))
    return _offered("heads", settings, sorted({*HEADS, own})) or [own]


def _sources(settings: dict) -> list[str]:
    files = [path.name for path in facts.files("pools", "*.safetensors")]
    return [*dict.fromkeys([SYNTHETIC, *files, settings["rows"]])]


def _devices(settings: dict) -> dict[str, str]:
    return {name: f"{name}: {machine.device_title(name)}" for name in machine.devices()}


def _requests(settings: dict) -> list[int]:
    return _offered("concurrency", settings, powers(1, 128))


def _contexts(settings: dict) -> list[int]:
    return _offered("context", settings, powers(256, 131_072))


def _pool_sizes(settings: dict) -> list[int]:
    """Recorded pools; here half-octaves from 2,048 up, in whole pages, the recorded among them."""
    if not settings["live"]:
        return _offered("pool_tokens", settings, ())
    largest = _largest_pool(load_model(settings["model"]), torch.device(settings["device"]))
    sizes = [int(2 ** (11 + i / 2)) // 64 * 64 for i in range(18)]
    return [*(s for s in sizes if s <= max(largest, 495_616)), 65_536, 131_072, 262_144, 495_616]


def _largest_pool(shape: Model, device: torch.device) -> int:
    """Slots that the largest strategy (FP8 and a full shadow) can hold here, in whole pages."""
    if device.type == "cpu":
        return CPU_POOL_TOKENS
    fits = machine.memory(device).free_bytes // (shape.layers * shape.row_bytes("fp8+bf16"))
    return fits // 64 * 64


def _own_heads(shape: Model) -> int:
    return shape.heads_per_gpu(8 if shape.heads % 8 == 0 else 1)


def follow(settings: dict, name: str | None) -> dict:
    """Another model has other heads per GPU, and what is measured here must fit and run here.

    What was left open at the start is filled in.
    """
    shape, device = load_model(settings["model"]), machine.as_device(settings["device"])
    found = settings | {"model": named(settings["model"]), "device": str(device)}
    if name == "model" or settings["heads"] is None:
        found["heads"] = _own_heads(shape)
    chosen, largest = settings["strategies"], _largest_pool(shape, device)
    chosen = (chosen,) if isinstance(chosen, str) else chosen
    here = settings["live"] and (name == "live" or chosen is None)
    found["strategies"] = tuple(
        s for s in (STRATEGIES if chosen is None else chosen) if not here or _runs(s, device)
    )
    if settings["pool_tokens"] is None:
        found["pool_tokens"] = min(495_616, largest) if settings["live"] else 495_616
    if name == "live" and not settings["live"]:
        here = _grid(facts.stamps("runs", "*.jsonl"))
        here = here[here.model == found["model"]]
        if here.empty:  # what was measured here of another model has no recorded run beside it
            return follow(found | {"model": "glm-5"}, "model")
        if found["heads"] not in set(here.heads):
            found["heads"] = int(here.heads.iloc[0])
    if name in ("model", "heads", "live") and not settings["live"]:
        for each in ("pool_tokens", "concurrency", "context"):
            if seen := _offered(each, found, ()):
                found[each] = min(seen, key=lambda v: abs(np.log(v / (found[each] or v))))
    if name == "live" and settings["live"]:
        found["pool_tokens"] = min(settings["pool_tokens"], largest)
        most = found["pool_tokens"] // settings["concurrency"]
        found["context"] = min(settings["context"], max(most, 1))
    return found


def _runs(strategy: str, device: torch.device) -> bool:
    """Whether a strategy can be tried on this kind of device: kernels need a GPU."""
    of = parse(strategy)
    return device.type == "cuda" or (of.reads == "bf16" and not of.needs)


SEEN: list[Step] = []  # measured in this session


def asleep(settings: dict) -> dict[str, str]:
    """What a recorded run has no use for."""
    return {} if settings["live"] else dict.fromkeys(("rows", "device"), "only to measure here")


@application(
    "shadowkv_lab.explorer", changed=follow, asleep=asleep, slow=lambda settings: settings["live"]
)
def step_view(
    model: Annotated[str, Menu("model", _models)] = "glm-5",
    pool_tokens: Annotated[int | None, Slider("pool size", _pool_sizes, "slots")] = None,
    concurrency: Annotated[int, Slider("concurrency", _requests, "requests")] = 1,
    context: Annotated[int, Slider("context", _contexts, "tokens")] = 1024,
    heads: Annotated[int | None, Menu("heads per GPU", _heads)] = None,
    strategies: Annotated[tuple[str, ...] | None, Several("strategies", _chosen)] = None,
    live: Annotated[bool, Tick("measure on this device")] = False,
    rows: Annotated[
        str, Menu("rows", _sources, help="synthetic, or a pool file: a name or a path")
    ] = SYNTHETIC,
    device: Annotated[str | None, Menu("device", _devices)] = None,
    *,
    work: Work,
) -> View:
    """Decode steps of each strategy, phase by phase: the nearest recorded run, or measured here.

    `live` measures on this machine, in a worker; otherwise the nearest recorded run is shown.
    """
    if not live:
        stamps = facts.stamps("runs", "*.jsonl")
        return _recorded_view(stamps, model, heads, pool_tokens, concurrency, context, strategies)
    shape = load_model(model)
    bench = measuring.Bench(
        shape,
        heads,
        machine.as_device(device),
        modes=("graph",),
        progress=work.report,
        cancelled=work.cancelled,
        **_rows(rows, shape, pool_tokens),
    )
    return measured_view(bench, pool_tokens, concurrency, context, strategies, SEEN)


explorer = step_view.app


def _rows(name: str, shape: Model, pool_tokens: int) -> dict:
    """Bench arguments for the chosen source of rows: a file of data/pools, or any by its path."""
    if name == SYNTHETIC:
        return {}
    from shadowkv_lab.sources import poolfile

    shipped = facts.path("pools", name)
    fill = poolfile.filler(shipped if shipped.exists() else name, shape)
    return {"fill": fill, "source": fill.source(pool_tokens, shape.layers)}

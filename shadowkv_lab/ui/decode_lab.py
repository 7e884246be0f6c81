"""The decode lab: pool size and concurrency to step times, measured here or recorded."""

import dataclasses
from functools import lru_cache

import ipywidgets as w
import numpy as np
import pandas as pd
import torch

from shadowkv_lab import facts, machine
from shadowkv_lab.errors import BadFile, OutOfRange
from shadowkv_lab.model import Model, known_models, load_model
from shadowkv_lab.steps import measure as decode
from shadowkv_lab.steps import records
from shadowkv_lab.strategies import STRATEGIES, parse
from shadowkv_lab.ui import figures
from shadowkv_lab.ui.app import App, Cancelled, View
from shadowkv_lab.ui.controls import check, menu, several, slider
from shadowkv_lab.ui.plots import Figures

HEADS = (8, 16, 32, 64, 128)
SYNTHETIC = "synthetic"
CPU_POOL_TOKENS = 16384  # slots at which a CPU re-measures in seconds
HERE_POOL_TOKENS = 2048  # a CPU's pool where nobody chose one: four strategies in some seconds
CONTEXTS = [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
CONCURRENCIES = [1, 2, 4, 8, 16, 32, 64, 128]


def recorded(model: str, heads: int, mode: str = "graph") -> pd.DataFrame:
    """Recorded runs of a model at a head count; with `provenance` and bytes moved a phase."""
    return _recorded(model, heads, mode, _stamps())


def _stamps() -> tuple:
    """The files of recorded runs as they are now; what is remembered of others is stale."""
    return facts.stamps("runs", "*.jsonl")


@lru_cache(maxsize=16)
def _recorded(model: str, heads: int, mode: str, stamps: tuple) -> pd.DataFrame:
    """`recorded`, read again when a file of `stamps` has changed; a slider asks at each step."""
    runs = records.read()
    ours = runs[(runs.model == model) & (runs.heads == heads) & (runs["mode"] == mode)]
    if ours.empty:
        have = sorted({f"{m}, {h} heads" for m, h in zip(runs.model, runs.heads, strict=True)})
        raise BadFile(
            f"No recorded run of {model} with {heads} heads",
            "; ".join(have) or "none is recorded yet",
            "Measure on this machine, or record one with shadowkv measure --record",
        )
    # The newest run of a setting speaks for it.
    keys = ["strategy", "pool_tokens", "concurrency", "context", "origin.device"]
    ours = ours.sort_values("origin.date").drop_duplicates(keys, keep="last")
    # Arrow's strings are slow to take one by one, and every figure takes them so.
    words = ours.select_dtypes("str").columns
    return with_bytes(ours.astype(dict.fromkeys(words, object)).assign(provenance="recorded"))


def with_bytes(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with the GB that each phase moves, by the strategy's own formula."""
    moved = [
        parse(r.strategy).step_moves(
            load_model(r.model), r.pool_tokens, r.live_tokens, r.new_tokens
        )
        for r in runs.itertuples()
    ]
    return runs.assign(
        cast_gb=[m.cast_bytes / 1e9 for m in moved],
        attention_gb=[m.attention_bytes / 1e9 for m in moved],
        write_gb=[m.write_bytes / 1e9 for m in moved],
    )


def nearest(runs: pd.DataFrame, pool_tokens: int, concurrency: int, context: int) -> pd.Series:
    """The recorded cell (pool, concurrency, context) nearest in log space."""
    cells = runs[["pool_tokens", "concurrency", "context"]].drop_duplicates()
    asked = np.log([pool_tokens, concurrency, context])
    return cells.iloc[np.abs(np.log(cells.to_numpy()) - asked).sum(axis=1).argmin()]


def views(runs: pd.DataFrame, around: pd.DataFrame) -> View:
    """The four figures: one cell's runs, and the runs `around` it along each axis."""
    cell = runs.iloc[0]
    pools = around[(around.concurrency == cell.concurrency) & (around.context == cell.context)]
    loads = around[(around.pool_tokens == cell.pool_tokens) & (around.context == cell.context)]
    drawn = Figures(
        lambda: figures.step_by_phase(runs),
        lambda: figures.against_pool(pools),
        lambda: figures.against_concurrency(loads),
        lambda: figures.memory_kept(runs),
    )
    return View(drawn, note=_note(runs), table=runs)


def _note(runs: pd.DataFrame) -> str:
    cell = runs.iloc[0]
    return (
        f"<b>{cell.provenance}</b> on {cell['origin.device']}, {cell['origin.date'][:10]}, "
        f"torch {cell['origin.torch']}, attention: {', '.join(sorted(set(runs.backend)))}; pool "
        f"{cell.pool_tokens:,}, {cell.concurrency} x {cell.context:,}; worst relative error "
        f"against float64 {runs.error.max():.1e}"
        + (
            f". Noisy: {', '.join(disturbed)}; {records.NOISY}"
            if (disturbed := records.noisy(runs))
            else ""
        )
    )


def recorded_view(
    model: str = "glm-5",
    heads: int | None = None,
    pool_tokens: int = 495_616,
    concurrency: int = 1,
    context: int = 1024,
    strategies: tuple[str, ...] = tuple(STRATEGIES),
) -> View:
    """The recorded run nearest to a setting, and its neighbours along each axis."""
    if min(pool_tokens, concurrency, context) < 1:
        raise OutOfRange(f"A pool of {pool_tokens}, {concurrency} x {context}", "1 or more of each")
    runs = recorded(model, heads or load_model(model).heads_per_gpu(8))
    runs = runs[runs.strategy.isin(strategies)]
    if runs.empty:
        raise BadFile(
            f"No recorded run of {', '.join(strategies) or 'no strategy'}",
            remedy="Choose at least one strategy that was recorded",
        )
    cell = nearest(runs, pool_tokens, concurrency, context)
    at_cell = (runs.pool_tokens == cell.pool_tokens) & (runs.concurrency == cell.concurrency)
    view = views(runs[at_cell & (runs.context == cell.context)], runs)
    if (pool_tokens, concurrency, context) == tuple(cell[:3]):
        return view
    asked = f"Nearest recorded run to a pool of {pool_tokens:,}, {concurrency} x {context:,}. "
    return dataclasses.replace(view, note=asked + view.note)


def measured_view(
    bench: decode.Bench,
    pool_tokens: int,
    concurrency: int,
    context: int,
    strategies: tuple[str, ...],
    seen: list[records.Run],
) -> View:
    """Measure a setting here; `seen` gathers this session's runs, drawn as the neighbours."""
    if not strategies:
        raise OutOfRange("No strategy is chosen", "one or more", "Choose some in the list")
    chosen = [parse(s) for s in strategies]
    try:
        new = list(decode.measure(bench, chosen, [pool_tokens], [(concurrency, context)]))
    except decode.Cancelled:
        raise Cancelled from None
    seen.extend(new)
    frame = pd.json_normalize([dataclasses.asdict(run) for run in seen])
    keys = ["strategy", "pool_tokens", "concurrency", "context"]
    frame = with_bytes(frame.drop_duplicates(keys, keep="last").assign(provenance="measured"))
    at_cell = (frame.pool_tokens == pool_tokens) & (frame.concurrency == concurrency)
    shown = frame[at_cell & (frame.context == context) & frame.strategy.isin(strategies)]
    return views(shown, frame[frame.strategy.isin(strategies)])


def measure_here(
    model: str = "glm-5",
    pool_tokens: int = 495_616,
    concurrency: int = 1,
    context: int = 1024,
    strategies: tuple[str, ...] = ("full_cast", "bf16_pool", "shadow", "gather_cast"),
    report=lambda text, done: None,
) -> View:
    """Measure a setting on this machine; on a CPU at a pool that takes seconds."""
    device, shape = machine.default_device(), load_model(model)
    if device.type == "cpu":
        pool_tokens = min(pool_tokens, HERE_POOL_TOKENS)
        context = min(context, pool_tokens // concurrency)
    bench = decode.Bench(shape, shape.heads_per_gpu(8), device, modes=("graph",), progress=report)
    return measured_view(bench, pool_tokens, concurrency, context, strategies, [])


def table(view: View) -> pd.DataFrame:
    """A view's numbers, ready to be read."""
    names = {
        "strategy": "strategy",
        "pool_tokens": "pool",
        "concurrency": "requests",
        "context": "context",
        "step_ms": "step ms",
        "cast_ms": "cast ms",
        "attention_ms": "attention ms",
        "write_ms": "write ms",
        "residual_ms": "residual ms",
        "step_spread_ms": "spread ms",
        "kept_bytes": "kept GiB",
        "error": "error",
        "provenance": "provenance",
    }
    shown = view.table[[*names]].sort_values("step_ms")
    shown = shown.assign(
        kept_bytes=shown.kept_bytes / 2**30, error=shown.error.map("{:.1e}".format)
    )
    return shown.rename(columns=names).round(3).reset_index(drop=True)


def explorer(
    model: str = "glm-5",
    pool_tokens: int | None = None,
    concurrency: int = 1,
    context: int = 1024,
    heads: int | None = None,
    strategies: tuple[str, ...] | None = None,
    live: bool = False,
    rows: str = SYNTHETIC,
    device: str | None = None,
) -> w.Widget:
    """The decode lab as a widget; every argument is the start value of a control.

    `live` re-measures on this machine when a control is released, in one worker; otherwise the
    nearest recorded run is shown. `rows` is "synthetic" or a pool file: its name under data/pools,
    or its path.
    """
    return make_app(
        model, pool_tokens, concurrency, context, heads, strategies, live, rows, device
    ).widget


def make_app(
    model: str,
    pool_tokens: int | None,
    concurrency: int,
    context: int,
    heads: int | None,
    strategies: tuple[str, ...] | None,
    live: bool,
    rows: str = SYNTHETIC,
    device: str | None = None,
) -> App:
    """The application behind `explorer`."""
    device = machine.as_device(device)
    seen: list[records.Run] = []
    known = known_models()
    shape = load_model(model)
    model = shape.name if shape.name in known else str(model)  # or the path of a config.json
    runnable = [n for n in STRATEGIES if device.type == "cuda" or not STRATEGIES[n].needs]
    largest = _largest_pool(shape, device)
    if pool_tokens is None:
        pool_tokens = 495_616 if not live or largest >= 495_616 else largest
    files = [p.name for p in facts.files("pools", "*.safetensors")]
    names, own = list(dict.fromkeys([SYNTHETIC, *files, rows])), shape.heads_per_gpu(8)
    devices = {d: f"{d}: {machine.device_title(d)}" for d in machine.devices()}
    controls = {
        "model": menu("model", known if model in known else [*known, model], model),
        "pool_tokens": slider("pool size", _pool_sizes(largest), pool_tokens, "slots"),
        "concurrency": slider("concurrency", CONCURRENCIES, concurrency, "requests"),
        "context": slider("context", CONTEXTS, context, "tokens"),
        "heads": menu("heads a GPU", sorted({*HEADS, own}), own if heads is None else heads),
        "rows": menu("rows", names, rows),
        "strategies": several(
            "strategies",
            [*STRATEGIES],
            (runnable if live else STRATEGIES) if strategies is None else strategies,
        ),
        "device": menu("device", devices, str(device)),
        "live": check("measure on this device", live),
    }

    @lru_cache(maxsize=128)
    def remembered(stamps: tuple, **asked) -> View:
        # Back and forth on a slider; the application does not change a view's figures.
        return recorded_view(**asked)

    def build(settings: dict, report, cancelled) -> View:
        asked = {k: v for k, v in settings.items() if k not in ("live", "rows", "device")}
        if not settings["live"]:
            return remembered(_stamps(), **asked)
        shape = load_model(asked.pop("model"))
        bench = decode.Bench(
            shape,
            asked.pop("heads"),
            machine.as_device(settings["device"]),
            modes=("graph",),
            progress=report,
            cancelled=cancelled,
            **_rows(settings["rows"], shape, settings["pool_tokens"]),
        )
        fitting = [r for r in seen if (r.model, r.heads) == (shape.name, bench.heads)]
        view = measured_view(bench, **asked, seen=fitting)
        seen[:] = fitting
        return view

    return App("shadowkv_lab.explorer", controls, build, slow=lambda settings: settings["live"])


def _rows(name: str, shape: Model, pool_tokens: int) -> dict:
    """Bench arguments for the chosen source of rows: a file of data/pools, or any by its path."""
    if name == SYNTHETIC:
        return {}
    from shadowkv_lab.sources import poolfile

    shipped = facts.path("pools", name)
    fill = poolfile.filler(shipped if shipped.exists() else name, shape)
    return {"fill": fill, "source": fill.source(pool_tokens, shape.layers)}


def _largest_pool(shape: Model, device: torch.device) -> int:
    """Slots that the largest strategy (FP8 and a full shadow) can hold here, in whole pages."""
    if device.type == "cpu":
        return CPU_POOL_TOKENS
    fits = machine.memory(device).free_bytes // (shape.layers * shape.row_bytes("fp8+bf16"))
    return fits // 64 * 64


def _pool_sizes(largest: int) -> list[int]:
    """Half-octave pool sizes from 2,048 up, in whole pages, the recorded ones among them."""
    steps = [int(2 ** (11 + i / 2)) // 64 * 64 for i in range(18)]
    return [*(s for s in steps if s <= max(largest, 495_616)), 65_536, 131_072, 262_144, 495_616]

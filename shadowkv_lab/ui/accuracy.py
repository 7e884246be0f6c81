"""Figures of accuracy. Every title states its finding with its number and names its data."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Annotated

import pandas as pd
import plotly.graph_objects as go
import torch

from shadowkv_lab.accuracy import STORAGES, AttentionError, ModelError, StorageError, planted
from shadowkv_lab.model import Model
from shadowkv_lab.sources.poolfile import PoolFile
from shadowkv_lab.ui import charts
from shadowkv_lab.ui.app import View
from shadowkv_lab.ui.application import application
from shadowkv_lab.ui.controls import Slider

# A storage has the colour of the strategy that keeps it; those that none keeps are not a
# strategy's.
COLOURS = {
    "bf16": charts.tag("bf16_pool").colour,
    "fp8": charts.tag("full_cast").colour,
    "fp8_scaled": charts.OTHERS[0],
    "packed": charts.OTHERS[2],
}
OPEN = (
    *("x-thin-open", "square-open", "cross-thin-open", "diamond-open", "circle-open"),
    *("triangle-down-open", "hexagon-open"),
)
SYMBOLS = {"bf16": "square", "fp8": "circle", "fp8_scaled": "diamond", "packed": "triangle-up"}
POWERS = {"exponentformat": "power", "dtick": 1}


def _figure(title: str, data: str, traces: Sequence, x: str, y: str = "", **layout) -> go.Figure:
    """The data under the title, "random weights" included; a legend below the plot."""
    below = {"yref": "container", "y": 0.02, "yanchor": "bottom"}
    base = {
        "title": {"subtitle": {"text": data, "font": {"size": 12, "color": "#666"}}},
        "legend": below,
        "margin": {"t": 80, "b": 150},
    }
    return charts.figure(title, traces, x, y, **charts.merged(base, layout))


def _mean(items: Sequence, name: str, value: Callable) -> float:
    return fmean(value(item) for item in items if item[0] == name)


def storage_lines(file: PoolFile, errors: Sequence[StorageError]) -> go.Figure:
    """Row error of each storage by layer; the latent part solid, the rope part dotted."""
    latent = [e for e in errors if e.part == "latent"]
    one, packed = (_mean(latent, s, lambda e: e.relative_l2) for s in ("fp8", "packed"))
    traces = []
    for storage in dict.fromkeys(e.storage for e in errors):
        for part, dash in (("latent", "solid"), ("rope", "dot")):
            mine = [e for e in errors if (e.storage, e.part) == (storage, part)]
            values = [e.relative_l2 for e in mine]
            lost = any(values)  # zero has no place on a log axis: the legend says it
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "x": [e.layer for e in mine],
                    "y": values if lost else [None] * len(mine),
                    "line": {"color": COLOURS[storage], "dash": dash},
                    "marker": {"symbol": SYMBOLS[storage], "size": 8},
                    "name": f"{storage}, {part}" + ("" if lost else ": 0, as the rows came"),
                }
            )
    return _figure(
        f"Unscaled e4m3 puts the latent off by {one:.1%} on average, a scale per 128 values by "
        f"{packed:.1%}",
        file.title,
        traces,
        "layer of the model",
        "relative L2 error of rows",
        log_y=True,
        height=480,
        xaxis={"tickmode": "array", "tickvals": list(file.layers)},
        yaxis=POWERS,
    )


def channel_map(file: PoolFile, channels: torch.Tensor, storage: str) -> go.Figure:
    """Relative error of each channel [layers, row] as colour, log scale."""
    rank, bad = file.model.kv_lora_rank, int((channels > 0.5).sum(1).max())
    heat = {
        "type": "heatmap",
        "z": channels.clamp(min=1e-3).log10().tolist(),
        "y": [str(n) for n in file.layers],
        "zmin": -3,
        "zmax": 0,
        "colorscale": "Viridis",
        "hovertemplate": "channel %{x}, layer %{y}<extra></extra>",
        "colorbar": {
            "title": {"text": "relative L2"},
            "tickvals": [-3, -2, -1, 0],
            "ticktext": ["≤ 10⁻³", "10⁻²", "10⁻¹", "1"],
            "thickness": 14,
        },
    }
    edge = {"type": "line", "x0": rank - 0.5, "x1": rank - 0.5, "y0": 0, "y1": 1, "yref": "paper"}
    return _figure(
        f"{storage}: up to {bad} of {rank} latent channels of a layer lose more than half of "
        "their norm",
        file.title,
        [heat],
        f"channel (from {rank} on: rope)",
        "layer of the model",
        height=320,
        margin={"b": 60},
        shapes=[edge | {"line": {"color": "white", "width": 2}}],
        xaxis={"showgrid": False, "tickvals": [*range(0, rank, 128), rank]},
        yaxis={"showgrid": False, "type": "category"},
    )


def error_against_bytes(
    file: PoolFile, storages: Sequence[AttentionError], strategies: Sequence[AttentionError]
) -> go.Figure:
    """Attention error against bytes kept, mean over layers: storages alone and strategies."""
    packed, fp8 = (_mean(storages, s, lambda e: e.output) for s in ("packed", "fp8"))
    more = file.model.row_bytes("packed") - file.model.row_bytes("fp8")
    traces = []
    for name in dict.fromkeys(e.name for e in storages):
        mine = [e for e in storages if e.name == name]
        off = fmean(e.output for e in mine)
        said = f"stored {name}, exact attention" + ("" if off else ": 0, as the rows came")
        mark = {"symbol": SYMBOLS[name]}
        traces.append(
            charts.points([mine[0].kept_bytes], [off or None], said, COLOURS[name], marker=mark)
        )
    for count, name in enumerate(dict.fromkeys(e.name for e in strategies)):
        mine, tag = [e for e in strategies if e.name == name], charts.tag(name)
        mark = {"symbol": OPEN[count % len(OPEN)], "size": 16, "line": {"width": 2}}
        off = fmean(e.output for e in mine)
        traces.append(
            charts.points([mine[0].kept_bytes], [off], tag.title, tag.colour, marker=mark)
        )
    return _figure(
        f"{more} B more per token (packed) take the output error from {fp8:.0%} to {packed:.0%}",
        file.title,
        traces,
        "bytes kept per token and layer",
        "relative L2 error of attention output",
        log_y=True,
        height=500,
        margin={"b": 180},
        xaxis={"rangemode": "tozero"},
        yaxis=POWERS,
    )


def attention_split(file: PoolFile, errors: Sequence[AttentionError]) -> go.Figure:
    """Each strategy's attention error, that of what it stores apart from that of its kernel."""
    tags = {e.name: charts.tag(e.name) for e in errors}
    worst_kernel = max(e.kernel_output for e in errors)
    worst_storage = max(e.storage_output for e in errors)
    traces = []
    for part, field, symbol in (
        ("what it stores", "storage_output", "circle"),
        ("its kernel", "kernel_output", "line-ns-open"),
    ):
        shown = [e for e in errors if getattr(e, field)]
        traces.append(
            charts.points(
                [getattr(e, field) for e in shown],
                [tags[e.name].title for e in shown],
                f"{part}, one mark per layer",
                [tags[e.name].colour for e in shown],
                marker={"symbol": symbol, "size": 11, "line": {"width": 2}},
            )
        )
    names = [tag.title for tag in reversed(tags.values())]
    return _figure(
        f"What is stored costs up to {worst_storage:.0%}; no kernel adds more than "
        f"{worst_kernel:.1%}",
        file.title,
        traces,
        "relative L2 error of attention output",
        log_x=True,
        margin={"l": 190, "b": 110},
        xaxis=POWERS,
        yaxis={"categoryorder": "array", "categoryarray": names},
    )


def model_bars(errors: Sequence[ModelError], geometry: Model, data: str) -> go.Figure:
    """Next-token KL and top-1 agreement of each storage on a model run whole."""
    worst = max((e for e in errors if e.kl > 0), key=lambda e: e.kl)
    sizes = {e.storage: geometry.row_bytes(STORAGES[e.storage].row_bytes) for e in errors}
    traces = [
        charts.points(
            [sizes[e.storage]],
            [e.kl or None],
            f"{e.storage}: perplexity {e.perplexity:.0f} ({e.perplexity_difference:+.1f})",
            COLOURS[e.storage],
            marker={"symbol": SYMBOLS[e.storage]},
            mode="markers+text",
            text=[f"  same top-1: {e.top1:.1%}  "],
            textposition=f"middle {'right' if sizes[e.storage] < 750 else 'left'}",
        )
        for e in errors
    ]
    return _figure(
        f"{worst.storage} moves predictions most: KL {worst.kl:.3f} nats, same first choice at "
        f"{worst.top1:.0%}",
        data,
        traces,
        "bytes kept per token and layer",
        "KL divergence of the next token, nats",
        log_y=True,
        margin={"b": 110},
        xaxis={"range": [0, 1500]},
        yaxis=POWERS,
    )


def storage_bars(errors: Sequence[StorageError], outliers: float) -> go.Figure:
    """Relative error of a latent row per storage, a mean over layers, at one outlier strength."""
    latent = [e for e in errors if e.part == "latent"]
    names = list(dict.fromkeys(e.storage for e in latent))
    values = {n: _mean(latent, n, lambda e: e.relative_l2) for n in names}
    heading = (
        f"At scale 1.0 FP8 rows are off by {values['fp8']:.1%};<br>a scale per 128 values leaves "
        f"{values['packed']:.2%}"
    )
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [STORAGES[n].title for n in names],
        "x": [values[n] for n in names],
        "text": [f"{values[n]:.2%}" for n in names],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": [COLOURS[n] for n in names]},
        "showlegend": False,
    }
    data = f"tiny GLM-5, random weights, planted outliers at strength {outliers:g}: not a model"
    axis = {"range": [0, 1.25 * max(values.values())], "tickformat": ".0%"}
    return _figure(heading, data, [bars], "relative L2 error of a latent row", xaxis=axis)


@application("shadowkv_lab.ui.accuracy.outliers_app", columns=1, slow=lambda settings: True)
def outliers_view(
    outliers: Annotated[
        float, Slider("planted outliers", values=(0.0, 0.25, 0.5, 0.75, 1.0), unit="of full")
    ] = 1.0,
) -> View:
    """What planted outliers do to each storage's rows; at 0 there are none."""
    errors = planted(outliers)
    table = pd.DataFrame(errors)
    note = "Random weights: this shows the arithmetic, and cannot choose a storage."
    return View([storage_bars(errors, outliers)], note, table)


outliers_app = outliers_view.app

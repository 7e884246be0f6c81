"""Figures of accuracy. Every title states its finding with its number and names its data."""

from collections.abc import Callable, Sequence
from statistics import fmean

import plotly.graph_objects as go
import torch

from shadowkv_lab.accuracy import STORAGES, AttentionError, ModelError, StorageError
from shadowkv_lab.model import Model
from shadowkv_lab.sources.poolfile import PoolFile
from shadowkv_lab.ui import style

# A storage has the colour of the strategy that keeps it, or one that no strategy of these has.
COLOURS = {
    "bf16": style.colour("bf16_pool"),
    "fp8": style.colour("full_cast"),
    "fp8_scaled": "#882255",
    "packed": "#999933",
}
OPEN = (
    "x-thin-open",
    "square-open",
    "cross-thin-open",
    "diamond-open",
    "circle-open",
    "triangle-down-open",
    "hexagon-open",
)
SYMBOLS = {"bf16": "square", "fp8": "circle", "fp8_scaled": "diamond", "packed": "triangle-up"}


def _finish(fig: go.Figure, file: PoolFile) -> go.Figure:
    """The data under the title, "random weights" included; a legend below the plot."""
    fig.update_layout(
        title_subtitle=dict(text=file.title, font=dict(size=12, color="#666")),
        legend=dict(orientation="h", yref="container", y=0.02, yanchor="bottom", x=0),
        margin=dict(t=80, b=150),
    )
    return fig


def _mean(items: Sequence, name: str, value: Callable) -> float:
    return fmean(value(item) for item in items if item[0] == name)


def storage_lines(file: PoolFile, errors: Sequence[StorageError]) -> go.Figure:
    """Row error of each storage by layer; the latent part solid, the rope part dotted."""
    latent = [e for e in errors if e.part == "latent"]
    one, packed = (_mean(latent, s, lambda e: e.relative_l2) for s in ("fp8", "packed"))
    fig = style.figure(
        f"Unscaled e4m3 puts the latent off by {one:.1%} on average, a scale per 128 values by "
        f"{packed:.1%}",
        "layer of the model",
        "relative L2 error of rows",
        log_y=True,
        height=480,
    )
    for storage in dict.fromkeys(e.storage for e in errors):
        for part, dash in (("latent", "solid"), ("rope", "dot")):
            mine = [e for e in errors if (e.storage, e.part) == (storage, part)]
            values = [e.relative_l2 for e in mine]
            lost = any(values)  # zero has no place on a log axis: the legend says it
            fig.add_scatter(
                x=[e.layer for e in mine],
                y=values if lost else [None] * len(mine),
                mode="lines+markers",
                line=dict(color=COLOURS[storage], dash=dash),
                marker=dict(symbol=SYMBOLS[storage], size=8),
                name=f"{storage}, {part}" + ("" if lost else ": 0, as the rows came"),
            )
    fig.update_xaxes(tickmode="array", tickvals=list(file.layers))
    fig.update_yaxes(dtick=1, exponentformat="power")
    return _finish(fig, file)


def channel_map(file: PoolFile, channels: torch.Tensor, storage: str) -> go.Figure:
    """Relative error of each channel [layers, row] as colour, log scale."""
    rank, bad = file.model.kv_lora_rank, int((channels > 0.5).sum(1).max())
    fig = style.figure(
        f"{storage}: up to {bad} of {rank} latent channels of a layer lose more than half of "
        "their norm",
        f"channel (from {rank} on: rope)",
        "layer of the model",
        height=320,
    )
    floor = 1e-3
    powers = [-3, -2, -1, 0]
    fig.add_heatmap(
        z=channels.clamp(min=floor).log10().tolist(),
        y=[str(n) for n in file.layers],
        zmin=-3,
        zmax=0,
        colorscale="Viridis",
        hovertemplate="channel %{x}, layer %{y}<extra></extra>",
        colorbar=dict(
            title="relative L2",
            tickvals=powers,
            thickness=14,
            ticktext=["≤ 10⁻³", "10⁻²", "10⁻¹", "1"],
        ),
    )
    fig.add_vline(x=rank - 0.5, line=dict(color="white", width=2))
    fig.update_xaxes(showgrid=False, tickvals=[*range(0, rank, 128), rank])
    fig.update_yaxes(showgrid=False, type="category")
    return _finish(fig, file).update_layout(margin_b=60)


def error_against_bytes(
    file: PoolFile, storages: Sequence[AttentionError], strategies: Sequence[AttentionError]
) -> go.Figure:
    """Attention error against bytes kept, mean over layers: storages alone and strategies."""
    packed, fp8 = (_mean(storages, s, lambda e: e.output) for s in ("packed", "fp8"))
    more = file.model.row_bytes("packed") - file.model.row_bytes("fp8")
    fig = style.figure(
        f"{more} B more a token (packed) take the output error from {fp8:.0%} to {packed:.0%}",
        "bytes kept per token and layer",
        "relative L2 error of attention output",
        log_y=True,
        height=500,
    )
    for name in dict.fromkeys(e.name for e in storages):
        mine = [e for e in storages if e.name == name]
        off = fmean(e.output for e in mine)
        fig.add_scatter(
            x=[mine[0].kept_bytes],
            y=[off or None],
            mode="markers",
            marker=dict(color=COLOURS[name], symbol=SYMBOLS[name], size=13),
            name=f"stored {name}, exact attention" + ("" if off else ": 0, as the rows came"),
        )
    for count, name in enumerate(dict.fromkeys(e.name for e in strategies)):
        mine = [e for e in strategies if e.name == name]
        fig.add_scatter(
            x=[mine[0].kept_bytes],
            y=[fmean(e.output for e in mine)],
            mode="markers",
            marker=dict(
                color=style.colour(name), symbol=OPEN[count % len(OPEN)], size=16, line_width=2
            ),
            name=style.title(name),
        )
    fig.update_yaxes(exponentformat="power", dtick=1)
    fig.update_xaxes(rangemode="tozero")
    return _finish(fig, file).update_layout(margin_b=180)


def attention_split(file: PoolFile, errors: Sequence[AttentionError]) -> go.Figure:
    """Each strategy's attention error, that of what it stores apart from that of its kernel."""
    names = list(dict.fromkeys(e.name for e in errors))
    worst_kernel = max(e.kernel_output for e in errors)
    worst_storage = max(e.storage_output for e in errors)
    fig = style.figure(
        f"What is stored costs up to {worst_storage:.0%}; no kernel adds more than "
        f"{worst_kernel:.1%}",
        "relative L2 error of attention output",
        "",
        log_x=True,
    )
    parts = (
        ("what it stores", "storage_output", "circle"),
        ("its kernel", "kernel_output", "line-ns-open"),
    )
    for part, field, symbol in parts:
        points = [(getattr(e, field), e) for e in errors if getattr(e, field)]
        fig.add_scatter(
            x=[value for value, _ in points],
            y=[style.title(e.name) for _, e in points],
            mode="markers",
            name=f"{part}, one mark a layer",
            marker=dict(
                color=[style.colour(e.name) for _, e in points],
                symbol=symbol,
                size=11,
                line_width=2,
            ),
        )
    fig.update_yaxes(categoryorder="array", categoryarray=[style.title(n) for n in reversed(names)])
    fig.update_xaxes(dtick=1, exponentformat="power")
    return _finish(fig, file).update_layout(margin=dict(l=190, b=110))


def model_bars(errors: Sequence[ModelError], geometry: Model, data: str) -> go.Figure:
    """Next-token KL and top-1 agreement of each storage on a model run whole."""
    named = {e.storage: e for e in errors}
    shown = [e for e in errors if e.kl > 0]
    worst = max(shown, key=lambda e: e.kl)
    fig = style.figure(
        f"{worst.storage} moves predictions most: KL {worst.kl:.3f} nats, same first choice at "
        f"{worst.top1:.0%}",
        "bytes kept per token and layer",
        "KL divergence of the next token, nats",
        log_y=True,
    )
    for name, e in named.items():
        fig.add_scatter(
            x=[geometry.row_bytes(STORAGES[name].row_bytes)],
            y=[e.kl or None],
            mode="markers+text",
            text=[f"  same top-1: {e.top1:.1%}"],
            textposition="middle right",
            marker=dict(color=COLOURS[name], symbol=SYMBOLS[name], size=13),
            name=f"{name}: perplexity {e.perplexity:.0f} ({e.perplexity_difference:+.1f})",
        )
    fig.update_layout(
        title_subtitle=dict(text=data, font=dict(size=12, color="#666")),
        margin=dict(t=80, b=110),
        legend=dict(orientation="h", yref="container", y=0.02, yanchor="bottom", x=0),
    )
    fig.update_yaxes(exponentformat="power", dtick=1)
    fig.update_xaxes(range=[0, 1500])
    return fig

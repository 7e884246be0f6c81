"""The decode lab's figures: runs in, finished plotly figures out. Each title states a finding."""

import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab.steps.records import noisy
from shadowkv_lab.ui import style

PHASES = {"cast_ms": "cast", "attention_ms": "attention", "write_ms": "write"}


def step_by_phase(runs: pd.DataFrame) -> go.Figure:
    """Stacked bars: one strategy a bar, cast, attention and write in it; its total beside it."""
    runs = runs.sort_values("step_ms", ascending=False, kind="stable")
    fig = style.figure(_ratio_title(runs), "step, all layers (ms)", "")
    names, marker, traces = [style.title(s) for s in runs.strategy], _marker(runs), []
    for column, phase in PHASES.items():
        opacity = style.PHASE_OPACITY[phase]
        traces.append(
            dict(
                type="bar",
                y=names,
                x=runs[column].tolist(),
                orientation="h",
                name=phase,
                showlegend=False,
                marker=marker | dict(opacity=opacity),
                customdata=list(zip(_gigabytes(runs, column), runs.provenance, strict=True)),
                hovertemplate="%{y}: " + phase + " %{x:.3f} ms<br>%{customdata[0]}<br>"
                "%{customdata[1]}<extra></extra>",
            )
        )
        traces.append(style.legend_entry(phase, opacity))
    fig.add_traces(traces)
    # Phases are timed one by one, so on a busy machine they may add up to more than the step.
    ends = runs[[*PHASES]].sum(axis=1).clip(lower=runs.step_ms)
    fig.update_layout(barmode="stack")
    # Set, not updated: plotly goes through an update of annotations one property at a time.
    fig.layout.annotations = [
        dict(
            x=end,
            y=name,
            xanchor="left",
            xshift=6,
            showarrow=False,
            text=f"{step_ms:,.2f} ms, {provenance}",
        )
        for name, end, step_ms, provenance in zip(
            names, ends, runs.step_ms, runs.provenance, strict=True
        )
    ]
    fig.update_xaxes(range=[0, 1.5 * ends.max()])
    fig.update_yaxes(automargin=True)
    return fig


def _marker(runs: pd.DataFrame) -> dict:
    """Bars in the strategies' colours, with the pattern of where their numbers come from."""
    return dict(
        color=[style.colour(s) for s in runs.strategy],
        line=dict(color="white", width=1),
        pattern=dict(shape=[style.PATTERNS[p] for p in runs.provenance], size=12, solidity=0.15),
    )


def _ratio_title(runs: pd.DataFrame) -> str:
    where = f"pool {_same(runs.pool_tokens)}, {_same(runs.concurrency)} x {_same(runs.context)}"
    by_name = runs.set_index("strategy").step_ms
    if disturbed := noisy(runs):
        names = ", ".join(map(style.title, disturbed))
        return f"Measured while other work ran: {names} cannot be compared<br><sup>{where}</sup>"
    if {"full_cast", "shadow"} <= set(by_name.index):
        ratio = by_name["full_cast"] / by_name["shadow"]
        return (
            f"The shadow's step is {ratio:.1f} times shorter than full cast's<br><sup>{where}</sup>"
        )
    best = by_name.idxmin()
    return (
        f"{style.title(best)} takes the shortest step, {by_name[best]:.2f} ms<br><sup>{where}</sup>"
    )


def _same(values: pd.Series) -> str:
    return f"{values.iloc[0]:,}" if values.nunique() == 1 else "several"


def _gigabytes(runs: pd.DataFrame, column: str) -> list[str]:
    """Each run's bytes and GB/s in one phase, in words."""
    texts = []
    for gb, ms in zip(runs[column.replace("_ms", "_gb")], runs[column], strict=True):
        rate = f" at {1000 * gb / ms:,.0f} GB/s" if gb and ms > 0 else ""
        texts.append(f"{gb:,.3f} GB moved{rate}")
    return texts


def against_pool(runs: pd.DataFrame) -> go.Figure:
    """Step time over pool size at one load: full cast climbs, the others do not."""
    heading = "Step time against pool size"
    grown = _growth(runs, "full_cast")
    if grown:
        heading = f"From the smallest pool to the largest, full cast's step grows {grown:.1f} times"
        other = _growth(runs, "shadow")
        heading += f", the shadow's {other:.2f}" if other else ""
    load = f"<br><sup>{_same(runs.concurrency)} x {_same(runs.context)} live tokens</sup>"
    fig = style.figure(heading + load, "pool (slots)", "step (ms)", log_x=True, log_y=True)
    return _lines(fig, runs, "pool_tokens")


def _growth(runs: pd.DataFrame, strategy: str) -> float | None:
    ours = runs.loc[runs.strategy == strategy, ["pool_tokens", "step_ms"]].to_numpy()
    if len(set(ours[:, 0])) < 2:
        return None
    return ours[ours[:, 0].argmax(), 1] / ours[ours[:, 0].argmin(), 1]


def against_concurrency(runs: pd.DataFrame) -> go.Figure:
    """Step time over running requests at one pool and context."""
    heading = "Step time against concurrency"
    many = runs[runs.concurrency == runs.concurrency.max()]
    if len(many) and runs.concurrency.nunique() > 1:
        best = many.loc[many.step_ms.idxmin()]
        heading = f"At {best.concurrency} requests {style.title(best.strategy)} is fastest: "
        heading += f"{best.step_ms:.2f} ms a step"
    where = f"<br><sup>pool {_same(runs.pool_tokens)}, context {_same(runs.context)}</sup>"
    fig = style.figure(heading + where, "running requests", "step (ms)", log_x=True, log_y=True)
    return _lines(fig, runs, "concurrency")


def _lines(fig: go.Figure, runs: pd.DataFrame, x: str) -> go.Figure:
    columns = ["strategy", x, "step_ms", "provenance", "cast_ms", "attention_ms"]
    lines: dict[str, list[tuple]] = {strategy: [] for strategy in runs.strategy}
    for strategy, *point in runs[columns].sort_values(x).itertuples(index=False, name=None):
        lines[strategy].append(point)
    fig.add_traces(
        [
            dict(
                type="scatter",
                mode="lines+markers",
                name=style.title(strategy),
                x=[point[0] for point in points],
                y=[point[1] for point in points],
                line=dict(color=style.colour(strategy), dash=style.DASHES[points[0][2]]),
                marker=style.marker(strategy),
                customdata=[point[2:] for point in points],
                hovertemplate="%{x:,}: %{y:.3f} ms a step, %{customdata[0]}<br>"
                "cast %{customdata[1]:.3f}, attention %{customdata[2]:.3f} ms",
            )
            for strategy, points in lines.items()
        ]
    )
    kinds, ticks = ", ".join(sorted(set(runs.provenance))), sorted(set(runs[x]))
    fig.update_layout(legend_title_text=f"{kinds}: ")
    fig.update_xaxes(tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks])
    return fig


def memory_kept(runs: pd.DataFrame) -> go.Figure:
    """Bars: GiB that each strategy keeps for the pool, and its scratch."""
    runs = runs.sort_values("kept_bytes", kind="stable")
    gib = runs.kept_bytes / 2**30
    scratch = ((runs.allocated_bytes - runs.kept_bytes) / 2**30).clip(lower=0)
    heading = f"The pool takes {gib.min():.2f} to {gib.max():.2f} GiB, scratch not counted"
    where = f"<br><sup>pool {_same(runs.pool_tokens)}, {_same(runs.layers)} layers</sup>"
    fig = style.figure(heading + where, "memory (GiB)", "")
    names, marker, traces = [style.title(s) for s in runs.strategy], _marker(runs), []
    for values, name, opacity in ((gib, "pool", 0.9), (scratch, "scratch and batch", 0.35)):
        traces.append(
            dict(
                type="bar",
                y=names,
                x=values.tolist(),
                orientation="h",
                name=name,
                showlegend=False,
                marker=marker | dict(opacity=opacity),
                customdata=runs.provenance.tolist(),
                hovertemplate=f"%{{y}}: %{{x:.2f}} GiB {name}, %{{customdata}}<extra></extra>",
            )
        )
        traces.append(style.legend_entry(name, opacity))
    fig.add_traces(traces)
    fig.update_layout(barmode="stack")
    fig.update_yaxes(automargin=True)
    return fig

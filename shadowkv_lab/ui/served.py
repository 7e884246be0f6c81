"""A run of real servers as one picture: what each side took, and what the lab had predicted."""

import math

import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab.server import runs
from shadowkv_lab.strategies import parse
from shadowkv_lab.ui import charts


def title(side: str) -> str:
    """What a side is called: SGLang without the plug-in, or its strategy."""
    name = parse(runs.strategy(side)).tag.title
    return f"plain SGLang ({name})" if side == "plain" else name


def figure(run: runs.ServerRun, requests: int = 1, input_tokens: int = 1024) -> go.Figure:
    """One load: ms per token of every side, slowest first, and a diamond where it was predicted.

    The finding names plain SGLang and the fastest side with its tokens under every load.
    """
    table = run.table()
    part = table[(table.requests == requests) & (table.input == input_tokens)]
    part = part.sort_values("ms", ascending=False)
    names = [title(side) for side in part.side]
    colours = [parse(runs.strategy(side)).tag.colour for side in part.side]
    hover = [
        "" if math.isnan(off) else f"predicted {predicted:.2f} ms, {off:+.1%}"
        for off, predicted in zip(part.off, part.predicted_ms, strict=True)
    ]
    traces = [charts.bar(names, part.ms, "a token", colours, "recorded", hover, showlegend=False)]
    seen = part[part.predicted_ms.notna()]
    if len(seen):
        traces.append(
            charts.points(
                seen.predicted_ms.tolist(),
                [title(side) for side in seen.side],
                "predicted, with the rest of the BF16 server",
                "white",
                hover="predicted %{x:.2f} ms<extra></extra>",
                marker={"symbol": "diamond", "size": 10, "line": {"color": "black", "width": 2}},
            )
        )
    load = f"{requests} x {input_tokens:,} tokens"
    alike = table.groupby("side").same_tokens.agg(lambda same: all(s is True for s in same))
    plain, same = part[part.side == "plain"], part[part.side.map(alike)]
    finding = f"{load} in SGLang {run.info['versions'].get('sglang', '')}"
    if len(plain) and len(same):
        best = same.iloc[-1]
        finding = (
            f"{title(best.side)}: the same tokens at {best.tokens_per_s:,.0f} tok/s instead of "
            f"plain SGLang's {plain.tokens_per_s.iloc[0]:,.1f}"
        )
    note = f"{load}, {run.info['card']}, {run.info['date'][:10]}; medians of repeats"
    texts = [
        f"{ms:.2f} ms, {rate:,.1f} tok/s"
        for ms, rate in zip(part.ms, part.tokens_per_s, strict=True)
    ]
    return charts.figure(
        charts.heading(finding, note),
        traces,
        "ms per token of one request",
        height=170 + 42 * len(part),
        legend={"y": -0.28},
        **charts.totals(names, part[["ms", "predicted_ms"]].max(axis=1), texts),
    )


def table(run: runs.ServerRun) -> pd.DataFrame:
    """Side by load: ms per token, the prediction in brackets with its error, a star beyond 5 %."""
    found = run.table()
    cells = {}
    for row in found.itertuples():
        text = f"{row.ms:.2f}"
        if not math.isnan(row.off):
            text += f" ({row.predicted_ms:.2f}, {row.off:+.1%}{'' if row.kept else ' *'})"
        cells.setdefault(title(row.side), {})[f"{row.requests} x {row.input:,}"] = text
    shown = pd.DataFrame.from_dict(cells, orient="index").fillna("")
    words = {True: "as plain's", False: "others", None: ""}
    same = found.groupby("side").same_tokens.agg(lambda s: None if s.isna().any() else s.all())
    shown["tokens"] = [
        words[same[side] if same[side] is None else bool(same[side])]
        for side in dict.fromkeys(found.side)
    ]
    return shown


def every(sides: tuple[str, ...] = ("plain", "shadow")) -> pd.DataFrame:
    """ms per token of these sides in each recorded run, of the loads that all of them had."""
    rows = [
        {
            "run": run.info["id"],
            "date": run.info["date"],
            "revision": run.info["revision"][:7],
            "side": title(m.side),
            "load": f"{m.requests} x {m.input_tokens:,}",
            "ms": m.ms,
        }
        for run in runs.recorded()
        for m in run.all
        if m.side in sides
    ]
    index = ["date", "run", "revision", "side"]
    return (
        pd.DataFrame(rows).pivot(index=index, columns="load", values="ms").dropna(axis=1).round(2)
    )

"""What a request waits for: TTFT, TPOT and ITL against the rate, of drawn or recorded traffic."""

import math
from dataclasses import dataclass
from typing import Annotated

import ipywidgets as w
import pandas as pd

from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.serving import traces, traffic
from shadowkv_lab.serving.contenders import WANTED, over_rates
from shadowkv_lab.serving.results import OBJECTIVE, Objective
from shadowkv_lab.ui import charts, serving
from shadowkv_lab.ui.app import View, Work
from shadowkv_lab.ui.application import application
from shadowkv_lab.ui.controls import Control, ModelName

FACTORS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0)  # on the traffic's own rate
REQUESTS = 400
WAITS = {
    "ttft": ("TTFT", "time to first token (ms)"),
    "tpot": ("TPOT", "time per output token (ms)"),
    "itl": ("ITL", "time between two tokens (ms)"),
}
TABLE = (
    *("strategy", "requests_per_s", "provenance", "p50_ttft_ms", "p99_ttft_ms"),
    *("p50_tpot_ms", "p99_tpot_ms", "p99_itl_ms"),
)


@dataclass(frozen=True)
class Recorded(Control):
    """A trace file's path, or the name of traffic that data/traffic describes."""

    def _kind(self, value):
        return w.Text

    def _more(self, value, settings):
        return {"value": str(value), "continuous_update": False}


def load_of(trace: str) -> traffic.Traffic:
    """Traffic of a name of data/traffic, drawn at 1 request/s, or of a file, with its own rate.

    Raises `BadFile`, and `OutOfRange` for traffic without a rate.
    """
    if trace in traffic.known_traffic():
        return traffic.poisson(1.0, REQUESTS, traffic.published(trace))
    load = traces.load(trace)
    if load.concurrency is not None or not math.isfinite(load.demand.requests_per_s):
        raise OutOfRange(f"{load.source} has no rate", "requests that arrive one after another")
    return load


def against_rate(rows: pd.DataFrame, name: str, said: str, objective: Objective = OBJECTIVE):
    """p50 and p99 of a wait against requests/s, of each strategy; `rows` are `TABLE`'s columns.

    `name` is "ttft", "tpot" or "itl". The title says up to which of the rates the p99 keeps the
    objective.
    """
    short, axis = WAITS[name]
    limit = objective.ttft_ms if name == "ttft" else objective.tpot_ms
    rows = rows.assign(
        **{
            n: rows.strategy.map(lambda s, n=n: getattr(charts.tag(s), n))
            for n in ("title", "colour")
        }
    )
    late = rows[rows[f"p99_{name}_ms"] > limit].groupby("title").requests_per_s.min()
    intime = rows[rows.requests_per_s < rows.title.map(late).fillna(math.inf)]
    kept = intime.groupby("title", sort=False).requests_per_s.max()
    finding = f"{short} at p99 is above {limit:,.0f} ms at every rate here"
    if len(kept):
        best = [*kept[kept == kept.max()].index]
        who = " and ".join(best)
        if len(best) > 2:
            who = f"{len(best)} of {rows.title.nunique()} strategies"
        finding = (
            f"{short} at p99 stays within {limit:,.0f} ms up to {kept.max():.2g} requests/s: {who}"
        )
    lines = []
    for q, width, told in ((99, 2.5, True), (50, 1.0, False)):
        hover = f"%{{fullData.name}}, p{q}: %{{y:,.0f}} ms at %{{x:.2g}} requests/s<extra></extra>"
        for line in charts.lines(rows, "requests_per_s", f"p{q}_{name}_ms", hover, showlegend=told):
            lines.append(line | {"line": line["line"] | {"width": width}})
    return charts.figure(
        charts.heading(finding, f"thick: p99, thin: p50; {said}"),
        lines,
        "requests/s",
        axis,
        log_x=True,
        log_y=True,
        xaxis=charts.ticks(rows.requests_per_s, ".2g"),
        **charts.level(limit),
    )


@application(
    "shadowkv_lab.ui.latencies.waits",
    changed=serving.follow,
    asleep=serving.asleep,
    slow=lambda settings: True,
    refusals=len(WAITS),
)
def waits_view(
    model: ModelName = "glm-5",
    gpu: serving.Gpu = "rtx-pro-6000-server",
    tensor_parallel: serving.TensorParallel = 8,
    rest: serving.Rest = "glm5-report",
    trace: Annotated[
        str, Recorded("traffic", help="The path of a trace, or a name of data/traffic")
    ] = "azure-conversation",
    strategies: serving.Strategies = WANTED,
    *,
    work: Work,
) -> View:
    """TTFT, TPOT and ITL at p50 and p99 against the rate, of drawn traffic or a trace of yours."""
    found, left_out = serving.asked(model, gpu, tensor_parallel, rest, strategies)
    load = load_of(trace)
    own, rows = load.demand.requests_per_s, []
    for i, factor in enumerate(FACTORS):
        work.stage(f"{len(load):,} requests at {factor * own:.2g} a second", i / len(FACTORS))
        rows += over_rates(found, load, [factor])
    table = pd.DataFrame(rows).rename(columns={"label": "strategy"})
    table["requests_per_s"] = (table.rate * own).round(6)
    said = f"{load.name}, {len(load):,} requests; {serving.source_of(found)}"
    return View(
        [against_rate(table, name, said) for name in WAITS],
        f"{serving.note(rest, found, left_out)}; traffic: {load.source}",
        table,
        TABLE,
    )


waits = waits_view.app

"""How fast the simulation itself is: seconds and memory for a trace, and how it grows."""

import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from shadowkv_lab.model import load_model
from shadowkv_lab.serving import traces, traffic
from shadowkv_lab.serving.lines import StepTime
from shadowkv_lab.serving.simulate import PREFILL_TOKENS_PER_S, Engine, simulate

KV_BYTES = 25.49 * 2**30  # the GLM-5 report's pool
GB_PER_S = 1597.0  # the Server card's datasheet
REST_MS = 31.0  # of the GLM-5 report at one request; held for all: this times the lab, not a GPU
LOAD = 0.45  # of the prefill rate: what a trace's rate is scaled to


class Timing(NamedTuple):
    """One simulation. Its times in the simulated world are assumed; these two are measured."""

    traffic: str
    engine: str
    requests: int
    seconds: float  # simulation and summary, one core
    peak_mib: float  # of the whole process, so far
    output_tokens_per_s: float
    preemptions: int
    recomputed_tokens: int
    leap_equals_step: bool | None  # None where stepping was not tried


def engine(storage: str) -> Engine:
    """The report's card with a pool of one storage: attention reads it at the datasheet's speed."""
    model = load_model("glm-5")
    reads = "bf16" if storage == "fp8+bf16" else storage
    ms_per_token = model.token_bytes(reads, index=False) / GB_PER_S / 1e6
    step = StepTime(lambda running, live: REST_MS + ms_per_token * live)
    return Engine(int(KV_BYTES) // model.token_bytes(storage), step, storage)


def run(
    trace: "str | Path | None" = None,
    *,
    counts: tuple[int, ...] = (10_000, 100_000),
    step_too: bool = True,
) -> list[Timing]:
    """Time a trace (scaled to a rate that can be served) on each pool, then growing traffic.

    Without `trace`, traffic drawn from the published quantiles of the Azure conversation trace,
    as many requests. The pool of a tenth shows what preemptions cost.
    """
    drawn = traffic.published("azure-conversation")
    load = traces.load(trace) if trace else traffic.poisson(5.53, 19_366, drawn)
    load = _servable(load)
    engines = [engine(storage) for storage in ("fp8", "bf16", "fp8+bf16")]
    tight = engine("fp8+bf16")
    engines.append(replace(tight, capacity_tokens=tight.capacity_tokens // 10, label="a tenth"))
    timings = [_time(each, load, step_too) for each in engines]
    for count in counts:
        grown = _servable(traffic.poisson(1.0, count, drawn, seed=1))
        timings.append(_time(engines[0], grown, False))
    return timings


def _servable(load: traffic.Traffic) -> traffic.Traffic:
    return load.scaled(rate=LOAD * PREFILL_TOKENS_PER_S / load.demand.prompt_tokens_per_s)


def _time(server: Engine, load: traffic.Traffic, step_too: bool) -> Timing:
    begin = time.perf_counter()
    results = simulate(server, load)
    row = results.summary()
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    same = None
    if step_too:
        again = simulate(server, load, leap=False)
        same = again.summary() == row and again.log.end == results.log.end
    return Timing(
        load.name,
        server.label,
        len(load),
        seconds,
        peak,
        row["output_tokens_per_s"],
        row["preemptions"],
        row["recomputed_tokens"],
        same,
    )

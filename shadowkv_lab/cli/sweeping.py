"""The command that runs a grid over the GPUs of this machine, or of a cluster."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from shadowkv_lab.cli import AsJson, app, console, progress, show


@app.command()
def sweep(
    out: Annotated[
        Path, typer.Option(help="The JSONL file that results are added to; a map's folder.")
    ],
    grid: Annotated[
        Path | None, typer.Option(help="A JSON file with the fields of sweep.grid.Grid.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Names or config.json's: a,b.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Cards: h200,b200; to measure, those of the workers.")
    ] = None,
    tensor_parallel: Annotated[str | None, typer.Option(help="Such as 4,8. Default: 8.")] = None,
    concurrency: Annotated[str | None, typer.Option(help="Such as 1,8 or 1:64:8.")] = None,
    context: Annotated[str | None, typer.Option(help="Such as 1024:8192:1024.")] = None,
    strategies: Annotated[
        str | None, typer.Option(help="Such as full_cast,shadow(layers=26). Default: all.")
    ] = None,
    pool_tokens: Annotated[
        str | None, typer.Option(help="Slots of one GPU. Default: what each strategy fits.")
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Predict instead, on CPUs, into Parquet files.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Serve this trace in simulated time instead.")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="Factors on the trace's requests/s: 0.5,1.")
    ] = None,
    rest: Annotated[
        str, typer.Option(help="The published stream that anchors predicted rests.")
    ] = "glm5-report",
    scheduler: Annotated[
        str | None, typer.Option(help="A dask scheduler's address. Default: this machine.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="On this machine. Default: one a GPU, else one a core.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure, predict or simulate each deployment x load x strategy, over many GPUs and hosts.

    Interrupted, or after an error, the same command goes on where it was.
    """
    from shadowkv_lab.errors import OutOfRange
    from shadowkv_lab.serving import traces
    from shadowkv_lab.strategies import parse_list
    from shadowkv_lab.sweep import cluster, kinds
    from shadowkv_lab.sweep.grid import Grid, read

    if predict and trace:
        raise OutOfRange("Both --predict and --trace", "one of the two")
    swept = read(grid) if grid else Grid()
    typed = dict(concurrency=concurrency, context=context, pool_tokens=pool_tokens)
    typed |= dict(strategies=strategies and tuple(s.label for s in parse_list(strategies)))
    typed |= dict(rates=rates and _factors(rates))
    named = {
        "model": model and model.split(","),
        "card": gpu and gpu.split(","),
        "tensor_parallel": tensor_parallel and _whole(tensor_parallel),
    }
    if named := {name: value for name, value in named.items() if value is not None}:
        typed |= dict(deployments=tuple(entry | named for entry in swept.deployments))
    typed = {name: value for name, value in typed.items() if value is not None}
    swept = dataclasses.replace(swept, **typed)
    load = trace and traces.load(trace)
    with cluster.connect(scheduler, workers, gpus=not (predict or trace)) as client:
        if not as_json:
            console.print(f"dask's dashboard: {client.dashboard_link}", soft_wrap=True)
        with progress(quiet=as_json) as report:
            if predict:
                tally = kinds.predict(client, swept, out, rest, report)
            elif load:
                tally = kinds.simulate(client, swept, load, out, rest, report)
            else:
                tally = kinds.measure(client, swept, out, report)
    if as_json:
        typer.echo(json.dumps(tally._asdict() | {"failures": str(tally.failures)}))
        return
    unit = "parts" if predict else "cells"
    console.print(
        f"{tally.cells:,} {unit}: {tally.made:,} made now, {tally.before:,} there before, "
        f"{tally.failed:,} failed{f' (why: {tally.failures})' if tally.failed else ''}",
        soft_wrap=True,
    )
    if predict and tally.made + tally.before:
        won = kinds.winners(out).strategy.value_counts(normalize=True)
        rows = [{"strategy": name, "share": share} for name, share in won.items() if share]
        show(rows, {"strategy": "strategy", "share": "of the loads it gives most tokens/s"})


def _whole(text: str) -> list[int]:
    from shadowkv_lab.sweep.grid import numbers

    return list(numbers(text, "tensor-parallel"))


def _factors(text: str) -> tuple[float, ...]:
    from shadowkv_lab.errors import OutOfRange

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise OutOfRange(f"rates {text[:60]!r}", "numbers, separated by commas") from None

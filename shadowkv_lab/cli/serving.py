"""The command that serves recorded traffic in simulated time."""

import json
from pathlib import Path
from typing import Annotated

import typer

from shadowkv_lab.cli import AsJson, app, console, progress, show

SHOWN = [
    "provenance",
    "finished",
    "refused",
    "output_tokens_per_s",
    "goodput_share",
    "p50_ttft_ms",
    "p99_ttft_ms",
    "p50_tpot_ms",
    "p99_tpot_ms",
    "p99_itl_ms",
    "preemptions",
    "recomputed_tokens",
    "queue_max",
    "kv_use_max",
    "cached_share",
    "shared_share",
]


@app.command()
def simulate(
    trace: Annotated[
        Path,
        typer.Option(
            help="Azure, Vidur or BurstGPT CSV, Mooncake JSONL, a bench_serving result, or a log "
            "of SGLang or vLLM with its requests; gzip or not."
        ),
    ],
    deployment: Annotated[
        str | None, typer.Option(help="A published one, such as glm5-report or sglang-35291.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A name, or a config.json.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A card of data/gpus.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Default: 8.")] = None,
    data_parallel: Annotated[int | None, typer.Option(help="DP attention ranks.")] = None,
    engine: Annotated[str | None, typer.Option(help="Whose scheduler: sglang or vllm.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Default: the engine's.")] = None,
    weights_gib: Annotated[float | None, typer.Option(help="Per GPU, as logs print it.")] = None,
    kv_gib: Annotated[float | None, typer.Option(help="The KV size of a log.")] = None,
    strategies: Annotated[str | None, typer.Option(help="Separated by commas.")] = None,
    rest: Annotated[
        str, typer.Option(help="The published stream that anchors the rest.")
    ] = "glm5-report",
    rate: Annotated[float, typer.Option(help="Factor on the trace's requests/s.")] = 1.0,
    replicas: Annotated[int, typer.Option(help="Servers after a least-loaded router.")] = 1,
    prefill_tokens_per_s: Annotated[float | None, typer.Option(help="Of one server.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="That each request asks for (SGLang's admission).")
    ] = None,
    overload: Annotated[bool, typer.Option(help="Serve more than prefill can.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve a recorded trace in simulated time: TTFT, TPOT, ITL, preemptions of each strategy."""
    from shadowkv_lab.deployment import published_deployment
    from shadowkv_lab.provenance import assumed
    from shadowkv_lab.serving import contenders, traces
    from shadowkv_lab.serving.replicas import simulate_replicas
    from shadowkv_lab.strategies import parse_list
    from shadowkv_lab.ui import tables

    load = traces.load(trace)
    load = load.scaled(rate=rate) if rate != 1 else load
    options = dict(
        tensor_parallel=tensor_parallel,
        data_parallel=data_parallel,
        engine=engine,
        page_size=page_size,
        weights_gib=weights_gib,
        kv_gib=kv_gib,
    )
    if deployment:
        given = {
            name: value for name, value in (options | {"model": model}).items() if value is not None
        }
        there = published_deployment(deployment, gpu, **given)
    else:
        names = {
            name: value
            for name, value in {"model": model, "card": gpu}.items()
            if value is not None
        }
        there = contenders.reported_or_derived(**names, **options)
    chosen = None if strategies is None else parse_list(strategies)
    found = contenders.contenders(there, chosen, anchor=rest)
    own = dict(prefill_tokens_per_s=prefill_tokens_per_s, max_new_tokens=max_new_tokens)
    own = {name: value for name, value in own.items() if value is not None}
    if prefill_tokens_per_s is not None:
        own["prefill"] = assumed("as typed")
    rows, refused = [], []
    with progress(quiet=as_json) as report:
        for i, contender in enumerate(found):
            report(f"{contender.name}, {len(load):,} requests", i / len(found))
            server = contenders.engine(contender, **own)
            ran = simulate_replicas(server, load, replicas, overload=overload)
            rows.append(ran.summary())
            refused += ran.refusals()[:1]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    console.print(f"{there}, {there.engine}: {load.source}, {len(load):,} requests")
    labels = [row["label"] for row in rows]
    lines = []
    for name in SHOWN:
        of = tables.column(name)
        cells = {row["label"]: of.cell(row[name]) for row in rows}
        lines.append({"": of.head, **cells})
    show(lines, {name: name for name in ("", *labels)})
    if replicas > 1:
        console.print(f"{replicas} replicas after a least-loaded router: a simple composition")
    for line in refused:
        console.print(f"refused, for one: {line}")

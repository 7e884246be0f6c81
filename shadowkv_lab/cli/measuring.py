"""Commands that look at this machine and measure on it."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from shadowkv_lab.cli import AsJson, Device, Model, Reads, app, console, integers, progress, show
from shadowkv_lab.errors import whole

MOST = 1 << 20  # heads, or tokens of a page


@app.command()
def doctor(
    model: Model = "glm-5", tensor_parallel: int = 8, device: Device = None, as_json: AsJson = False
) -> None:
    """Say which GPU is here, what will run on it, what not, and the remedy."""
    from shadowkv_lab import doctor

    findings = doctor.examine(model, tensor_parallel, device)
    if as_json:
        typer.echo(json.dumps([f._asdict() for f in findings], indent=1))
        return
    show((f._asdict() for f in findings), ("what", "state", "finding", "remedy"))


@app.command()
def rules(
    model: Model = "glm-5",
    gpu: Annotated[str, typer.Option(help="A card of data/gpus.")] = "rtx-pro-6000-server",
    kv_dtype: Annotated[
        str, typer.Option(help="bf16, fp8_e4m3, fp8_e5m2, packed_656 or packed_432.")
    ] = "fp8_e4m3",
    tensor_parallel: int = 8,
    heads: Annotated[
        int | None, typer.Option(help="Query heads per GPU, instead of tensor_parallel.")
    ] = None,
    page_size: int = 64,
    as_of: Annotated[str | None, typer.Option(help="A day or month, such as 2026-02.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which attention backends can serve a model on a GPU, which not, and by which rule."""
    from shadowkv_lab import machine, rules
    from shadowkv_lab.model import load_model

    shape = load_model(model)
    heads = shape.heads_per_gpu(tensor_parallel) if heads is None else heads
    capability = machine.card(gpu).compute_capability
    heads, page_size = whole(heads, "Heads", 1, MOST), whole(page_size, "Page size", 1, MOST)
    serving = rules.Serving.of(shape, capability, kv_dtype, heads, page_size)
    table = rules.compatibility(serving, as_of)
    if as_json:
        typer.echo(table.to_json(orient="records", indent=1))
        return
    rows = table.fillna("").to_dict("records")
    for row in rows:
        changed = f" Runs with {row['runs_if']}." if row["runs_if"] else ""
        row["why"] = f"{row['why_not']}{changed} [{row['library']}]".strip()
    show(rows, {"backend": "", "runs": "", "why": "why, and by which release"})


@app.command()
def measure(
    model: Model = "glm-5",
    pool_tokens: Annotated[str, typer.Option(help="Slots; several: 65536,495616.")] = "495616",
    concurrency: Annotated[str, typer.Option(help="Running requests; several: 1,8.")] = "1",
    context: Annotated[
        str, typer.Option(help="Live tokens per request; several: 1024,8192.")
    ] = "1024",
    strategies: Annotated[
        str, typer.Option(help="Such as full_cast,shadow(layers=26); or all.")
    ] = "full_cast,bf16_pool,shadow,gather_cast",
    heads: Annotated[int | None, typer.Option(help="Query heads per GPU (default: TP 8).")] = None,
    device: Device = None,
    backend: Annotated[
        str, typer.Option(help="auto, reference, flashinfer_fa2, flashinfer_fa3")
    ] = "auto",
    page_size: int = 1,
    order: Annotated[str, typer.Option(help="Slot order: random or contiguous.")] = "random",
    reads: Reads = "dense",
    tokens_per_step: Annotated[
        int, typer.Option(help="Query tokens per request: 1, more with MTP.")
    ] = 1,
    modes: Annotated[str, typer.Option(help="On a GPU: graph,eager.")] = "graph,eager",
    seconds: Annotated[float, typer.Option(help="Samples of each timing add up to this.")] = 0.2,
    pool_file: Annotated[Path | None, typer.Option(help="Rows from a pool file.")] = None,
    seed: int = 0,
    record: Annotated[Path | None, typer.Option(help="Add each run to this JSONL file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure decode steps of each strategy on this machine, and check their outputs."""
    from shadowkv_lab import machine
    from shadowkv_lab.files import ready
    from shadowkv_lab.model import load_model
    from shadowkv_lab.steps import measure as decode
    from shadowkv_lab.steps.step import NOISY, append, frame, to_dict
    from shadowkv_lab.strategies import STRATEGIES, parse_list

    shape = load_model(model)
    loads = [
        (c, n) for c in integers(concurrency, "concurrency") for n in integers(context, "context")
    ]
    bench = decode.Bench(
        shape,
        shape.heads_per_gpu(8) if heads is None else heads,
        machine.as_device(device),
        backend=backend,
        page_size=page_size,
        order=order,
        seed=seed,
        modes=tuple(mode.strip() for mode in modes.split(",")),
        budget_s=seconds,
        reads=reads,
        tokens_per_step=tokens_per_step,
    )
    if pool_file:
        from shadowkv_lab.sources import poolfile

        fill = poolfile.filler(pool_file, shape)
        source = fill.source(max(integers(pool_tokens, "pool-tokens")), shape.layers)
        bench = dataclasses.replace(bench, fill=fill, source=source)
    chosen = parse_list(list(STRATEGIES) if strategies == "all" else strategies)
    if record:
        ready(record)
    runs = []
    with progress(quiet=as_json) as report:
        bench = dataclasses.replace(bench, progress=report)
        for run in decode.measure(bench, chosen, integers(pool_tokens, "pool-tokens"), loads):
            runs.append(run)
            if record:
                append(record, run)
    if as_json:
        typer.echo(json.dumps([to_dict(run) for run in runs], indent=1))
        return
    rows = frame(runs).to_dict("records")
    for row in rows:
        row["kept_gib"] = row["kept_bytes"] / 2**30
        row["load"] = f"{row['concurrency']} x {row['context']:,}"
        row["load"] += f", {tokens_per_step} tokens each" if tokens_per_step > 1 else ""
    console.print(f"{shape.name}, {bench.heads} heads, on {runs[0].origin.device}: measured")
    columns = "strategy mode pool_tokens load step_ms step_spread_ms cast_ms attention_ms write_ms"
    columns += " index_ms top_k_ms" if reads == "dsa" else ""
    show(rows, f"{columns} residual_ms kept_gib error".split())
    if disturbed := [run.strategy.label for run in runs if run.noisy]:
        console.print(f"noisy: {', '.join(disturbed)}: {NOISY}")


bench = typer.Typer(no_args_is_help=True, help="Benchmarks of the lab's own code.")
app.add_typer(bench, name="bench")


@bench.command("kernels")
def bench_kernels(
    model: Model = "glm-5",
    device: Device = None,
    pool_tokens: int = 524_288,
    heads: Annotated[
        str | None, typer.Option(help="Head counts: 8,16,32,64,128; with --tune the table's.")
    ] = None,
    pages: Annotated[str, typer.Option(help="Page sizes, up to 64, the first first.")] = "64,1",
    queries: Annotated[str, typer.Option(help="Query tokens per request: 1, with MTP 2,4.")] = "1",
    limit: Annotated[
        float | None, typer.Option(help="Seconds after which no other shape begins.")
    ] = None,
    tune: Annotated[bool, typer.Option(help="Remake this GPU's launch table instead.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="Write rows to this file, as they come; one of this GPU goes on."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time each kernel beside its peers and this run's copy bandwidth."""
    from shadowkv_lab import machine
    from shadowkv_lab.errors import whole
    from shadowkv_lab.files import ready
    from shadowkv_lab.model import load_model
    from shadowkv_lab.steps import bench as kernels
    from shadowkv_lab.steps import measure as decode
    from shadowkv_lab.steps import tune as tuning
    from shadowkv_lab.steps.step import origin as origin_of

    shape, where = load_model(model), machine.as_device(device)
    counts = None if heads is None else tuple(integers(heads, "heads"))
    if record:
        ready(record)
    with progress(quiet=as_json) as report:
        if tune:
            console.print(f"wrote {tuning.tune(shape, where, counts, report)}")
            return
        sizes = [whole(n, "Page size", 1, max(kernels.PAGES)) for n in integers(pages, "pages")]
        todo = kernels.cells(counts or kernels.HEADS, sizes, integers(queries, "queries"))
        kernels.check(where)
        log = kernels.Log(origin_of(where, *decode.bandwidth(where)), record)
        todo = [cell for cell in todo if cell not in log.cells]
        seconds = float("inf") if limit is None else limit
        for cell, found in kernels.bench(shape, where, pool_tokens, todo, seconds, report):
            log.add(cell, found)
    if as_json:
        typer.echo(log.text)
        return
    origin, rows = log.entry["origin"], log.entry["rows"]
    console.print(
        f"{shape.name}, {pool_tokens:,} slots, on {origin['device']}; copy bandwidth "
        f"{origin['copy_gb_per_s']:,.0f} GB/s"
    )
    columns = "kernel shape heads page_size queries ms gb_per_s of_copy error ratio plan_ms"
    show(rows, columns.split())
    failed = Counter((row["kernel"], row["reason"]) for row in log.entry["failed"])
    for (kernel, reason), count in failed.items():
        console.print(f"{kernel}: no time at {count} shapes: {reason}", markup=False)


@bench.command("dsa")
def bench_dsa(
    model: Model = "glm-5",
    device: Device = None,
    record: Annotated[Path | None, typer.Option(help="Add each row to this JSONL file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time index scores, the choice and attention over chosen rows beside their peers."""
    from shadowkv_lab import machine
    from shadowkv_lab.files import append_line, ready
    from shadowkv_lab.model import load_model
    from shadowkv_lab.steps import bench as kernels
    from shadowkv_lab.steps import bench_dsa
    from shadowkv_lab.steps import measure as decode
    from shadowkv_lab.steps.step import origin as origin_of

    where = machine.as_device(device)
    if record:
        ready(record)
    kernels.check(where)
    rows = []
    with progress(quiet=as_json) as report:
        origin = dataclasses.asdict(origin_of(where, *decode.bandwidth(where))) if record else {}
        for row in bench_dsa.run(load_model(model), where, progress=report):
            rows.append(dataclasses.asdict(row))
            if record:
                append_line(record, {"schema": 1, "row": rows[-1], "origin": origin})
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    show(rows, ["kernel", "load", "heads", "ms", "gb_per_s", "ratio", "error"])


@bench.command("serving")
def bench_serving(
    trace: Annotated[Path | None, typer.Option(help="An Azure CSV or Mooncake JSONL.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time the serving simulation over a trace, and over growing numbers of requests."""
    from shadowkv_lab.serving import bench

    rows = [timing._asdict() for timing in bench.run(trace)]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    show(rows, list(rows[0]))

"""Commands that predict, and that reproduce the GLM-5 report."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from shadowkv_lab.cli import AsJson, Device, Model, Reads, app, console, progress, show

Gpu = Annotated[str, typer.Option(help="A card of data/gpus.")]
REPORT_CARD = "rtx-pro-6000-server"

# What `reproduce` prints of each table; the CSV files hold all of it.
PRINTED = {
    "smaller_pools": (
        "The cheapest remedy",
        "pool_tokens cast_ms tpot_ms tokens_per_s low_tokens_per_s high_tokens_per_s provenance",
    ),
    "arithmetic": ("The arithmetic", "what formula value unit published agrees"),
    "measured": (
        "Measured here, and recorded",
        "strategy device pool_tokens scaled step_ms tpot_ms tokens_per_s error provenance",
    ),
    "does_not_add_up": (
        "What does not add up",
        "hypothesis tpot_ms low_ms high_ms gb_per_s total_gib fits_server under_server "
        "under_workstation",
    ),
    "verdict": (
        "The verdict",
        "strategy step_ms tpot_ms low_tokens_per_s high_tokens_per_s gib_for_pool fits "
        "tokens_that_fit tokens_per_s_per_gib provenance",
    ),
}


@app.command()
def budget(
    model: Annotated[str | None, typer.Option(help="A name, or a config.json.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A card of data/gpus.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Default: 8.")] = None,
    data_parallel: Annotated[int | None, typer.Option(help="DP attention ranks.")] = None,
    pipeline_parallel: int | None = None,
    decode_context_parallel: int | None = None,
    layout: Annotated[
        str | None, typer.Option(help="fp8_e4m3, fp8_e5m2, bf16, fp8_ds_mla or nvfp4_ds_mla.")
    ] = None,
    page_size: Annotated[int | None, typer.Option(help="Default: the engine's.")] = None,
    engine: Annotated[str | None, typer.Option(help="Whose rule: sglang or vllm.")] = None,
    quantisation: Annotated[str | None, typer.Option(help="Of the checkpoint.")] = None,
    weights_gib: Annotated[float | None, typer.Option(help="Per GPU, as logs print it.")] = None,
    mem_fraction_static: Annotated[
        float | None, typer.Option(help="Or vLLM's gpu_memory_utilization.")
    ] = None,
    context: int = 1024,
    concurrency: int = 1,
    kv_gib: Annotated[float | None, typer.Option(help="The KV size of a log.")] = None,
    log: Annotated[Path | None, typer.Option(help="An SGLang or vLLM start-up log.")] = None,
    index: Annotated[bool, typer.Option(help="Index keys, which DSA models allocate.")] = True,
    mtp: Annotated[bool, typer.Option(help="The MTP layer's cache.")] = False,
    smallest_card: Annotated[
        str | None, typer.Option(help="Which cards hold this load with this strategy?")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what fits: memory term by term, and each strategy's tokens and requests.

    Without a model, a card or a log it is the GLM-5 report's server.
    """
    from shadowkv_lab import budget
    from shadowkv_lab.deployment import deployment, published_deployment
    from shadowkv_lab.load import Load
    from shadowkv_lab.server import logs

    options = dict(
        tensor_parallel=tensor_parallel,
        data_parallel=data_parallel,
        pipeline_parallel=pipeline_parallel,
        decode_context_parallel=decode_context_parallel,
        layout=layout,
        page_size=page_size,
        engine=engine,
        quantisation=quantisation,
        weights_gib=weights_gib,
        memory_fraction=mem_fraction_static,
        kv_gib=kv_gib,
        index_layers=None if index else 0,
        mtp=mtp or None,
    )
    load = Load(concurrency, context)
    if log:
        reading = logs.read(log, model, REPORT_CARD if gpu is None else gpu, **options)
        plan = budget.budget(reading.deployment, load)
        for line in reading.lines:
            typer.echo(line, err=True) if as_json else console.print(line, soft_wrap=True)
    else:
        if model is None and gpu is None:
            at = published_deployment("glm5-report", **options)
        else:
            known = "glm-5" if model is None else model, REPORT_CARD if gpu is None else gpu
            at = deployment(*known, **options)
        if smallest_card is not None:
            _print(budget.cards_for(at, smallest_card, load), as_json)
            return
        plan = budget.budget(at, load)
    table = plan.table()
    if as_json:
        _print(table, as_json)
        return
    console.print(plan.formula)
    columns = [
        "strategy",
        "token_bytes",
        "tokens",
        "requests",
        "kept_gib",
        "scratch_gib",
        "left_gib",
        "fits",
    ]
    columns = dict.fromkeys(columns, "") | {"requests": f"requests of {context:,}"}
    show(table.to_dict("records"), columns, str(plan.deployment))
    for reason, rows in table[table.reason != ""].groupby("reason", sort=False):
        console.print(f"{', '.join(rows.strategy)}: {reason}")


@app.command()
def predict(
    model: Model = "glm-5",
    gpu: Gpu = REPORT_CARD,
    pool_tokens: int = 495_616,
    concurrency: int = 1,
    context: int = 1024,
    heads: Annotated[int | None, typer.Option(help="Query heads per GPU (default: TP 8).")] = None,
    reads: Reads = "dense",
    as_json: AsJson = False,
) -> None:
    """Predict each strategy's step on a card, with the provenance of every phase."""
    from shadowkv_lab.steps.predict import at, predict_all

    rows = []
    setting = at(model, pool_tokens, concurrency, context, heads, reads)
    for found in predict_all(setting, gpu):
        phases = {f"{p.name}_ms": p.ms for p in found.phases}
        rows.append(
            {
                "strategy": found.strategy.label if reads == "dense" else found.strategy.title,
                "step_ms": found.ms,
                **phases,
                "provenance": str(found.provenance),
                "how": found.how,
            }
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    show(rows, list(rows[0]))


@app.command()
def reproduce(
    device: Device = None,
    context: Annotated[int | None, typer.Option(help="The report does not give its own.")] = None,
    pool_tokens: Annotated[int | None, typer.Option(help="The largest that is quick here.")] = None,
    gpu: Gpu = REPORT_CARD,
    out: Annotated[Path, typer.Option(help="Where the files go.")] = Path("out/reproduce"),
    notebook: Annotated[bool, typer.Option(help="Execute a5_recorded_runs too.")] = False,
    profile: Annotated[bool, typer.Option(help="Profile one step of two strategies.")] = True,
) -> None:
    """Re-derive the GLM-5 report, measure it here, and say what does not add up.

    Exit status 1 if a strategy fails its check or a derived figure leaves its published one.
    """
    from shadowkv_lab.glm5 import reproduce

    with progress(quiet=False) as report:
        found = reproduce.run(
            device,
            out,
            card=gpu,
            context=context,
            pool_tokens=pool_tokens,
            profile=profile,
            progress=report,
        )
    for name, (heading, columns) in PRINTED.items():
        console.print(f"\n{heading}", style="bold")
        if name in found.notes:
            console.print(found.notes[name])
        _print(found.tables[name], columns=columns.split())
    for row in found.tables["verdict"].itertuples():
        console.print(f"{row.strategy}: {row.verdict}")
    files = list(found.files)
    if notebook:
        from shadowkv_lab import facts
        from shadowkv_lab.ui import notebooks

        with progress(quiet=False) as report:
            report("executing a5_recorded_runs", 0.5)
            target = out / "a5_recorded_runs.ipynb"
            lab = facts.shipped("notebooks") / target.name
            files.append(notebooks.execute(lab, target, folder=out))
    console.print("\nwrote " + ", ".join(str(f) for f in files))
    failed = [check for check in found.checks if not check.ok]
    console.print(f"{len(found.checks) - len(failed)} of {len(found.checks)} checks hold")
    for check in found.checks:
        word, style = ("holds", None) if check.ok else ("failed", "bold red")
        console.print(f"{word}: {check.what}: {check.found}", style=style)
    if failed:
        raise typer.Exit(1)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A result file, or the folder of one run.")],
    after: Annotated[Path, typer.Argument(help="The same, with the patch.")],
    before_log: Annotated[Path | None, typer.Option(help="The server's log.")] = None,
    after_log: Annotated[Path | None, typer.Option(help="The server's log.")] = None,
    before_trace: Annotated[
        Path | None, typer.Option(help="A profiler trace, gzip or not.")
    ] = None,
    after_trace: Annotated[Path | None, typer.Option(help="A profiler trace, gzip or not.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: what the files name.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A card of data/gpus; the trace's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Decode steps of an unmarked trace.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers that read the pool; all.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="One picture and one sentence: FILE.md, .html or .png.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a patch changed in a server: TPOT, the cast that is left, and what could explain it.

    A folder holds one run's result file (*.jsonl, or vLLM's *.json), *.log and trace.
    """
    from shadowkv_lab.server import compare, report
    from shadowkv_lab.steps.trace import short_name

    found = compare.compare(
        compare.read(before, log=before_log, trace=before_trace),
        compare.read(after, log=after_log, trace=after_trace),
        model=model,
        gpu=gpu,
        steps=steps,
        layers=layers,
    )
    wrote = []
    if out:
        from shadowkv_lab.ui.display import png

        wrote = report.write(found, out, png)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
        return
    console.print(found.sentence, style="bold", soft_wrap=True)
    _print(found.tpot, columns=_shown(found.tpot))
    if found.cast is not None and len(found.cast):
        show(
            found.cast.assign(kernel=found.cast.kernel.map(short_name))
            .fillna("")
            .to_dict("records"),
            dict(kernel="cast, ms per step", model="of", before_ms="before", after_ms="after"),
        )
    if found.left is not None:
        console.print(f"{found.left:.0%} of the cast is left ({found.left_how})")
    if found.budget is not None:
        console.print(found.budget.formula)
    if len(found.hypotheses):
        wanted = ("hyp", "tpot", "off", "gb_", "total", "fits", "under")
        shown = [name for name in found.hypotheses.columns if name.startswith(wanted)]
        _print(found.hypotheses, columns=shown)
    for line in found.notes:
        console.print(f"- {line}", soft_wrap=True)
    if wrote:
        console.print("wrote " + ", ".join(map(str, wrote)))


def _shown(tpot) -> list[str]:
    """The columns of a table of TPOTs that say something: a step beside it only with MTP."""
    left_out = {"benchmark", "tpot_from", "repeats"}
    if (tpot.before_step_ms == tpot.before_ms).all():
        left_out |= {"before_step_ms", "after_step_ms"}
    return [name for name in tpot.columns if name not in left_out]


def _print(table, as_json: bool = False, columns: Iterable[str] | None = None) -> None:
    """A DataFrame as a table of `columns` (all of them, if left out), or as JSON."""
    if as_json:
        typer.echo(table.to_json(orient="records", indent=1))
        return
    show(table.to_dict("records"), table.columns if columns is None else columns)

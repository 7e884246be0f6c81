"""Commands around files: real rows captured, notebooks executed and shared."""

import ast
from pathlib import Path
from typing import Annotated

import typer

from shadowkv_lab.cli import app, console, progress
from shadowkv_lab.errors import OutOfRange


@app.command()
def capture(
    checkpoint: Annotated[Path, typer.Option(help="A folder with config.json and safetensors.")],
    text: Annotated[Path, typer.Option(help="A text file.")],
    out: Annotated[Path, typer.Option(help="The pool file to write.")],
    layers: Annotated[str, typer.Option(help="Such as 0-2 or 0,2.")] = "0-2",
    queries: Annotated[int, typer.Option(help="Queries kept a layer.")] = 16,
    max_tokens: int | None = None,
    device: str = "cpu",
) -> None:
    """Run a text through a checkpoint's first layers, and keep their KV rows in a pool file."""
    from shadowkv_lab.sources import capture

    with progress(quiet=False) as report:
        file = capture.capture(
            checkpoint,
            text,
            out,
            layers=layers,
            queries=queries,
            max_tokens=max_tokens,
            device=device,
            progress=report,
        )
    console.print(f"wrote {out}: {len(file.layers)} layers x {file.tokens} tokens")


class _Pairs(typer.core.TyperCommand):
    """Takes papermill's `-p NAME VALUE` as well as `-p NAME=VALUE`."""

    def parse_args(self, ctx, args):
        joined = []
        for word in args:
            if len(joined) > 1 and joined[-2] == "-p" and "=" not in joined[-1]:
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return super().parse_args(ctx, joined)


@app.command("run-notebook", cls=_Pairs)
def run_notebook(
    notebook: Path,
    parameter: Annotated[
        list[str] | None, typer.Option("-p", help="NAME VALUE or NAME=VALUE; several.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", help="Where to; in place if left out.")
    ] = None,
) -> None:
    """Execute a notebook from a clean kernel, with other parameters if asked for.

    The name of one that the lab ships, such as a2_accuracy, stands for it: a copy is written.
    """
    from shadowkv_lab import facts
    from shadowkv_lab.ui import notebooks

    values = {}
    for text in parameter or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise OutOfRange(f"Parameter {text!r}", "NAME=VALUE, such as pool_tokens=131072")
        values[name] = _value(value)
    shipped, folder = facts.shipped("notebooks") / f"{notebook.stem}.ipynb", None
    if not notebook.exists() and shipped.exists():
        notebook, output = shipped, output or Path(shipped.name)
        folder = output.resolve().parent
    console.print(f"wrote {notebooks.execute(notebook, output, values, folder)}")


def _value(text: str) -> object:
    """A word as Python reads it, or as YAML and shells write flags; else it is text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@app.command()
def export(
    notebook: Path,
    output: Annotated[
        Path | None, typer.Option("-o", help="Where to; out/NAME.html if left out.")
    ] = None,
) -> None:
    """Write an executed notebook as one HTML file that works offline, its plots live."""
    from shadowkv_lab.ui import export

    path = export.export(notebook, output)
    console.print(f"wrote {path}, {path.stat().st_size / 1e6:.1f} MB")

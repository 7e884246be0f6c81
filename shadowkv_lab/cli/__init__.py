"""`shadowkv`: the lab's functions without a browser."""

import sys
from collections.abc import Iterable, Mapping
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shadowkv_lab.errors import LabError, OutOfRange
from shadowkv_lab.ui import tables

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
# Into a file or a pipe, tables are wide enough not to be folded. Names may have brackets in them,
# which are no mark-up.
console = Console(width=None if sys.stdout.isatty() else 120, markup=False, highlight=False)

Model = Annotated[str, typer.Option(help="A model of data/models, or the path of a config.json.")]
Device = Annotated[str | None, typer.Option(help="cuda:0, cpu, ...; the freest GPU if left out.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for machines instead of a table.")]


def main() -> None:
    """Run the command line; a named error becomes one line and exit status 2."""
    try:
        app()
    except LabError as error:
        line = Text.assemble((type(error).__name__, "bold red"), f": {error}")
        Console(stderr=True).print(line, soft_wrap=True)
        raise SystemExit(2) from None


def integers(text: str, what: str) -> list[int]:
    """Whole numbers from a comma-separated list; raises `OutOfRange`."""
    try:
        values = [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        raise OutOfRange(f"{what} {text!r}", "whole numbers, separated by commas") from None
    if any(value < 1 for value in values):
        raise OutOfRange(f"{what} {text!r}", "1 or more")
    return values


def show(rows: Iterable[dict], columns: Iterable[str], heading: str = "") -> None:
    """Print rows as a table, `columns` of them; a mapping gives some a heading of their own."""
    table = Table(title=heading or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    rows, names = list(rows), list(columns)
    own = columns if isinstance(columns, Mapping) else {}
    for key in names:
        number = any(type(row[key]) in (int, float) for row in rows)
        of = tables.column(key)
        head = own.get(key) or f"{of.title}\n{of.unit}".rstrip()
        # A name that is broken over lines cannot be searched.
        whole = number or key in ("strategy", "load")
        justify = "right" if number else "left"
        table.add_column(head, justify=justify, overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(tables.column(key).cell(row[key]) for key in names))
    console.print(table)


class progress:
    """A progress bar with the time left, called with (text, share done); silent if `quiet`."""

    def __init__(self, quiet: bool):
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False)
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)

    def __enter__(self):
        self.bar.start()
        self.task = self.bar.add_task("", total=1.0)
        return lambda text, done: self.bar.update(self.task, description=text, completed=done)

    def __exit__(self, *_):
        self.bar.stop()


# Each module registers its commands.
from shadowkv_lab.cli import applications, measuring, predicting, serving, sharing  # noqa: E402, F401

"""`shadowkv`: the lab's functions without a browser."""

import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
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
Reads = Annotated[str, typer.Option(help="dense, or dsa: the rows that the model's index chooses.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for machines instead of a table.")]


def main() -> None:
    """Run the command line. Exit status 0, 1 for a finding of the lab's own, 2 for a named error
    or wrong usage, 3 for a bug of the lab, 130 where it was stopped."""
    warnings.showwarning = _warn
    try:
        app()  # usage errors end here with 2, Ctrl-C with 130
    except LabError as error:
        _end(2, type(error).__name__, error)
    except KeyboardInterrupt:
        _end(130, "Stopped", "what was finished before is kept")
    except BrokenPipeError:  # `shadowkv ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(141) from None
    except OSError as error:
        _end(2, "CannotWrite", f"{error.strerror or error}: {error.filename or 'output'}")
    except Exception as error:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            _end(2, "DoesNotFit", f"the memory did not suffice ({error or 'out of memory'})")
        if os.environ.get("SHADOWKV_TRACEBACK"):
            raise
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}: {error}"
        remedy = "Please report it; SHADOWKV_TRACEBACK=1 shows where it comes from"
        _end(3, "A bug of the lab", f"{where}. {remedy}")


def _end(code: int, name: str, what: object) -> None:
    _said(name, what)
    raise SystemExit(code) from None


def _said(name: str, what: object) -> None:
    """Print one line on standard error."""
    line = Text.assemble((name, "bold red"), f": {' '.join(shown(str(what)).split())}")
    with suppress(OSError):
        Console(stderr=True).print(line, soft_wrap=True)


def shown(text: str) -> str:
    """A text without characters that a terminal would obey: files can hold any."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def _warn(message, category, *_, **__) -> None:
    _said("warning" if category is UserWarning else category.__name__, message)


def integers(text: str, what: str) -> list[int]:
    """Whole numbers from a comma-separated list; raises `OutOfRange`."""
    try:
        values = [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        raise OutOfRange(f"{what} {text[:60]!r}", "whole numbers, separated by commas") from None
    if any(not 1 <= value < 2**48 for value in values):
        raise OutOfRange(f"{what} {text[:60]!r}", "1 or more")
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
        table.add_row(*(shown(tables.column(key).cell(row[key])) for key in names))
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
from shadowkv_lab.cli import applications, measuring, predicting, serving, sharing, sweeping  # noqa: E402, F401

"""A widget application: labelled controls, figures, an error shown in place, a line to paste."""

from __future__ import annotations

import html
import itertools
import json
import string
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import ipywidgets as w
import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab.errors import CannotWrite, LabError
from shadowkv_lab.ui import charts, display, plots, tables

if TYPE_CHECKING:
    from shadowkv_lab.ui.application import Application

CONTROL_WIDTH = "472px"
BUSY_AFTER_S = 0.2  # quicker answers need no indicator

CSS = """<style>
.shadowkv :is(button, input, select, textarea, .noUi-handle):focus-visible {
  outline: 3px solid #0072B2 !important; outline-offset: 1px; }
.shadowkv-error { border-left: 4px solid #D55E00; padding: 4px 10px; background: #fff4ec;
  color: #222; line-height: 1.4; }
.shadowkv-code { user-select: all; background: #f2f2f2; color: #222; padding: 3px 6px;
  overflow-wrap: anywhere; border-bottom: 1px dotted #0072B2; }
.shadowkv .widget-html-content { line-height: 1.5; }
.shadowkv-beside { color: #555; font-size: 11px; }
.shadowkv-stale { opacity: 0.45; filter: grayscale(1); }
</style>"""


@dataclass(frozen=True)
class View:
    """What one setting shows: figures, a line about them, and the numbers behind them.

    `columns` are those of the table that are to be read. `more` has the tables of figures that
    `table` says nothing of, by name; `beside` a word beside a control, by its name. `unanswered`
    is why there is no answer at this setting: an application says it in the answer's place, and a
    command ends with it.
    """

    figures: Sequence[go.Figure]
    note: str = ""
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    columns: Sequence[str] = ()
    more: dict[str, pd.DataFrame] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)
    unanswered: LabError | None = None

    @property
    def shown(self) -> pd.DataFrame:
        """The numbers, ready to be read."""
        return tables.table(self.table, self.columns or None)


def unanswered(error: LabError, figures: int = 1, **more) -> View:
    """The view of a setting that has no answer: the reason where the figures would be."""
    title = charts.figure(
        charts.heading("no answer at this setting", html.escape(error.what, quote=False)),
        height=180,
        xaxis={"visible": False},
        yaxis={"visible": False},
    )
    return View([title] * figures, _in_place(error), unanswered=error, **more)


class Cancelled(Exception):
    """A newer setting has come, or nobody wants the answer any more; the work is dropped."""


@dataclass(frozen=True)
class Work:
    """What a slow view is given: it reports (text, share done), and asks whether to go on."""

    report: Callable[[str, float], None] = lambda text, done: None
    cancelled: Callable[[], bool] = lambda: False

    def stage(self, text: str, done: float) -> None:
        """Report, and raise `Cancelled` where the answer is not wanted any more."""
        if self.cancelled():
            raise Cancelled
        self.report(text, done)


QUIET = Work()


class App:
    """An application's controls and figures at work.

    A view is made at once, or in one worker where `slow(settings)` says so: then results are grey
    while it works, progress is shown, and a newer setting or Cancel stops it. A `LabError` is
    shown in its own words above the last good view. The line below the figures imports and calls
    the application at their settings.
    """

    def __init__(self, of: Application, settings: dict):
        self.of, self.defaults = of, settings
        self.controls = {n: c.widget(settings[n], settings) for n, c in of.controls.items()}
        self.beside = {name: w.HTML() for name in self.controls}
        self.turn, self.worker, self.view, self.line = 0, None, View([]), ""
        self._lock = threading.Lock()
        self._stale = False
        self._width = plots.column_width(of.columns)
        self.status, self.error, self.note, self.code = (w.HTML() for _ in range(4))
        self.busy = w.FloatProgress(max=1.0, layout=w.Layout(width="12em", visibility="hidden"))
        self.cancel = _button("Cancel", "Stop the work under way", self._cancel)
        self.cancel.layout.display = "none"
        buttons = [
            _button("Reset", "Back to the settings it started with", self.reset),
            _button("Save this view", "CSV and PNG, into the folder out", self.save),
        ]
        self.plots = w.GridBox(layout=_columns(of.columns))
        rows = []
        for name, control in self.controls.items():
            control.layout.width, control.layout.flex, control.layout.min_width = "auto", "1", "0"
            self.beside[name].add_class("shadowkv-beside")
            row = w.HBox([control, self.beside[name]], layout=w.Layout(width=CONTROL_WIDTH))
            rows.append(row)
            control.observe(self._moved, names="value")
        self.widget = w.VBox(
            [
                w.HTML(CSS),
                w.GridBox(rows, layout=_columns(2)),
                w.HBox([*buttons, self.cancel, self.busy, self.status]),
                self.error,
                self.note,
                self.plots,
                self.code,
            ]
        )
        self.widget.add_class("shadowkv")
        self.refresh()

    @property
    def settings(self) -> dict:
        """Every control's value by its name."""
        return {name: control.value for name, control in self.controls.items()}

    def reset(self) -> None:
        """Put every control back to where it started, and show that once."""
        self._put(self.defaults)
        self.refresh()

    def save(self) -> None:
        """Write numbers (CSV), figures (PNG) and the setting under out/, beside earlier ones.

        What is shown below an error, or in grey, is an older setting's: that is not saved.
        """
        if self._stale:
            self.status.value = "not saved: the figures are not those of this setting"
            return
        try:
            self.status.value = html.escape(self._save(Path("out"), self.of.where.split(".")[-1]))
        except OSError as error:
            told = CannotWrite(f"The view was not saved: {error}", "a folder that can be written")
            self.error.value = _in_place(told)

    def _save(self, folder: Path, name: str) -> str:
        folder.mkdir(exist_ok=True)
        if not (folder / ".gitignore").exists():
            (folder / ".gitignore").write_text("*\n")
        number = next(n for n in itertools.count(1) if not (folder / f"{name}-{n}.csv").exists())
        path = folder / f"{name}-{number}.csv"
        _to_csv(self.view.table, path)
        for more, table in self.view.more.items():
            _to_csv(table, path.with_name(f"{path.stem}-{more}.csv"))
        path.with_suffix(".py").write_text(f"{self.line}\n")
        pictures = [picture for fig in self.view.figures if (picture := display.png(fig))]
        for letter, picture in zip(string.ascii_lowercase, pictures, strict=False):
            path.with_name(f"{path.stem}{letter}.png").write_bytes(picture)
        lacking = "" if len(pictures) == len(self.view.figures) else "; no Chromium for pictures"
        return f"saved {path} beside the notebook, and {len(pictures)} PNG files{lacking}"

    def refresh(self) -> None:
        """Show the current setting; the last one wins."""
        settings = self.settings
        slow = self.of.slow(settings)
        self._settle(settings, slow)
        module, _, name = self.of.where.rpartition(".")
        arguments = ", ".join(f"{key}={_literal(value)}" for key, value in settings.items())
        line = f"from {module} import {name}; {name}({arguments})"
        turn = self._next_turn()
        if not slow:
            self._work(settings, line, turn)
            return
        self._grey(True)
        self.cancel.layout.display = ""
        previous = self.worker

        def wait_then_work():
            if previous is not None:
                previous.join()
            self._work(settings, line, turn)

        self.worker = threading.Thread(target=wait_then_work, daemon=True)
        self.worker.start()

    def _next_turn(self) -> int:
        with self._lock:
            self.turn += 1
            return self.turn

    def _cancel(self) -> None:
        """Drop the work under way; what is shown stays, grey."""
        self._next_turn()
        self._end(stale=True)
        self.status.value = "cancelled: the figures are those of an earlier setting"

    def _settle(self, settings: dict, slow: bool) -> None:
        """Put controls that do nothing to sleep, with the reason beside; drag where it is quick."""
        asleep = self.of.asleep(settings)
        for name, control in self.controls.items():
            if control.disabled != (name in asleep):
                control.disabled = name in asleep
            self._say(name, asleep.get(name) or self.view.beside.get(name, ""))
            if control.has_trait("continuous_update"):
                # A text is read when it is whole.
                control.continuous_update = not (slow or isinstance(control, w.Textarea))

    def _say(self, name: str, text: str) -> None:
        if self.beside[name].value != (said := html.escape(text, quote=False)):
            self.beside[name].value = said

    def _work(self, settings: dict, line: str, turn: int) -> None:
        finished = threading.Event()

        def cancelled() -> bool:
            return turn != self.turn

        def report(text: str, done: float) -> None:
            if not cancelled() and not finished.is_set():
                self.status.value, self.busy.value = html.escape(text), done
                self.busy.layout.visibility = "visible"

        if cancelled():
            return
        indicator = threading.Timer(BUSY_AFTER_S, report, ("working ...", 0.5))
        indicator.daemon = True
        indicator.start()
        try:
            view = self.of(**settings, work=Work(report, cancelled))
        except Cancelled:
            return
        except LabError as error:
            view = error
        except Exception as error:
            # A bug of ours; said in place too, since a worker's traceback goes to the log alone.
            if not cancelled():
                self._end(_in_place(error))
            raise
        finally:
            indicator.cancel()
            finished.set()
        if cancelled():
            return
        if isinstance(view, LabError):
            self._end(_in_place(view))
            return
        self.view, self.line = view, line
        self._answer(view)
        self._draw(view.figures)
        told = f'<code class="shadowkv-code">{html.escape(line, quote=False)}</code>'
        self.code.value = f"To show the same: {told}"
        for name, text in view.beside.items():
            if not self.controls[name].disabled:
                self._say(name, text)
        self._end()

    def _answer(self, view: View) -> None:
        """Show a view's words."""
        self.note.value = charts.words(view.note)

    def _end(self, error: str = "", stale: bool = False) -> None:
        """Work has ended. Below an error, what is shown is an older setting's."""
        self.error.value, self.status.value, self.busy.layout.visibility = error, "", "hidden"
        self.cancel.layout.display = "none"
        self._grey(stale or bool(error))

    def _grey(self, stale: bool) -> None:
        """Mark the shown figures as those of an older setting, or as current again."""
        if stale != self._stale:
            self._stale = stale
            for part in self._answers:
                (part.add_class if stale else part.remove_class)("shadowkv-stale")

    @property
    def _answers(self) -> tuple[w.Widget, ...]:
        """What is an older setting's while a worker makes a newer one's."""
        return self.note, self.plots

    def _draw(self, figures: Sequence[go.Figure]) -> None:
        self._show(plots.draw(self.plots.children, figures, self._width))

    def _show(self, drawn: Sequence[plots.Plot]) -> None:
        shown = self.plots.children
        if len(shown) != len(drawn):
            self.plots.children = drawn
            for plot in shown[len(drawn) :]:
                plot.close()

    def _moved(self, change: dict) -> None:
        """A user has moved a control: what depends on it follows."""
        if change["new"] == change["old"]:
            return
        name = next(n for n, control in self.controls.items() if control is change["owner"])
        try:
            self._put(self.of.changed(self.settings, name))
        except LabError as error:
            self._next_turn()
            self._end(_in_place(error))
            return
        self.refresh()

    def _put(self, settings: dict) -> None:
        """Set controls, and their options, without showing each change."""
        for control in self.controls.values():
            control.unobserve(self._moved, names="value")
        try:
            for name, control in self.of.controls.items():
                control.put(self.controls[name], settings[name], settings)
        finally:
            for control in self.controls.values():
                control.observe(self._moved, names="value")


def _button(label: str, tooltip: str, pressed: Callable[[], None]) -> w.Button:
    button = w.Button(description=label, tooltip=tooltip)
    button.on_click(lambda _: pressed())
    return button


def _to_csv(table: pd.DataFrame, path: Path) -> None:
    """With the index where it is names, without it where it only counts."""
    named = pd.api.types.is_string_dtype(table.index)
    table.to_csv(path, index=named, index_label=(table.index.name or "name") if named else None)


def _columns(count: int) -> w.Layout:
    return w.Layout(
        grid_template_columns=f"repeat({count}, {plots.column_width(count)}px)", grid_gap="4px 6px"
    )


def _literal(value: object) -> str:
    """A setting as Python, strings in double quotes."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _in_place(error: Exception) -> str:
    """A named error laid out: what was wrong, what is allowed, what to do. Any other, plainly."""
    if isinstance(error, LabError):
        parts = [f"{error.what.rstrip('.')}."]
        if error.allowed:
            parts.append(f"Allowed: {error.allowed.rstrip('.')}.")
        if error.remedy:
            parts.append(error.remedy.rstrip(".") + ("" if error.remedy.endswith("?") else "."))
    else:
        parts = [str(error), "This is a bug in the lab; the kernel's log has the traceback."]
    text = "<br>".join(html.escape(part, quote=False) for part in parts)
    return f'<div role="alert" class="shadowkv-error"><b>{type(error).__name__}</b>: {text}</div>'

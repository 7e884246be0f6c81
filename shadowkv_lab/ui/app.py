"""A widget application: labelled controls, figures, an error shown in place, a line to paste."""

import contextlib
import html
import itertools
import json
import string
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ipywidgets as w
import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab.errors import CannotWrite, LabError
from shadowkv_lab.ui import display, plots

CONTROL_WIDTH = "540px"
BUSY_AFTER_S = 0.2  # quicker answers need no indicator

CSS = """<style>
.shadowkv :is(button, input, select, textarea, .noUi-handle):focus-visible {
  outline: 3px solid #0072B2 !important; outline-offset: 1px; }
.shadowkv-error { border-left: 4px solid #D55E00; padding: 4px 10px; background: #fff4ec;
  color: #222; line-height: 1.4; }
.shadowkv-code { user-select: all; background: #f2f2f2; color: #222; padding: 3px 6px;
  overflow-wrap: anywhere; border-bottom: 1px dotted #0072B2; }
.shadowkv .widget-html-content { line-height: 1.5; }
</style>"""


@dataclass(frozen=True)
class View:
    """What one setting shows: figures, a line about them, and the numbers behind them.

    `more` has the tables of figures that `table` says nothing of, by name.
    """

    figures: Sequence[go.Figure]
    note: str = ""
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    more: dict[str, pd.DataFrame] = field(default_factory=dict)


class Cancelled(Exception):
    """A newer setting has come; the older one's work is dropped."""


class App:
    """Controls by name, and `build(settings, report, cancelled) -> View`.

    `build` runs at once, or in one worker where `slow(settings)` says so: then results are grey
    while it works, `report(text, done)` shows progress, and a newer setting cancels an older one.
    A `LabError` is shown in its own words above the last good view. `call` is the full name of the
    function whose arguments are the controls: the line below the figures imports and calls it.
    """

    def __init__(
        self,
        call: str,
        controls: dict[str, w.Widget],
        build: Callable[[dict, Callable, Callable[[], bool]], View],
        slow: Callable[[dict], bool] = lambda settings: False,
        columns: int = 2,
    ):
        self.module, _, self.name = call.rpartition(".")
        self.controls, self.build, self.slow = controls, build, slow
        self.defaults = {name: control.value for name, control in controls.items()}
        self.turn, self.worker, self.view, self.line = 0, None, View([]), ""
        self._lock = threading.Lock()
        self._drawn: list[dict] = []
        self._stale = False
        self._width = plots.column_width(columns)
        self.status, self.error, self.note, self.code = (w.HTML() for _ in range(4))
        self.busy = w.FloatProgress(max=1.0, layout=w.Layout(width="12em", visibility="hidden"))
        reset = w.Button(description="Reset", tooltip="Back to the settings it started with")
        save = w.Button(description="Save this view", tooltip="CSV and PNG, into the folder out")
        reset.on_click(lambda _: self.reset())
        save.on_click(lambda _: self.save())
        self.plots = w.GridBox(layout=_columns(columns))
        self.widget = w.VBox(
            [
                w.HTML(CSS),
                w.GridBox([*controls.values()], layout=_columns(2)),
                w.HBox([reset, save, self.busy, self.status]),
                self.error,
                self.note,
                self.plots,
                self.code,
            ]
        )
        self.widget.add_class("shadowkv")
        for control in controls.values():
            control.layout.width = CONTROL_WIDTH
            control.observe(self._changed, names="value")
        self.refresh()

    @property
    def settings(self) -> dict:
        """Every control's value by its name."""
        return {name: control.value for name, control in self.controls.items()}

    def reset(self) -> None:
        """Put every control back to its default, and show that once."""
        with self._quiet():
            for name, value in self.defaults.items():
                self.controls[name].value = value
        self.refresh()

    def save(self) -> None:
        """Write numbers (CSV), figures (PNG) and the setting under out/, beside earlier ones.

        What is shown below an error, or in grey, is an older setting's: that is not saved.
        """
        if self._stale:
            self.status.value = "not saved: the figures are not those of this setting"
            return
        try:
            self.status.value = html.escape(self._save(Path("out"), self.name))
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
        arguments = ", ".join(f"{name}={_literal(value)}" for name, value in settings.items())
        line = f"from {self.module} import {self.name}; {self.name}({arguments})"
        with self._lock:
            self.turn += 1
            turn = self.turn
        if not self.slow(settings):
            self._work(settings, line, turn)
            return
        self._grey(True)
        previous = self.worker

        def wait_then_work():
            if previous is not None:
                previous.join()
            self._work(settings, line, turn)

        self.worker = threading.Thread(target=wait_then_work, daemon=True)
        self.worker.start()

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
            view = self.build(settings, report, cancelled)
        except Cancelled:
            return
        except LabError as error:
            view = error
        except Exception as error:
            # A fault of ours; said in place too, since a worker's traceback is seen by nobody.
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
        else:
            self.view, self.line, self.note.value = view, line, view.note
            told = f'<code class="shadowkv-code">{html.escape(line, quote=False)}</code>'
            self.code.value = f"To show the same: {told}"
            self._draw(view.figures)
            self._end()

    def _end(self, error: str = "") -> None:
        """Nothing is worked on any more. Below an error, what is shown is an older setting's."""
        self.error.value, self.status.value, self.busy.layout.visibility = error, "", "hidden"
        self._grey(bool(error))

    def _grey(self, stale: bool) -> None:
        """Mark the shown figures as those of an older setting, or as current again."""
        if stale != self._stale:
            self._stale = stale
            for plot in self.plots.children:
                plot.layout.paper_bgcolor = plot.layout.plot_bgcolor = (
                    "#dddddd" if stale else "white"
                )

    def _draw(self, figures: Sequence[go.Figure]) -> None:
        shown = list(self.plots.children)
        widgets, self._drawn = plots.draw(shown, self._drawn, figures, self._width)
        # NOTE: figures compare by what they show, so the widgets are told apart by identity.
        kept = {id(widget) for widget in widgets}
        if [id(plot) for plot in shown] != [id(widget) for widget in widgets]:
            self.plots.children = widgets
            for plot in shown:
                if id(plot) not in kept:
                    plot.close()

    def _changed(self, change: dict) -> None:
        if change["new"] != change["old"]:
            self.refresh()

    @contextlib.contextmanager
    def _quiet(self):
        """Change controls without showing each change."""
        for control in self.controls.values():
            control.unobserve(self._changed, names="value")
        try:
            yield
        finally:
            for control in self.controls.values():
                control.observe(self._changed, names="value")


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
        parts = [str(error), "This is a fault of the lab. The kernel's log has the traceback."]
    text = "<br>".join(html.escape(part, quote=False) for part in parts)
    return f'<div role="alert" class="shadowkv-error"><b>{type(error).__name__}</b>: {text}</div>'

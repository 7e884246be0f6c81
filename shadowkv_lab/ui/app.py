"""A widget application: labelled controls, figures, an error shown in place, a line to paste."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ipywidgets as w
import pandas as pd
import plotly.graph_objects as go

from shadowkv_lab.errors import LabError
from shadowkv_lab.ui import display

LABEL = {"description_width": "9em"}
PLOT_WIDTH = 610  # two side by side are read at 1280 px


@dataclass(frozen=True)
class View:
    """What one setting shows: figures, a line about them, and the numbers behind them."""

    figures: list[go.Figure]
    note: str = ""
    table: pd.DataFrame = field(default_factory=pd.DataFrame)


class Cancelled(Exception):
    """A newer setting has come; the older one's work is dropped."""


class App:
    """Controls by name, and `build(settings, report, cancelled) -> View`.

    `build` runs at once, or in one worker where `slow(settings)` says so: then results are grey
    while it works, `report(text, done)` shows progress, and a newer setting cancels an older one.
    A `LabError` is shown in its own words above the last good view. `call` is the function whose
    arguments are the controls, so that the line below the figures reproduces the view.
    """

    def __init__(self, call: str, controls: dict[str, w.Widget],
                 build: Callable[[dict, Callable, Callable[[], bool]], View],
                 slow: Callable[[dict], bool] = lambda settings: False,
                 columns: int = 2):  # fmt: skip
        self.call, self.controls, self.build, self.slow = call, controls, build, slow
        self.defaults = {name: control.value for name, control in controls.items()}
        self.turn, self.worker, self.view = 0, None, View([])
        self._lock = threading.Lock()
        self.status, self.error, self.note, self.code = (w.HTML() for _ in range(4))
        self.busy = w.FloatProgress(max=1.0, layout=w.Layout(width="12em", visibility="hidden"))
        reset = w.Button(description="Reset", tooltip="Back to the defaults")
        save = w.Button(description="Save this view", tooltip="CSV and PNG, under out/")
        reset.on_click(lambda _: self.reset())
        save.on_click(lambda _: self.save())
        self.plots = w.GridBox(
            layout=w.Layout(
                grid_template_columns=f"repeat({columns}, {PLOT_WIDTH}px)", grid_gap="6px"
            )
        )
        grid = w.GridBox(list(controls.values()),
                         layout=w.Layout(grid_template_columns="repeat(2, 610px)"))  # fmt: skip
        self.widget = w.VBox([
            grid, w.HBox([reset, save, self.busy, self.status]), self.error, self.note, self.plots,
            self.code,
        ])  # fmt: skip
        for control in controls.values():
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
        """Write the view's numbers as CSV and its figures as PNG under out/."""
        folder = Path("out")
        folder.mkdir(exist_ok=True)
        self.view.table.to_csv(folder / f"{self.call}.csv", index=False)
        pictures = [display.png(fig) for fig in self.view.figures]
        for i, picture in enumerate(p for p in pictures if p):
            (folder / f"{self.call}-{i + 1}.png").write_bytes(picture)
        self.status.value = f"saved as {folder}/{self.call}*"

    def refresh(self) -> None:
        """Show the current setting; the last one wins."""
        settings = self.settings
        arguments = ", ".join(f"{k}={v!r}" for k, v in settings.items())
        self.code.value = f"<code>{self.call}({arguments})</code>"
        with self._lock:
            self.turn += 1
            turn = self.turn
        if not self.slow(settings):
            self._work(settings, turn)
            return
        self._grey(True)
        previous = self.worker

        def wait_then_work():
            if previous is not None:
                previous.join()
            self._work(settings, turn)

        self.worker = threading.Thread(target=wait_then_work, daemon=True)
        self.worker.start()

    def _work(self, settings: dict, turn: int) -> None:
        def cancelled() -> bool:
            return turn != self.turn

        def report(text: str, done: float) -> None:
            if not cancelled():
                self.status.value, self.busy.value = text, done
                self.busy.layout.visibility = "visible" if done < 1 else "hidden"

        if cancelled():
            return
        try:
            view = self.build(settings, report, cancelled)
        except Cancelled:
            return
        except LabError as error:
            if not cancelled():
                self.error.value = _in_place(error)
                self._settle("")
            return
        if not cancelled():
            self.view, self.error.value, self.note.value = view, "", view.note
            self._draw(view.figures)
            self._settle("")

    def _settle(self, text: str) -> None:
        self.status.value, self.busy.layout.visibility = text, "hidden"
        self._grey(False)

    def _grey(self, stale: bool) -> None:
        self.plots.layout.border = "2px dashed #bbb" if stale else None
        self.plots.layout.opacity = None
        for plot in self.plots.children:
            plot.layout.paper_bgcolor = plot.layout.plot_bgcolor = "#dddddd" if stale else "white"

    def _draw(self, figures: list[go.Figure]) -> None:
        """Change the shown figures in place where their traces match; else replace them."""
        shown = self.plots.children
        same = len(shown) == len(figures) and all(
            [t.type for t in a.data] == [t.type for t in b.data]
            for a, b in zip(shown, figures, strict=True)
        )
        if not same:
            # NOTE: a FigureWidget's stored state is that of the figure it was made from.
            for figure in figures:
                figure.update_layout(width=PLOT_WIDTH)
            self.plots.children = [go.FigureWidget(figure) for figure in figures]
            return
        for widget, figure in zip(shown, figures, strict=True):
            with widget.batch_update():
                for old, new in zip(widget.data, figure.data, strict=True):
                    old.update(new.to_plotly_json(), overwrite=True)
                widget.layout.update(figure.layout.to_plotly_json(), overwrite=True)
                widget.layout.width = PLOT_WIDTH

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


def _in_place(error: LabError) -> str:
    """A named error laid out: what was wrong, what is allowed, what to do."""
    parts = [f"<b>{type(error).__name__}</b>: {error.what}."]
    if error.allowed:
        parts.append(f"Allowed: {error.allowed}.")
    if error.remedy:
        parts.append(error.remedy)
    style = "border-left:4px solid #D55E00;padding:4px 10px;background:#fff4ec"
    return f'<div role="alert" style="{style}">{"<br>".join(parts)}</div>'


def slider(label: str, values: list[int], value: int, unit: str) -> w.SelectionSlider:
    """A slider over whole numbers spaced as the list is, shown with their unit."""
    values = sorted({*values, value})
    return w.SelectionSlider(
        options=[(f"{v:,} {unit}", v) for v in values], value=value, description=label,
        continuous_update=False, style=LABEL, layout=w.Layout(width="600px"),
    )  # fmt: skip

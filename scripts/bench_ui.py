"""What the notebooks must reach, measured here: `make bench-ui`, a table in Markdown.

Each control of each application in JupyterLab and Chromium: from the keydown event to the last
change of the application on the page, its figures drawn anew; the median of five presses. Then how
soon the main screen answers after Run All, what importing the lab adds to torch, and how long a
notebook takes.
"""

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "browser"))

import nbformat  # noqa: E402

from shadowkv_lab.ui import (  # noqa: E402
    accuracy,
    budget,
    decode,
    glm5,
    kernels,
    latencies,
    notebooks,
    screen,
    serving,
    simulated,
)

KEY_MS, SLOWEST_MS, FIRST_S, IMPORT_S, NOTEBOOK_S = 120, 200, 10, 0.5, 60
PRESSES = 5
POLL_MS = 100  # at each frame, Playwright's own default, asking costs 20 ms
APPLICATIONS = {
    "main screen": screen.screen_view,
    "recorded runs": decode.step_view,
    "kernels": kernels.kernels_view,
    "memory": budget.budget_view,
    "the report": glm5.reproduction_view,
    "loads": serving.load_view,
    "traffic": simulated.traffic_view,
    "waits": latencies.waits_view,
    "outliers": accuracy.outliers_view,
}
NOT_PRESSED = {"live", "log", "strategies", "trace"}  # to measure, to paste or type, and a list

# The page's own clock: Playwright's round trips are no part of what a user waits for.
WATCH = """app => {
  const seen = window.bench = {pressed: 0, last: 0};
  const changed = () => { seen.last = performance.now(); };
  app.addEventListener('keydown', () => { seen.pressed = seen.last = performance.now(); }, true);
  new MutationObserver(changed).observe(
    app, {subtree: true, childList: true, characterData: true, attributes: true});
  app.querySelectorAll('.js-plotly-plot').forEach(plot => plot.on('plotly_afterplot', changed));
}"""
QUIET = """() => performance.now() - window.bench.last > 450
  && ![...document.querySelectorAll('.shadowkv button')].some(
    b => b.innerText === 'Cancel' && b.offsetParent)"""


class Page:
    """One application alone in a notebook in JupyterLab."""

    def __init__(self, lab, browser, folder: Path, view):
        name, called = f"{view.__name__}.ipynb", view.app.__name__
        module = view.function.__module__
        source = f"from {module} import {view.__name__}\n\n{view.__name__}.app()  # {called}"
        _notebook(folder / name, source)
        self.notebook = lab.open(browser, name)
        self.notebook.run_all()
        self.app = self.notebook.app()
        self.app.root.locator(".gtitle").first.wait_for(timeout=120_000)
        self.notebook.page.wait_for_timeout(1000)
        self.app.root.evaluate(WATCH)

    def presses(self, control) -> list[float]:
        """ms of each press of a control, to and fro; empty where it cannot be pressed now."""
        root, page = self.app.root, self.notebook.page
        kind, label = type(control).__name__, control.description
        named = page.locator(f'.widget-label:text-is("{label}")')
        row = root.locator(".widget-inline-hbox").filter(has=named).first
        if kind == "Checkbox":
            row = root.locator(".widget-checkbox", has_text=label).first
        found, there = [], True
        for _ in range(PRESSES):
            keys = {"Dropdown": ("End", "Home"), "Checkbox": ("Space", "Space")}
            key = keys.get(kind, ("ArrowRight", "ArrowLeft"))[not there]
            there = not there
            if kind == "SelectionSlider":
                row.locator(".noUi-handle").first.focus()
            elif kind == "ToggleButtons":
                key, buttons = "Enter", root.locator(".widget-toggle-button")
                buttons.nth(0 if there else 1).focus()
            elif kind in ("FloatText", "IntText"):
                key = "ArrowDown" if there else "ArrowUp"
                row.locator("input").first.focus()
            else:
                row.locator("select, input").first.focus()
            page.wait_for_timeout(250)  # what the focus itself changes
            page.evaluate("window.bench.pressed = 0")
            page.keyboard.press(key)
            page.wait_for_function(QUIET, timeout=60_000, polling=POLL_MS)
            at = page.evaluate("[window.bench.pressed, window.bench.last]")
            if at[0] and at[1] > at[0]:
                found.append(at[1] - at[0])
        root.get_by_role("button", name="Reset", exact=True).click()
        page.wait_for_timeout(250)
        page.wait_for_function(QUIET, timeout=60_000, polling=POLL_MS)
        return found


def _notebook(path: Path, *sources: str) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)


def row(what: str, detail: str, value: float, of: str, limit: str, met: bool | None) -> bool:
    """One row of the table; whether its limit is missed."""
    verdict = {True: "ok", False: "**missed**", None: "worker"}[met]
    print(f"| {what} | {detail} | {value:,.3g} | {of} | {limit} | {verdict} |", flush=True)
    return met is False


def in_browser(names: list[str]) -> int:
    """Every control of the applications, and Run All of the first notebook; how many missed."""
    from lab_server import chromium, served

    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shutil.copy(ROOT / "notebooks" / "01_start_here.ipynb", place)
        with served(place) as lab, chromium() as browser:
            missed += first_answer(lab, browser)
            for name in names:
                missed += _application(lab, browser, place, name, APPLICATIONS[name])
    return missed


def _application(lab, browser, place: Path, name: str, view) -> int:
    page, opened, every, missed = Page(lab, browser, place, view), view.open(), [], 0
    if opened.worker:
        opened.worker.join()
    start = opened.settings
    for control_name, control in opened.controls.items():
        hidden = control.layout.display == "none"
        if control_name in NOT_PRESSED or control.disabled or hidden:
            continue
        if len(getattr(control, "_options_full", (0, 0))) < 2:
            continue
        times = page.presses(control)
        if not times:
            row(name, control.description, math.nan, "0 presses", f"{KEY_MS} ms", False)
            missed += 1
            continue
        first = control_name in ("start", "model", "checkpoint", "card", "gpu", "tensor_parallel")
        slow = view.slow(start) or (first and name in ("main screen", "loads"))
        median = statistics.median(times)
        missed += row(
            name,
            control.description,
            median,
            f"{len(times)}, at most {max(times):,.0f}",
            f"{KEY_MS} ms",
            median < KEY_MS or (None if slow else False),
        )
        every += [] if slow else times
    if every:
        worst = sorted(every)[math.ceil(0.95 * len(every)) - 1]
        of = f"95th percentile of {len(every)}"
        missed += row(name, "all", worst, of, f"{SLOWEST_MS} ms", worst < SLOWEST_MS)
    page.notebook.page.context.close()
    return missed


def first_answer(lab, browser) -> int:
    """Seconds from Run All of the first notebook to a figure that has followed a key press."""
    notebook = lab.open(browser, "01_start_here.ipynb")
    page, app = notebook.page, notebook.app()
    page.wait_for_selector("#jp-main-statusbar >> text=/\\| Idle/", timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    start = time.perf_counter()
    page.get_by_text("Run All Cells", exact=True).click()
    app.root.locator(".gtitle").first.wait_for(timeout=120_000)
    shown = time.perf_counter() - start
    before = app.root.locator(".sk-middle").inner_text()
    app.slider("concurrency").focus()
    page.keyboard.press("ArrowRight")
    while app.root.locator(".sk-middle").inner_text() == before:
        page.wait_for_timeout(20)
    took = time.perf_counter() - start
    page.context.close()
    of = f"shown after {shown:.1f}"
    return row("Run All", "the screen has answered a press, s", took, of, f"{FIRST_S} s", took < 10)


def in_processes(code: str, runs: int = 3) -> float:
    """What a program prints, in the median of clean processes."""
    command = [sys.executable, "-c", code]
    ran = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(runs)]
    return statistics.median(float(r.stdout) for r in ran)


def import_seconds(statement: str) -> float:
    """What a statement takes after torch's import."""
    return in_processes(
        f"import torch, time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    )


def notebook_seconds(name: str) -> float:
    """How long a notebook takes to execute from a clean kernel."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        notebooks.execute(ROOT / "notebooks" / name, Path(folder, name))
        return time.perf_counter() - start


def main() -> int:
    """Print the table; 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=APPLICATIONS, help="an application")
    parser.add_argument("--no-notebooks", action="store_true", help="leave the rest out")
    chosen = parser.parse_args()
    print(f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the start.\n")
    print("| what | control | median | of | limit | |\n|---|---|---|---|---|---|")
    missed = 0
    if not chosen.no_notebooks:
        took = import_seconds("import shadowkv_lab")
        of = "3, after torch"
        missed += row("import", "shadowkv_lab, s", took, of, f"{IMPORT_S} s", took < IMPORT_S)
        for path in sorted((ROOT / "notebooks").glob("0*.ipynb")):
            took = notebook_seconds(path.name)
            limit = f"{NOTEBOOK_S} s"
            missed += row("executes", f"{path.stem}, s", took, "1", limit, took < NOTEBOOK_S)
    if shutil.which("chromium") is None:
        print("\nNo chromium on the PATH: no key press was measured.")
        return 1
    missed += in_browser(chosen.only or list(APPLICATIONS))
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())

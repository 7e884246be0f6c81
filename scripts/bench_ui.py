"""What the notebooks must reach, measured here: `make bench-ui`.

Key press to changed figure in JupyterLab and Chromium: from the keydown event on the slider to
plotly.js' word that it has drawn the bars anew. Then what importing the lab adds to torch, and how
long 02_glm5_report takes.
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "browser"))

from shadowkv_lab.ui import notebooks  # noqa: E402

KEY_MS, IMPORT_S, NOTEBOOK_S, VIEW_MS = 120, 0.5, 60, 60
CONCURRENCIES = 8  # positions of the concurrency slider

# The page's own clock: Playwright's round trips are no part of what a user waits for. A press
# counts where it leads to another recorded run, so that the bars are others.
WATCH = """app => {
  window.presses = [];
  let pressed = null;
  app.addEventListener('keydown', () => { pressed = performance.now(); }, true);
  app.querySelectorAll('.js-plotly-plot').forEach((plot, number) => {
    plot.on('plotly_afterplot', () => {
      const after = performance.now() - pressed;
      if (number === 0) window.presses.push([after]);
      else if (window.presses.length) window.presses.at(-1).push(after);
    });
  });
}"""


def key_presses() -> tuple[list[list[float]], list[list[float]]]:
    """Milliseconds from key press to each changed figure: at new settings, and at seen ones.

    The concurrency slider goes to and fro, at one pool after another; then all the way back.
    """
    from lab_server import chromium, served

    with tempfile.TemporaryDirectory() as folder:
        _notebook(Path(folder, "bench.ipynb"))
        with served(Path(folder)) as lab, chromium() as browser:
            notebook = lab.open(browser, "bench.ipynb")
            notebook.run_all()
            app, page = notebook.app(), notebook.page
            app.root.locator(".gtitle").first.wait_for()
            app.root.evaluate(WATCH)
            there, back = "ArrowRight", "ArrowLeft"
            found = []
            for pool_key in (back, there):
                page.evaluate("window.presses.length = 0")
                for _ in range(3):
                    _press(app, "concurrency", there, CONCURRENCIES - 1)
                    _press(app, "pool size", pool_key, 5)
                    there, back = back, there
                found.append(page.evaluate("window.presses"))
            return tuple(found)


def _press(app, label: str, key: str, times: int) -> None:
    app.slider(label).focus()
    for _ in range(times):
        app.page.keyboard.press(key)
        app.page.wait_for_timeout(350)


def _notebook(path: Path) -> None:
    import nbformat

    source = "from shadowkv_lab import explorer\n\nexplorer()"
    cells = [nbformat.v4.new_code_cell(source)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)


def import_seconds(statement: str, runs: int = 3) -> float:
    """What a statement takes after torch's import, in the median of clean processes."""
    code = (
        f"import torch, time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    )
    ran = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(runs)
    ]
    return statistics.median(float(r.stdout) for r in ran)


def first_view_ms(runs: int = 5) -> float:
    """The first view of recorded runs after a warm import, in the median of clean processes."""
    code = (
        "import time; from shadowkv_lab.ui import decode; t = time.perf_counter(); "
        "view = decode.step_view(); [figure for figure in view.figures]; "
        "print(1000 * (time.perf_counter() - t))"
    )
    ran = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(runs)
    ]
    return statistics.median(float(r.stdout) for r in ran)


def notebook_seconds(name: str = "02_glm5_report.ipynb") -> float:
    """How long a notebook takes to execute from a clean kernel."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        notebooks.execute(ROOT / "notebooks" / name, Path(folder, name))
        return time.perf_counter() - start


def main() -> int:
    """Print each figure beside its bound; 1 if one is missed."""
    missed = []

    def row(what: str, value: float, bound: float, unit: str, note: str = "") -> None:
        missed.extend([what] if value >= bound else [])
        verdict = "missed" if value >= bound else "ok"
        print(f"{what:<34} {value:9.3g} {unit:<3} under {bound:g} {unit:<3} {verdict}  {note}")

    apps = import_seconds("from shadowkv_lab import explorer")
    note = f"with the explorer, plotly and ipywidgets {apps:.2f} s"
    row(
        "import shadowkv_lab, after torch",
        import_seconds("import shadowkv_lab"),
        IMPORT_S,
        "s",
        note,
    )
    row("first view of recorded runs", first_view_ms(), VIEW_MS, "ms", "recorded runs read anew")
    row("02_glm5_report executes in", notebook_seconds(), NOTEBOOK_S, "s")
    if shutil.which("chromium") is None:
        print("key press to changed figure: no chromium on the PATH, not measured")
        return 1
    first, again = key_presses()
    for what, found in (
        ("key press to figure, new setting", first),
        ("key press to figure, seen before", again),
    ):
        times, last = [t[0] for t in found], [t[-1] for t in found]
        worst = sorted(times)[int(0.9 * len(times))]
        row(
            what,
            statistics.median(times),
            KEY_MS,
            "ms",
            f"median of {len(times)}; p90 "
            f"{worst:.0f} ms; all figures {statistics.median(last):.0f} ms",
        )
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())

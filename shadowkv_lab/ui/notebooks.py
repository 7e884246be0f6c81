"""Notebooks executed from a clean kernel, and stripped of what must not be shared."""

import ast
import os
import re
import subprocess
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from shadowkv_lab.errors import BadFile, CannotRun, OutOfRange, UnknownName
from shadowkv_lab.files import parse, read_text, ready, write
from shadowkv_lab.ui.display import SERVED

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
TIMEOUT_S = 900
PARAMETERS, INJECTED, LIVE = "parameters", "injected-parameters", "live-run"
FOOTER = "from shadowkv_lab.ui import provenance\n\nprovenance.footer()"


def read(path: str | Path) -> nbformat.NotebookNode:
    """A notebook; raises `BadFile` for a file that is none."""
    text = read_text(path)
    parse(text or " ", dict, str(path), unique=False)
    try:
        notebook = nbformat.reads(text, 4)
        nbformat.validate(notebook)
    except Exception as error:  # nbformat's own kinds, and whatever its upgrade of old ones meets
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise BadFile(f"Cannot read {path}: {why}", "an .ipynb file, format 4") from None
    return notebook


def execute(
    source: str | Path,
    target: str | Path | None = None,
    parameters: dict | None = None,
    folder: str | Path | None = None,
) -> Path:
    """Run a notebook from a clean kernel in its own folder, or another, and write it back, or to
    `target`.

    `parameters` replace those of the cell tagged `parameters`, as papermill does. With LIVE=1 in
    the environment a parameter `live` is set, so that what can be measured here is; the next run
    without it drops that again. A provenance footer is added where none ends the notebook.
    Raises `UnknownName` for a parameter that the notebook does not have, `OutOfRange` for a value
    of another kind than the one it has, `CannotWrite` before anything runs, and `CannotRun`
    with the error of a cell that raised; then nothing is written.
    """
    source = Path(source)
    notebook = prepared(read(source), parameters or {})
    target = ready(target or source)
    place = {"metadata": {"path": str(folder or source.resolve().parent)}}
    kernels = {name: value for name, value in os.environ.items() if name != SERVED}
    # One output for what a cell prints, in however many messages it comes.
    options = dict(record_timing=False, coalesce_streams=True)
    client = NotebookClient(notebook, timeout=TIMEOUT_S, resources=place, **options)
    try:
        # This stderr is the kernel's own; cells have another.
        client.execute(env=kernels, stderr=subprocess.DEVNULL)
    except Exception as error:
        if getattr(client, "_async_cleanup_kernel_future", None):  # nbclient's answer to a signal
            raise KeyboardInterrupt from None
        raise CannotRun(
            f"{source.name} did not run: {_plain(error)}",
            remedy="Run its cells one by one in JupyterLab to see where",
        ) from error
    return write(target, nbformat.writes(stripped(notebook)).rstrip() + "\n")


def _plain(error: Exception) -> str:
    """The last line of an error, without a terminal's colours."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def declared(notebook: nbformat.NotebookNode) -> dict[str, object]:
    """Names that the cell tagged `parameters` assigns, with their values; None if computed."""
    found: dict[str, object] = {}
    for cell in notebook.cells:
        if PARAMETERS not in cell.metadata.get("tags", ()):
            continue
        try:
            lines = ast.parse(cell.source).body
        except SyntaxError as error:
            raise BadFile(
                f"The cell tagged {PARAMETERS} cannot be read ({error.msg})",
                "plain Python assignments",
            ) from None
        for line in lines:
            names = line.targets if isinstance(line, ast.Assign) else []
            names = [line.target] if isinstance(line, ast.AnnAssign) else names
            for name in names:
                if isinstance(name, ast.Name):
                    constant = isinstance(line.value, ast.Constant)
                    found[name.id] = line.value.value if constant else None
    return found


def _require_kind(name: str, value: object, default: object) -> None:
    """A flag for a flag, a number for a number, text for text; None stands for all of them."""
    kinds = {bool: "True or False", str: "text", int: "a number", float: "a number"}
    same = {int: (int, float), float: (int, float)}.get(type(default), type(default))
    if value is None or type(default) not in kinds:
        return
    if not isinstance(value, same) or isinstance(value, bool) != isinstance(default, bool):
        raise OutOfRange(
            f"Parameter {name} = {value!r}", f"{kinds[type(default)]}, such as {default!r}"
        )


def prepared(notebook: nbformat.NotebookNode, parameters: dict) -> nbformat.NotebookNode:
    """A notebook ready to run: parameters injected, LIVE=1 heeded, a footer at its end."""
    known = declared(notebook)
    for name in parameters:
        if name not in known:
            raise UnknownName("parameter", name, known)
        _require_kind(name, parameters[name], known[name])
    notebook.cells = [c for c in notebook.cells if LIVE not in c.metadata.get("tags", ())]
    live = os.environ.get("LIVE") == "1" and "live" in known and "live" not in parameters
    if parameters or live:
        tags = [INJECTED, LIVE] if live and not parameters else [INJECTED]
        _inject(notebook, parameters | ({"live": True} if live else {}), tags)
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    if not code or "provenance.footer()" not in code[-1].source:
        notebook.cells.append(nbformat.v4.new_code_cell(FOOTER, id="provenance-footer"))
    return notebook


def _inject(notebook: nbformat.NotebookNode, values: dict, tags: list[str]) -> None:
    """Put a cell that assigns `values` after the one tagged `parameters`, in place of an older."""
    lines = ["# Parameters", *(f"{name} = {value!r}" for name, value in values.items())]
    cell = nbformat.v4.new_code_cell("\n".join(lines), id=INJECTED, metadata={"tags": tags})
    cells = [c for c in notebook.cells if INJECTED not in c.metadata.get("tags", ())]
    after = [i for i, c in enumerate(cells, 1) if PARAMETERS in c.metadata.get("tags", ())]
    notebook.cells = [*cells[: after[0]], cell, *cells[after[0] :]]


def stripped(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A notebook without widget state and views: 5 MB of plotly.js a figure, and "model not
    found" for a reader without a kernel. The static figure behind each widget stays."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata.pop("papermill", None)
    for cell in notebook.cells:
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if WIDGET_VIEW not in o.get("data", {})]
    return notebook


def pre_save(model: dict, **_) -> None:
    """Jupyter's hook before a save: drop widget views whose state is not saved with them.

    JupyterLab saves the view of a widget without its state, and whoever opens that reads "model
    not found". The figure below the widget is what is to be seen.
    """
    if model.get("type") != "notebook" or not model.get("content"):
        return
    notebook = model["content"]
    state = notebook.get("metadata", {}).get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    for cell in notebook.get("cells", ()):
        if "outputs" in cell:
            views = [o.get("data", {}).get(WIDGET_VIEW, {}) for o in cell["outputs"]]
            cell["outputs"] = [
                o
                for o, view in zip(cell["outputs"], views, strict=True)
                if not view or view.get("model_id") in state
            ]

"""Notebooks executed from a clean kernel, and stripped of what must not be shared."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

from shadowkv_lab.errors import LabError

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
TIMEOUT_S = 900


class NotebookFailed(LabError):
    """A notebook with a cell that raised."""


def execute(source: str | Path, target: str | Path | None = None,
            parameters: dict | None = None) -> Path:  # fmt: skip
    """Run a notebook in its own folder and write it back, or to `target`.

    `parameters` replace those of the cell tagged `parameters`, as papermill does. Raises
    `NotebookFailed` with the cell's error; then nothing is written.
    """
    source = Path(source)
    target = Path(target) if target else source
    notebook = nbformat.read(source, 4)
    if parameters:
        from papermill.parameterize import parameterize_notebook

        notebook = parameterize_notebook(notebook, parameters, report_mode=False)
    folder = str(source.resolve().parent)
    client = NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": folder}},
                            record_timing=False)  # fmt: skip
    try:
        client.execute()
    except Exception as error:
        raise NotebookFailed(
            f"{source.name} did not run: {str(error).strip().splitlines()[-1]}",
            remedy="Run its cells one by one in JupyterLab to see where",
        ) from error
    nbformat.write(stripped(notebook), target)
    return target


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

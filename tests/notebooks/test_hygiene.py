"""What is committed under notebooks/ can be sent to anybody as it is."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from shadowkv_lab.ui.display import PLOTLY
from shadowkv_lab.ui.notebooks import WIDGET_VIEW

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_LINES, MOST_BYTES = 25, 1_000_000
A_PATH = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|Users|mnt|opt|usr)/[\w.]|[A-Z]:\\\\Users")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return json.loads(path.read_text())


def outputs(notebook):
    for cell in notebook["cells"]:
        yield from cell.get("outputs", ())


def text(source):
    return source if isinstance(source, str) else "".join(source)


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 3


def test_no_widget_state_and_no_widget_view(notebook):
    assert "widgets" not in notebook["metadata"]
    assert not [o for o in outputs(notebook) if WIDGET_VIEW in o.get("data", {})]


def test_every_figure_has_a_picture_and_no_html(notebook):
    for output in outputs(notebook):
        found = output.get("data", {})
        if PLOTLY in found:
            assert "image/png" in found and "text/html" not in found
        assert "plotly" not in text(found.get("text/html", "")).lower()


def test_executed_in_order_without_an_error(notebook):
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1))
    assert not [o for o in outputs(notebook) if o["output_type"] == "error"]
    assert not [o for o in outputs(notebook) if o.get("name") == "stderr"]


def test_no_absolute_path(notebook):
    for cell in notebook["cells"]:
        for found in (text(cell["source"]), json.dumps(cell.get("outputs", []))):
            pictures_out = re.sub(r'"image/png": "[^"]*"', "", found)
            assert not A_PATH.search(pictures_out), A_PATH.search(pictures_out)


def test_small(path):
    assert path.stat().st_size < MOST_BYTES


def test_cells_are_thin(notebook):
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert len(text(cell["source"]).splitlines()) <= MOST_LINES, text(cell["source"])[:80]


def test_parameters_first_and_provenance_last(notebook):
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert code[0]["metadata"].get("tags") == ["parameters"]
    assert text(code[-1]["source"]).rstrip().endswith("provenance.footer()")


def test_no_cell_injected_by_an_earlier_run(notebook):
    assert not [c for c in notebook["cells"] if "injected" in str(c["metadata"].get("tags"))]


def test_each_widget_is_followed_by_a_figure(notebook):
    """A reader without a kernel sees the result: a cell that shows an app has figures after it."""
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    shown = re.compile(r"^(?:\w+\.)?(explorer|screen|\w*app|loads|traffics)\(.*\)$", re.M)
    for cell, after in pairwise(code):
        if shown.search(text(cell["source"])):
            assert [o for o in after["outputs"] if PLOTLY in o.get("data", {})], cell["source"]


def test_the_index_names_every_notebook():
    index = (ROOT / "notebooks" / "README.md").read_text()
    for path in NOTEBOOKS:
        assert path.name in index

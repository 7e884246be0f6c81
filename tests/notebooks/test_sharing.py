"""How figures reach a notebook, and how notebooks are run with other parameters and saved."""

import io
import os
import subprocess
import sys
import warnings

import nbformat
import plotly.graph_objects as go
import pytest
from PIL import Image
from typer.testing import CliRunner

from shadowkv_lab.cli import app, main
from shadowkv_lab.errors import BadFile, CannotRun, CannotWrite, OutOfRange, UnknownName
from shadowkv_lab.ui import display, export, notebooks


@pytest.fixture
def shown(monkeypatch):
    """MIME bundles that `show` displays."""
    bundles = []
    monkeypatch.setattr(display, "display", lambda bundle, raw: bundles.append(bundle))
    return bundles


def notebook(*sources, tags=("parameters",)):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = list(tags)
    return nbformat.v4.new_notebook(cells=cells)


def test_without_a_chromium_json_alone_and_one_warning(shown, monkeypatch):
    def broken(**_):
        raise RuntimeError("no browser")

    monkeypatch.setattr("kaleido.start_sync_server", broken)
    display._browser.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no Chromium") as heard:
            for _ in range(3):
                display.show(go.Figure(go.Bar(x=[1], y=[2])))
        assert len(heard) == 1
        assert [set(b) for b in shown] == [{display.PLOTLY, "text/plain"}] * 3
    finally:
        display._browser.cache_clear()


def test_a_browser_that_is_found_and_does_not_start_is_no_trap():
    """In a process of its own: kaleido keeps its browser's path."""
    code = (
        "import plotly.graph_objects as go\nfrom shadowkv_lab.ui import display\n"
        "display.display = lambda bundle, raw: print(sorted(bundle))\n"
        "for _ in range(2): display.show(go.Figure())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"BROWSER_PATH": "/bin/false"},
    )
    assert ended.returncode == 0
    assert ended.stdout == f"{sorted([display.PLOTLY, 'text/plain'])}\n" * 2
    assert ended.stderr.count("no Chromium could be started") == 1
    assert "Traceback" not in ended.stderr


def test_many_figures_start_the_browser_once(shown, monkeypatch):
    started, picture = [], io.BytesIO()
    Image.new("RGB", (2, 2)).save(picture, "png")
    monkeypatch.setattr("kaleido.start_sync_server", lambda **_: started.append(1))
    monkeypatch.setattr(go.Figure, "to_image", lambda self, kind: picture.getvalue())
    display._browser.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(5):
                display.show(go.Figure(go.Bar(x=[1], y=[2])))
    finally:
        display._browser.cache_clear()
    assert len(started) == 1
    assert [set(b) for b in shown] == [{display.PLOTLY, "image/png", "text/plain"}] * 5


def test_parameters_are_checked_and_injected():
    book = notebook("pool_tokens = 1\nlive = False", "print(pool_tokens)")
    with pytest.raises(UnknownName, match="Did you mean 'pool_tokens'"):
        notebooks.prepared(book, {"pool_token": 2})
    ready = notebooks.prepared(book, {"pool_tokens": 2})
    assert "pool_tokens = 2" in ready.cells[1].source
    assert ready.cells[-1].source.endswith("provenance.footer()")


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"live": "false"}, "True or False"),
        ({"live": 1}, "True or False"),
        ({"pool_tokens": "32k"}, "a number, such as 1"),
        ({"pool_tokens": True}, "a number"),
        ({"gpu": 5}, "text, such as 'h200'"),
    ],
)
def test_a_parameter_of_another_kind_is_refused(wrong, words):
    book = notebook("pool_tokens = 1\nlive: bool = False\ngpu = 'h200'\ncomputed = 2 * 3")
    with pytest.raises(OutOfRange, match=words):
        notebooks.prepared(book, wrong)
    notebooks.prepared(book, {"pool_tokens": 2.5, "live": True, "gpu": None, "computed": "x"})
    with pytest.raises(BadFile, match="plain Python"):
        notebooks.prepared(notebook("%matplotlib inline"), {})


def test_where_nothing_can_be_written_nothing_is_run(tmp_path):
    source, ran = tmp_path / "n.ipynb", tmp_path / "ran"
    nbformat.write(notebook("x = 1", f"open({str(ran)!r}, 'w')"), source)
    (tmp_path / "file").write_text("")
    for target in (tmp_path, tmp_path / "file" / "o.ipynb"):
        with pytest.raises(CannotWrite):
            notebooks.execute(source, target)
        with pytest.raises(CannotWrite):
            export.export(executed(tmp_path), target)
    assert not ran.exists()
    assert notebooks.execute(source, tmp_path / "new" / "o.ipynb").exists() and ran.exists()


def executed(folder):
    """A notebook with an output, in brackets that are no mark-up."""
    book = notebook("x = 1")
    book.cells[0].execution_count = 1
    nbformat.write(book, folder / "[red]o.ipynb")
    return folder / "[red]o.ipynb"


def test_brackets_in_names_and_messages_are_no_mark_up(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, ["export", str(executed(tmp_path))])
    assert "out/[red]o.html" in ran.output and (tmp_path / "out/[red]o.html").exists()
    monkeypatch.setattr(sys, "argv", ["shadowkv", "export", "a[/b].ipynb"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "a[/b].ipynb" in capsys.readouterr().err


def test_live_is_for_one_run(monkeypatch):
    monkeypatch.setenv("LIVE", "1")
    book = notebook("live = False", "provenance.footer()")
    ready = notebooks.prepared(book, {})
    assert "live = True" in ready.cells[1].source and len(ready.cells) == 3
    monkeypatch.delenv("LIVE")
    assert [c.source for c in notebooks.prepared(ready, {}).cells] == [
        "live = False",
        "provenance.footer()",
    ]


def test_a_failing_cell_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "n.ipynb"
    nbformat.write(notebook("x = 1", "raise ValueError('broken [/b] here')"), path)
    before = path.read_bytes()
    with pytest.raises(CannotRun, match=r"ValueError: broken \[/b\] here"):
        notebooks.execute(path)
    assert path.read_bytes() == before


def test_saving_drops_views_without_state_and_keeps_those_with():
    def view(model):
        return {"output_type": "display_data", "data": {notebooks.WIDGET_VIEW: {"model_id": model}}}

    state = {"widgets": {notebooks.WIDGET_STATE: {"state": {"kept": {}}}}}
    text = {"output_type": "stream", "name": "stdout", "text": "x"}
    content = {"metadata": state, "cells": [{"outputs": [view("kept"), view("lost"), text]}]}
    notebooks.pre_save({"type": "notebook", "content": content})
    assert content["cells"][0]["outputs"] == [view("kept"), text]
    notebooks.pre_save({"type": "file", "content": "text"})


def test_flags_on_the_command_line_are_read_as_flags(tmp_path):
    nbformat.write(notebook("live = True", "print(live is False)"), tmp_path / "n.ipynb")
    ran = CliRunner().invoke(
        app, ["run-notebook", str(tmp_path / "n.ipynb"), "-p", "live", "false"]
    )
    assert ran.exit_code == 0, ran.output
    assert nbformat.read(tmp_path / "n.ipynb", 4).cells[2].outputs[0].text == "True\n"


@pytest.mark.parametrize("option", [["-p", "n", "32"], ["-p", "n=32"]])
def test_run_notebook_on_the_command_line(tmp_path, option):
    """papermill's two words, and one; a value as Python reads it; the footer stamped."""
    nbformat.write(notebook("n = 1", "print(n + 1)"), tmp_path / "n.ipynb")
    out = tmp_path / "out.ipynb"
    ran = CliRunner().invoke(
        app, ["run-notebook", str(tmp_path / "n.ipynb"), *option, "-o", str(out)]
    )
    assert ran.exit_code == 0, ran.output
    cells = nbformat.read(out, 4).cells
    assert cells[2].outputs[0].text == "33\n"
    assert "executed on" in cells[-1].outputs[0].data["text/plain"]

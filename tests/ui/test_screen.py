"""The main screen: it answers at every setting, and its parts agree with one another."""

import html
import itertools
import json
import re

import numpy as np
import pytest

from shadowkv_lab import facts
from shadowkv_lab.deployment import deployment, published_deployment
from shadowkv_lab.errors import CannotRun
from shadowkv_lab.load import Load
from shadowkv_lab.server.launch import launch_line
from shadowkv_lab.steps.answer import anchored, answers
from shadowkv_lab.steps.grid import CONTEXTS, REQUESTS, grid
from shadowkv_lab.strategies import parse
from shadowkv_lab.ui import screen as module
from shadowkv_lab.ui.screen import screen_view


@pytest.fixture
def app():
    opened = screen_view.open()
    settle(opened)
    return opened


def settle(app):
    if app.worker:
        app.worker.join(60)


def shown(app):
    """All that a user sees beside the controls themselves."""
    figures = [[t.to_plotly_json() for t in plot.data] for plot in app.plots.children]
    layouts = [plot.layout.to_plotly_json() for plot in app.plots.children]
    beside = [label.value for label in app.beside.values()]
    return repr((app.note.value, app.rows.value, figures, layouts, beside, app.error.value))


def values(control):
    return [value for _, value in control._options_full]


SLIDERS = ("pool_tokens", "concurrency", "context", "along")


def press(app, name, value):
    app.controls[name].value = value
    settle(app)
    assert not app.error.value, (name, value, app.error.value)


def test_the_grid_says_what_each_answer_says():
    """A grid is interpolated between predictions; the answers are made one by one."""
    for at in (published_deployment(), deployment("deepseek-r1", "h200", quantisation="fp8")):
        rest, made = anchored("case", at), grid(at)
        loads = itertools.product((1, 3, 24, 200), (700, 1024, 12_000, 131_072), (None, 90_000))
        for R, n, limit in loads:
            for a in answers(at, Load(R, n), rest, pool_tokens=limit):
                if not a.runs:
                    continue
                rows = min(at.rows(parse(a.strategy.label)), limit or 1 << 40)
                rows = rows // at.page_size * at.page_size
                rate, running = made.tokens_per_s(a.strategy.label, rows, rest, R, n, a.cut)
                assert int(running) == a.running
                assert float(rate) == pytest.approx(a.tokens_per_s, rel=0.015), (R, n, a)


def test_the_start_is_the_report_and_says_which_how_fast_and_why(app):
    said = html.unescape(re.sub(r"<[^>]+>", "", app.note.value))
    assert "BF16 pool: 32.3 tok/s, 3.1 x full cast's 10.5" in said
    assert "64.6 of full cast's 95.6 ms" in said
    assert "--kv-cache-dtype bfloat16" in said and "273,280 tokens" in said
    assert "74.1" in said and app.settings["start"] == module.REPORT
    notes = [note.text for note in app.plots.children[0].layout.annotations]
    assert any("13.5" in note for note in notes) and any("10.5" in note for note in notes)


@pytest.mark.parametrize("start", list(module.SERVERS))
def test_every_position_of_every_slider_changes_something(start):
    app = screen_view.open(start=start)
    settle(app)
    for name in SLIDERS:
        before = None
        for value in values(app.controls[name]):
            press(app, name, value)
            now = shown(app)
            assert now != before, (start, name, value)
            before = now


@pytest.mark.parametrize("name", ["start", "model", "card", "tensor_parallel"])
def test_every_choice_answers_or_says_why_not(name):
    app = screen_view.open()
    settle(app)
    first = app.controls[name].value
    choices = [v for v in values(app.controls[name]) if v != first]
    seen = {shown(app)}
    for value in choices:
        press(app, name, value)
        seen.add(shown(app))
        assert re.search("tok/s|No answer here|No strategy runs", app.note.value)
        assert app.settings[name] == value
        for kind in values(app.controls["checkpoint"]):
            press(app, "checkpoint", kind)
        for slider in SLIDERS:
            positions = values(app.controls[slider])
            press(app, slider, positions[0])
            press(app, slider, positions[-1])
    assert len(seen) >= len(choices), "starts may show the same server; nothing else may"


def test_what_is_typed_of_the_memory_is_yours_until_the_server_changes(app):
    kept = app.view.table.set_index("strategy").tokens["full cast"]
    press(app, "weights_gib", 65.0)
    assert "yours" in app.beside["weights_gib"].value
    assert app.view.table.set_index("strategy").tokens["full cast"] < kept
    press(app, "weights_gib", 0.0)
    assert app.controls["weights_gib"].value == 61.0, "0 derives it again"
    press(app, "kv_gib", 10.0)
    assert "yours" in app.beside["kv_gib"].value
    press(app, "card", "h200")
    assert "yours" not in app.beside["kv_gib"].value and app.settings["kv_gib"] > 30


def test_a_model_that_does_not_fit_is_an_answer(app):
    press(app, "tensor_parallel", 1)
    assert "No answer here" in app.note.value and "weights" in app.note.value
    press(app, "tensor_parallel", 8)
    assert "tok/s" in app.note.value


def test_my_own_tpot_comes_out_again():
    settings = dict(rest="mine", tpot_ms=60.0, tpot_of="bf16_pool", concurrency=1, context=1024)
    table = screen_view(**settings).table.set_index("strategy")
    assert table.tpot_ms["BF16 pool"] == pytest.approx(60.0)
    assert "No answer here" in screen_view(**settings | {"tpot_ms": 0.5}).note


def test_a_pasted_log_is_the_server(monkeypatch):
    from pathlib import Path

    text = Path(__file__).parents[1] / "server/cases/log-01-dsv32-packed.log"
    app = screen_view.open()
    settle(app)
    press(app, "log", text.read_text())
    assert app.settings["start"] == "log" and app.settings["model"] == "deepseek-v3.2"
    press(app, "start", module.REPORT)
    assert app.settings["model"] == "glm-5"
    app.controls["log"].value = "no log at all"
    settle(app)
    assert "BadFile" in app.error.value or "No answer" in app.note.value


def test_launch_lines_are_of_what_can_be_launched():
    at = published_deployment()
    line = launch_line("shadow", at)
    assert line.startswith("SHADOWKV_STRATEGY=shadow ") and "--attention-backend flashinfer" in line
    assert f"--max-total-tokens {at.rows(parse('shadow'))}" in line, "SGLang does not count a copy"
    assert "--dsa-decode-backend trtllm" in line, "else rows are packed"
    assert "SHADOWKV" not in launch_line("full_cast", at, 4096)
    assert launch_line("full_cast", at, 4096).endswith("--max-total-tokens 4096")
    with pytest.raises(CannotRun, match=r"SGLang 0\.5\.23"):
        launch_line("native_fp8", at)
    with pytest.raises(CannotRun, match="DP attention"):
        launch_line("fused_fp8", deployment("deepseek-r1", "h200", data_parallel=8))


def test_the_map_and_the_curve_agree_with_the_answer(app):
    for R, n in ((1, 1024), (64, 2048), (8, 65_536)):
        press(app, "concurrency", R)
        press(app, "context", n)
        cells = app.plots.children[1].data[0]
        column = module.CONCURRENCIES.index(R)
        told = cells.customdata[CONTEXTS.index(n)][column]
        best = re.search(r"sk-big>([^:<]+)", app.said.value)[1]
        assert told.split(",")[0].split(" (")[0] == html.unescape(best).split(",")[0].split(" (")[0]


def test_what_is_measured_here_is_said(monkeypatch, tmp_path):
    """Of a config.json of one's own with two layers, so that a CPU takes seconds."""
    config = dict(facts.find("models", "model", "glm-5")["config"], num_hidden_layers=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(module, "HERE", [])
    monkeypatch.setattr(module.reproduce, "CPU_POOL_TOKENS", 512)
    app = screen_view.open(model=str(tmp_path / "config.json"), weights_gib=1.0, context=131_072)
    settle(app)
    app.measure_here().join(120)
    settle(app)
    assert not app.error.value
    told = html.unescape(app.note.value)
    assert "Measured here" in told and "1 x 512" in told, "as much of the load as fits"
    assert [step.strategy.name for step in module.HERE] == list(module.MEASURED)
    assert f"{module.HERE[0].ms:,.1f} ms" in told


def test_an_update_is_quick(app):
    import time

    took = []
    for value in (1, 8, 64, 2, 16, 128):
        start = time.process_time()
        press(app, "concurrency", value)
        took.append(1000 * (time.process_time() - start))
    assert np.median(took) < 3 * 60, took
    assert REQUESTS[-1] == 256


def test_what_a_server_showed_is_said_beside_the_prediction():
    """On the H200 server a BF16 pool was faster at 8 x 2,048 than the kernel that is predicted."""
    view = screen_view(start="h200-server", concurrency=8, context=2048)
    rates = {"BF16 pool": 8000 / 7.2, "fused FP8 (this lab)": 8000 / 7.6, "full cast": 8000 / 72.3}
    for rate in rates.values():
        assert f"seen {rate:,.1f} tok/s" in view.rows
    assert "On a server</b> BF16 pool was the fastest: 1,111.1 tok/s" in view.note
    assert "seen" not in screen_view(start="h200-server", concurrency=4, context=2048).rows

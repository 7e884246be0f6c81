"""The main screen: it answers at every setting, and its parts agree with one another."""

import html
import itertools
import json
import re
import threading
import time

import numpy as np
import pytest

from shadowkv_lab import facts
from shadowkv_lab.deployment import deployment, published_deployment
from shadowkv_lab.errors import CannotRun
from shadowkv_lab.load import Load
from shadowkv_lab.server.launch import launch_line
from shadowkv_lab.steps.answer import anchored, answers
from shadowkv_lab.steps.grid import CONTEXTS, REQUESTS, grid
from shadowkv_lab.steps.predict import predict
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
    figures = [plot.spec for plot in app.plots.children]
    beside = [label.value for label in app.beside.values()]
    return repr((app.answer.value, figures, beside, app.error.value))


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
    said = html.unescape(re.sub(r"<[^>]+>", "", app.answer.value))
    assert "BF16 pool: 32.3 tok/s, 3.1 x full cast's 10.5" in said
    assert "64.6 of full cast's 95.6 ms" in said
    assert "--kv-cache-dtype bfloat16" in said and "273,280 tokens" in said
    assert "74.1" in said and app.settings["start"] == module.REPORT
    notes = [note.text for note in app.plots.children[0].figure.layout.annotations]
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
        assert re.search("tok/s|No answer here|No strategy runs", app.answer.value)
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
    assert "No answer here" in app.answer.value and "weights" in app.answer.value
    press(app, "tensor_parallel", 8)
    assert "tok/s" in app.answer.value


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
    assert "BadFile" in app.error.value or "No answer" in app.answer.value


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
        cells = app.plots.children[1].figure.data[0]
        column = module.CONCURRENCIES.index(R)
        told = cells.customdata[CONTEXTS.index(n)][column]
        best = re.search(r"sk-big>([^:<]+)", app.answer.value)[1]
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
    told = html.unescape(app.answer.value)
    assert "Measured here" in told and "1 x 512" in told, "as much of the load as fits"
    assert [step.strategy.name for step in module.HERE] == list(module.MEASURED)
    assert f"{module.HERE[0].ms:,.1f} ms" in told


def test_measuring_here_can_be_cancelled_and_the_answer_stays(app, monkeypatch):
    started = threading.Event()

    def endless(at, load, report, cancelled):
        report("a step", 0.5)
        started.set()
        while not cancelled():
            time.sleep(0.01)
        raise module.measuring.Cancelled

    monkeypatch.setattr(module, "HERE", [])
    monkeypatch.setattr(module, "measured_here", endless)
    before, worker = app.answer.value, app.measure_here()
    assert started.wait(10) and app.cancel.layout.display == "" and app.measure.disabled
    press(app, "concurrency", 8)
    assert app.answer.value != before, "the sliders answer meanwhile"
    assert app.cancel.layout.display == ""
    app.cancel.click()
    worker.join(10)
    settle(app)
    assert "cancelled" in app.status.value and module.HERE == []
    assert app.cancel.layout.display == "none" and not app.measure.disabled


def test_the_last_answer_is_grey_while_another_is_made(app, monkeypatch):
    going, done = threading.Event(), threading.Event()
    made = module.grid

    def slow(*args, **more):
        going.set()
        done.wait(10)
        return made(*args, **more)

    monkeypatch.setattr(module, "grid", slow)
    monkeypatch.setattr(module, "ready", lambda *at: False)
    app.controls["card"].value = "h200"
    assert going.wait(10)
    assert all("shadowkv-stale" in part._dom_classes for part in (app.answer, app.plots))
    assert app.cancel.layout.display == ""
    done.set()
    settle(app)
    assert (
        "shadowkv-stale" not in app.answer._dom_classes and "H200" in app.settings["card"].upper()
    )


def test_tokens_of_a_step_that_are_accepted_multiply_what_a_step_gives(app):
    """The step by hand: the strategy's own at two tokens, and the rest of two requests."""
    at = published_deployment()
    rest = anchored("glm5-report", at)
    step = predict("full_cast", at, Load(1, 1024, 2)).ms
    assert app.controls["accepted"].layout.display == "none"
    press(app, "tokens_per_step", 2)
    assert app.controls["accepted"].layout.display == "" and not app.controls["accepted"].disabled
    for accepted in (1.0, 1.5, 2.0):
        press(app, "accepted", accepted)
        table = app.view.table.set_index("strategy")
        rate = 1000 * accepted / (step + rest(2))
        assert table.tokens_per_s["full cast"] == pytest.approx(rate, rel=1e-6)
        assert table.tpot_ms["full cast"] == pytest.approx(1000 / rate, rel=1e-6)
        line = app.plots.children[0].figure.data[0]
        assert line.y[-1] == pytest.approx(rate, rel=0.015), "the curve's end is the answer"
    assert "ms/step" in app.answer.value and "--speculative-num-draft-tokens 2" in app.answer.value
    rings = [t for t in app.plots.children[0].figure.data if t.name == "published or recorded"]
    assert not rings[0].x, "what was seen was seen without MTP"
    press(app, "model", "kimi-k2")
    assert app.settings["tokens_per_step"] == 1 and app.controls["tokens_per_step"].disabled
    assert "no MTP layer" in app.beside["tokens_per_step"].value


@pytest.mark.parametrize(
    "settings, kernel",
    [
        (dict(model="glm-5", card="h200", tensor_parallel=4), "recorded attention"),
        (dict(model="deepseek-v3.2", card="h200"), "recorded attention"),
        (dict(model="deepseek-r1", card="b200"), "published attention"),
    ],
)
def test_rings_of_other_cards_models_and_heads_are_their_own(settings, kernel):
    """Each ring lies on a line of its strategy: of a time that the prediction rests on."""
    view = screen_view(start="own", along="context", **settings)
    curve = view.figures[0]
    (rings,) = [t for t in curve.data if t.name == "published or recorded"]
    assert rings.x and all(kernel in said for said in rings.customdata)
    lines = {t.name: dict(zip(t.x, t.y, strict=True)) for t in curve.data if t.mode == "lines"}
    for x, y, said in zip(rings.x, rings.y, rings.customdata, strict=True):
        line = lines[said.split(":")[0]]
        if x in line:
            assert y == pytest.approx(line[x], rel=0.05), said
    elsewhere = screen_view(start="own", along="context", **settings | {"card": "gb10"})
    assert not next(t for t in elsewhere.figures[0].data if t.name == rings.name).x


def test_an_update_is_quick(app):
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
    rates = {
        "BF16 pool": 8000 / 7.44,
        "fused FP8 (this lab)": 8000 / 7.84,
        "full cast": 8000 / 72.42,
    }
    for rate in rates.values():
        assert f"seen {rate:,.1f} tok/s" in view.rows
    assert "On a server</b> BF16 pool was the fastest: 1,075.3 tok/s" in view.note
    assert "seen" not in screen_view(start="h200-server", concurrency=4, context=2048).rows

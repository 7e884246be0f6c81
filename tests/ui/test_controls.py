"""Start values of the applications: taken, or refused by a named error that lists the allowed."""

import html

import ipywidgets
import pandas as pd
import pytest

import shadowkv_lab
from shadowkv_lab.errors import CannotRun, DoesNotFit, OutOfRange, UnknownName
from shadowkv_lab.ui import budget, controls, decode, display, glm5, serving, simulated


@pytest.mark.parametrize(
    "call, wrong, error, words",
    [
        (shadowkv_lab.explorer, {"model": "glm5"}, UnknownName, "Did you mean"),
        (shadowkv_lab.explorer, {"concurrency": -1}, OutOfRange, "whole requests above 0"),
        (shadowkv_lab.explorer, {"context": "1k"}, OutOfRange, "whole tokens above 0"),
        (shadowkv_lab.explorer, {"heads": 7}, OutOfRange, "heads per GPU of 7.*Allowed: 8"),
        (shadowkv_lab.explorer, {"heads": 7, "live": True}, OutOfRange, "8, 16, 32, 64, 128"),
        (shadowkv_lab.explorer, {"strategies": ("shadwo",)}, UnknownName, "Did you mean 'shadow'"),
        (budget.budget_app, {"gpu": "h-200"}, UnknownName, "Did you mean 'h200'"),
        (budget.budget_app, {"tensor_parallel": 3}, OutOfRange, "1, 2, 4, 8, 16"),
        (budget.budget_app, {"kv_gib": "all"}, OutOfRange, "a number"),
        (glm5.reproduction_app, {"gpu": "h200"}, UnknownName, "rtx-pro-6000-server"),
        (serving.loads, {"rest": "mine"}, UnknownName, "glm5-report"),
        (simulated.traffics, {"rate": 0}, OutOfRange, "requests/s above 0"),
        (simulated.traffics, {"lengths": "short"}, UnknownName, "long answers"),
    ],
)
def test_a_start_value_that_a_control_lacks_is_refused_by_name(call, wrong, error, words):
    with pytest.raises(error, match=words):
        call(**wrong)


@pytest.mark.parametrize("call", [serving.loads, simulated.traffics])
def test_an_argument_that_no_control_has_is_refused(call):
    with pytest.raises(TypeError, match="contxt"):
        call(contxt=1024)


def test_a_start_value_between_a_sliders_own_joins_them():
    found = controls.Slider("context", (512, 1024), "tokens").widget(700, {})
    assert [v for _, v in found._options_full] == [512, 700, 1024] and found.value == 700
    assert found.options[1][0] == "700 tokens"
    assert controls.Several("s", ("a", "b")).widget("b", {}).value == ("b",)


@pytest.mark.parametrize(
    "view",
    [budget.budget_view, glm5.reproduction_view, serving.load_view, decode.step_view],
    ids=lambda view: view.__name__,
)
def test_the_line_to_paste_runs_anywhere(view):
    app = view.open()
    if app.worker:
        app.worker.join(60)
    scope = {}
    exec(app.line.replace("; ", "\nwidget = ", 1), scope)
    assert isinstance(scope["widget"], ipywidgets.VBox)
    lines = [
        child.value for child in scope["widget"].children if isinstance(child, ipywidgets.HTML)
    ]
    assert app.code.value in lines, "and shows the same setting"


@pytest.mark.parametrize("rest_ms", [-5.0, float("nan"), float("inf")])
def test_a_rest_that_is_none_is_refused(rest_ms):
    with pytest.raises(OutOfRange, match="0 or more"):
        glm5.reproduction_view(rest_ms=rest_ms)


def test_an_empty_choice_and_sizes_below_one_are_refused():
    app = decode.step_view.open(strategies=())
    assert "NoAnswer" in app.error.value and app.settings["strategies"] == ()
    with pytest.raises(OutOfRange, match="one or more"):
        decode.measured_view(None, 64, 1, 1, (), [])
    with pytest.raises(OutOfRange, match="1 or more"):
        decode.step_view(context=0)


def test_a_saved_table_names_its_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(display, "png", lambda fig: None)
    for app, name, column in (
        (simulated.traffic_view.open(), "traffics-1", "name"),
        (glm5.reproduction_view.open(), "reproduction_app-1-hypotheses", "hypothesis"),
    ):
        if app.worker:
            app.worker.join(60)
        app.save()
        assert "no Chromium" in app.status.value
        table = pd.read_csv(tmp_path / "out" / f"{name}.csv")
        assert table.columns[0] == column and table[column].notna().all()


def test_the_budgets_words_follow_what_is_known():
    app = budget.budget_view.open()
    assert "weights: the report says about 61 GB" in html.unescape(app.note.value)
    app.controls["weights_gib"].value = 40.0
    assert "weights: as typed [assumed]" in html.unescape(app.note.value)
    app.controls["model"].value = "kimi-k2"
    assert "estimated from the config" in html.unescape(app.note.value), "nobody's 40 GiB any more"
    with pytest.raises(DoesNotFit, match=r"100\.00 GiB of KV.*below its 94\.10 GiB"):
        budget.budget_view(kv_gib=100.0)


def test_a_strategy_that_no_kernel_serves_on_a_card_gets_no_numbers():
    left = serving.load_view(strategies=("native_fp8", "full_cast"))
    assert left.note.startswith("Left out: native FP8") and "SM90" in left.note
    assert left.table.strategy.tolist() == ["full_cast"]
    alone = serving.load_view(strategies=("native_fp8",))
    assert isinstance(alone.unanswered, CannotRun) and "SM90" in alone.figures[0].layout.title.text
    view = budget.budget_view()
    refused = view.table.set_index("strategy").loc["native_fp8"]
    assert pd.isna(refused.tokens) and "SM90" in refused.reason
    assert "Left out: native FP8" in view.note
    there = budget.budget_view(gpu="h200", kv_gib=40.0).table.set_index("strategy")
    assert there.loc["native_fp8"].tokens > 0

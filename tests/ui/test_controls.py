"""Start values of the applications: taken, or refused by a named error that lists the allowed."""

import html

import ipywidgets
import pandas as pd
import pytest

import shadowkv_lab
from shadowkv_lab.errors import CannotRun, DoesNotFit, OutOfRange, UnknownName
from shadowkv_lab.ui import budget, controls, decode_lab, display, reproduce_lab, serving_lab


@pytest.mark.parametrize(
    "call, wrong, error, words",
    [
        (shadowkv_lab.explorer, {"model": "glm5"}, UnknownName, "Did you mean"),
        (shadowkv_lab.explorer, {"concurrency": -1}, OutOfRange, "whole requests above 0"),
        (shadowkv_lab.explorer, {"context": "1k"}, OutOfRange, "whole tokens above 0"),
        (shadowkv_lab.explorer, {"heads": 7}, OutOfRange, "8, 16, 32, 64, 128"),
        (shadowkv_lab.explorer, {"strategies": ("shadwo",)}, UnknownName, "Did you mean 'shadow'"),
        (budget.budget_app, {"gpu": "h-200"}, UnknownName, "Did you mean 'h200'"),
        (budget.budget_app, {"tensor_parallel": 3}, OutOfRange, "1, 2, 4, 8, 16"),
        (budget.budget_app, {"kv_gib": "all"}, OutOfRange, "a number"),
        (reproduce_lab.reproduction_app, {"gpu": "h200"}, UnknownName, "rtx-pro-6000-server"),
        (serving_lab.loads, {"rest": "mine"}, UnknownName, "case"),
        (serving_lab.traffics, {"rate": 0}, OutOfRange, "requests/s above 0"),
        (serving_lab.traffics, {"lengths": "short"}, UnknownName, "long answers"),
    ],
)
def test_a_start_value_that_a_control_lacks_is_refused_by_name(call, wrong, error, words):
    with pytest.raises(error, match=words):
        call(**wrong)


@pytest.mark.parametrize("call", [serving_lab.loads, serving_lab.traffics])
def test_an_argument_that_no_control_has_is_refused(call):
    with pytest.raises(TypeError, match="contxt"):
        call(contxt=1024)


def test_a_start_value_between_a_sliders_own_joins_them():
    found = controls.slider("context", [512, 1024], 700, "tokens")
    assert [v for _, v in found._options_full] == [512, 700, 1024] and found.value == 700
    assert found.options[1][0] == "700 tokens"
    assert controls.several("s", ["a", "b"], "b").value == ("b",)


@pytest.mark.parametrize(
    "make",
    [
        budget.make_app,
        reproduce_lab.make_app,
        serving_lab.loads_app,
        lambda: decode_lab.make_app("glm-5", None, 1, 1024, None, None, False),
    ],
)
def test_the_line_to_paste_runs_anywhere(make):
    app = make()
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
        reproduce_lab.reproduction_view(rest_ms=rest_ms)


def test_an_empty_choice_and_sizes_below_one_are_refused():
    app = decode_lab.make_app("glm-5", None, 1, 1024, None, (), False)
    assert "BadFile" in app.error.value and app.settings["strategies"] == ()
    with pytest.raises(OutOfRange, match="one or more"):
        decode_lab.measured_view(None, 64, 1, 1, (), [])
    with pytest.raises(OutOfRange, match="1 or more"):
        decode_lab.recorded_view(context=0)


def test_a_saved_table_names_its_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(display, "png", lambda fig: None)
    for app, name, column in (
        (serving_lab.traffics_app(), "traffics-1", "name"),
        (reproduce_lab.make_app(), "reproduction_app-1-hypotheses", "hypothesis"),
    ):
        app.save()
        assert "no Chromium" in app.status.value
        table = pd.read_csv(tmp_path / "out" / f"{name}.csv")
        assert table.columns[0] == column and table[column].notna().all()


def test_the_budgets_words_follow_what_is_known():
    app = budget.make_app()
    assert "weights: 'mem usage' of one GPU [recorded]" in html.unescape(app.note.value)
    app.controls["weights_gib"].value = 40.0
    assert "weights: 'mem usage' of one GPU [assumed]" in html.unescape(app.note.value)
    assert "type your own" in budget.budget_view("kimi-k2", "h200", 8).note
    assert "type your own" not in budget.budget_view().note
    with pytest.raises(DoesNotFit, match=r"up to 38\.53 GiB of KV"):
        budget.budget_view(kv_gib=100.0)


def test_a_strategy_that_no_kernel_serves_on_a_card_gets_no_numbers():
    with pytest.raises(CannotRun, match="SM90"):
        serving_lab.load_view(strategies=("native_fp8", "full_cast"))
    assert "native_fp8" in set(
        serving_lab.load_view(gpu="h200", strategies=("native_fp8",)).table.strategy
    )
    view = budget.budget_view()
    assert "native_fp8" not in set(view.table.strategy)
    assert "Left out: native FP8" in view.note
    assert "native_fp8" in set(budget.budget_view(gpu="h200", kv_gib=40.0).table.strategy)

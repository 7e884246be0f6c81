"""Start values of the applications: taken, or refused by a named error that lists the allowed."""

import pytest

import shadowkv_lab
from shadowkv_lab.errors import BadSize, UnknownName
from shadowkv_lab.ui import budget, controls, reproduce_lab, serving_lab


@pytest.mark.parametrize(
    "call, wrong, error, words",
    [
        (shadowkv_lab.explorer, {"model": "glm-55"}, UnknownName, "Did you mean"),
        (shadowkv_lab.explorer, {"concurrency": -1}, BadSize, "whole requests above 0"),
        (shadowkv_lab.explorer, {"context": "1k"}, BadSize, "whole tokens above 0"),
        (shadowkv_lab.explorer, {"heads": 7}, BadSize, "8, 16, 32, 64, 128"),
        (shadowkv_lab.explorer, {"strategies": ("shadwo",)}, UnknownName, "Did you mean 'shadow'"),
        (budget.budget_app, {"gpu": "h2000"}, UnknownName, "Did you mean 'h200'"),
        (budget.budget_app, {"tensor_parallel": 3}, BadSize, "1, 2, 4, 8, 16"),
        (budget.budget_app, {"kv_gib": "all"}, BadSize, "a number"),
        (reproduce_lab.reproduction_app, {"gpu": "h200"}, UnknownName, "rtx-pro-6000-server"),
        (serving_lab.loads, {"rest": "mine"}, UnknownName, "case"),
        (serving_lab.traffics, {"rate": 0}, BadSize, "requests/s above 0"),
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

"""The fit recovers a known model; provenance says what it rests on."""

import json

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv_lab.budget import budget
from shadowkv_lab.errors import DoesNotFit, NoAnswer, OutOfRange, UnknownName
from shadowkv_lab.model import load_model
from shadowkv_lab.steps import fit as fitting
from shadowkv_lab.steps.held_out import held_out, summary
from shadowkv_lab.steps.predict import predict, predict_all, step_time, weakest
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.strategies import parse
from tests.steps import synthetic_runs as known

GLM = load_model("glm-5")
FIT = fitting.fit(known.runs())


def truth(strategy, P, L, R, gb_per_s=known.H200_GB_PER_S, shape=GLM):
    """The known model's step, by DESIGN's traffic table written out again."""
    fp8, bf16 = 576, 1152
    moves = {
        "full_cast": ((fp8 + bf16) * P, bf16 * L, fp8 * R),
        "bf16_pool": (0, bf16 * L, bf16 * R),
        "shadow": (0, bf16 * L, 1728 * R),
    }[strategy]
    return shape.layers * sum(
        known.layer_ms(phase, b, gb_per_s) for phase, b in zip(known.SHARE, moves, strict=True) if b
    )


@given(
    st.sampled_from(["full_cast", "bf16_pool", "shadow"]),
    st.integers(65_536, 495_616),
    st.integers(1, 32),
    st.integers(1024, 2048),
)
@settings(max_examples=60, deadline=None)
def test_a_known_model_is_recovered_between_its_runs(strategy, P, R, context):
    step = predict(strategy, "glm-5", "h200", P, R, context, fitted=FIT)
    assert step.step_ms == pytest.approx(truth(strategy, P, R * context, R), rel=0.01)
    assert step.provenance == "calibrated"


def test_outside_the_runs_is_assumed_and_says_why():
    step = predict("full_cast", "glm-5", "h200", 16_384, 1, 1024, fitted=FIT)
    assert step["cast"].provenance == "assumed"
    assert "outside the recorded sizes" in step["cast"].how
    assert step["attention"].provenance == "calibrated"
    assert step.provenance == "assumed"
    assert (
        predict("shadow", "glm-5", "h200", 495_616, 1, 65_536, fitted=FIT)["attention"].provenance
        == "assumed"
    )


def test_other_heads_are_an_analogy():
    step = predict("shadow", "glm-5", "h200", 495_616, 1, 1024, heads=16, fitted=FIT)
    assert "8 heads" in step["attention"].how


def test_the_cases_own_cast_calibrates_its_cards():
    """64.6 ms at the case's pool on both cards, and by bytes, assumed, at half of it."""
    for card in ("rtx-pro-6000-server", "rtx-pro-6000-workstation"):
        step = predict("full_cast", "glm-5", card, 495_616, 1, 1024, fitted=FIT)
        assert step["cast"].ms == pytest.approx(64.6)
        assert step["cast"].provenance == "calibrated"
        assert step["cast"].gb_per_s == pytest.approx(1034, abs=1)
        assert step["attention"].provenance == "assumed"
        half = predict("full_cast", "glm-5", card, 247_808, 1, 1024, fitted=FIT)["cast"]
        assert half.ms == pytest.approx(32.3)
        assert half.provenance == "assumed"


def test_a_borrowed_utilisation_scales_with_the_bandwidth():
    lent = predict("shadow", "glm-5", "rtx-pro-6000-server", 495_616, 8, 8192, fitted=FIT)
    assert lent.step_ms == pytest.approx(truth("shadow", 495_616, 65_536, 8, 1597), rel=0.01)
    assert "h200" in lent["attention"].how


def test_a_users_own_runs_turn_the_card_calibrated():
    name = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    both = pd.concat([known.runs(), known.runs(device=name, gb_per_s=1597)])
    step = predict(
        "shadow", "glm-5", "rtx-pro-6000-server", 495_616, 8, 2048, fitted=fitting.fit(both)
    )
    assert step.provenance == "calibrated"


def test_newer_runs_and_graph_replays_come_first():
    old = known.runs(strategies="bf16_pool").assign(attention_ms=99.0)
    eager = known.runs(strategies="bf16_pool", mode="eager").assign(attention_ms=77.0)
    new = known.runs(strategies="bf16_pool").assign(**{"origin.date": "2026-02-02"})
    fitted = fitting.fit(pd.concat([new, old, eager]))
    step = predict("bf16_pool", "glm-5", "h200", 495_616, 1, 1024, fitted=fitted)
    assert step.step_ms == pytest.approx(truth("bf16_pool", 495_616, 1024, 1), rel=0.01)


def test_mixed_layers_are_sums_of_both_kinds():
    mixed = predict("shadow(layers=26)", "glm-5", "h200", 495_616, 1, 1024, fitted=FIT)
    parts = [truth(s, 495_616, 1024, 1) for s in ("shadow", "full_cast")]
    assert mixed.step_ms == pytest.approx((26 * parts[0] + 52 * parts[1]) / 78, rel=0.01)


def test_the_bytes_are_the_strategys_own():
    step = predict("full_cast", "glm-5", "h200", 495_616, 1, 1024, fitted=FIT)
    assert step["cast"].moved_bytes == pytest.approx(66.8e9, rel=1e-3)  # DESIGN section 3
    assert [p.name for p in step.phases] == ["cast", "attention", "write"]


def test_step_time_agrees_with_predict_at_its_knots_and_is_linear_between():
    step = step_time("shadow", "glm-5", "h200", 495_616, fitted=FIT, rest=Rest(10.0, experts=0))
    live, times = step.knots(8)
    assert live[0] == 8
    assert live[-1] == 495_616
    assert live == sorted(live)
    i = len(live) // 2
    assert step(8, live[i]) == pytest.approx(10 + step.at(8, live[i]).step_ms)
    middle = (live[i] + live[i + 1]) / 2
    assert step(8, middle) == pytest.approx((times[i] + times[i + 1]) / 2)
    assert step.provenance == "assumed"  # the rest's
    assert step_time("shadow", "glm-5", "h200", 8, fitted=FIT)(8, 8) > 0


def test_held_out_error_of_a_known_model_is_small():
    r1 = known.runs(model="deepseek-r1", pools=(131_072,), loads=((1, 1024), (32, 1024)))
    rows = held_out(pd.concat([known.runs(), r1]))
    assert set(rows.kind) == {"pool", "context", "model"}
    assert rows.error.median() < 0.01
    assert rows.error.quantile(0.9) < 0.05
    found = summary(rows)
    assert list(found.kind) == ["pool", "context", "model", "all"]
    assert found.runs.iloc[-1] == len(rows)


def test_held_out_groups_are_whole():
    """A held-out pool's runs cannot have shaped their own prediction: poison shows in the error."""
    runs = known.runs()
    poisoned = runs.pool_tokens == 262_144
    runs.loc[poisoned, ["cast_ms", "step_ms"]] *= 3
    rows = held_out(runs)
    seen = rows[
        (rows.kind == "pool") & (rows.pool_tokens == 262_144) & (rows.strategy == "full_cast")
    ]
    assert seen.error.min() > 0.5


def test_nothing_recorded_is_an_error_not_a_guess():
    with pytest.raises(UnknownName, match=r"b200.*h200"):
        predict("shadow", "glm-5", "NVIDIA Unheard Of", 495_616, 1, 1024, fitted=FIT)
    with pytest.raises(NoAnswer, match="Record one"):
        empty = fitting.fit(known.runs().iloc[:0])
        predict("shadow", "glm-5", "h200", 495_616, 1, 1024, fitted=empty)


def test_strategies_that_no_kernel_serves_are_left_out():
    for gpu, served in (("h200", True), ("rtx-pro-6000-server", False)):
        found = {p.strategy for p in predict_all("glm-5", gpu, 495_616, 1, 1024, fitted=FIT)}
        assert ("native_fp8" in found) == served and "fused_fp8" in found
        plan = budget("glm-5", gpu, kv_gib=25.49)
        assert ("native_fp8" in {c.strategy for c in plan.capacities}) == served


def test_bad_loads():
    with pytest.raises(DoesNotFit):
        predict("shadow", "glm-5", "h200", 1024, 8, 1024, fitted=FIT)
    with pytest.raises(OutOfRange):
        predict("shadow", "glm-5", "h200", 1024, 1, fitted=FIT)
    with pytest.raises(OutOfRange):
        predict("shadow", "glm-5", "h200", 1024, 1, 0, fitted=FIT)


def test_weakest():
    assert weakest(["recorded", "assumed", "calibrated"]) == "assumed"
    assert weakest([]) == "calibrated"


def test_runs_of_models_without_a_file_are_left_out():
    odd = known.runs(strategies="bf16_pool").assign(model="no-such-model")
    assert len(fitting.points(pd.concat([known.runs(), odd]))) == len(fitting.points(known.runs()))


def test_kernel_benchmarks_fill_in_what_runs_lack(tmp_path):
    """fa2 is timed by the kernel benchmark only; SM120 has no fa3, so it borrows fa2's."""
    layers, loads = 78, ((1, 1024), (1, 65_536), (32, 8192))
    rows = [
        {
            "kernel": f"flashinfer bf16 {v}",
            "shape": f"{R} x {n}",
            "heads": 8,
            "bytes": layers * R * n * 1152,
            "ms": layers * slow * known.layer_ms("attention", R * n * 1152),
        }
        for v, slow in (("fa2", 2.0), ("fa3", 9.0))
        for R, n in loads
    ]
    path = tmp_path / "h200_kernels.json"
    path.write_text(json.dumps({"origin": {"device": "NVIDIA H200"}, "rows": rows}))
    fitted = fitting.fit(known.runs(), [path])
    lent = predict("shadow", "glm-5", "rtx-pro-6000-server", 495_616, 1, 16_384, fitted=fitted)
    by_hand = 78 * 2 * known.layer_ms("attention", 16_384 * 1152, 1597)
    assert lent["attention"].ms == pytest.approx(by_hand, rel=0.01)
    assert "fa2" in lent["attention"].how
    here = predict("shadow", "glm-5", "h200", 495_616, 1, 2048, fitted=fitted)
    assert here.step_ms == pytest.approx(truth("shadow", 495_616, 2048, 1), rel=0.01)


def test_published_point_is_the_file(monkeypatch):
    """The calibration reads data/published: no number of the case is typed into the code."""
    entry = json.loads(json.dumps(fitting.facts.find("published", "", "case"))) | {"cast_ms": 32.3}
    real = fitting.facts.find
    monkeypatch.setattr(fitting.facts, "find", lambda *a: entry if a[2] == "case" else real(*a))
    step = predict(
        "full_cast",
        "glm-5",
        "rtx-pro-6000-server",
        495_616,
        1,
        1024,
        fitted=fitting.fit(known.runs()),
    )
    assert step["cast"].ms == pytest.approx(32.3)
    assert parse("full_cast").label == "full_cast"

"""The fit recovers a known model; provenance says what it rests on."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv_lab.budget import budget
from shadowkv_lab.deployment import deployment
from shadowkv_lab.errors import DoesNotFit, NoAnswer, OutOfRange, UnknownName
from shadowkv_lab.model import load_model
from shadowkv_lab.steps import fit as fitting
from shadowkv_lab.steps.evidence import of_bench, of_steps
from shadowkv_lab.steps.held_out import held_out, summary
from shadowkv_lab.steps.predict import at, predict_all, predict_at, resized
from shadowkv_lab.strategies import Label, parse
from tests.steps import synthetic_runs as known

GLM = load_model("glm-5")
FIT = fitting.fit_points(of_steps(known.runs()))  # no published table beside them


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
    step = predict_at(strategy, at("glm-5", P, R, context), "h200", fitted=FIT)
    assert step.ms == pytest.approx(truth(strategy, P, R * context, R), rel=0.05)
    assert str(step.provenance) == "calibrated"


def test_outside_the_runs_is_assumed_and_says_why():
    step = predict_at("full_cast", at("glm-5", 16_384, 1, 1024), "h200", fitted=FIT)
    assert str(step["cast"].provenance) == "assumed"
    assert "beyond the sizes" in step["cast"].provenance.how
    assert str(step["attention"].provenance) == "calibrated"
    assert str(step.provenance) == "assumed"
    far = predict_at("shadow", at("glm-5", 495_616, 1, 65_536), "h200", fitted=FIT)
    assert str(far["attention"].provenance) == "assumed"


def test_other_heads_are_an_analogy():
    step = predict_at("shadow", at("glm-5", 495_616, 1, 1024, 16), "h200", fitted=FIT)
    assert "8 heads" in step["attention"].provenance.how


def test_the_reports_own_cast_calibrates_its_cards():
    """64.6 ms at the report's pool on both cards, and by bytes, assumed, at half of it."""
    fitted = fitting.fit(known.runs())
    for card in ("rtx-pro-6000-server", "rtx-pro-6000-workstation"):
        step = predict_at("full_cast", at("glm-5", 495_616, 1, 1024), card, fitted=fitted)
        assert step["cast"].ms == pytest.approx(64.6)
        assert str(step["cast"].provenance) == "calibrated"
        assert step["cast"].gb_per_s == pytest.approx(1034, abs=1)
        half = predict_at("full_cast", at("glm-5", 247_808, 1, 1024), card, fitted=fitted)["cast"]
        assert half.ms == pytest.approx(32.3, rel=0.025)
        assert str(half.provenance) == "assumed"


def test_a_borrowed_utilisation_scales_with_the_bandwidth():
    """launch + (time - launch) x bandwidths, by hand; the launch is the lender's, 11 us at most."""
    setting = at("glm-5", 495_616, 8, 8192)
    here, lent = (predict_at("shadow", setting, c, fitted=FIT) for c in ("h200", "h20"))
    launches = 78 * 0.011
    by_hand = launches + (here["attention"].ms - launches) * 4800 / 4000
    assert lent["attention"].ms == pytest.approx(by_hand, rel=0.01)
    assert "h200" in lent["attention"].provenance.how


def test_a_users_own_runs_turn_the_card_calibrated():
    name = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    both = [*known.runs(), *known.runs(device=name, gb_per_s=1597)]
    step = predict_at(
        "shadow", at("glm-5", 495_616, 8, 2048), "rtx-pro-6000-server", fitted=fitting.fit(both)
    )
    assert str(step.provenance) == "calibrated"


def test_newer_runs_and_graph_replays_come_first():
    old = known.runs(strategies="bf16_pool", times=9)
    eager = known.runs(strategies="bf16_pool", mode="eager", date="2026-03-03", times=7)
    new = known.runs(strategies="bf16_pool", date="2026-02-02")
    fitted = fitting.fit([*new, *old, *eager])
    step = predict_at("bf16_pool", at("glm-5", 495_616, 1, 1024), "h200", fitted=fitted)
    assert step.ms == pytest.approx(truth("bf16_pool", 495_616, 1024, 1), rel=0.01)


def test_mixed_layers_are_sums_of_both_kinds():
    mixed = predict_at("shadow(layers=26)", at("glm-5", 495_616, 1, 1024), "h200", fitted=FIT)
    parts = [truth(s, 495_616, 1024, 1) for s in ("shadow", "full_cast")]
    assert mixed.ms == pytest.approx((26 * parts[0] + 52 * parts[1]) / 78, rel=0.01)


def test_the_bytes_are_the_strategys_own():
    step = predict_at("full_cast", at("glm-5", 495_616, 1, 1024), "h200", fitted=FIT)
    assert step["cast"].bytes == pytest.approx(66.8e9, rel=1e-3)  # DESIGN section 3
    assert [p.name for p in step.phases] == ["cast", "attention", "write"]


def test_held_out_error_of_a_known_model_is_small():
    rows = held_out(of_steps(known.runs()), kinds=("requests",))
    between_or_above = rows[rows.requests > 1]
    assert len(between_or_above) and between_or_above.error.max() < 0.25
    found = summary(rows)
    assert found.times.iloc[-1] == len(rows) and list(found.kind)[-1] == "all"


def test_held_out_groups_are_whole():
    """A held-out time cannot have shaped its own prediction: poison shows in the error."""
    points = of_steps(known.runs())
    poisoned = [p._replace(ms=3 * p.ms) if p.requests == 32 else p for p in points]
    rows = held_out(poisoned, kinds=("requests",))
    assert rows[rows.requests == 32].error.min() > 0.4


def test_nothing_recorded_is_an_error_not_a_guess():
    with pytest.raises(UnknownName, match=r"b200.*h200"):
        predict_at("shadow", at("glm-5", 495_616), "NVIDIA Unheard Of", fitted=FIT)
    with pytest.raises(NoAnswer, match="Record one"):
        empty = fitting.fit([])
        predict_at("shadow", at("glm-5", 495_616, 1, 1024), "h200", fitted=empty)


def test_strategies_that_no_kernel_serves_are_left_out():
    for gpu, served in (("h200", True), ("rtx-pro-6000-server", False)):
        found = {p.strategy.name for p in predict_all(at("glm-5", 495_616), gpu, fitted=FIT)}
        assert ("native_fp8" in found) == served and "fused_fp8" in found
        plan = budget(deployment("GLM-5-NVFP4", gpu, kv_gib=25.49))
        assert ("native_fp8" in {c.strategy.label for c in plan.capacities}) == served


def test_bad_loads():
    with pytest.raises(DoesNotFit):
        predict_at("shadow", at("glm-5", 1024, 8, 1024), "h200", fitted=FIT)
    with pytest.raises(OutOfRange):
        predict_at("shadow", at("glm-5", 1024, 1, 0), "h200", fitted=FIT)


def test_steps_of_unknown_models_and_strategies_count_like_any_other():
    """What bears on a curve travels with the step: nothing is looked up by name."""
    known_steps = known.runs(strategies="bf16_pool")
    foreign = [
        replace(
            s,
            strategy=Label("their_own", "their own", "#123456", 40),
            setting=replace(s.setting, model=replace(s.setting.model, name="no-such-model")),
        )
        for s in known_steps
    ]
    assert of_steps(foreign) == of_steps(known_steps)


def test_a_smaller_pool_scales_by_bytes_and_a_foreign_strategy_is_refused():
    small, large = (
        known.runs("full_cast", pools=(P,), loads=((1, 8192),))[0] for P in (65_536, 495_616)
    )
    grown = resized(small, 495_616)
    factor = 495_616 / 65_536
    assert grown["cast"].ms == pytest.approx(small["cast"].ms * factor)
    assert grown["cast"].bytes == large["cast"].bytes and grown.kept_bytes == large.kept_bytes
    assert grown["attention"] == small["attention"]
    assert grown.ms - small.ms == pytest.approx(small["cast"].ms * (factor - 1))
    assert str(grown.provenance) == "calibrated" and "by bytes" in grown["cast"].provenance.how
    with pytest.raises(UnknownName):
        resized(replace(small, strategy=Label("their_own", "", "#123456", 40)), 495_616)
    assert resized(small, 65_536) is small


def test_kernel_benchmarks_fill_in_what_runs_lack(tmp_path):
    """fa2 is timed by the kernel benchmark only, and is answered by name."""
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
    entry = {"origin": {"device": "NVIDIA H200", "date": "2026-01-02"}, "rows": rows}
    path.write_text(json.dumps(entry))
    fitted = fitting.fit_points([*of_steps(known.runs()), *of_bench(path)])
    setting = at("glm-5", 495_616, 1, 1024)
    by_name = predict_at("shadow", setting, "h200", backend="flashinfer_fa2", fitted=fitted)
    by_hand = 78 * 2 * known.layer_ms("attention", 1024 * 1152)
    assert by_name["attention"].ms == pytest.approx(by_hand, rel=0.01)
    here = predict_at("shadow", at("glm-5", 495_616, 1, 2048), "h200", fitted=fitted)
    assert here["attention"].curve == "flashinfer_fa3", "SM90 takes fa3 by itself"


def test_published_point_is_the_file(monkeypatch):
    """The calibration reads data/published: no number of the report is typed into the code."""
    entry = json.loads(json.dumps(fitting.facts.find("published", "", "glm5-report"))) | {
        "cast_ms": 32.3
    }
    real = fitting.facts.find
    monkeypatch.setattr(
        fitting.facts, "find", lambda *a: entry if a[2] == "glm5-report" else real(*a)
    )
    fitted = fitting.fit(known.runs())
    step = predict_at("full_cast", at("glm-5", 495_616), "rtx-pro-6000-server", fitted=fitted)
    assert step["cast"].ms == pytest.approx(32.3)
    assert parse("full_cast").label == "full_cast"

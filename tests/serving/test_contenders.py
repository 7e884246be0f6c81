"""Contenders from budget and prediction; the lab's figures and widgets over them."""

import re

import numpy as np
import pytest

from shadowkv_lab import errors, machine
from shadowkv_lab.model import load_model
from shadowkv_lab.serving import traffic
from shadowkv_lab.serving.closed_form import point
from shadowkv_lab.serving.contenders import ANCHORS, ByBytes, anchored_rest, contenders, engine
from shadowkv_lab.serving.simulate import simulate
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.strategies import parse

BASIC = ("full_cast", "bf16_pool", "shadow")


def test_the_case_has_its_capacities_and_its_tpot():
    cast, plain, shadow = contenders(strategies=BASIC)
    assert [c.capacity_tokens for c in (cast, plain, shadow)] == [495_616, 273_280, 188_608]
    # Anchored on the case, full cast at one request is the case's TPOT again.
    assert point(cast, 1, 1024).step_ms == pytest.approx(95.6, rel=1e-3)
    assert point(plain, 1, 1024).step_ms < 40
    assert {c.step.provenance for c in (cast, plain, shadow)} == {"assumed"}


@pytest.mark.parametrize("anchor", ANCHORS)
def test_a_rest_grows_with_the_requests_and_says_that_it_is_assumed(anchor):
    rest = anchored_rest(anchor, load_model("glm-5"), machine.card("h200"))
    assert 0 < rest(1) < rest(8) < rest(64) and str(rest.provenance) == "assumed"


def test_an_unknown_anchor_is_named():
    with pytest.raises(errors.UnknownName, match="rtx6kpro"):
        contenders(anchor="rtx6000pro")


def test_by_bytes_is_the_table_of_moves():
    shape = load_model("glm-5")
    step = ByBytes(parse("full_cast"), shape, 495_616, 1597.0, 1000.0, Rest(10.0, experts=0))
    expected = 78 * (1728 * 495_616 / 1e9 + (1152 * 8000 + 576 * 4) / 1597e6)
    assert step(4, 8000) == pytest.approx(10 + expected)
    partly = ByBytes(
        parse("shadow(layers=26)"), shape, 495_616, 1597.0, 1000.0, Rest(0.0, experts=0)
    )
    assert partly(1, 0) == pytest.approx(52 * 1728 * 495_616 / 1e9, rel=1e-3)


def test_an_engine_takes_the_contenders_lines():
    cast = contenders(strategies=["full_cast"])[0]
    load = traffic.closed_loop(1, 1, traffic.fixed(1000, 200))
    ran = simulate(engine(cast), load)
    steps = [cast.step(1, 1000 + token) for token in range(1, 200)]
    assert ran.tpot_ms[0] == pytest.approx(np.mean(steps), rel=1e-3)
    assert ran.provenance == "assumed" and ran.engine.label == "full_cast"


lab = pytest.importorskip("shadowkv_lab.ui.serving_lab")


def test_figures_state_their_finding_units_and_provenance():
    view = lab.load_view(strategies=BASIC)
    assert len(view.figures) == 3 and "assumed" in view.note
    for figure in view.figures:
        assert "assumed" in figure.layout.title.text
        assert any(digit in figure.layout.title.text for digit in "123456789")
    assert view.figures[1].layout.xaxis.type == "log"
    assert view.table.running.tolist() == [60, 33, 23]


def test_shares_of_a_map_add_up_and_say_where_they_come_from():
    found = contenders(strategies=BASIC)
    row = lab.figures.wins({"case": found}).loc["case"]
    assert row.pop("provenance") == "assumed" and row.sum() == pytest.approx(100, abs=1)


def test_the_traffic_view_shows_the_cliff_or_the_objectives(monkeypatch):
    monkeypatch.setattr(lab, "REQUESTS", 60)
    monkeypatch.setattr(lab, "RATES", [0.1, 1.0])
    monkeypatch.setattr(lab, "CAPACITY_SHARES", (0.2, 1.0))
    loop = lab.traffic_view(strategies=BASIC, concurrency=64)
    assert "preempted" in loop.figures[1].layout.title.text
    shadow, plain = loop.table.preemptions["shadow buffer"], loop.table.preemptions["BF16 pool"]
    assert shadow > plain == 0
    apart = lab.traffic_view(arrivals="Poisson", lengths="azure-conversation", strategies=BASIC)
    assert "requests/s" in apart.figures[1].layout.title.text and "public trace" in apart.note


def test_a_widget_shows_an_error_in_its_place_and_recovers(monkeypatch):
    monkeypatch.setattr(lab, "REQUESTS", 40)
    monkeypatch.setattr(lab, "CAPACITY_SHARES", (1.0,))
    app = lab.traffics_app(strategies=BASIC, concurrency=8)
    assert not app.error.value and len(app.plots.children) == 2
    app.controls["lengths"].value = "mooncake-synthetic"
    app.controls["arrivals"].value = "Poisson"
    assert "DoesNotFit" in app.error.value and "no strategy can serve it" in app.error.value
    app.controls["arrivals"].value = "closed loop"
    assert not app.error.value


def test_every_setting_of_the_closed_form_shows_something():
    app = lab.loads_app()
    for name in ("model", "gpu", "rest"):
        for title, value in app.controls[name]._options_full:
            app.controls[name].value = value
            assert app.view.figures, title
            # What does not fit a card, or was not tried there, is said by name.
            named = ("DoesNotFit", "CannotRun")
            assert not app.error.value or any(name in app.error.value for name in named)
    app.controls["strategies"].value = ()
    assert "No strategy is chosen" in app.error.value


def test_where_requests_are_refused_the_cliff_and_the_traffic_say_so():
    serving_lab = pytest.importorskip("shadowkv_lab.ui.serving_lab")
    view = serving_lab.traffic_view(lengths="fixed", prompt_tokens=65_536, output_tokens=256)
    cliff = view.figures[1]
    served = [x for x, y in zip(cliff.data[0].x, cliff.data[0].y, strict=True) if y is not None]
    assert min(served) >= 65_792, "one request needs so many rows"
    claimed = re.search(r"From ([\d,]+) tokens", cliff.layout.title.text)
    assert claimed is None or int(claimed[1].replace(",", "")) >= 65_792
    with pytest.raises(errors.DoesNotFit, match="No request fits"):
        serving_lab.traffic_view(
            gpu="h100",
            lengths="fixed",
            prompt_tokens=65_536,
            output_tokens=65_536,
            strategies=("shadow",),
        )


def test_gaps_of_many_hours_do_not_overflow():
    serving_lab = pytest.importorskip("shadowkv_lab.ui.serving_lab")
    view = serving_lab.traffic_view(lengths="fixed", output_tokens=65_536)
    assert (view.table.p99_itl_ms > 0).all()

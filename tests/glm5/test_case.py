"""The case's arithmetic and hypotheses, by hand from its published numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest

from shadowkv_lab.errors import NoAnswer, OutOfRange
from shadowkv_lab.glm5 import case, hypotheses
from shadowkv_lab.model import load_model
from shadowkv_lab.provenance import measured
from shadowkv_lab.steps.fit import fit
from shadowkv_lab.steps.rest import Rest, distinct_experts, rest_from
from tests.steps import synthetic_runs as known

LINES = {line.what: line for line in case.arithmetic()}


@pytest.mark.parametrize(
    ("what", "value", "digits"),
    [
        ("cast, a layer", 856.5, 1),
        ("cast, a step", 66.8, 1),
        ("speed of the cast", 1.034, 3),
        ("tokens/s before", 10.5, 1),
        ("tokens/s after", 13.5, 1),
        ("gain", 29, 0),
        ("cast's share of the TPOT", 67.6, 1),
        ("all but the cast", 31.0, 1),
        ("tokens/s without a cast", 32, 0),
        ("gone by the patch", 21.5, 1),
        ("of the cast", 33, 0),
        ("unexplained", 43.1, 1),
    ],
)
def test_each_step_of_the_arithmetic(what, value, digits):
    assert round(LINES[what].value, digits) == value


def test_what_was_published_agrees_and_the_69_percent_are_explained():
    assert [x.agrees for x in LINES.values() if x.published is not None] == [True] * 4
    assert "93.6 ms" in LINES["cast's share of the TPOT"].note  # 64.6 / 0.69


@pytest.mark.parametrize(
    ("value", "printed", "agrees"),
    [
        (856.5, 857, True),
        (856.49, 857, False),
        (10.46, 10.5, True),
        (10.44, 10.5, False),
        (29.01, 29.0, True),
        (0.69, 0.69, True),
        (13.449, 13.5, False),
    ],
)
def test_rounding(value, printed, agrees):
    assert case.within_rounding(value, printed) is agrees


def test_hypotheses_by_hand():
    table = hypotheses.hypotheses().set_index("hypothesis")
    part = table.loc["26 of 78 layers shadowed"]
    assert part.tpot_ms == pytest.approx(95.6 - 64.6 * 26 / 78)
    # 25.49 GiB + 26 layers of BF16 rows + 61 GiB of weights: 4.7 GiB too much for 95.6.
    assert part.total_gib == pytest.approx(25.49 + 26 * 495_616 * 1152 / 2**30 + 61, abs=0.01)
    assert not part.fits_server
    full = table.loc["the shadow covers every layer"]
    assert full.total_gib == pytest.approx(41.5 + 25.49 + 61, abs=0.05)
    assert not full.fits_workstation
    assert full.tpot_ms == pytest.approx(31.0)
    faster = table.loc["a full cast by a faster kernel"]
    assert faster.gb_per_s == pytest.approx(1550, abs=1)  # 66.8 GB / 43.1 ms
    assert round(100 * faster.share_server) == 97
    assert round(100 * faster.share_workstation) == 86
    assert faster.under_server
    assert faster.fits_server
    cut = table.loc["the pool cut to 2/3"]
    assert cut.tpot_ms == pytest.approx(95.6 - 64.6 / 3)
    assert cut.fits_server
    assert not table.established.any()


def test_a_faster_kernel_than_the_card_is_not_under_its_bandwidth():
    of = case.server(95.6, 60.0)  # 29 ms for 66.8 GB
    row = hypotheses.hypotheses(of).set_index("hypothesis").loc["a full cast by a faster kernel"]
    assert row.gb_per_s > 1792
    assert not row.under_workstation


def test_a_vector_cast_is_predicted_from_another_cards_share():
    """66.8 GB at 86.5 % of 1792 GB/s take 43.1 ms, of 1597 GB/s 48.4; neither is solved for."""
    table = hypotheses.hypotheses(cast_share=0.865).set_index("hypothesis")
    rows = {
        c: table.loc[f"the lab's vector cast on the {c} card"] for c in ("workstation", "server")
    }
    assert rows["workstation"].tpot_ms == pytest.approx(31.0 + 66_801 / (0.865 * 1792), abs=0.01)
    assert rows["server"].tpot_ms == pytest.approx(31.0 + 66_801 / (0.865 * 1597), abs=0.01)
    assert "not solved for" in hypotheses.in_words(case.server(), table.reset_index())
    assert hypotheses.vector_cast_share(fit(known.runs("vector_cast"))) == pytest.approx(
        0.25, rel=0.01
    )
    assert hypotheses.vector_cast_share(fit(known.runs("shadow"))) is None


def test_the_graph_hypothesis_takes_a_recorded_eager_cost():
    both = [known.runs("shadow", mode="graph"), known.runs("shadow", mode="eager")]
    both[1] = [replace(s, ms=s.ms + 11.0) for s in both[1]]
    eager_ms = hypotheses.host_bound_ms(both[0] + both[1])
    assert eager_ms == pytest.approx(11.0)
    table = hypotheses.hypotheses(eager_ms=eager_ms).set_index("hypothesis")
    assert table.loc["the step lost its CUDA graph"].tpot_ms == pytest.approx(42.0)
    assert hypotheses.host_bound_ms(both[0]) is None


def test_a_users_own_server():
    of = case.server(50.0, 40.0, 262_144, 61, model="deepseek-r1", weights_gib=85.0)
    assert of.cast_ms == pytest.approx(64.6 * 262_144 * 61 / (495_616 * 78))
    assert of.still_ms == pytest.approx(of.cast_ms - 10)
    words = hypotheses.in_words(of, hypotheses.hypotheses(of))
    assert "10.0 of the cast's" in words
    assert "none is established" in words
    gone = case.server(50.0, 20.0, cast_ms=25.0)
    slower = case.server(95.6, 120.0)
    told = hypotheses.in_words(slower, hypotheses.hypotheses(slower))
    assert "did not become faster (95.6 to 120.0 ms)" in told and "went" not in told
    assert "something else has changed" in hypotheses.in_words(gone, hypotheses.hypotheses(gone))


def test_same_class_of_machine():
    table = hypotheses.same_class()
    assert round(table.step_ms[0], 1) == 31.0
    assert table.step_ms[1] == pytest.approx(1000 / 51.0)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(before_ms=math.nan),
        dict(after_ms=-1.0),
        dict(pool_tokens=0),
        dict(layers=-3),
        dict(cast_ms=math.inf),
        dict(weights_gib=0.0),
    ],
)
def test_bad_numbers_of_a_server(wrong):
    with pytest.raises(OutOfRange):
        case.server(**wrong)


def test_a_tpot_shorter_than_its_cast():
    with pytest.raises(NoAnswer, match="cast alone is longer than the step"):
        case.server(before_ms=60.0)
    with pytest.raises(NoAnswer, match="cast alone is longer"):
        rest_from(60.0, 66.0, load_model("glm-5"), "rtx-pro-6000-server")


def test_distinct_experts_by_drawing_them():
    rng = np.random.default_rng(0)
    for running in (1, 4, 32):
        drawn = [
            len({e for _ in range(running) for e in rng.choice(256, 8, replace=False)})
            for _ in range(400)
        ]
        assert distinct_experts(256, 8, running) == pytest.approx(np.mean(drawn), rel=0.01)


def test_rest_by_hand():
    glm = load_model("glm-5")
    rest = rest_from(95.6, 66.0, glm, "rtx-pro-6000-server", expert_bits=4.5)
    assert rest(1) == pytest.approx(29.6)
    # 3 x 6144 x 2048 weights of 4.5 bits, an eighth of them, 75 layers, at 4214/4800 of 1597 GB/s.
    one = 3 * 6144 * 2048 * 4.5 / 8 / 8 * 75 / (1597e6 * 4214 / 4800)
    assert rest.expert_ms == pytest.approx(one)
    assert rest(64) - rest(1) == pytest.approx(one * (256 * (1 - (31 / 32) ** 64) - 8))
    assert str(rest.provenance) == "assumed"


def test_rest_by_table():
    rest = Rest(0.0, table=((1, 20.0), (8, 27.0), (64, 60.0)), provenance=measured())
    assert [rest(n) for n in (1, 8, 64)] == [20.0, 27.0, 60.0]
    assert rest(120) == pytest.approx(60 + 33)  # the last 56 requests cost 33 ms
    assert rest(36) == pytest.approx(43.5)


@pytest.mark.parametrize("wrong", [(math.nan, 1.0), (10.0, -1.0), (0.0, 1.0)])
def test_rest_of_no_time(wrong):
    with pytest.raises(OutOfRange):
        rest_from(*wrong, load_model("glm-5"), "h200")


def test_deepseek_check_uses_the_issues_own_context():
    runs = known.runs(model="deepseek-r1", pools=(65_536, 131_072), heads=16)
    table = case.check_deepseek(fit(runs), runs).set_index("what")
    cast = table.loc["cast, a step (ms)"]
    assert cast.lab == pytest.approx(61 * known.layer_ms("cast", 131_072 * 1728))
    assert cast.reported == 13.77
    assert set(table.context) == {1442}  # 1.1 % of 131,072 tokens are referenced
    base = table.loc["the server's step less that: base (ms)"].lab
    bf16 = 61 * (known.layer_ms("attention", 1442 * 1152) + known.layer_ms("write", 1152))
    assert table.lab.iloc[-1] == pytest.approx(base + bf16, rel=0.01)


def test_author_estimate():
    table = case.author_estimate()
    assert list(table.author) == [51.0, 247_000.0]
    assert table.lab[0] == pytest.approx(46.2, abs=0.05)
    assert table.lab[1] == 273_281

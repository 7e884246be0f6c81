"""The GLM-5 report's arithmetic and its explanations, by hand from the published numbers.

The expected values are written out from the report's own figures and the sizes of DESIGN 3:
61 + 25.49 GiB of 94.1, 495,616 slots, 78 layers, 576 B in FP8, 1152 in BF16, 132 B of index key.
"""

import math

import numpy as np
import pytest

from shadowkv_lab import facts
from shadowkv_lab.deployment import published_deployment
from shadowkv_lab.errors import NoAnswer, OutOfRange, UnknownName
from shadowkv_lab.glm5 import hypotheses, reported, verdict
from shadowkv_lab.load import Load
from shadowkv_lab.machine import card
from shadowkv_lab.model import load_model
from shadowkv_lab.provenance import measured
from shadowkv_lab.steps.answer import ANCHORS, anchored
from shadowkv_lab.steps.fit import fit
from shadowkv_lab.steps.predict import predict
from shadowkv_lab.steps.rest import Rest, distinct_experts, rest_from
from shadowkv_lab.steps.step import recorded
from tests.steps import synthetic_runs as known

GIB = 2**30
LINES = {line.what: line for line in reported.arithmetic()}
SERVER, WORKSTATION = "rtx-pro-6000-server", "rtx-pro-6000-workstation"


@pytest.mark.parametrize(
    ("what", "value", "digits"),
    [
        ("cast per layer", 856.5, 1),
        ("cast per step", 66.8, 1),
        ("speed of the cast", 1.034, 3),
        ("tokens/s before", 10.5, 1),
        ("tokens/s after", 13.5, 1),
        ("gain", 29, 0),
        ("cast's share of the TPOT", 67.6, 1),
        ("all but the cast", 31.0, 1),
        ("tokens/s without a cast", 32, 0),
        ("gone with the patch", 21.5, 1),
        ("share of the cast that went", 33, 0),
        ("unexplained", 43.1, 1),
        ("weights by SGLang's rule", 61.1, 1),
        ("a shadow of the whole pool", 41.5, 1),
        ("with the FP8 pool and the weights", 128.0, 1),
    ],
)
def test_each_step_of_the_arithmetic(what, value, digits):
    assert round(LINES[what].value, digits) == value


def test_what_was_published_agrees_and_the_69_percent_are_explained():
    assert [x.agrees for x in LINES.values() if x.published is not None] == [True] * 4
    assert "93.6 ms" in LINES["cast's share of the TPOT"].note  # 64.6 / 0.69


def test_derived_figures_are_not_recorded():
    assert {str(x.provenance) for x in LINES.values()} == {"calibrated"}
    assert set(hypotheses.hypotheses().provenance) == {"calibrated"}
    assert list(hypotheses.same_class().provenance) == ["calibrated", "published"]


def test_the_reports_weights_are_its_own():
    report = reported.published()
    assert (report["weights_gib"], reported.published("rtx6kpro")["weights_gib"]) == (61, 57.06)
    assert reported.server().room_gib(card(SERVER)) == pytest.approx(94.1 - 61)


def test_the_report_has_its_name_and_for_one_release_the_old_one():
    assert facts.find("published", "result", "case")["name"] == "glm5-report"
    assert published_deployment("case") == published_deployment("glm5-report")
    at = published_deployment()
    assert "glm5-report" in ANCHORS and "case" not in ANCHORS
    assert anchored("case", at)(1) == anchored("glm5-report", at)(1)
    with pytest.raises(UnknownName, match="glm5-report"):
        anchored("glm5-reprot", at)


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
    assert reported.within_rounding(value, printed) is agrees


def row_of(table, name):
    (row,) = [row for _, row in table.iterrows() if row.hypothesis.startswith(name)]
    return row


def test_every_layer_shadowed():
    table = hypotheses.hypotheses()
    whole = row_of(table, "every layer shadowed, over the whole pool")
    kv = 495_616 * 78 * (576 + 132 + 1152) / GIB
    assert whole.total_gib == pytest.approx(kv + 61) == pytest.approx(128.0, abs=0.05)
    assert whole.tpot_ms == pytest.approx(95.6 - 64.6)
    assert not whole.fits_server and not whole.fits_workstation
    cut = row_of(table, "every layer shadowed, the pool cut to 188,652")
    assert cut.pool_tokens == int(25.49 * GIB) // (78 * (576 + 132 + 1152)) == 188_652
    assert cut.kv_gib == pytest.approx(25.49, abs=0.001)
    assert cut.fits_server and cut.fits_workstation
    assert cut.tpot_ms == pytest.approx(31.0) and not cut.reaches  # so not the report's 74.1


def test_a_third_of_the_layers_over_the_whole_pool():
    part = row_of(hypotheses.hypotheses(), "26 of 78 layers shadowed")
    assert part.tpot_ms == pytest.approx(95.6 - 64.6 * 26 / 78) and part.reaches
    kv = 25.49 + 26 * 495_616 * 1152 / GIB
    assert part.kv_gib == pytest.approx(kv, abs=0.001) == pytest.approx(39.3, abs=0.05)
    assert not part.fits_server


def test_twelve_or_thirteen_layers_with_393_thousand_tokens():
    """Where the line of 74.1 ms meets 25.49 GiB, found here by bisection."""

    def tokens(layers):  # (78 - n) / 78 of 64.6 ms over P / 495,616 of the pool leave 43.1 ms
        return 495_616 * 43.1 / 64.6 * 78 / (78 - layers)

    def gib(layers):
        return tokens(layers) * (78 * (576 + 132) + 1152 * layers) / GIB

    low, high = 0.0, 78.0 - 1e-9
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gib(middle) < 25.49 else (low, middle)
    assert 12 < low < 13 and tokens(low) == pytest.approx(393_000, abs=1000)
    table = hypotheses.hypotheses()
    for layers, fits_in_the_pool in ((12, True), (13, False)):
        row = row_of(table, f"{layers} of 78 layers shadowed, the pool cut")
        assert row.pool_tokens == pytest.approx(tokens(layers), abs=1)
        assert row.kv_gib == pytest.approx(gib(layers), abs=1e-3)
        assert (row.kv_gib <= 25.49) is fits_in_the_pool
        assert row.tpot_ms == pytest.approx(74.1, abs=1e-3) and row.fits_server


def test_twenty_two_layers_do_not_fit_what_the_weights_leave():
    row = row_of(hypotheses.hypotheses(), "22 of 78 layers shadowed, the pool cut")
    assert row.pool_tokens == pytest.approx(495_616 * 43.1 / 64.6 * 78 / 56, abs=1)
    assert round(row.pool_tokens / 1000) == 461
    kv = row.pool_tokens * (78 * (576 + 132) + 22 * 1152) / GIB
    assert row.kv_gib == pytest.approx(kv) == pytest.approx(34.6, abs=0.05)
    assert row.tpot_ms == pytest.approx(74.1, abs=1e-3) and row.reaches
    assert kv > 94.1 - 61 and not row.fits_server and not row.fits_workstation


def test_a_smaller_pool_and_a_faster_kernel():
    table = hypotheses.hypotheses()
    cut = row_of(table, "no layer shadowed, the pool cut to 2/3")
    assert cut.tpot_ms == pytest.approx(95.6 - 64.6 / 3, abs=1e-3) and cut.fits_server
    faster = row_of(table, "a full cast by a faster kernel")
    assert faster.gb_per_s == pytest.approx(495_616 * 78 * 1728 / 43.1e6)
    assert faster.gb_per_s == pytest.approx(1550, abs=1)  # 1.55 TB/s
    assert round(100 * faster.share_server) == 97  # of 1597 GB/s
    assert round(100 * faster.share_workstation) == 86  # of 1792
    assert faster.under_server and faster.fits_server and faster.reaches
    assert not table.established.any()


def test_line_and_grid_are_one_formula():
    of = reported.server()
    line = hypotheses.line(of)
    assert list(line.layers) == list(range(27))[: len(line)] and len(line) == 26
    for row in line.itertuples():
        left = 64.6 * (78 - row.layers) / 78 * row.pool_tokens / 495_616
        assert 31.0 + left == pytest.approx(74.1)
    grid = hypotheses.grid(of, [0, 39, 78], [247_808, 495_616])
    assert list(grid.tpot_ms) == pytest.approx([63.3, 95.6, 47.15, 63.3, 31.0, 31.0])


def test_a_faster_kernel_than_the_card_is_not_under_its_bandwidth():
    of = reported.server(95.6, 60.0)  # 29 ms for 66.8 GB
    row = row_of(hypotheses.hypotheses(of), "a full cast by a faster kernel")
    assert row.gb_per_s > 1792
    assert not row.under_workstation


def test_a_vector_cast_is_predicted_and_not_solved_for():
    table = hypotheses.recorded_hypotheses()
    for name in (SERVER, WORKSTATION):
        step = predict("vector_cast", verdict.report(name), Load(1, 1024), pool_tokens=495_616)
        row = row_of(table, f"the lab's vector cast on the {name.rsplit('-', 1)[1]}")
        assert row.tpot_ms == pytest.approx(31.0 + step["cast"].ms)
        assert row.low_ms < row.tpot_ms < row.high_ms and row.provenance == "assumed"
    words = hypotheses.in_words(reported.server(), table)
    assert "Not solved for it" in words and "none is established" in words


def test_a_gather_of_static_shape():
    """70.5 ms when this was first predicted: what reading the whole of a request costs."""
    row = row_of(hypotheses.recorded_hypotheses(), "a gather of static shape on the server")
    assert "202,752 rows" in row.assumes
    at, whole = verdict.report(SERVER), Load(1, 202_752)
    gather = predict("gather_cast", at, whole, pool_tokens=495_616)
    short = predict("full_cast", at, Load(1, 1024), pool_tokens=495_616)
    assert gather["cast"].bytes == 78 * 202_752 * (576 + 1152)
    assert row.tpot_ms == pytest.approx(95.6 - 64.6 - short["attention"].ms + gather.ms)
    assert row.tpot_ms == pytest.approx(70.5, abs=1.0)
    assert row.reaches and row.provenance == "assumed"


def test_lost_graphs_are_the_longer_of_host_and_gpu():
    table = hypotheses.recorded_hypotheses()
    row = row_of(table, "CUDA graphs lost")
    eager = [
        s.ms
        for s in recorded()
        if (s.strategy.label, s.mode, s.setting.model.name) == ("shadow", "eager", "glm-5")
        and (s.setting.pool_tokens, s.setting.load) == (495_616, Load(1, 1024))
    ]
    host = hypotheses.predicted(reported.server()).host_ms
    assert host == pytest.approx(eager[-1], rel=0.03)
    assert row.tpot_ms == max(31.0, host) == pytest.approx(31.0), "not 31.0 plus the host's time"
    assert not row.reaches and "950 us per layer" in row.assumes  # 74.1 ms / 78
    slow = hypotheses.hypotheses(predicted=hypotheses.Predicted(host_ms=74.1))
    assert row_of(slow, "CUDA graphs lost").tpot_ms == pytest.approx(74.1)


def test_a_users_own_server():
    of = reported.server(50.0, 40.0, 262_144, 61, model="deepseek-r1", weights_gib=85.0)
    assert of.cast_ms == pytest.approx(64.6 * 262_144 * 61 / (495_616 * 78))
    assert of.still_ms == pytest.approx(of.cast_ms - 10)
    assert of.kv_gib is None, "the report's 25.49 GiB are of the report's pool"
    words = hypotheses.in_words(of, hypotheses.hypotheses(of))
    assert "10.0 of the cast's" in words
    assert "none is established" in words
    gone = reported.server(50.0, 20.0, cast_ms=25.0)
    slower = reported.server(95.6, 120.0)
    told = hypotheses.in_words(slower, hypotheses.hypotheses(slower))
    assert "did not become faster (95.6 to 120.0 ms)" in told and "went" not in told
    assert "something else has changed" in hypotheses.in_words(gone, hypotheses.hypotheses(gone))


def test_same_class_of_machine():
    table = hypotheses.same_class()
    assert round(table.step_ms[0], 1) == 31.0
    assert table.step_ms[1] == pytest.approx(1000 / ((50.4 + 51.6) / 2))
    assert table.step_ms[1] < 20.0 < table.step_ms[0]


def test_how_much_of_the_cast_went_elsewhere():
    table = reported.taken_away().share_of_the_cast
    hand = [(95.6 - 74.1) / 64.6, (31.52 - 17.20) / 13.77, (31.52 - 17.68) / 13.77]
    assert list(table) == pytest.approx(hand)
    assert [round(100 * share) for share in table] == [33, 104, 101]


def test_what_a_faster_kernel_can_gain():
    table = reported.faster_cast(recorded())
    workstation, server, h200 = table.itertuples()
    gb = 495_616 * 78 * 1728 / 1e9
    assert workstation.fastest_ms == pytest.approx(gb / 1.792) == pytest.approx(37.3, abs=0.05)
    assert server.fastest_ms == pytest.approx(gb / 1.597) == pytest.approx(41.8, abs=0.05)
    assert (round(server.gain, 1), round(workstation.gain, 1)) == (1.5, 1.7)
    assert round(h200.gain, 1) == 4.0 and h200.provenance == "recorded"
    assert gb / h200.cast_ms == pytest.approx(1.03, abs=0.01)  # TB/s
    assert len(reported.faster_cast([])) == 2, "nothing recorded, nothing said"


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
        reported.server(**wrong)


def test_a_tpot_shorter_than_its_cast():
    with pytest.raises(NoAnswer, match="cast alone is longer than the step"):
        reported.server(before_ms=60.0)
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
    table = reported.check_deepseek(fit(runs), runs).set_index("what")
    cast = table.loc["cast per step (ms)"]
    assert cast.lab == pytest.approx(61 * known.layer_ms("cast", 131_072 * 1728))
    assert cast.reported == 13.77
    assert set(table.context) == {1442}  # 1.1 % of 131,072 tokens are referenced
    base = table.loc["the server's step less that: base (ms)"].lab
    bf16 = 61 * (known.layer_ms("attention", 1442 * 1152) + known.layer_ms("write", 1152))
    assert table.lab.iloc[-1] == pytest.approx(base + bf16, rel=0.01)


def test_author_estimate():
    table = reported.author_estimate()
    assert list(table.author) == [51.0, 247_000.0]
    assert table.lab[0] == pytest.approx(46.2, abs=0.05)
    assert table.lab[1] == 273_281

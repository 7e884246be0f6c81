"""The GLM-5 report's capacities through the closed form, and crossovers against a scan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv_lab.errors import DoesNotFit, OutOfRange
from shadowkv_lab.model import load_model
from shadowkv_lab.provenance import recorded
from shadowkv_lab.serving.closed_form import Contender, by_pair, cell, crossovers, point, winner_map
from shadowkv_lab.serving.lines import PS_PER_MS, Lines, StepTime

GLM5 = load_model("glm-5")
CAPACITY = {
    storage: int(25.49 * 2**30) // GLM5.token_bytes(storage)
    for storage in ("fp8", "bf16", "fp8+bf16")
}


def contender(name, capacity, rest=30.0, slope=0.0):
    return Contender(name, capacity, StepTime(lambda r, n: rest + 0.1 * r + slope * n, recorded()))


def test_capacities_of_the_case():
    assert CAPACITY == {"fp8": 495_612, "bf16": 273_281, "fp8+bf16": 188_652}


def test_a_slow_step_with_room_beats_a_fast_one_without():
    # 64.6 ms of cast and 495,612 tokens, against none and 273,281, at 8,192 tokens per request.
    cast = contender("full_cast", CAPACITY["fp8"], 31.0 + 64.6)
    plain = contender("bf16_pool", CAPACITY["bf16"], 31.0)
    few, many = (point(c, 200, 8192) for c in (plain, cast))
    assert (few.running, few.queued) == (33, 167) and many.running == 60
    assert few.tokens_per_s == pytest.approx(1000 * 33 / (31.0 + 3.3))
    assert many.provenance == recorded()
    assert few.tokens_per_s_per_user == pytest.approx(1000 / 34.3)
    # The fused kernel has both, and wins wherever the BF16 pool is full.
    fused = contender("fused_fp8", CAPACITY["fp8"], 32.0)
    found = crossovers([plain, fused], [8192], [1, 64, 256])
    assert by_pair(found) == {("bf16_pool", "fused_fp8"): found}
    assert found[0].concurrency == 35  # 33 / 34.3 < R / (32 + R / 10) from R = 34.7 on


@given(
    st.lists(st.tuples(st.integers(100, 5000), st.integers(1, 90)), min_size=2, max_size=4),
    st.integers(10, 300),
)
@settings(max_examples=50, deadline=None)
def test_crossovers_are_where_a_scan_finds_them(sizes, context):
    contenders = [contender(str(i), c, rest) for i, (c, rest) in enumerate(sizes)]
    every = list(range(1, 65))
    found = [(c.concurrency, c.before, c.after) for c in crossovers(contenders, [context], every)]
    winners = [cell(contenders, c, context).winner for c in every]
    scan = [
        (c, a, b)
        for c, a, b in zip(every[1:], winners, winners[1:], strict=False)
        if a != b and None not in (a, b)
    ]
    assert found == scan


def test_the_map_says_where_nobody_fits_and_who_is_alone():
    contenders = [contender("large", 1000), contender("small", 500)]
    (short, middle, long) = winner_map(contenders, [1, 2], [400, 800, 1200])
    assert [c.winner for c in short] == ["large", "large"] and short[0].lead == 0  # a tie
    assert [(c.winner, c.running, c.lead) for c in middle] == [("large", 1, float("inf"))] * 2
    assert [c.winner for c in long] == [None, None]


def test_bad_loads_are_named():
    with pytest.raises(DoesNotFit, match="keeps 500 tokens, below one request of 501"):
        point(contender("small", 500), 1, 501)
    for load in ((0, 5), (5, 0)):
        with pytest.raises(OutOfRange):
            point(contender("small", 500), *load)


@given(st.integers(1, 300), st.integers(0, 500_000))
def test_lines_meet_a_linear_step(running, live):
    step = StepTime(lambda r, n: 20 + 0.3 * r + 5.5e-5 * n)
    lines, live = Lines(step, 500_000), max(live, running)
    assert lines(running, live) == pytest.approx(step(running, live), abs=0.5 * 500_000 / PS_PER_MS)
    line = lines.line(running, live)
    assert line.span_ps(live, running, 7) == sum(line.ps(live + i * running) for i in range(7))


def test_lines_are_straight_between_the_knots_of_a_step():
    bent = StepTime(lambda r, n: (n / r) ** 2, knots=lambda r: [r, 10.5 * r, 100 * r])
    lines = Lines(bent, 1000)
    assert [lines(2, n) for n in (2, 21, 200)] == pytest.approx([1.0, 10.5**2, 1e4], abs=1e-6)
    assert lines(2, 22) == pytest.approx(10.5**2 + (1e4 - 10.5**2) / 179, abs=1e-6)


def test_knots_out_of_order_are_named():
    for knots in ([], [5, 5], [9, 3], [-1, 3]):
        step = StepTime(lambda *_: 1.0, knots=lambda running, knots=knots: knots)
        with pytest.raises(OutOfRange):
            Lines(step, 100).line(1, 1)

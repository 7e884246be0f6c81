"""The simulated engine against a slow one, against the closed form, and against its invariants."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import serve

from shadowkv_lab.errors import DoesNotFit, OutOfRange
from shadowkv_lab.serving import traffic
from shadowkv_lab.serving.closed_form import Contender, loop_tokens_per_s, point
from shadowkv_lab.serving.simulate import Engine, simulate
from shadowkv_lab.serving.steps import FS_PER_MS, FS_PER_S, PiecewiseLinear, Step

STEP = Step(lambda running, live: 20.0 + 0.25 * running + 1e-4 * live)
ROUND = Step(lambda *_: 10.0)  # whole ms, as the arrivals: they meet at the ends of steps
BENT = PiecewiseLinear(
    Step(lambda running, live: 5.0 + 0.5 * running + 2e-2 * max(0, live - 40) + 1e-3 * live),
    [0, 40, 97, 300],
)


def requests(arrival_ms, prompt, output, concurrency=None):
    arrays = np.cumsum(arrival_ms) / 1e3, np.array(prompt), np.array(output)
    return traffic.Traffic("test", *arrays, concurrency)


@st.composite
def loads(draw, most=10):
    count = draw(st.integers(1, most))
    gaps = st.one_of(st.just(0), st.integers(0, 30), st.just(10), st.integers(0, 2000))
    numbers = lambda low, high: st.lists(  # noqa: E731
        st.integers(low, high), min_size=count, max_size=count
    )
    arrival = draw(st.lists(gaps, min_size=count, max_size=count))
    concurrency = draw(st.one_of(st.none(), st.integers(1, 6)))
    return requests(arrival, draw(numbers(1, 40)), draw(numbers(1, 45)), concurrency)


@st.composite
def engines(draw):
    page = draw(st.sampled_from([1, 1, 4, 16]))
    step = draw(st.sampled_from([STEP, BENT, ROUND]))
    return Engine(
        draw(st.one_of(st.integers(page, 99), st.integers(70, 160))),
        step,
        "test",
        prefill_tokens_per_s=draw(st.sampled_from([300.0, 1000.0, 4000.0])),
        chunk_tokens=draw(st.sampled_from([5, 32, 2048])),
        page_tokens=page,
        max_running=draw(st.sampled_from([1, 3, 256])),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.2])),
    )


def everything(results):
    """All that a run says, for equality."""
    times = [(r.arrival, r.admitted, r.first, r.end, r.preemptions) for r in results.requests]
    log = results.log
    samples = [list(c) for c in (log.at_s, log.admissions, log.preemptions, log.running, log.free)]
    return (
        times,
        samples,
        results.summary(),
        [list(x) for x in (*results.queue(), *results.kv_use())],
    )


@given(loads(), engines())
@settings(max_examples=250, deadline=None)
def test_agrees_with_a_slow_engine_in_every_token(load, engine):
    ran = simulate(engine, load, overload=True)
    lines = engine.step
    if not isinstance(lines, PiecewiseLinear):
        lines = PiecewiseLinear(lines, [0, engine.capacity_tokens])
    rows = [(round(at * FS_PER_S), p, g) for at, p, g in load.rows()]
    times, gaps, redone, refused = serve(
        rows,
        load.concurrency,
        engine.capacity_tokens,
        lambda r, n: lines.line(r, n).fs(n),
        round(FS_PER_S / engine.prefill_tokens_per_s),
        engine.chunk_tokens,
        engine.page_tokens,
        engine.max_running,
        engine.watermark,
    )
    ours = [(r.id, r.arrival, r.admitted, r.first, r.end, r.preemptions) for r in ran.finished]
    assert ours == times
    assert [r.id for r in ran.refused] == refused
    assert ran.scheduler.recomputed_tokens == redone
    assert ran.log.gap_count == len(gaps) and ran.log.gap_total == sum(gaps)
    if gaps:
        expected = [np.mean(gaps), *np.percentile(gaps, [50, 90, 99])]
        np.testing.assert_allclose(ran.itl_ms, np.array(expected) / FS_PER_MS, rtol=1e-12)


@given(loads(25), engines())
@settings(max_examples=150, deadline=None)
def test_leaping_equals_stepping(load, engine):
    leaps, steps = (simulate(engine, load, leap=leap, overload=True) for leap in (True, False))
    np.testing.assert_equal(everything(leaps), everything(steps))


@given(loads(25), engines())
@settings(max_examples=150, deadline=None)
def test_invariants_at_every_event(load, engine):
    seen = [0]

    def observe(now, scheduler):
        assert now >= seen[-1]
        seen.append(now)
        held = [scheduler.rows_held(r) for r in scheduler.running.values()]
        scheduler.blocks.check_integrity(held)
        assert len(held) <= engine.max_running
        live = [scheduler.rows_held(r) for r in scheduler.running.values() if r.decoding]
        assert sum(live) == scheduler.blocks.live_tokens and len(live) == scheduler.blocks.growing

    ran = simulate(engine, load, overload=True, observe=observe)
    assert len(ran.finished) + len(ran.refused) == len(load)  # once, or reported
    assert not {r.id for r in ran.finished} & {r.id for r in ran.refused}
    for r in ran.finished:
        assert r.arrival <= r.admitted < r.first <= r.end
    assert ran.log.gap_count == sum(r.output - 1 for r in ran.finished)  # out = asked
    assert ran.output_tokens == sum(r.output for r in ran.finished)
    assert ran.scheduler.blocks.free == ran.scheduler.blocks.total  # nothing leaks
    assert ran.scheduler.preemptions == sum(r.preemptions for r in ran.requests)
    times, waiting = ran.queue()
    assert (waiting >= 0).all() and (np.diff(times) > 0).all()
    assert not len(waiting) or waiting[-1] == 0
    assert ((ran.kv_use()[1] >= 0) & (ran.kv_use()[1] <= 1)).all()
    np.testing.assert_equal(everything(ran), everything(simulate(engine, load, overload=True)))


@given(st.integers(1, 5000), st.integers(2, 800))
@settings(max_examples=50, deadline=None)
def test_one_request_takes_the_predicted_steps(prompt, output):
    ran = simulate(Engine(10_000, STEP), requests([0], [prompt], [output]))
    steps = [STEP(1, prompt + token) for token in range(1, output)]
    assert ran.tpot_ms[0] == pytest.approx(np.mean(steps), rel=1e-9)
    assert ran.ttft_ms[0] == pytest.approx(prompt / 4.0, rel=1e-12)
    flat = simulate(Engine(10_000, Step(lambda *_: 31.0)), requests([0], [prompt], [output]))
    assert flat.tpot_ms[0] == 31.0


@given(st.integers(1, 40), st.integers(64, 2000), st.integers(150, 400))
@settings(max_examples=25, deadline=None)
def test_a_closed_loop_agrees_with_the_closed_form(concurrency, prompt, output):
    loop = traffic.closed_loop(concurrency, 6 * concurrency, traffic.fixed(prompt, output))
    contender = Contender("test", 1_000_000, STEP)
    # Prefill aside, running / step; with prefill, the time that it takes from the steps.
    free = simulate(Engine(1_000_000, STEP, prefill_tokens_per_s=1e9), loop)
    formula = point(contender, concurrency, prompt + output // 2).tokens_per_s
    assert free.summary()["output_tokens_per_s"] == pytest.approx(formula, rel=0.02)
    paid = simulate(Engine(1_000_000, STEP), loop)
    formula = loop_tokens_per_s(contender, concurrency, prompt, output, 4000.0)
    assert paid.summary()["output_tokens_per_s"] == pytest.approx(formula, rel=0.02)


def test_a_pool_of_exactly_one_request_makes_progress():
    load = requests([0] * 5, [50] * 5, [51] * 5)
    ran = simulate(Engine(100, STEP), load)
    assert len(ran.finished) == 5 and not ran.refused
    assert len(simulate(Engine(99, STEP), load).refused) == 5


def test_a_request_longer_than_the_pool_is_named_and_holds_up_nobody():
    ran = simulate(Engine(100, STEP), requests([0, 0, 0], [10, 101, 10], [5, 5, 5]))
    assert [r.id for r in ran.finished] == [0, 2]
    assert ran.refusals() == [
        "request 1: 101 prompt + 5 output tokens need 105 rows, the pool holds 100"
    ]
    assert ran.summary()["refused"] == 1


def test_only_refused_requests_still_give_a_summary():
    ran = simulate(Engine(10, STEP), requests([0, 5], [50, 50], [5, 5], 1))
    row = ran.summary()
    assert row["refused"] == 2 and row["finished"] == 0 and np.isnan(row["p99_itl_ms"])


def test_a_full_pool_preempts_the_newest_and_computes_it_again():
    # 2 x 30 rows fit 64 at first, 2 x 40 do not.
    ran = simulate(Engine(64, STEP, watermark=0), requests([0, 0], [30, 30], [11, 11]))
    assert [r.preemptions for r in ran.requests] == [0, 1]
    assert ran.scheduler.recomputed_tokens == 32
    assert len(ran.finished) == 2


@pytest.mark.parametrize("leap", [True, False])
def test_who_arrives_as_a_step_ends_is_in_the_next(leap):
    # The first prompt takes 10 ms and each step 10; the second request comes at 50, not at 51.
    for arrival, admitted in ((50, 50), (51, 60)):
        load = requests([0, arrival], [10, 10], [20, 20])
        ran = simulate(Engine(100, ROUND, prefill_tokens_per_s=1000), load, leap=leap)
        assert ran.requests[1].admitted == admitted * FS_PER_MS


def test_no_strategy_serves_more_prompts_than_prefill_makes():
    load = traffic.poisson(10, 100, traffic.fixed(1000, 10), seed=1)
    with pytest.raises(DoesNotFit, match=r"no strategy can serve it.*Scale the rate below 0\.\d"):
        simulate(Engine(10_000, STEP), load)
    assert len(simulate(Engine(10_000, STEP), load, overload=True).finished) == 100
    simulate(Engine(10_000, STEP), load.scaled(rate=0.3))


@pytest.mark.parametrize(
    "options",
    [
        {"capacity_tokens": 0},
        {"capacity_tokens": 10, "page_tokens": 64},
        {"page_tokens": 0},
        {"prefill_tokens_per_s": 0},
        {"chunk_tokens": 0},
        {"max_running": 0},
        {"watermark": 1.0},
    ],
)
def test_bad_engines_are_named(options):
    with pytest.raises(OutOfRange):
        Engine(**{"capacity_tokens": 100, "step": STEP, **options})


def test_a_step_of_no_time_is_named():
    with pytest.raises(OutOfRange, match="above 0 ms"):
        simulate(Engine(100, Step(lambda *_: 0.0)), requests([0], [5], [5]))

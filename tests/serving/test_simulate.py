"""The simulated engine against a slow one, against the closed form, and against its invariants."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import VLLM, SGLang

from shadowkv_lab.errors import DoesNotFit, OutOfRange
from shadowkv_lab.serving import traffic
from shadowkv_lab.serving.closed_form import Contender, loop_tokens_per_s, point
from shadowkv_lab.serving.lines import PS_PER_MS, PS_PER_S, Lines, StepTime
from shadowkv_lab.serving.replicas import simulate_replicas
from shadowkv_lab.serving.simulate import Engine, simulate

STEP = StepTime(lambda running, live: 20.0 + 0.25 * running + 1e-4 * live)
ROUND = StepTime(lambda *_: 10.0)  # whole ms, as the arrivals: they meet at the ends of steps
BENT = StepTime(
    lambda running, live: 5.0 + 0.5 * running + 2e-2 * max(0, live - 40) + 1e-3 * live,
    knots=lambda running: [0, 40, 97, 300],
)
CAST = StepTime(lambda running, rows: 7.5 + 1e-3 * rows)
BLOCK = 16  # tokens of a prefix block


def requests(arrival_ms, prompt, output, concurrency=None, blocks=None):
    arrays = np.cumsum(arrival_ms) / 1e3, np.array(prompt), np.array(output)
    return traffic.Traffic("test", *arrays, concurrency, blocks=blocks, block_tokens=BLOCK)


def chains(draw, prompts):
    """Block hashes of each prompt: some begin like an earlier one, and go their own way later."""
    made, number = [], 0
    for prompt in prompts:
        whole = prompt // BLOCK
        like = made[draw(st.integers(0, len(made) - 1))] if made else ()
        common = min(draw(st.integers(0, 5)), len(like), whole)
        made.append((*like[:common], *range(number, number + whole - common)))
        number += whole - common
    return made


@st.composite
def loads(draw, most=10, prefixes=False):
    count = draw(st.integers(1, most))
    gaps = st.one_of(st.just(0), st.integers(0, 30), st.just(10), st.integers(0, 2000))
    numbers = lambda low, high: st.lists(  # noqa: E731
        st.integers(low, high), min_size=count, max_size=count
    )
    arrival = draw(st.lists(gaps, min_size=count, max_size=count))
    concurrency = draw(st.one_of(st.none(), st.integers(1, 6)))
    prompt = draw(numbers(1, 90 if prefixes else 40))
    blocks = chains(draw, prompt) if prefixes else None
    return requests(arrival, prompt, draw(numbers(1, 45)), concurrency, blocks)


@st.composite
def engines(draw, policies=("vllm", "sglang")):
    page = draw(st.sampled_from([1, 1, 4, 16]))
    return Engine(
        draw(st.one_of(st.integers(page, 99), st.integers(70, 260))),
        draw(st.sampled_from([STEP, BENT, ROUND])),
        "test",
        prefill_tokens_per_s=draw(st.sampled_from([300.0, 1000.0, 4000.0])),
        prefill_cast=draw(st.sampled_from([None, CAST])),
        prefill_graphs=draw(st.booleans()),
        chunk_tokens=draw(st.sampled_from([5, 32, 2048])),
        page_size=page,
        max_running=draw(st.sampled_from([1, 3, 256])),
        policy=draw(st.sampled_from(policies)),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.2])),
        max_new_tokens=draw(st.sampled_from([None, 30])),
    )


def columns(results):
    """(id, arrival, admitted, first, end, preemptions) of each finished request."""
    log = results.log
    each = results.arrivals, log.admitted, log.first, log.end, log.preempted
    return [(i, *(int(column[i]) for column in each)) for i in results.served]


def everything(results):
    """All that a run says, for equality."""
    log = results.log
    samples = [list(c) for c in (log.at, log.admissions, log.preemptions, log.running, log.free)]
    return (
        columns(results),
        samples,
        results.summary(),
        [list(x) for x in (*results.queue(), *results.kv_use())],
    )


def by_oracle(load, engine):
    step, cast = Lines(engine.step, engine.capacity_tokens), engine.prefill_cast
    cast = cast and Lines(cast, engine.capacity_tokens)
    blocks = load.blocks or [()] * len(load)
    arguments = (
        [
            (round(at * PS_PER_S), p, g, b)
            for (at, p, g), b in zip(load.rows(), blocks, strict=True)
        ],
        load.concurrency,
        engine.capacity_tokens,
        lambda r, n: step.line(r, n).ps(n),
        round(PS_PER_S / engine.prefill_tokens_per_s),
        engine.chunk_tokens,
        engine.page_size,
        engine.max_running,
        BLOCK if load.blocks else 0,
        cast and (lambda rows: cast.line(1, rows).ps(rows), engine.prefill_graphs),
    )
    if engine.policy == "vllm":
        return VLLM(*arguments, watermark=engine.watermark).serve()
    return SGLang(*arguments, max_new=engine.max_new_tokens).serve()


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("policy", ["vllm", "sglang"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_agrees_with_a_slow_engine_in_every_token(policy, prefixes, data):
    load, engine = data.draw(loads(prefixes=prefixes)), data.draw(engines([policy]))
    ran = simulate(engine, load, overload=True)
    times, gaps, redone, refused = by_oracle(load, engine)
    assert columns(ran) == times
    assert [r.id for r in ran.refused] == refused
    assert ran.scheduler.recomputed_tokens == redone
    runs = zip(*ran.log.gap_runs, strict=True)
    ours = [[first + growth * i] * n for n, first, growth, k in runs for i in range(k)]
    ours = list(itertools.chain(*ours))
    assert sorted(ours) == gaps
    if gaps:
        expected = [np.mean(gaps), *np.percentile(gaps, [50, 90, 99])]
        np.testing.assert_allclose(ran.itl_ms, np.array(expected) / PS_PER_MS, rtol=1e-12)


@pytest.mark.parametrize("prefixes", [False, True])
def test_retraction_agrees_with_a_slow_engine(prefixes):
    """Prompts that are admitted one by one, with answers that outgrow the pool."""
    retracted = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        count, answer = int(rng.integers(8, 14)), int(rng.integers(60, 110))
        prompt = rng.integers(BLOCK, BLOCK + 5, count) if prefixes else rng.integers(3, 7, count)
        blocks = [(int(rng.integers(0, 3)),) for _ in range(count)] if prefixes else None
        output = answer - rng.integers(0, 4, count)
        load = requests(rng.choice([0, 0, 7], count), prompt, output, None, blocks)
        engine = Engine(
            int(rng.uniform(3.2, 6) * (answer + prompt.mean())),
            BENT,
            prefill_tokens_per_s=1000.0,
            chunk_tokens=int(prompt.max()),
            page_size=int(rng.choice([1, 1, 4])),
            policy="sglang",
            max_new_tokens=int(rng.choice([1, 1, 115])),
        )
        leaps, steps = (simulate(engine, load, leap=leap, overload=True) for leap in (True, False))
        times, _, redone, _ = by_oracle(load, engine)
        assert columns(leaps) == times and leaps.scheduler.recomputed_tokens == redone
        np.testing.assert_equal(everything(leaps), everything(steps))
        retracted += leaps.scheduler.preemptions > 0
    assert retracted > 15, retracted


@given(st.one_of(loads(25), loads(25, True)), engines())
@settings(max_examples=200, deadline=None)
def test_leaping_equals_stepping(load, engine):
    leaps, steps = (simulate(engine, load, leap=leap, overload=True) for leap in (True, False))
    np.testing.assert_equal(everything(leaps), everything(steps))


@given(st.one_of(loads(25), loads(25, True)), engines())
@settings(max_examples=200, deadline=None)
def test_invariants_at_every_event(load, engine):
    seen = [0]

    def observe(now, scheduler):
        assert now >= seen[-1]
        seen.append(now)
        held = [scheduler.own_rows(r) for r in scheduler.running.values()]
        scheduler.blocks.check_integrity(held)
        assert len(held) <= engine.max_running
        live = [scheduler.rows(r) for r in scheduler.running.values() if r.decoding]
        assert sum(live) == scheduler.blocks.live_tokens and len(live) == scheduler.blocks.decoding

    ran = simulate(engine, load, overload=True, observe=observe)
    assert ran.finished + len(ran.refused) == len(load)  # once, or reported
    assert not set(ran.served) & {r.id for r in ran.refused}
    for _, arrival, admitted, first, end, _ in columns(ran):
        assert arrival <= admitted < first <= end
    counted = np.multiply(ran.log.gap_runs[0], ran.log.gap_runs[3]).sum()
    assert counted == (load.output_tokens[ran.served] - 1).sum()  # out = asked
    assert ran.output_tokens == load.output_tokens[ran.served].sum()
    assert ran.scheduler.blocks.available == ran.scheduler.blocks.total  # nothing leaks
    assert ran.scheduler.preemptions == sum(ran.log.preempted)
    assert 0 <= ran.shared_share < 1 and 0 <= ran.cached_share < 1
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
    flat = simulate(Engine(10_000, StepTime(lambda *_: 31.0)), requests([0], [prompt], [output]))
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
    assert ran.finished == 5 and not ran.refused
    assert len(simulate(Engine(99, STEP), load).refused) == 5


def test_a_request_longer_than_the_pool_is_named_and_holds_up_nobody():
    ran = simulate(Engine(100, STEP), requests([0, 0, 0], [10, 101, 10], [5, 5, 5]))
    assert ran.served.tolist() == [0, 2]
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
    assert list(ran.log.preempted) == [0, 1]
    assert ran.scheduler.recomputed_tokens == 32
    assert ran.finished == 2


def test_sglang_retracts_to_the_end_of_the_queue_and_trusts_less():
    """By hand: a pool of 355 rows, prompts of 10, answers of 100.

    A prompt per pass; the fourth is admitted, since 10 + 100 + 1 < 355 - 3 x 10 - 0.7 x 3 x 99;
    the fifth is not. After 78 steps 4 x 88 rows stand, 4 more do not fit: the last admitted goes
    to the end of the queue.
    """
    engine = Engine(355, ROUND, prefill_tokens_per_s=1e3, policy="sglang", chunk_tokens=10)
    ratios, waiting = {}, {}

    def observe(now, scheduler):
        ratios[scheduler.blocks.steps] = scheduler.new_token_ratio
        waiting[scheduler.blocks.steps] = [r.id for r in scheduler.waiting]

    ran = simulate(engine, requests([0] * 5, [10] * 5, [100] * 5), leap=False, observe=observe)
    assert ratios[78] == 700_000_000 - 78 * 1_003_333 and waiting[78] == [4]
    assert ratios[79] == (3 * 79 + 3 * 20) * 10**9 // (3 * 100 + 1) and waiting[79] == [4, 3]
    assert ratios[80] == ratios[79] - 1_003_333
    assert list(ran.log.preempted) == [0, 0, 0, 1, 0] and ran.scheduler.recomputed_tokens == 88
    assert ran.log.admitted[4] >= ran.log.end[0] and ran.finished == 5


def test_prefill_pays_the_cast_that_sglang_pays():
    """A pool of 100,000 rows: no prefix, a short one, a long one; with and without graphs."""
    cast = StepTime(lambda *_: 50.0)
    prompts = {"none": [3000], "short": [9000], "long": [30_000]}
    for graphs, chunk, expected in (
        # passes: 1; 4096 + 4096 + 808; 7 x 4096 + 1328. Each replays a graph.
        (True, 4096, {"none": 1, "short": 3, "long": 8}),
        # Above 8,192 tokens no graph is replayed, and the first pass has no prefix.
        (True, 16_384, {"none": 1, "short": 0, "long": 0}),
        # Without graphs: a second pass over 4,096 rows casts; from 8,192 rows on they are gathered.
        (False, 4096, {"none": 0, "short": 1, "long": 1}),
    ):
        engine = Engine(100_000, ROUND, prefill_cast=cast, prefill_graphs=graphs, policy="sglang")
        engine = replace(engine, chunk_tokens=chunk)
        for name, prompt in prompts.items():
            ran = simulate(engine, requests([0], prompt, [2]))
            assert ran.ttft_ms[0] == pytest.approx(prompt[0] / 4.0 + 50 * expected[name]), name


@pytest.mark.parametrize("leap", [True, False])
def test_who_arrives_as_a_step_ends_is_in_the_next(leap):
    # The first prompt takes 10 ms and each step 10; the second request comes at 50, not at 51.
    for arrival, admitted in ((50, 50), (51, 60)):
        load = requests([0, arrival], [10, 10], [20, 20])
        ran = simulate(Engine(100, ROUND, prefill_tokens_per_s=1000), load, leap=leap)
        assert ran.log.admitted[1] == admitted * PS_PER_MS


def test_no_strategy_serves_more_prompts_than_prefill_makes():
    load = traffic.poisson(10, 100, traffic.fixed(1000, 10), seed=1)
    with pytest.raises(DoesNotFit, match=r"no strategy can serve it.*Scale the rate below 0\.\d"):
        simulate(Engine(10_000, STEP), load)
    assert simulate(Engine(10_000, STEP), load, overload=True).finished == 100
    simulate(Engine(10_000, STEP), load.scaled(rate=0.3))


@pytest.mark.parametrize(
    "options",
    [
        {"capacity_tokens": 0},
        {"capacity_tokens": 10, "page_size": 64},
        {"page_size": 0},
        {"prefill_tokens_per_s": 0},
        {"chunk_tokens": 0},
        {"max_running": 0},
        {"watermark": 1.0},
        {"policy": "tgi"},
        {"max_new_tokens": 0},
    ],
)
def test_bad_engines_are_named(options):
    with pytest.raises(OutOfRange):
        Engine(**{"capacity_tokens": 100, "step": STEP, **options})


def test_a_step_of_no_time_is_named():
    with pytest.raises(OutOfRange, match="above 0 ms"):
        simulate(Engine(100, StepTime(lambda *_: 0.0)), requests([0], [5], [5]))


def alike(fleet, one):
    """Whether two runs say the same of every request."""
    ours, theirs = fleet.summary(), one.summary()
    return columns(fleet) == columns(one) and ours == pytest.approx(theirs, nan_ok=True)


@given(st.one_of(loads(25), loads(25, True)), engines())
@settings(max_examples=100, deadline=None)
def test_one_replica_is_the_simulation(load, engine):
    one = simulate(engine, load, overload=True)
    assert alike(simulate_replicas(engine, load, 1, overload=True), one)


@given(loads(25), engines(), st.integers(2, 5))
@settings(max_examples=50, deadline=None)
def test_replicas_serve_each_request_once(load, engine, count):
    fleet = simulate_replicas(engine, load, count, overload=True)
    assert fleet.finished + len(fleet.refused) == len(load)
    assert fleet.finished == sum(r.finished for r in fleet.replicas)
    counted = np.multiply(fleet.log.gap_runs[0], fleet.log.gap_runs[3]).sum()
    assert counted == (load.output_tokens[fleet.served] - 1).sum()
    assert fleet.scheduler.preemptions == sum(fleet.log.preempted)
    assert (fleet.queue()[1] >= 0).all()


def test_a_router_sends_to_the_replica_with_the_fewest():
    """By hand: three at once over two, then one when only the second has a request less."""
    load = requests([0, 0, 0, 400], [10] * 4, [30, 30, 60, 5])
    fleet = simulate_replicas(Engine(1000, ROUND, prefill_tokens_per_s=1e3), load, 2)
    own = [r.served.tolist() for r in fleet.replicas]
    assert own == [[0, 2], [1, 3]]  # 0 and 1 end at 300 ms; at 400 ms the first still has 2
    assert fleet.summary()["duration_s"] == fleet.log.end[2] / PS_PER_S


def test_two_replicas_serve_twice_the_rate_as_one_serves_it():
    one = traffic.poisson(2.0, 3000, traffic.fixed(200, 50), seed=3)
    alone = simulate(Engine(100_000, STEP), one).summary()
    both = simulate_replicas(Engine(100_000, STEP), one.scaled(rate=2), 2).summary()
    assert both["output_tokens_per_s"] == pytest.approx(2 * alone["output_tokens_per_s"], rel=0.02)
    assert both["p50_ttft_ms"] <= 1.05 * alone["p50_ttft_ms"]
    with pytest.raises(OutOfRange, match="Replicas: 0"):
        simulate_replicas(Engine(100, STEP), one, 0)

"""Contenders from budget and prediction; the lab's figures and widgets over them."""

import re

import numpy as np
import pytest

from shadowkv_lab import errors
from shadowkv_lab.deployment import deployment, published_deployment
from shadowkv_lab.provenance import Kind
from shadowkv_lab.serving import traffic
from shadowkv_lab.serving.closed_form import loop_tokens_per_s, point
from shadowkv_lab.serving.contenders import contenders, engine, over_rates, reported_or_derived
from shadowkv_lab.serving.simulate import simulate
from shadowkv_lab.steps.rest import Rest

BASIC = ("full_cast", "bf16_pool", "shadow")


def test_the_report_has_its_capacities_and_its_tpot():
    cast, plain, shadow = contenders(reported_or_derived(), BASIC)
    assert [c.capacity_tokens for c in (cast, plain, shadow)] == [495_616, 273_280, 188_608]
    # Anchored on the report, full cast at one request is the report's TPOT again.
    assert point(cast, 1, 1024).step_ms == pytest.approx(95.6, rel=1e-3)
    assert point(plain, 1, 1024).step_ms < 40
    assert {c.step.provenance.kind for c in (cast, plain, shadow)} == {Kind.ASSUMED}


def test_an_unknown_anchor_is_named():
    with pytest.raises(errors.UnknownName, match="rtx6kpro"):
        contenders(deployment("glm-5", "h200"), anchor="rtx6000pro")


def test_everything_is_read_off_the_deployment():
    """Another model, card, page, spread and engine: nothing of the GLM-5 report is left."""
    at = deployment("deepseek-r1", "h200", engine="vllm", kv_gib=30.0, page_size=16)
    rest = Rest(10.0, experts=0)
    (native,) = contenders(at, ["bf16_pool"], rest=rest)
    assert native.capacity_tokens == (30 * 2**30) // (61 * 1152) // 16 * 16
    served = engine(native)
    assert (served.policy, served.page_size, served.prefill_cast) == ("vllm", 16, None)
    assert served.prefill.kind is Kind.ASSUMED  # 4,000 tokens/s are another machine's
    report = engine(contenders(reported_or_derived(), ["full_cast"])[0])
    assert (report.policy, report.page_size, report.chunk_tokens) == ("sglang", 64, 8192)
    assert report.prefill.kind is Kind.PUBLISHED and "rtx6kpro" in report.prefill.source.title
    # Eight ranks of DP attention have eight pools, and one request reads one of them.
    ranks = deployment("deepseek-r1", "h200", data_parallel=8, kv_gib=30.0)
    alone = deployment("deepseek-r1", "h200", kv_gib=30.0)
    one, eight = (contenders(d, ["bf16_pool"], rest=rest)[0] for d in (alone, ranks))
    assert eight.capacity_tokens == 8 * one.capacity_tokens
    assert eight.step(8, 80_000) < eight.step(64, 640_000) <= one.step(64, 640_000)


def test_a_memory_of_ones_own_is_not_the_reports():
    assert reported_or_derived() == published_deployment("glm5-report", "rtx-pro-6000-server")
    assert reported_or_derived(kv_gib=10.0).kv_gib == 10.0
    assert reported_or_derived(card="h200").given.keys() == set()
    assert reported_or_derived(tensor_parallel=4).kv_gib is None


def test_only_sglangs_full_and_gathering_casts_pay_in_the_prefill():
    at = deployment("deepseek-r1", "h200")
    strategies = ["full_cast", "gather_cast", "bf16_pool", "shadow", "shadow(layers=26)"]
    made = {c.name: c for c in contenders(at, strategies)}
    found = {name: c.prefill_cast for name, c in made.items()}
    assert found["bf16_pool"] is found["shadow"] is None
    full, gathered, part = (found[n] for n in ("full_cast", "gather_cast", "shadow(layers=26)"))
    assert full(1, 100) == full(1, 100_000) and gathered(1, 100) < gathered(1, 100_000)
    # 35 of 61 layers are cast, over a smaller pool.
    pools = made["shadow(layers=26)"].capacity_tokens / made["full_cast"].capacity_tokens
    assert part(1, 100) == pytest.approx(35 / 61 * pools * full(1, 100), rel=0.02)
    vllm = deployment("deepseek-r1", "h200", engine="vllm")
    assert contenders(vllm, ["full_cast"])[0].prefill_cast is None


@pytest.mark.parametrize("prompt", [2048, 20_000])
@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_a_loop_with_its_prefills_casts_agrees_with_the_closed_form(concurrency, prompt):
    (cast,) = contenders(deployment("deepseek-r1", "h200"), ["full_cast"], anchor="rtx6kpro")
    loop = traffic.closed_loop(concurrency, 6 * concurrency, traffic.fixed(prompt, 256))
    formula = loop_tokens_per_s(cast, concurrency, prompt, 256, 4000.0)
    ran = simulate(engine(cast), loop).summary()["output_tokens_per_s"]
    assert ran == pytest.approx(formula, rel=0.005)
    free = simulate(engine(cast, prefill_cast=None), loop).summary()["output_tokens_per_s"]
    assert free > ran


def test_an_engine_takes_the_contenders_step():
    cast = contenders(reported_or_derived(), ["full_cast"])[0]
    load = traffic.closed_loop(1, 1, traffic.fixed(1000, 200))
    ran = simulate(engine(cast), load)
    steps = [cast.step(1, 1000 + token) for token in range(1, 200)]
    assert ran.tpot_ms[0] == pytest.approx(np.mean(steps), rel=1e-3)
    assert str(ran.provenance) == "assumed" and ran.engine.label == "full_cast"


def test_waits_grow_with_the_rate():
    found = contenders(reported_or_derived(), BASIC)
    load = traffic.poisson(1.0, 300, traffic.published("azure-conversation"))
    rows = over_rates(found, load, [0.1, 1.0, 3.0])
    assert [(row["rate"], row["label"]) for row in rows[:4]] == [
        *((0.1, c.name) for c in found),
        (1.0, found[0].name),
    ]
    for i in range(3):
        waits = [row["p99_ttft_ms"] for row in rows[i::3]]
        assert waits == sorted(waits) and waits[2] > 10 * waits[0]


closed = pytest.importorskip("shadowkv_lab.ui.serving")
lab = pytest.importorskip("shadowkv_lab.ui.simulated")


def test_figures_state_their_finding_units_and_provenance():
    view = closed.load_view(strategies=BASIC)
    assert len(view.figures) == 3 and "assumed" in view.note
    for figure in view.figures:
        assert "assumed" in figure.layout.title.text
        assert any(digit in figure.layout.title.text for digit in "123456789")
    assert view.figures[1].layout.xaxis.type == "log"
    assert view.table.running.tolist() == [60, 33, 23]


def test_shares_of_a_map_add_up_and_say_where_they_come_from():
    found = contenders(reported_or_derived(), BASIC)
    row = closed.wins({"glm5-report": found}).loc["glm5-report"]
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


def test_every_setting_of_the_closed_form_shows_something_or_says_why_not():
    for name in ("model", "gpu", "rest"):
        choices = closed.load_view.controls[name].options
        start = closed.load_view.start()
        for value in choices if isinstance(choices, tuple) else choices(start):
            value = value[1] if isinstance(value, tuple) else value
            try:
                assert closed.load_view(**{name: value}).figures
            except (errors.DoesNotFit, errors.CannotRun, errors.NoAnswer) as error:
                assert error.what
    with pytest.raises(errors.OutOfRange, match="No strategy is chosen"):
        closed.load_view(strategies=())


def test_where_requests_are_refused_the_cliff_and_the_traffic_say_so():
    view = lab.traffic_view(lengths="fixed", prompt_tokens=65_536, output_tokens=256)
    cliff = view.figures[1]
    served = [x for x, y in zip(cliff.data[0].x, cliff.data[0].y, strict=True) if y is not None]
    assert min(served) >= 65_792, "one request needs that many rows"
    claimed = re.search(r"From ([\d,]+) tokens", cliff.layout.title.text)
    assert claimed is None or int(claimed[1].replace(",", "")) >= 65_792
    refused = lab.traffic_view(
        gpu="h100",
        lengths="fixed",
        prompt_tokens=65_536,
        output_tokens=65_536,
        strategies=("shadow",),
    )
    assert isinstance(refused.unanswered, errors.DoesNotFit)
    assert "No request fits" in refused.figures[0].layout.title.text


def test_gaps_of_many_hours_do_not_overflow():
    view = lab.traffic_view(lengths="fixed", output_tokens=65_536)
    assert (view.table.p99_itl_ms > 0).all()

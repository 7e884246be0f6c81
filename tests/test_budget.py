"""The memory budget against DESIGN's vectors and arithmetic by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowkv_lab.budget import budget, cards_for, largest_context
from shadowkv_lab.errors import DoesNotFit, LabError, OutOfRange, UnknownName

CARD_GIB = 97_887 / 1024  # as the driver reports an RTX PRO 6000


def case(**options):
    return budget("glm-5", "rtx-pro-6000-server", kv_gib=25.49, **options)


@pytest.mark.parametrize(
    ("strategy", "a_token", "tokens"),
    [
        ("full_cast", 55_224, 495_612),
        ("gather_cast", 55_224, 495_612),
        ("bf16_pool", 100_152, 273_281),
        ("shadow", 145_080, 188_652),
    ],
)
def test_design_vectors(strategy, a_token, tokens):
    found = case().of(strategy)
    assert (found.token_bytes, found.tokens) == (a_token, tokens)
    assert found.index_bytes == 78 * 132


def test_requests_and_scratch_by_hand():
    found = case(context=4096, concurrency=2)
    assert found.of("full_cast").requests == 495_612 // 4096 == 120
    # One layer of BF16 for the whole pool, and for the live tokens only.
    assert found.of("full_cast").scratch_gib == pytest.approx(495_612 * 1152 / 2**30)
    assert found.of("gather_cast").scratch_gib == pytest.approx(8192 * 1152 / 2**30)
    assert found.of("bf16_pool").scratch_gib == 0


def test_sglang_rule_and_its_terms():
    plan = budget("glm-5", "rtx-pro-6000-server", 8, 57.06, 0.92, before_weights_gib=1.5)
    free = CARD_GIB - 1.5
    assert plan.kv_gib == pytest.approx((free - 57.06) - 0.08 * free)
    assert plan.kv_gib == pytest.approx(sum(t.gib for t in plan.terms))
    assert [t.name for t in plan.terms] == ["card memory", "before weights", "weights", "reserve"]
    for number in ("97887", "57.06", f"{free:.2f}", f"{plan.kv_gib:.2f}"):
        assert number in plan.formula


def test_vllm_rule():
    plan = budget("glm-5", "h200", 8, 57.06, 0.9, engine="vllm", graphs_gib=2, activations_gib=3)
    card = 143_155 / 1024
    pages = 4 * 48 * 202_752 / 2**30
    assert plan.kv_gib == pytest.approx(0.9 * card - 57.06 - 2 - 3 - pages)


def test_a_logged_size_leaves_a_named_difference():
    plan = case()
    rule = CARD_GIB - 57.06 - 0.08 * CARD_GIB
    assert plan.terms[-1].name == "not accounted for"
    assert plan.terms[-1].gib == pytest.approx(25.49 - rule)
    assert plan.kv_gib == pytest.approx(25.49)


def test_tokens_of_a_log_are_bytes_of_its_dtype():
    plan = budget("glm-5", "rtx-pro-6000-server", pool_tokens=495_616)
    assert plan.kv_gib == pytest.approx(495_616 * 55_224 / 2**30)
    assert plan.of("full_cast").tokens == 495_616


def test_extras():
    assert case(index=False).of("full_cast").token_bytes == 78 * 576
    with_mtp = case(mtp=True)
    assert with_mtp.of("full_cast").token_bytes == 79 * (576 + 132)
    assert with_mtp.of("shadow").token_bytes == 79 * (1728 + 132)
    assert case(page_size=64).of("full_cast").tokens == 495_612 // 64 * 64
    r1 = budget("deepseek-r1", "h200", weights_gib=85.0).of("full_cast")
    assert (r1.token_bytes, r1.index_bytes) == (61 * 576, 0)


def test_partial_shadow_lies_between():
    plan = case(strategies=["full_cast", "shadow(layers=26)", "shadow"])
    assert plan.of("shadow(layers=26)").token_bytes == 55_224 + 26 * 1152


def test_provenance_of_what_was_typed():
    words = {t.name: t.provenance for t in case(recorded=["kv_gib"]).terms}
    assert words == {
        "card memory": "recorded",
        "before weights": "assumed",
        "weights": "recorded",
        "reserve": "calibrated",
        "not accounted for": "recorded",
    }
    typed = budget("glm-5", "h200", weights_gib=60.0)
    assert {t.name: t.provenance for t in typed.terms}["weights"] == "assumed"


def test_inverse_questions():
    plan = case()
    assert largest_context(plan, "shadow", 4) == 188_652 // 4
    assert largest_context(plan, "full_cast", 1) == 202_752  # the model's positions
    table = cards_for("glm-5", "shadow", 8, 65_536)
    assert list(table.memory_gib) == sorted(table.memory_gib)
    first = table[table.fits].iloc[0]
    assert first.requests >= 8
    smaller = table[table.memory_gib < first.memory_gib]
    assert not smaller.fits.any()
    assert all(smaller.why)


@given(st.floats(0.5, 60), st.sampled_from(["full_cast", "bf16_pool", "shadow"]))
def test_capacity_is_the_most_that_fits(kv_gib, strategy):
    plan = budget("glm-5", "h200", kv_gib=kv_gib)
    found = plan.of(strategy)
    room = kv_gib * 2**30
    assert found.tokens * found.token_bytes <= room * (1 + 1e-12)
    assert room < (found.tokens + 1) * found.token_bytes * (1 + 1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(mem_fraction_static=0.0),
        dict(mem_fraction_static=1.0),
        dict(mem_fraction_static=92),
        dict(mem_fraction_static=math.nan),
        dict(weights_gib=-1.0),
        dict(weights_gib=0),
        dict(kv_gib=math.inf),
        dict(kv_gib=0),
        dict(pool_tokens=-5),
        dict(context=0),
        dict(context=202_753),
        dict(concurrency=0),
        dict(tensor_parallel=7),
        dict(engine="trt"),
        dict(graphs_gib=math.nan),
    ],
)
def test_bad_sizes_are_named(wrong):
    with pytest.raises(OutOfRange):
        budget("glm-5", "rtx-pro-6000-server", **wrong)


def test_weights_that_do_not_fit():
    with pytest.raises(DoesNotFit, match=r"120\.00 GiB of weights.*more GPUs"):
        budget("glm-5", "rtx-pro-6000-server", weights_gib=120.0)
    with pytest.raises(DoesNotFit, match="were asked for"):
        budget("glm-5", "rtx-pro-6000-server", kv_gib=40.0)
    with pytest.raises(UnknownName):
        budget("glm-5", "rtx-9000")
    assert issubclass(DoesNotFit, LabError)

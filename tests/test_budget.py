"""The memory budget against DESIGN's vectors and arithmetic by hand."""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowkv_lab import machine
from shadowkv_lab.budget import budget, cards_for, largest_context
from shadowkv_lab.deployment import deployment, published_deployment
from shadowkv_lab.errors import CannotRun, DoesNotFit, LabError, NoAnswer, OutOfRange, UnknownName
from shadowkv_lab.load import Load
from shadowkv_lab.provenance import Kind, recorded
from shadowkv_lab.strategies import STRATEGIES, Strategy
from shadowkv_lab.strategies.base import Moves

CARD_GIB = 97_887 / 1024  # as the driver reports an RTX PRO 6000
SERVER = "rtx-pro-6000-server"


def plan(load=None, strategies=None, model="GLM-5-NVFP4", card=SERVER, **options):
    """A budget with DESIGN's 25.49 GiB of KV and pages of one token, unless told otherwise."""
    options = {"kv_gib": 25.49, "page_size": 1} | options
    return budget(deployment(model, card, **options), load, strategies)


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
    found = plan().of(strategy)
    assert (found.token_bytes, found.tokens) == (a_token, tokens)
    assert found.index_bytes == 78 * 132


def test_requests_and_scratch_by_hand():
    found = plan(Load(2, 4096))
    assert found.of("full_cast").requests == 495_612 // 4096 == 120
    # One layer of BF16 for the whole pool, and for the live tokens only.
    assert found.of("full_cast").scratch_gib == pytest.approx(495_612 * 1152 / 2**30)
    assert found.of("gather_cast").scratch_gib == pytest.approx(8192 * 1152 / 2**30)
    assert found.of("bf16_pool").scratch_gib == 0


def test_sglang_rule_and_its_terms():
    made = plan(weights_gib=57.06, memory_fraction=0.92, before_weights_gib=1.5, kv_gib=None)
    free = CARD_GIB - 1.5
    assert made.kv_gib == pytest.approx((free - 57.06) - 0.08 * free)
    assert made.kv_gib == pytest.approx(sum(t.gib for t in made.terms))
    assert [t.name for t in made.terms] == ["card memory", "before weights", "weights", "reserve"]
    for number in ("97887", "57.06", f"{free:.2f}", f"{made.kv_gib:.2f}"):
        assert number in made.formula


def test_vllm_rule():
    at = dict(engine="vllm", memory_fraction=0.9, graphs_gib=2, activations_gib=3, kv_gib=None)
    made = plan(card="h200", weights_gib=57.06, **at)
    pages = 4 * 48 * 202_752 / 2**30
    assert made.kv_gib == pytest.approx(0.9 * 143_155 / 1024 - 57.06 - 2 - 3 - pages)
    # A log of vLLM's with a utilisation of 1.00: 139.72 - 39.66 - 2.53 - 0.24 = 97.29 (log-10).
    whole = machine.Card("x", "x", round(139.72 * 1024), 4000, 78, 60, 1, (9, 0), None)
    at |= dict(memory_fraction=1.0, graphs_gib=0.24, activations_gib=2.53)
    pages = 4 * 48 * 163_840 / 2**30
    kv = plan(model="deepseek-r1", card=whole, weights_gib=39.66, **at).kv_gib
    assert kv == pytest.approx(97.29 - pages, abs=0.01)


def test_a_logged_size_leaves_a_named_difference():
    made = plan(weights_gib=57.06, memory_fraction=0.92)
    rule = CARD_GIB - 57.06 - 0.08 * CARD_GIB
    assert made.terms[-1].name == "not accounted for"
    assert made.terms[-1].gib == pytest.approx(25.49 - rule)
    assert made.kv_gib == pytest.approx(25.49)


def test_the_glm5_report_closes():
    """About 61 GiB of weights, 0.92, 94.1 free before loading and 25.49 GiB of KV fit together."""
    made = budget(published_deployment("glm5-report"))
    terms = {t.name: t for t in made.terms}
    assert terms["weights"].gib == -61
    assert terms["weights"].provenance.kind is Kind.PUBLISHED
    assert terms["before weights"].provenance.kind is Kind.ASSUMED
    assert abs(terms["not accounted for"].gib) < 0.1
    assert made.of("full_cast").tokens == made.pool.tokens == 495_616


def test_tokens_of_a_log_are_bytes_of_its_layout():
    made = plan(kv_gib=None, pool_tokens=495_616)
    assert made.kv_gib == pytest.approx(495_616 * 55_224 / 2**30)
    assert made.of("full_cast").tokens == 495_616


def test_extras():
    assert plan(index_layers=0).of("full_cast").token_bytes == 78 * 576
    with_mtp = plan(mtp=True)
    assert with_mtp.of("full_cast").token_bytes == 79 * (576 + 132)
    assert with_mtp.of("shadow").token_bytes == 79 * (1728 + 132)
    assert plan(page_size=64).of("full_cast").tokens == 495_612 // 64 * 64
    assert plan(page_size=None).of("full_cast").tokens == 495_612 // 64 * 64  # a DSA model's
    r1 = plan(model="deepseek-r1", card="h200").of("full_cast")
    assert (r1.token_bytes, r1.index_bytes) == (61 * 576, 0)


def test_partial_shadow_lies_between():
    made = plan(strategies=["full_cast", "shadow(layers=26)", "shadow"])
    assert made.of("shadow(layers=26)").token_bytes == 55_224 + 26 * 1152


def test_provenance_of_what_was_seen():
    made = plan(weights_gib=57.06, given={"kv_gib": recorded("a log")})
    assert {t.name: str(t.provenance) for t in made.terms} == {
        "card memory": "recorded",
        "before weights": "assumed",
        "weights": "assumed",  # typed
        "reserve": "assumed",  # the engine's own default fraction
        "not accounted for": "recorded",
    }
    # The weakest part names the number: GiB as logged, over bytes per token.
    assert str(made.of("full_cast").provenance) == "calibrated"


def test_what_the_rules_refuse_has_a_reason_and_no_number():
    made = plan()
    (refused,) = made.refused
    assert refused.strategy.label == "native_fp8" and "SM90" in refused.verdict.reason
    with pytest.raises(CannotRun, match="SM90"):
        made.of("native_fp8")
    row = made.table().set_index("strategy").loc["native_fp8"]
    assert not row.fits and "SM90" in row.reason
    assert row[["tokens", "requests", "kept_gib", "token_bytes"]].isna().all()
    (untried,) = [c for c in made.capacities if c.untried]
    assert untried.strategy.label == "fused_fp8"


@pytest.mark.parametrize(
    ("layout", "a_token", "tokens"),
    [("fp8_ds_mla", 54_728, 307_046), ("nvfp4_ds_mla", 37_032, 453_771)],
)
def test_packed_rows_are_counted_and_read_by_nobody_here(layout, a_token, tokens):
    """GLM-5.2 under vLLM, 15.65 GiB, MTP on (log-11 and log-12)."""
    made = plan(
        model="glm-5.2", tensor_parallel=4, engine="vllm", layout=layout, mtp=True, kv_gib=15.65
    )
    assert (made.pool.token_bytes, made.pool.tokens) == (a_token, tokens)
    assert f"{tokens:,} slots" in made.formula
    assert [c.strategy.label for c in made.capacities] == ["bf16_pool"]
    assert all("packed" in r.verdict.reason for r in made.refused)


def test_an_estimate_of_the_weights_does_not_overrule_a_logged_pool():
    # TP 4: no published checkpoint of GLM-5.2 fits with this pool, so the server has another.
    made = plan(model="glm-5.2", tensor_parallel=4, layout="fp8_ds_mla", kv_gib=15.65)
    assert made.memory.reserve_gib is None and "not known" in made.formula
    assert all(c.left_gib is None for c in made.capacities)


def test_pipeline_stages_the_larger_counts():
    """97.29 GiB hold 2,925,188 BF16 tokens on the stage of 31 layers, not 1,486,571 (log-10)."""
    at = dict(layout="bf16", engine="vllm", memory_fraction=1.0, kv_gib=97.29)
    made = plan(model="deepseek-r1", card="h200", pipeline_parallel=2, **at)
    assert made.pool.tokens == int(97.29 * 2**30) // (31 * 1152) == 2_925_188
    assert "30 or 31 layers" in made.formula


def test_dcp_ranks_share_a_request():
    """46.80 GiB are 715,136 slots of a GPU in the log, eight times as many tokens (log-09)."""
    at = dict(layout="bf16", engine="vllm", decode_context_parallel=8, kv_gib=46.80)
    made = plan(Load(4, 131_072), model="kimi-k2", card="h200", **at)
    rows = int(46.80 * 2**30) // (61 * 1152)
    assert rows == pytest.approx(715_136, rel=1e-4)
    assert (made.pool.rows, made.pool.tokens) == (rows, 8 * rows)
    assert made.pool.requests == 8 * rows // 131_072


def test_dp_ranks_have_a_pool_each():
    """1,230,416 slots per rank, 9,843,328 together (log-04)."""
    at = dict(layout="bf16", data_parallel=8, pool_tokens=1_230_416, kv_gib=80.53)
    made = plan(Load(8, 4096), model="deepseek-r1", card="h200", **at)
    assert "9,843,328 tokens" in made.formula
    assert made.pool.requests == 8 * (1_230_416 // 4096)
    assert [c.strategy.label for c in made.capacities] == ["bf16_pool"]  # nothing is cast


def test_a_strategy_that_keeps_buffers_of_its_own_has_less_room():
    @dataclass(frozen=True)
    class Beside(Strategy):
        name, title = "beside", "with a buffer beside"

        def buffers(self, model):
            return {"hot": 131_072}

        def moves(self, model, P, L, R):
            return Moves(0, model.row_bytes("bf16") * L, model.row_bytes("fp8") * R)

    try:
        found = plan(strategies=["full_cast", "beside"])
        room = int(25.49 * 2**30) - 78 * 131_072 * 1152
        assert found.of("beside").tokens == room // 55_224
        assert found.of("beside").kept_gib == pytest.approx(25.49, abs=1e-3)
        assert found.of("full_cast").tokens == 495_612
        assert plan(kv_gib=10.0, strategies=["beside"]).of("beside").tokens == 0
    finally:
        del STRATEGIES["beside"]


def test_inverse_questions():
    made = plan()
    assert largest_context(made, "shadow", 4) == 188_652 // 4
    assert largest_context(made, "full_cast", 1) == 202_752  # the model's positions
    table = cards_for(made.deployment, "shadow", Load(8, 65_536))
    assert list(table.memory_gib) == sorted(table.memory_gib)
    first = table[table.fits].iloc[0]
    assert first.requests >= 8
    smaller = table[table.memory_gib < first.memory_gib]
    assert not smaller.fits.any()
    assert all(smaller.why)
    # What was seen of one card's memory is not carried to another.
    assert (
        not cards_for(published_deployment("glm5-report"), "full_cast", Load())
        .tokens.eq(495_616)
        .any()
    )


@given(st.floats(0.5, 60), st.sampled_from(["full_cast", "bf16_pool", "shadow"]))
def test_capacity_is_the_most_that_fits(kv_gib, strategy):
    found = plan(card="h200", kv_gib=kv_gib).of(strategy)
    room = kv_gib * 2**30
    assert found.tokens * found.token_bytes <= room * (1 + 1e-12)
    assert room < (found.tokens + 1) * found.token_bytes * (1 + 1e-12)


@pytest.mark.parametrize("wrong", [dict(context=0), dict(context=202_753), dict(concurrency=0)])
def test_bad_loads_are_named(wrong):
    with pytest.raises(OutOfRange):
        plan(Load(**wrong))


def test_weights_that_do_not_fit():
    with pytest.raises(DoesNotFit, match=r"120\.00 GiB of weights.*more GPUs"):
        plan(weights_gib=120.0, kv_gib=None)
    with pytest.raises(DoesNotFit, match="were asked for"):
        budget(published_deployment("glm5-report", kv_gib=40.0))
    with pytest.raises(DoesNotFit, match=r"500\.00 GiB of KV"):
        plan(kv_gib=500)
    with pytest.raises(UnknownName):
        plan(card="rtx-9000")
    assert issubclass(DoesNotFit, LabError)


def test_unknown_weights_are_asked_for():
    bare = replace(plan().deployment.model, vocab_size=0, name="mine")
    with pytest.raises(NoAnswer, match=r"vocab_size.*--weights-gib"):
        plan(model=bare, kv_gib=None)
    assert plan(model=bare).of("full_cast").tokens == 495_612
    assert math.isfinite(plan(model=bare, weights_gib=57.06, kv_gib=None).kv_gib)

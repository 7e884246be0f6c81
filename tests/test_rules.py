"""The compatibility table against what the GLM-5 report, the issues and the release notes state."""

import json
import re
from datetime import date

import pytest
from own_strategy import hot_set

from shadowkv_lab import machine, rules
from shadowkv_lab.budget import budget
from shadowkv_lab.deployment import LAYOUTS, deployment
from shadowkv_lab.errors import LabError, OutOfRange, UnknownName
from shadowkv_lab.facts import DATA
from shadowkv_lab.model import known_models, load_model
from shadowkv_lab.rules import Serving, can_run, check, compatibility
from shadowkv_lab.steps.predict import predict_all
from shadowkv_lab.strategies import STRATEGIES, parse

BOOK = json.loads((DATA / "rules" / "attention_backends.json").read_text())
RULES = pytest.mark.parametrize("rule", BOOK["rules"], ids=lambda rule: rule["id"])

# GLM-5 on 8 RTX PRO 6000: 64 heads / 8, an index, pages of 64. R1 on 8 H200: 128 heads / 8.
GLM5 = Serving((12, 0), "fp8_e4m3", heads=8, page_size=64, qk_nope_head_dim=192, dsa=True)
R1 = Serving((9, 0), "fp8_e4m3", heads=16, page_size=1, qk_nope_head_dim=128)
R1_SM120 = Serving((12, 0), "fp8_e4m3", heads=16, page_size=64, qk_nope_head_dim=128)


def failed(backend, serving, as_of=None):
    return {verdict.rule for verdict in check(backend, serving, as_of)}


def runs(serving, as_of=None):
    frame = compatibility(serving, as_of)
    return dict(zip(frame["backend"], frame["runs"], strict=True))


def but(serving, **changes):
    return rules.replace(serving, **changes)


@pytest.mark.parametrize("day", ["2026-02", "2026-02-28", date(2026, 2, 28)])
def test_dead_ends_of_the_case_in_its_day(day):
    assert "sizeof(DType) == 2" in str(check("flashinfer_fa2", GLM5, day)[0])
    trtllm = check("trtllm_mla", GLM5, day)
    assert any("qk_nope_head_dim 128" in v.reason for v in trtllm)
    assert any("128 query heads" in v.reason for v in trtllm)
    cutlass = " ".join(map(str, check("cutlass_mla", GLM5, day)))
    assert "SM100" in cutlass and "128" in cutlass and "page size 64" in cutlass
    table = runs(GLM5, day)
    for dead in ("flashinfer_fa2", "flashinfer_fa3", "flashinfer_xqa", "trtllm_mla"):
        assert table[dead] == "no"
    for dead in ("cutlass_mla", "flashmla", "vllm_triton", "flashinfer_sparse_mla"):
        assert table[dead] == "no"
    # What the GLM-5 report did run is reported to be broken by others on the same card.
    assert table["sglang_flashinfer"] == "disputed"
    assert table["lab_fused_fp8"] == "no"  # no release yet


def test_the_qk_nope_rule_left_in_march_and_128_heads_stayed():
    assert "trtllm-nope-128" in failed("trtllm_mla", GLM5, {"flashinfer": "0.6.4"})
    assert failed("trtllm_mla", GLM5, {"flashinfer": "0.6.5"}) == {"trtllm-xqa-heads"}
    assert failed("trtllm_mla", but(GLM5, heads=128)) == set()
    assert "trtllm-nope-128" not in failed("trtllm_mla", GLM5, "2026-03")


def test_ways_out_today_for_glm5_on_sm120():
    table = compatibility(GLM5).set_index("backend")
    assert table.loc["sglang_triton", "runs"] == "yes"
    assert "query is cast to FP8" in table.loc["sglang_triton", "note"]
    assert table.loc["lab_fused_fp8", "runs"] == "yes"
    assert table.loc["flashinfer_sparse_mla", "runs_if"] == "kv_dtype=packed_656"
    assert table.loc["vllm_flashinfer_sparse_sm120", "runs_if"] == "kv_dtype=packed_656"
    assert table.loc["flashinfer_fa2", "runs_if"] == "kv_dtype=bf16"
    for dead in ("flashinfer_fa2", "flashinfer_fa3", "flashinfer_xqa", "trtllm_mla", "flashmla"):
        assert table.loc[dead, "runs"] == "no"
    assert "removed" in table.loc["cutlass_mla", "why_not"]


def test_sparse_mla_takes_packed_rows_of_glm_only():
    packed = but(GLM5, kv_dtype="packed_656")
    assert failed("flashinfer_sparse_mla", packed) == set()
    assert failed("flashinfer_sparse_mla", packed, {"sglang": "0.5.16"}) == {"sparse-not-yet"}
    assert "sparse-glm" in failed("flashinfer_sparse_mla", but(packed, qk_nope_head_dim=128))
    assert "sparse-glm" in failed("flashinfer_sparse_mla", but(packed, dsa=False))
    assert "sparse-sm12x" in failed("flashinfer_sparse_mla", but(packed, compute_capability=(9, 0)))
    # DeepSeek-V3.2 has its way through vLLM.
    assert failed("vllm_flashinfer_sparse_sm120", but(packed, qk_nope_head_dim=128)) == set()


def test_flashinfer_reads_fp8_on_hopper_since_0_6_14_and_0_6_18():
    assert failed("flashinfer_fa3", R1) == set() == failed("flashinfer_native_fp8", R1)
    assert failed("flashinfer_fa3", R1, {"flashinfer": "0.6.14"}) == set()
    assert failed("flashinfer_fa3", R1, {"flashinfer": "0.6.13"}) == {"fa3-16-bit"}
    assert failed("flashinfer_native_fp8", R1, {"flashinfer": "0.6.13"}) == {"native-fp8-not-yet"}
    assert failed("flashinfer_fa2", R1, {"flashinfer": "0.6.17"}) == {"fa2-16-bit-fragments"}
    assert failed("flashinfer_fa2", R1, {"flashinfer": "0.6.18"}) == set()
    assert failed("flashinfer_fa2", R1_SM120) == {"fa2-fp8-hopper"}
    for blackwell in ((10, 0), (12, 0)):
        serving = but(R1, compute_capability=blackwell)
        assert failed("flashinfer_native_fp8", serving) == {"fa3-hopper"}
    assert failed("flashinfer_native_fp8", but(R1, kv_dtype="bf16")) == {"native-fp8-rows"}


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_bf16_rows_of_every_lab_model_run_on_fa2(capability):
    for nope, heads, page in ((192, 8, 64), (128, 16, 1), (128, 8, 64)):
        serving = Serving(capability, "bf16", heads, page, nope)
        assert failed("flashinfer_fa2", serving) == set()
        assert (failed("flashinfer_fa3", serving) == set()) == (capability == (9, 0))


def test_xqa_wants_128_heads_and_pages_of_16_to_128():
    assert failed("flashinfer_xqa", GLM5) == {"xqa-128-heads"}
    assert failed("flashinfer_xqa", but(R1_SM120, heads=128)) == set()
    assert failed("flashinfer_xqa", but(R1_SM120, heads=128, page_size=1)) == {"xqa-page"}
    bf16 = but(R1_SM120, heads=128, kv_dtype="bf16")
    assert failed("flashinfer_xqa", bf16, {"flashinfer": "0.6.10"}) == {"xqa-fp8"}
    assert failed("flashinfer_xqa", bf16) == set()


def test_vllm_triton_misses_shared_memory_on_sm120_by_1024_bytes():
    (verdict,) = check("vllm_triton", R1_SM120)
    wanted, given = (int(n.replace(",", "")) for n in re.findall(r"\d+,\d{3}", verdict.reason)[:2])
    assert (wanted, given, wanted - given) == (102_400, 101_376, 1_024)
    card = json.loads((DATA / "gpus" / "rtx-pro-6000-server.json").read_text())
    assert card["shared_memory_per_block_bytes"] == given
    assert failed("vllm_triton", but(R1_SM120, kv_dtype="bf16")) == set()
    assert failed("vllm_triton", but(R1_SM120, compute_capability=(9, 0))) == set()
    assert failed("vllm_triton", R1_SM120, {"vllm": "0.19.0"}) == set()
    assert failed("vllm_triton", R1_SM120, {"vllm": "0.17.0"}) == {"vllm-triton-fp8-not-yet"}
    assert "vllm-dense" in failed("vllm_triton", GLM5)


def test_reported_rules_dispute_and_do_not_forbid():
    b200 = Serving((10, 0), "bf16", heads=16, page_size=128, qk_nope_head_dim=128)
    (verdict,) = check("cutlass_mla", b200, "2026-02")
    assert (
        verdict.disputed
        and "reported by the author of the GLM-5 report" in str(verdict)
        and "128" in str(verdict)
    )
    assert runs(b200, "2026-02")["cutlass_mla"] == "disputed"
    assert runs(b200)["cutlass_mla"] == "no"


def test_flashmla_served_deepseek_on_h200():
    assert failed("flashmla", but(R1, page_size=64)) == set()
    assert failed("flashmla", R1) == {"flashmla-page"}


@pytest.mark.parametrize("heads, runs_", [(7, False), (8, True), (128, True), (129, False)])
def test_lab_fused_kernel(heads, runs_):
    assert (failed("lab_fused_fp8", but(GLM5, heads=heads)) == set()) == runs_
    assert failed("lab_fused_fp8", but(GLM5, kv_dtype="bf16")) == {"lab-fused-rows"}
    assert failed("lab_fused_fp8", but(GLM5, compute_capability=(8, 0))) == {"lab-fused-e4m3"}


@RULES
def test_every_rule_is_dated_and_sourced(rule):
    releases = BOOK["releases"][rule["library"]]
    assert rule["since"] in releases
    if "until" in rule:
        assert rule["until"] in releases
        assert rules._key(rule["since"]) < rules._key(rule["until"])
    assert rule["evidence"] in ("read", "compiled", "measured", "reported")
    assert len(rule["source"]) > 10 and rule["reason"].rstrip(")").endswith(".")
    assert re.search(
        r"\d+\.\d+|https://|issue|reported by|rtx6kpro|this repository", rule["source"]
    )
    assert set(rule["backends"]) <= set(rules.backends())
    known = {field.name for field in rules.fields(Serving)} | {"cc_major", "sm"}
    for wanted in ({**rule.get("when", {}), **(rule["requires"] or {})}).items():
        assert wanted[0] in known
        assert isinstance(wanted[1], list) or set(wanted[1]) <= {"min", "max", "multiple_of"}


@RULES
def test_every_rule_can_fail_and_says_so(rule):
    """Some serving breaks the rule at its first version; its verdict carries what a user needs."""
    grid = [
        Serving(cc, kv, heads, page, nope, rank, rope, dsa)
        for cc in ((7, 5), (8, 0), (9, 0), (10, 0), (12, 0))
        for kv in rules.KV_DTYPES
        for heads in (4, 8, 129)
        for page in (1, 64, 128)
        for nope, rank, rope in ((192, 512, 64), (32, 512, 64), (128, 200, 32))
        for dsa in (False, True)
    ]
    for backend in rule["backends"]:
        verdicts = (
            verdict
            for serving in grid
            for verdict in check(backend, serving, {rule["library"]: rule["since"]})
        )
        verdict = next(v for v in verdicts if v.rule == rule["id"])
        assert verdict.backend == backend and verdict.library == rule["library"]
        assert verdict.version.startswith(rule["since"]) and verdict.source == rule["source"]


def test_releases_are_in_order():
    for days in BOOK["releases"].values():
        assert list(days) == sorted(days, key=rules._key)
        assert list(days.values()) == sorted(days.values())
        assert all(date.fromisoformat(day) for day in days.values())
    assert len({rule["id"] for rule in BOOK["rules"]}) == len(BOOK["rules"])


def test_an_installed_version_newer_than_those_read_keeps_the_newest_rules():
    assert failed("flashinfer_fa2", GLM5, {"flashinfer": "0.7.9+cu130"}) == {"fa2-fp8-hopper"}


def test_version_order():
    versions = ["0.7.0", "0.6.18", "0.6.8", "0.6.7.post2", "0.6.7"]
    assert sorted(versions, key=rules._key) == versions[::-1]
    assert rules._key("0.6.18+cu130") == rules._key("0.6.18")


def test_table_has_a_row_a_backend():
    frame = compatibility(R1)
    assert tuple(frame.columns) == rules.COLUMNS
    assert tuple(frame["backend"]) == rules.backends()
    assert ((frame["why_not"] == "") == (frame["runs"] == "yes")).all()
    assert ((frame["source"] == "") == (frame["runs"] == "yes")).all()


def test_bad_questions_are_named():
    with pytest.raises(UnknownName, match="flashinfer_fa3"):
        check("flashinfer_fa4", R1)
    with pytest.raises(UnknownName, match="fp8_e4m3"):
        but(R1, kv_dtype="fp8")
    with pytest.raises(OutOfRange, match="heads is 0"):
        but(R1, heads=0)
    with pytest.raises(UnknownName, match="sglang"):
        check("flashmla", R1, {"sglan": "0.5.9"})
    with pytest.raises(LabError, match="2026-02-25 or later"):
        check("flashmla", R1, "2025-12")
    with pytest.raises(LabError, match=r"flashinfer 0\.5\.3.*0\.6\.2 on"):
        check("flashinfer_fa3", R1, {"flashinfer": "0.5.3"})
    with pytest.raises(LabError, match="not a day"):
        check("flashmla", R1, "2026-13")
    with pytest.raises(LabError, match="not a day"):
        check("flashmla", R1, "last week")


def spreads(model):
    """TP as far as it divides the heads, to fewer than any kernel takes; and DP attention."""
    for size in (1, 4, 8, 16, 64):
        if model.heads % size == 0:
            yield dict(tensor_parallel=size)
    yield dict(tensor_parallel=8, data_parallel=4)


@pytest.mark.parametrize("name", known_models())
def test_what_is_refused_has_a_reason_and_nothing_else(name):
    """All cards, spreads, layouts and strategies: no capacity and no prediction for a refused one.

    And the other way round: what has none is refused, so that nothing vanishes in silence.
    """
    model = load_model(name)
    with hot_set() as own:  # a user's strategy is asked the same way
        strategies = [kind() for kind in STRATEGIES.values()] + [parse("shadow(layers=3)")]
        assert own.name in STRATEGIES
        for card in map(machine.card, machine.known_cards()):
            for spread in spreads(model):
                for layout in LAYOUTS:
                    at = deployment(model, card, kv_gib=10, layout=layout, **spread)
                    verdicts = {s.label: can_run(s, at) for s in strategies}
                    allowed = {label for label, verdict in verdicts.items() if verdict}
                    assert all(v.reason for v in verdicts.values() if not v)
                    assert all(not v.reason for v in verdicts.values() if v)
                    plan = budget(at, strategies=strategies)
                    assert {c.strategy.label for c in plan.capacities} == allowed
                    assert {r.strategy.label for r in plan.refused} == set(verdicts) - allowed
                flat = deployment(model, card, **spread)
                setting = flat.setting(pool_tokens=65_536)
                ranked = {step.strategy.label for step in predict_all(setting, card)}
                assert ranked == {n for n, kind in STRATEGIES.items() if can_run(kind(), flat)}


@pytest.mark.parametrize(
    ("strategy", "at", "allowed"),
    [
        # By the library's own code: fa3's FP8 on SM90 alone, the lab's kernel from 8 heads on.
        ("native_fp8", dict(card="h200"), True),
        ("native_fp8", dict(card="h20"), True),
        ("native_fp8", dict(card="b200"), False),
        ("native_fp8", dict(card="h200", layout="fp8_e5m2"), False),
        ("fused_fp8", dict(card="h200", tensor_parallel=16), False),  # 4 heads
        ("fused_fp8", dict(card="h200", tensor_parallel=16, data_parallel=16), True),  # 64
        ("fused_fp8", dict(card="h200", layout="fp8_e5m2"), False),
        ("full_cast", dict(card="h200", layout="fp8_e5m2"), True),
        ("full_cast", dict(card="h200", layout="fp8_ds_mla"), False),
        ("full_cast", dict(card="h200", layout="bf16"), False),
        ("bf16_pool", dict(card="h200", layout="nvfp4_ds_mla"), True),
        ("shadow", dict(card="mi355x"), True),
        ("fused_fp8", dict(card="mi355x"), False),
    ],
)
def test_who_can_run(strategy, at, allowed):
    assert bool(can_run(parse(strategy), deployment("glm-5", **at))) == allowed


def test_verdicts_say_who_can_and_what_was_not_tried():
    packed = can_run(parse("full_cast"), deployment("glm-5", layout="fp8_ds_mla"))
    assert "656 B" in packed.reason and "flashinfer_sparse_mla" in packed.reason
    unread = can_run(parse("full_cast"), deployment("glm-5.2", layout="nvfp4_ds_mla"))
    assert "No backend that the lab has rules for" in unread.reason
    fused = can_run(parse("fused_fp8"), deployment("glm-5"))
    assert fused and "compiled for SM120" in fused.untried
    assert not can_run(parse("fused_fp8"), deployment("glm-5", "h200")).untried
    assert "AMD" in can_run(parse("bf16_pool"), deployment("glm-5", "mi300x")).untried
    four = can_run(parse("fused_fp8"), deployment("glm-5", "h200", tensor_parallel=16))
    assert [rule.rule for rule in four.broken] == ["lab-fused-heads"] and four.sources
    # One layer that cannot run stops the whole strategy.
    assert not can_run(parse("shadow(layers=3)"), deployment("glm-5", layout="bf16"))


def test_no_backend_was_tried_on_an_amd_card():
    table = compatibility(Serving(None, "fp8_e4m3", 8, 64, 192, dsa=True))
    assert set(table.runs) == {"not tried"} and all(table.why_not)

"""Each thing that the plug-in refuses, by a named error that says what, and what to do."""

import pytest
import torch
from worlds import attached, backend, pool, runner

from shadowkv_lab.errors import BadFile, CannotRun, DoesNotFit, OutOfRange, UnknownName
from shadowkv_lab.server.plugin import Settings, parse_layers, refusals, settings

GOOD = {"attention_backend": "flashinfer", "kv_cache_dtype": "fp8_e4m3"}
BAD = {
    "kv_cache_dtype": "bfloat16",
    "dtype": "half",
    "pp_size": 2,
    "dcp_size": 2,
    "attn_cp_size": 2,
    "attn_dp_size": 2,
    "speculative_algorithm": "EAGLE",
    "radix_cache_backend": "mine",
    "disaggregation_mode": "decode",
}


def test_environment():
    assert settings({}) is None
    assert settings({"SHADOWKV_STRATEGY": "shadow", "SHADOWKV_LAYERS": "2"}).covers(1)
    assert settings({"SHADOWKV_STRATEGY": "shadow"}).covers(77)
    assert parse_layers("0-2, 9") == {0, 1, 2, 9} and parse_layers("3") == {0, 1, 2}
    for bad in ({"SHADOWKV_STRATEGY": "shadows"}, {"SHADOWKV_STRATEGY": "bf16_pool"}):
        with pytest.raises(UnknownName, match="shadow"):
            settings(bad)
    assert parse_layers("0") == {0}  # layer 0: only a number above 0 is a count
    for name, value in (("LAYERS", "9-3"), ("LAYERS", "x"), ("CHECK", "-1")):
        with pytest.raises(OutOfRange, match=name):
            settings({"SHADOWKV_STRATEGY": "shadow", f"SHADOWKV_{name}": value})
    with pytest.raises(OutOfRange, match="vector_cast"):
        settings({"SHADOWKV_STRATEGY": "vector_cast", "SHADOWKV_LAYERS": "26"})


@pytest.mark.parametrize("rule", refusals.RULES, ids=lambda r: r.argument)
def test_arguments_of_the_real_server(sglang, chosen, rule):
    """Resolved by the real ServerArgs; each rule names an argument that it really has."""
    from sglang.srt.server_args import ServerArgs

    from shadowkv_lab.server.plugin import hooks

    chosen("shadow")
    fine = ServerArgs(model_path="dummy", **GOOD)
    bad = ServerArgs(**{"model_path": "dummy", **GOOD, rule.argument: BAD.get(rule.argument, True)})
    arguments = fine.resolved_dict()
    assert rule.argument in arguments
    hooks.check_arguments(None, fine)
    resolved = bad.resolved_dict()
    if rule.argument == "enable_dp_attention":  # it reports the width, not the flag
        resolved["enable_dp_attention"] = True
    with pytest.raises(CannotRun, match=rule.flag):
        refusals.check_arguments(resolved, Settings("shadow"))
    if rule.shadow_only:
        refusals.check_arguments(resolved, Settings("vector_cast"))


def test_other_attention_backend_is_refused():
    fa3 = {"attention_backend": "flashinfer", "decode_attention_backend": "fa3"}
    for backends in ({}, {"attention_backend": "triton"}, fa3):
        with pytest.raises(CannotRun, match="--attention-backend flashinfer"):
            refusals.check_arguments(
                {**GOOD, "attention_backend": None, **backends}, Settings("shadow")
            )


def test_pools(sglang, chosen):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    chosen("shadow")
    mha = MHATokenToKVPool(8, 1, torch.bfloat16, 2, 64, 1, "cpu", False, enable_kv_cache_copy=False)
    with pytest.raises(BadFile, match="MHATokenToKVPool"):
        refusals.check_pool(mha, Settings("shadow"))
    with pytest.raises(CannotRun, match="656"):
        attached(pool("DSATokenToKVPool", width=656))
    with pytest.raises(CannotRun, match="bfloat16"):
        attached(pool(dtype=torch.bfloat16))
    own = pool()
    own.__class__ = type("UnifiedMLATokenToKVPool", (MLATokenToKVPool,), {})
    with pytest.raises(CannotRun, match="UnifiedMLATokenToKVPool"):
        attached(own)
    chosen("shadow", layers=[1, 7])
    with pytest.raises(CannotRun, match="layer 7"):
        attached(pool())


def test_workers(chosen):
    from shadowkv_lab.server.plugin import hooks

    chosen("shadow")
    real = pool()
    for changes, what in (({"is_draft_worker": True}, "draft"), ({"dtype": torch.half}, "float16")):
        with pytest.raises(CannotRun, match=what):
            hooks.attach(None, backend(real), runner(real, **changes))
    with pytest.raises(CannotRun, match="SimpleNamespace"):
        hooks.attach(None, runner(real), runner(real))


@pytest.mark.parametrize("kind", ["MLATokenToKVPool", "DSATokenToKVPool"])
@pytest.mark.parametrize("layers", [3, 1])
def test_the_told_number_of_tokens_fits_and_no_page_more(sglang, chosen, kind, layers):
    room = 30_000_000
    with pytest.raises(DoesNotFit, match="--max-total-tokens") as error:
        refusals.check_room(pool(kind, 12_800), layers, room)
    told = int(str(error.value).split("--max-total-tokens ")[1].rstrip("."))
    refusals.check_room(pool(kind, told), layers, room)
    with pytest.raises(DoesNotFit):
        refusals.check_room(pool(kind, told + 2 * 64), layers, room)


def test_a_pool_beyond_the_room_is_refused_at_the_start(chosen):
    chosen("shadow", room=100_000)
    with pytest.raises(DoesNotFit):
        attached(pool())
    chosen("shadow", room=None)
    with pytest.raises(CannotRun, match="_profile_available_bytes"):
        attached(pool())


def test_missing_and_unapplied_hooks_are_named(sglang, chosen, monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    from shadowkv_lab.server.plugin import hooks

    for path in (
        f"{hooks.POOL}.gone",
        "sglang.srt.mem_cache.gone.Pool.write",
        "sglang.srt.mem_cache.memory_pool.DSATokenToKVPool.set_kv_buffer",
    ):
        with pytest.raises(CannotRun, match=path.rsplit(".", 1)[1]):
            hooks.resolve(path)  # the last one is inherited: a hook there would miss its base
    chosen("shadow")
    target = f"{hooks.POOL}.move_kv_cache"
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    with pytest.raises(CannotRun, match="move_kv_cache"):
        attached(pool())

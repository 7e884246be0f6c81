"""Which releases of SGLang the plug-in runs on, and the functions it hooks there."""

import inspect

import pytest

from shadowkv_lab.errors import CannotRun
from shadowkv_lab.server.plugin import READ, RELEASES, STRATEGIES, Settings, check_release

RAN = "0.5.23"
# As that release defines them. The hooks take these names and places: `wrote` the seventh argument
# of a write for the layer, `planned` the first three of the planner's.
SIGNATURES = {
    "arg_groups.validation_hook.check_server_args": "server_args",
    "layers.attention.flashinfer_mla_backend.FlashInferMLAAttnBackend.__init__": (
        "self model_runner skip_prefill kv_indptr_buf q_indptr_decode_buf"
    ),
    "layers.attention.flashinfer_mla_backend.FlashInferMLAAttnBackend.forward_decode": (
        "self q k v layer forward_batch save_kv_cache q_rope k_rope"
    ),
    "layers.attention.flashinfer_mla_backend.FlashInferMLAAttnBackend.forward_extend": (
        "self q k v layer forward_batch save_kv_cache q_rope k_rope"
    ),
    "layers.attention.flashinfer_mla_backend.FlashInferMLAIndicesUpdaterDecode.update": (
        "self seq_lens seq_lens_sum decode_wrapper init_metadata_replay spec_info *plan "
        "*req_pool_indices **fast_decode_kwargs"
    ),
    "mem_cache.memory_pool.MLATokenToKVPool.set_kv_buffer": (
        "self layer loc_info cache_k cache_v layer_id_override"
    ),
    "mem_cache.memory_pool.MLATokenToKVPool.set_mla_kv_buffer": (
        "self layer loc_info cache_k_nope cache_k_rope layer_id_override"
    ),
    "mem_cache.memory_pool.MLATokenToKVPool.move_kv_cache": "self tgt_loc src_loc",
    "mem_cache.memory_pool.MLATokenToKVPool.load_cpu_copy": (
        "self kv_cache_cpu indices mamba_indices req_pool_index"
    ),
    "mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes": (
        "self pre_model_load_memory"
    ),
    "model_executor.model_runner.ModelRunner.forward": (
        "self forward_batch skip_attn_backend_init pp_proxy_tensors reinit_attn_backend "
        "split_forward_count"
    ),
    "model_loader.loader.initialize_dummy_weights": "model low high seed",
}
STARS = {
    inspect.Parameter.KEYWORD_ONLY: "*",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def hooked():
    from shadowkv_lab.server.plugin import hooks, trial

    found = trial.targets({"SHADOWKV_WEIGHTS": "drawn", "SHADOWKV_ROWS": "1"})
    for name in STRATEGIES:
        found |= hooks.targets(Settings(name, None, 1 if name == "shadow" else 0))
    return set(found)


def test_every_hooked_function_s_signature(sglang):
    from shadowkv_lab.server.plugin import hooks

    assert sglang.__version__ == RAN
    assert hooked() == {f"sglang.srt.{path}" for path in SIGNATURES}
    for path, wanted in SIGNATURES.items():
        parameters = inspect.signature(hooks.resolve(f"sglang.srt.{path}")).parameters.values()
        assert " ".join(STARS.get(p.kind, "") + p.name for p in parameters) == wanted, path


def test_releases():
    """One was run. Those that were read are refused with what differs, as are all others."""
    assert list(RELEASES) == [RAN] and RAN not in READ
    check_release(RAN)
    check_release(f"{RAN}.post1+cu130")
    for version in (*READ, "0.5.16", "0.6.0"):
        with pytest.raises(CannotRun) as error:
            check_release(version)
        text = str(error.value)
        assert f"SGLang {version}:" in text and f"{RAN} (run on one H200)" in text
        assert ("two other hooks" in text) == (version in ("0.5.17", "0.5.18"))
        assert ("it was not run" in text) == (version == "0.5.22")

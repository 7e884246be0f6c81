"""Captured latents and queries, against hooks, the whole model, and its own attention output."""

import logging

import pytest
import torch

from shadowkv_lab.errors import BadFile, OutOfRange, WrongResult
from shadowkv_lab.machine import version_of
from shadowkv_lab.model import from_config
from shadowkv_lab.sources import capture, checkpoint, poolfile

pytest.importorskip("transformers")

TEXT = "Whoever moves the whole store for a few lines will wait. " * 3
TINY = dict(
    vocab_size=300,
    hidden_size=96,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=2,
    q_lora_rank=48,
    kv_lora_rank=64,
    qk_rope_head_dim=16,
    qk_nope_head_dim=24,
    v_head_dim=32,
    max_position_embeddings=4096,
    bos_token_id=0,
    eos_token_id=None,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=40.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    beta_fast=32,
    beta_slow=1,
    original_max_position_embeddings=1024,
)
DSA = dict(index_topk=2048, index_head_dim=32, index_n_heads=2)
MODELS = {
    "glm": ("GlmMoeDsa", DSA),
    "glm_sparse": ("GlmMoeDsa", {**DSA, "index_topk": 8}),
    "glm_shared": ("GlmMoeDsa", {**DSA, "indexer_types": ["full", "shared", "full"]}),
    "v3": ("DeepseekV3", {}),
    "v3_yarn": ("DeepseekV3", {"rope_parameters": YARN}),
    "v3_half": ("DeepseekV3", {"rope_interleave": False}),
    "v32_yarn": ("DeepseekV32", {**DSA, "rope_parameters": YARN}),
}


def build(name, dtype=torch.float32):
    import transformers

    kind, extra = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**TINY, **extra)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for weight in model.parameters():
        if weight.ndim >= 2:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model.to(dtype)


IDS = torch.randint(2, 300, (50,), generator=torch.Generator().manual_seed(0))


class LatentTap:
    """The latent from kv_a_layernorm, the raw rope key rotated here by complex numbers."""

    def __init__(self, model, inv_freq, interleaved):
        self.latent, self.raw = {}, {}
        for i, layer in enumerate(model.model.layers):
            a = layer.self_attn
            a.kv_a_layernorm.register_forward_hook(
                lambda m, x, y, i=i: self._keep(self.latent, i, y)
            )
            a.kv_a_proj_with_mqa.register_forward_hook(
                lambda m, x, y, i=i, a=a: self._keep(self.raw, i, y[..., a.kv_lora_rank :])
            )
        self.inv_freq, self.interleaved = inv_freq, interleaved

    def _keep(self, into, layer, value):
        into.setdefault(layer, []).append(value[0].detach())

    def rope(self, layer, factor):
        raw = torch.cat(self.raw[layer]).double()
        half = raw.shape[1] // 2
        a, b = (raw[:, 0::2], raw[:, 1::2]) if self.interleaved else (raw[:, :half], raw[:, half:])
        angle = torch.arange(len(raw)).double()[:, None] * self.inv_freq.double()
        turned = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle) * factor
        return torch.cat([turned.real, turned.imag], 1)


@pytest.mark.parametrize("name", ["glm", "v3", "v3_yarn", "v3_half", "v32_yarn"])
def test_hooks_and_cache_agree(name):
    """The latent bit for bit; the rotated key by another formula, in float64, nearly so."""
    model = build(name)
    rotary = model.model.rotary_emb
    tap = LatentTap(model, rotary.inv_freq, getattr(model.config, "rope_interleave", True))
    found = capture.run(model, IDS, [0, 1, 2], chunk_tokens=16)
    for layer, rows in enumerate(found.rows):
        assert torch.equal(torch.cat(tap.latent[layer]), rows[:, :64])
        rope = tap.rope(layer, rotary.attention_scaling)
        assert torch.allclose(rope, rows[:, 64:].double(), atol=1e-4)


def test_hooks_and_cache_agree_bit_for_bit_on_the_tiny_checkpoint(checkpoint_dir):
    """In BF16, rope part included: the model's own rotation, called again on the hooked key."""
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as modeling

    model = checkpoint.load_model(checkpoint_dir, 3).model
    tap = LatentTap(model, None, True)
    ids = capture.tokenise(checkpoint_dir, TEXT)
    found = capture.run(model, ids, [0, 1, 2])
    cos, sin = model.model.rotary_emb(found.rows[0], torch.arange(len(ids))[None])
    for layer, rows in enumerate(found.rows):
        raw = torch.cat(tap.raw[layer])[None, None]
        _, rope = modeling.apply_rotary_pos_emb_interleave(raw, raw, cos, sin)
        assert torch.equal(torch.cat([torch.cat(tap.latent[layer]), rope[0, 0]], 1), rows)


@pytest.mark.skipif(
    (version_of("transformers") or "9") < "5.18", reason="its DSA cache holds no latents"
)
@pytest.mark.parametrize("chunk", [4096, 64])
def test_the_truncated_model_equals_the_full_ones_first_layers(checkpoint_dir, tmp_path, chunk):
    """Bit for bit against transformers' own loader and its plain forward, in the same chunks."""
    from transformers import DynamicCache, GlmMoeDsaForCausalLM

    full = GlmMoeDsaForCausalLM.from_pretrained(checkpoint_dir, dtype=torch.bfloat16).eval()
    ids, cache = capture.tokenise(checkpoint_dir, TEXT), DynamicCache(config=full.config)
    with torch.no_grad():
        for start in range(0, len(ids), chunk):
            full(
                ids[None, start : start + chunk],
                use_cache=True,
                **{capture.cache_argument(full): cache},
            )
    file = capture.capture(checkpoint_dir, TEXT, tmp_path / "p", layers="0-2", chunk_tokens=chunk)
    assert file.tokens == len(ids) == len(TEXT) and file.layers == (0, 1, 2)
    for i in range(3):
        own = cache.layers[i]
        assert torch.equal(file.stored(i), torch.cat([own.keys, own.values], -1)[0, 0])
        assert torch.equal(file.extra("index_keys", i), own.indexer_keys[0])


@pytest.mark.parametrize("name", list(MODELS))
def test_absorbed_queries_against_the_models_own_attention(name):
    """From what is captured alone, with the geometry's softmax scale, in float64 and by hooks of
    our own on o_proj: independent of the check that `run` makes."""
    model, outs = build(name), {}
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda m, x, i=i: outs.setdefault(i, []).append(x[0][0].detach())
        )
    found = capture.run(model, IDS, [0, 1, 2], chunk_tokens=20, queries=9)
    assert found.attention_check < 1e-5
    shape = from_config(model.config.to_dict(), name, "test")
    assert shape.softmax_scale == pytest.approx(model.model.layers[0].self_attn.scaling, rel=1e-12)
    if name == "glm_sparse":  # the lab's attention is dense; run's own check knows the mask
        return
    for i in range(3):
        rows, q = found.rows[i].double(), found.queries[i].double()
        w_uv = model.model.layers[i].self_attn.kv_b_proj.weight.view(4, 56, 64)[:, 24:].double()
        own = torch.cat(outs[i]).view(-1, 4, 32)
        for query, position in zip(q, found.query_positions, strict=True):
            seen = rows[: position + 1]
            p = torch.softmax(query @ seen.T * shape.softmax_scale, -1)
            out = torch.einsum("hr,hvr->hv", p @ seen[:, :64], w_uv)
            assert torch.allclose(out, own[position].double(), atol=1e-4)


def test_chunked_prefill_is_prefill():
    model = build("glm")
    one, many = (capture.run(model, IDS, [0, 1, 2], chunk_tokens=c) for c in (50, 7))
    for a, b in zip(one.rows + one.queries, many.rows + many.queries, strict=True):
        assert torch.allclose(a, b, atol=2e-4)
    assert torch.equal(one.query_positions, many.query_positions)


def test_scores_never_take_text_by_text(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    lengths = []
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS,
        "sdpa",
        lambda m, q, *a, **k: (lengths.append(q.shape[2]), own(m, q, *a, **k))[1],
    )
    capture.run(build("glm"), IDS, [0], chunk_tokens=16)
    assert max(lengths) == 16


def test_index_keys_of_layers_that_have_an_indexer():
    found = capture.run(build("glm_shared"), IDS, [0, 1, 2])
    assert [k is not None for k in found.index_keys] == [True, False, True]
    assert found.index_keys[0].shape == (50, 32)
    assert capture.run(build("v3"), IDS, [0]).index_keys == [None]


def test_the_interface_is_put_back(checkpoint_dir):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    capture.run(build("v3"), IDS, [0])
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


def test_a_capture_says_what_it_is(checkpoint_dir, tmp_path, caplog):
    import hashlib

    seen, text = [], tmp_path / "text.txt"
    text.write_text(TEXT)
    with caplog.at_level(logging.INFO, "shadowkv_lab.sources"):
        capture.capture(
            checkpoint_dir,
            text,
            tmp_path / "p",
            layers="1",
            queries=5,
            max_tokens=60,
            chunk_tokens=16,
            progress=lambda t, d: seen.append((d, t)),
        )
    file = poolfile.load(tmp_path / "p")
    assert file.layers == (1,) and file.tokens == 60 and len(file.extra("query_positions")) == 5
    assert file.metadata["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert file.metadata["weights"] == "random" and "random weights" in file.title
    assert file.metadata["shards"] and "opened model-" in caplog.text
    assert float(file.metadata["attention_check"]) < 3e-2
    assert [d for d, _ in seen] == sorted(d for d, _ in seen) and seen[-1][0] == 1.0
    assert {t.split()[0] for _, t in seen} == {"loading", "prefill", "writing"}


@pytest.mark.gpu
def test_a_gpu_captures_what_the_cpu_does(checkpoint_dir, tmp_path):
    one, other = (
        capture.capture(checkpoint_dir, TEXT, tmp_path / device, dtype=torch.float32, device=device)
        for device in ("cpu", "cuda")
    )
    for i in range(3):
        off = (one.stored(i) - other.stored(i)).norm() / one.stored(i).norm()
        assert off < 1e-3


# Bad input


def test_a_text_of_no_tokens_and_one_past_the_models_positions(checkpoint_dir, tmp_path):
    with pytest.raises(OutOfRange, match=r"0 tokens.*1 to 4096"):
        capture.capture(checkpoint_dir, "", tmp_path / "p")
    with pytest.raises(OutOfRange, match=r"5000 tokens.*1 to 4096 tokens.*max_tokens"):
        capture.capture(checkpoint_dir, "x" * 5000, tmp_path / "p")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("layers", ["", "0-9", "4", "a", "2-1", "-1"])
def test_layers_that_the_model_does_not_have(checkpoint_dir, tmp_path, layers):
    with pytest.raises(OutOfRange, match="0 to 3"):
        capture.capture(checkpoint_dir, TEXT, tmp_path / "p", layers=layers)


def test_layers_by_number():
    assert capture.parse_layers("0-2", 78) == (0, 1, 2)
    assert capture.parse_layers("5, 0,2-3", 78) == (0, 2, 3, 5)


def test_no_tokenizer(broken, tmp_path):
    for path in broken.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(BadFile, match="no tokenizer"):
        capture.capture(broken, TEXT, tmp_path / "p")


def test_nan_rows_are_refused_and_the_old_file_stays(checkpoint_dir, tmp_path, monkeypatch):
    (tmp_path / "p").write_bytes(b"old")
    load = checkpoint.load_model

    def poisoned(*args, **options):
        loaded = load(*args, **options)
        waits = capture.tokenise(checkpoint_dir, TEXT)[2]
        loaded.model.model.embed_tokens.weight.data[waits] = float("nan")
        return loaded

    monkeypatch.setattr(checkpoint, "load_model", poisoned)
    with pytest.raises(OutOfRange, match="Layer 0, token 2 has NaN"):
        capture.capture(checkpoint_dir, TEXT, tmp_path / "p", layers="0")
    assert (tmp_path / "p").read_bytes() == b"old"


def test_a_model_that_attends_otherwise_is_refused():
    model = build("v3")
    model.model.layers[1].self_attn.v_head_dim  # a layer whose values are not what W_UV says
    own = model.model.layers[1].self_attn.expand_kv
    model.model.layers[1].self_attn.expand_kv = lambda *a: (own(*a)[0], own(*a)[1] * 1.1)
    with pytest.raises(WrongResult, match="off by"):
        capture.run(model, IDS, [0, 1])

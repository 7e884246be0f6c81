"""Storage, attention and model error against numpy in float64, ml_dtypes and torch's own losses."""

import hashlib
import math
import os
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from shadowkv_lab import accuracy, facts
from shadowkv_lab.accuracy import attention, model, storage
from shadowkv_lab.errors import BadFile, NoAnswer, OutOfRange, UnknownName
from shadowkv_lab.machine import version_of
from shadowkv_lab.model import load_model
from shadowkv_lab.sources import poolfile, tiny
from shadowkv_lab.strategies import STRATEGIES, parse

os.environ.setdefault("HF_HUB_OFFLINE", "1")
POOL = facts.DATA / "pools" / "tiny-glm-5-random.safetensors"
GLM = load_model("glm-5")
CPU_STRATEGIES = [s for s in STRATEGIES.values() if s.reads == "bf16" and s.needs is None]


@pytest.fixture(scope="module")
def pool():
    return poolfile.load(POOL)


def rows(count=50, seed=0):
    """Rows with an outlier channel that is clipped at times and one that is flushed."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, 576, generator=generator)
    found[:, 7] *= 300
    found[:, 9] *= 1e-3
    return found.bfloat16()


# Storage error


def e4m3(values):
    """Saturating e4m3 by ml_dtypes, in float64."""
    clipped = np.clip(values, -448, 448).astype(np.float32)
    return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def by_numpy(exact, name):
    if name == "bf16":
        return exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    if name == "fp8":
        return e4m3(exact)
    if name == "fp8_scaled":
        scale = np.abs(exact).max() / 448
        return e4m3(exact / scale) * scale
    groups = exact[:, :512].reshape(-1, 4, 128)
    scales = np.abs(groups).max(-1, keepdims=True) / 448
    return np.concatenate([(e4m3(groups / scales) * scales).reshape(-1, 512), exact[:, 512:]], 1)


@pytest.mark.parametrize("name", list(accuracy.STORAGES))
def test_storage_errors_against_numpy(name):
    exact = rows().double().numpy()
    stored = by_numpy(exact, name)
    for error in storage.errors_of(rows(), name, GLM):
        span = slice(0, 512) if error.part == "latent" else slice(512, None)
        a, b = exact[:, span], stored[:, span]
        cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        # A value on the edge between two codes may fall either way in float32 and float64.
        close = dict(rel=5e-3, abs=1e-9)
        assert error.relative_l2 == pytest.approx(
            np.linalg.norm(b - a) / np.linalg.norm(a), **close
        )
        assert error.cosine == pytest.approx(cosine.mean(), rel=1e-5)
        assert error.max_abs == pytest.approx(np.abs(b - a).max(), **close)
        assert error.flushed == pytest.approx(((a != 0) & (b == 0)).mean(), rel=0.02)


def test_clipped_and_flushed_shares_by_hand():
    found = torch.zeros(4, 576)
    found[0, 0], found[1, 1], found[2, 2], found[3, 3] = 500.0, -449.0, 2.0**-11, 448.0
    latent, rope = storage.errors_of(found, "fp8", GLM)
    assert latent.clipped == 2 / (4 * 512) and latent.flushed == 1 / (4 * 512)
    assert (rope.clipped, rope.flushed) == (0, 0)
    assert latent.max_abs == 52.0
    scaled, _ = storage.errors_of(found, "fp8_scaled", GLM)
    assert scaled.clipped == 0 and scaled.scale == pytest.approx(500 / 448)


def test_bytes_kept_and_an_unknown_storage():
    kept = {n: storage.errors_of(rows(), n, GLM)[0].row_bytes for n in accuracy.STORAGES}
    assert kept == {"bf16": 1152, "fp8": 576, "fp8_scaled": 576, "packed": 656}
    with pytest.raises(UnknownName, match="packed"):
        accuracy.round_trip(rows(), "pakced", 512)


def test_channel_errors_against_numpy(pool):
    found = accuracy.channel_errors(pool, "fp8")
    exact = pool.rows(1).double().numpy()
    wanted = np.linalg.norm(e4m3(exact) - exact, axis=0) / np.linalg.norm(exact, axis=0)
    assert found.shape == (3, 576) and np.allclose(found[1], wanted, rtol=1e-6)


# Attention error


def attend_by_numpy(q, kept, position, scale):
    seen = kept[: position + 1]
    scores = q @ seen.T * scale
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p @ seen[:, :512], p


@pytest.mark.parametrize("name", list(accuracy.STORAGES))
def test_storage_attention_against_numpy(pool, name):
    error = next(e for e in accuracy.storage_attention(pool, [name]) if e.layer == 2)
    exact = pool.rows(2).double().numpy()
    stored = by_numpy(exact, name)
    q, positions = pool.extra("queries", 2).double().numpy(), pool.extra("query_positions").tolist()
    off, total, kl = 0.0, 0.0, []
    for query, position in zip(q, positions, strict=True):
        (out, p), (ours, r) = (attend_by_numpy(query, k, position, 1 / 16) for k in (exact, stored))
        off, total = off + ((ours - out) ** 2).sum(), total + (out**2).sum()
        kl += (p * np.log(p / r)).sum(-1).tolist()
    assert pool.model.softmax_scale == 1 / 16
    assert error.output == pytest.approx(math.sqrt(off / total), rel=2e-2, abs=1e-9)
    assert error.kl == pytest.approx(np.mean(kl), rel=2e-2, abs=1e-9)
    assert error.worst_kl == pytest.approx(np.max(kl), rel=2e-2, abs=1e-9)


@pytest.mark.parametrize("kind", CPU_STRATEGIES, ids=lambda s: s.name)
def test_what_is_stored_and_the_kernel_are_told_apart(pool, kind):
    """A strategy stores fp8 or bf16, so its storage error is that storage's; kernels add little."""
    found = accuracy.attention_errors(pool, [kind()])
    stored = "bf16" if kind.kinds == ("bf16",) else "fp8"
    for error, alone in zip(found, accuracy.storage_attention(pool, [stored]), strict=True):
        assert error.storage_output == pytest.approx(alone.output, rel=1e-9, abs=1e-12)
        assert error.kl == pytest.approx(alone.kl, rel=1e-9, abs=1e-12)
        assert 0 < error.kernel_output < 5e-3  # a BF16 output alone is up to 2^-9 off
        assert error.output <= error.storage_output + 2 * error.kernel_output
    assert [e.layer for e in found] == [0, 1, 2]


def test_full_cast_and_an_exact_shadow_agree_bit_for_bit(pool):
    outs = []
    for name in ("full_cast", "shadow", "shadow(layers=1)", "gather_cast"):
        step = attention.prepared(pool, parse(name))
        step.run("cast", "attend")
        outs.append(step.out)
    assert all(torch.equal(outs[0], out) for out in outs[1:]) and outs[0].isfinite().all()


def test_what_a_mirror_of_the_rows_gains_and_the_trap(pool):
    found = accuracy.coherence(pool)
    assert found.exact_equals_full_cast and found.exact_survives_restore
    assert found.original_gain > 10
    # A prefix restored from FP8 differs from one written fresh by about what FP8 costs.
    cost = np.mean([e.output for e in accuracy.attention_errors(pool, [parse("full_cast")])])
    assert 0.5 * cost < found.original_restored < 2 * cost


def test_a_file_without_queries(tmp_path):
    poolfile.write(tmp_path / "p", GLM, "bf16", (0,), 50, lambda i: rows(), source="test")
    with pytest.raises(BadFile, match="has no queries"):
        accuracy.storage_attention(poolfile.load(tmp_path / "p"))


def test_attention_progress(pool):
    seen = []
    accuracy.attention_errors(
        pool, [parse("full_cast"), parse("shadow")], progress=lambda text, done: seen.append(done)
    )
    assert seen == [0.0, 0.5, 1.0]


# Model error

latent_cache = pytest.mark.skipif(
    (version_of("transformers") or "9") < "5.18", reason="its DSA cache holds no latents"
)


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory):
    pytest.importorskip("transformers")
    return tiny.write(tmp_path_factory.mktemp("checkpoint") / "tiny-glm-5")


TEXT = "Rows are stored in eight bits, and to be read they are turned back into sixteen."


@latent_cache
def test_model_errors(checkpoint_dir):
    seen = []
    found = {
        e.storage: e
        for e in accuracy.model_errors(
            checkpoint_dir, TEXT, chunk_tokens=32, progress=lambda t, done: seen.append(done)
        )
    }
    own = found["bf16"]  # a BF16 model's rows lose nothing in BF16
    assert (own.kl, own.top1, own.perplexity_difference) == (0, 1, 0)
    assert own.tokens == len(TEXT) - 1
    assert found["fp8"].kl > found["packed"].kl > 0 and found["fp8"].top1 < 1
    assert seen == sorted(seen) and seen[-1] == 1.0


@latent_cache
def test_perplexity_is_that_of_the_models_own_loss(checkpoint_dir):
    from transformers import GlmMoeDsaForCausalLM

    from shadowkv_lab.sources import capture

    whole = GlmMoeDsaForCausalLM.from_pretrained(checkpoint_dir, dtype=torch.float32).eval()
    ids = capture.tokenise(checkpoint_dir, TEXT)[None]
    with torch.no_grad():
        loss = float(whole(ids, labels=ids, use_cache=False).loss)
    (found,) = accuracy.model_errors(checkpoint_dir, TEXT, ["bf16"], dtype=torch.float32)
    assert found.perplexity - found.perplexity_difference == pytest.approx(math.exp(loss), rel=1e-4)
    assert 0 < found.kl < 1e-2 and found.perplexity_difference != 0


@latent_cache
def test_the_cache_stores_what_the_storage_stores(checkpoint_dir):
    """Layer 0 sees unchanged hidden states, so its rows are the own cache's after a round trip."""
    from transformers import DynamicCache

    from shadowkv_lab.sources import capture, checkpoint

    loaded, ids = checkpoint.load_model(checkpoint_dir, 1), capture.tokenise(checkpoint_dir, TEXT)
    kept = {}
    for name in ("own", *accuracy.STORAGES):
        cache = (
            DynamicCache(config=loaded.model.config)
            if name == "own"
            else model.quantised_cache(loaded.model.config, name, [2.0])
        )
        with torch.no_grad():
            loaded.model.model(
                ids[None], use_cache=True, **{capture.cache_argument(loaded.model.model): cache}
            )
        kept[name] = torch.cat([cache.layers[0].keys, cache.layers[0].values], -1)[0, 0].double()
    exact = kept["own"].numpy()
    assert torch.equal(kept["bf16"], kept["own"])
    assert np.array_equal(kept["fp8"], e4m3(exact))
    assert np.array_equal(kept["fp8_scaled"], e4m3(exact / 2) * 2)
    close = np.isclose(kept["packed"].numpy(), by_numpy(exact, "packed"), rtol=2**-8)
    assert close.mean() > 0.999  # float32 and float64 may differ where a value lies between codes


def test_comparison_against_torchs_own_losses():
    generator = torch.Generator().manual_seed(0)
    own, ours = (torch.randn(20, 9, generator=generator).double().log_softmax(-1) for _ in "ab")
    ids = torch.randint(0, 9, (20,), generator=generator)
    found = model.compare("fp8", own, ours, ids)
    kl = torch.nn.functional.kl_div(ours, own, log_target=True, reduction="batchmean")
    losses = [torch.nn.functional.nll_loss(p, ids) for p in (own, ours)]
    assert found.kl == pytest.approx(float(kl))
    assert found.perplexity == pytest.approx(math.exp(losses[1]))
    assert found.perplexity_difference == pytest.approx(math.exp(losses[1]) - math.exp(losses[0]))
    same = sum(int(a.argmax() == b.argmax()) for a, b in zip(own, ours, strict=True))
    assert found.top1 == same / 20


# What is said and shown


def test_the_paragraph_states_its_data_and_random_weights_choose_nothing(pool):
    alone = accuracy.storage_attention(pool)
    told = accuracy.describe(pool, accuracy.storage_errors(pool), alone)
    assert "tiny-glm-5, random weights, 3 layers x 339 tokens" in told and "12 queries" in told
    assert "says nothing of a trained model" in told and "BF16, 1152 B" in told
    with pytest.raises(NoAnswer, match=r"cannot choose a storage.*real checkpoint.*capture"):
        accuracy.choose(pool, alone)


def test_a_real_checkpoints_rows_choose(pool, monkeypatch):
    monkeypatch.setitem(pool.metadata, "weights", "as published")
    told = accuracy.choose(pool, accuracy.storage_attention(pool))
    assert "speak for packed" in told and "656 B" in told and "keep BF16 (1152 B)" in told
    # With other numbers, another choice: fp8 within 25 % of the least takes the fewest bytes.
    level = [
        e._replace(kl=1e-3 if e.name == "packed" else 1.2e-3, output=0.01)
        for e in accuracy.storage_attention(pool)
    ]
    assert "speak for e4m3" in accuracy.choose(pool, level)


def test_the_planted_outliers_can_be_none():
    """At strength 0 nothing is clipped, and a scale per layer has nothing left to mend."""
    none, full = (
        {(e.storage, e.part): e for e in accuracy.planted(s, tokens=48) if e.layer == 0}
        for s in (0, 1)
    )
    assert none[("fp8", "latent")].clipped == 0 < full[("fp8", "latent")].clipped
    assert none[("fp8", "latent")].relative_l2 < 0.04 < full[("fp8", "latent")].relative_l2
    with pytest.raises(OutOfRange, match=r"0 .none. to 1"):
        accuracy.planted(1.5)


def test_the_shipped_pool_is_small_labelled_and_of_its_text(pool):
    assert POOL.stat().st_size < 2e6
    assert pool.metadata["weights"] == "random" and "random" in POOL.name
    text = POOL.with_suffix(".txt").read_bytes()
    assert hashlib.sha256(text).hexdigest() == pool.metadata["text_sha256"]
    clipped = [e.clipped for e in accuracy.storage_errors(pool, ["fp8"]) if e.part == "latent"]
    flushed = [e.flushed for e in accuracy.storage_errors(pool, ["fp8"]) if e.part == "latent"]
    assert min(clipped) > 0 and min(flushed) > 0.01  # FP8 has something to lose


def test_the_shipped_pool_feeds_glm_5(pool):
    assert poolfile.problem(POOL, GLM) is None
    assert poolfile.problem(POOL, replace(GLM, kv_lora_rank=256)) is not None

"""A checkpoint's first layers: which files are opened, in what memory, and what is refused."""

import json
import logging
import shutil
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shadowkv_lab.errors import BadFile, OutOfRange
from shadowkv_lab.sources import checkpoint, tiny
from shadowkv_lab.sources.tensorfile import TensorFile

pytest.importorskip("transformers")

INDEX = "model.safetensors.index.json"


def weight_map(directory):
    return json.loads((directory / INDEX).read_text())["weight_map"]


def edit(directory, changes: dict, drop=(), config=None):
    """Rewrite single tensors, and keep the index right."""
    shard_of = weight_map(directory)
    for shard in set(shard_of.values()):
        tensors = load_file(directory / shard)
        here = [n for n in changes if shard_of.get(n.removesuffix("_scale_inv"), shard) == shard]
        gone = [n for n in drop if n in tensors]
        if here or gone:
            tensors.update({n: changes[n] for n in here})
            save_file({n: t for n, t in tensors.items() if n not in gone}, directory / shard)
            shard_of.update(dict.fromkeys(here, shard))
            for name in gone:
                del shard_of[name]
    (directory / INDEX).write_text(json.dumps({"weight_map": shard_of}))
    if config:
        raw = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(raw | config))


def test_it_loads_what_transformers_loads(checkpoint_dir):
    """All tensors of the whole model, fused experts and float32 routers included."""
    from transformers import GlmMoeDsaForCausalLM

    theirs = GlmMoeDsaForCausalLM.from_pretrained(checkpoint_dir, dtype=torch.bfloat16).state_dict()
    ours = checkpoint.load_model(checkpoint_dir, head=True)
    state = ours.model.state_dict()
    assert set(state) == set(theirs) and ours.layers == 4
    for name, tensor in theirs.items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name
    assert ours.loaded_bytes == sum(t.nbytes for t in theirs.values())


def test_only_the_shards_of_the_first_layers_are_opened(checkpoint_dir, caplog):
    with caplog.at_level(logging.INFO, "shadowkv_lab.sources"):
        loaded = checkpoint.load_model(checkpoint_dir, 1)
    needed = {
        shard
        for name, shard in weight_map(checkpoint_dir).items()
        if name.startswith(("model.embed_tokens", "model.layers.0."))
    }
    assert set(loaded.shards) == needed < set(weight_map(checkpoint_dir).values())
    assert all(f"opened {shard}" in caplog.text for shard in needed)
    assert "1 of 4 layers" in caplog.text


def test_shards_that_are_not_needed_need_not_be_there(broken):
    opened = checkpoint.load_model(broken, 1).shards
    for path in broken.glob("*.safetensors"):
        if path.name not in opened:
            path.unlink()
    assert checkpoint.load_model(broken, 1).shards == opened
    with pytest.raises(BadFile, match="which is not in"):
        checkpoint.load_model(broken, 4)


def test_progress(checkpoint_dir):
    seen = []
    checkpoint.load_model(checkpoint_dir, 2, progress=lambda text, done: seen.append((text, done)))
    assert [d for _, d in seen] == sorted(d for _, d in seen) and "loading model.embed" in seen[0][
        0
    ]


MEMORY = """
    import sys, torch, transformers
    from shadowkv_lab.sources import checkpoint, tiny
    checkpoint._empty_model(checkpoint.open_shards(sys.argv[1])[1], 4, 3)  # imports are paid for
    def kb(key):
        return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    before = kb("VmRSS")
    loaded = checkpoint.load_model(sys.argv[1], 3)
    print(loaded.loaded_bytes, (kb("VmHWM") - before) * 1024)
"""


def to_block_fp8(weight):
    """[N, K] as e4m3 with one scale per 128 x 128, in numpy."""
    w = weight.float().numpy()
    n, k = (-(-s // 128) for s in w.shape)
    padded = np.zeros((n * 128, k * 128), np.float32)
    padded[: w.shape[0], : w.shape[1]] = w
    blocks = padded.reshape(n, 128, k, 128)
    scale = (np.abs(blocks).max((1, 3)) / 448).astype(np.float32)
    stored = (blocks / scale[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
    back = (stored.astype(np.float32) * scale[:, None, :, None]).reshape(n * 128, k * 128)
    stored = stored.reshape(n * 128, k * 128)[: w.shape[0], : w.shape[1]].copy()
    fp8 = torch.from_numpy(stored.view(np.uint8)).view(torch.float8_e4m3fn)
    return fp8, torch.from_numpy(scale), torch.from_numpy(back[: w.shape[0], : w.shape[1]].copy())


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_memory_stays_within_the_loaded_tensors_and_20_percent(tmp_path, monkeypatch, kind):
    for key, value in dict(vocab_size=20_000, hidden_size=1024, intermediate_size=4096).items():
        monkeypatch.setitem(tiny.CONFIG, key, value)
    directory = tiny.write(tmp_path / "larger")
    if kind == "fp8":
        names = [
            n
            for n in weight_map(directory)
            if n.endswith("_proj.weight") and "experts" not in n and "indexer" not in n
        ]
        changes = {}
        for name in names:
            source = TensorFile(directory / weight_map(directory)[name]).read(name)
            changes[name], changes[f"{name}_scale_inv"], _ = to_block_fp8(source)
        edit(directory, changes, config={"quantization_config": {"quant_method": "fp8"}})
    for _ in range(3):  # under memory pressure the libraries' own pages come and go, and add
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(MEMORY), str(directory)],
            capture_output=True,
            text=True,
            check=True,
        )
        loaded, peak = map(int, done.stdout.split())
        if peak < 1.2 * loaded:
            break
    assert loaded > 120e6 and peak < 1.2 * loaded


def test_block_fp8_is_dequantised(broken):
    """Against numpy and ml_dtypes; one matrix has blocks that are not whole."""
    names = [
        "model.layers.0.self_attn.q_a_proj.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
    ]
    changes, wanted = {}, {}
    for name in names:
        source = TensorFile(broken / weight_map(broken)[name]).read(name)
        changes[name], changes[f"{name}_scale_inv"], wanted[name] = to_block_fp8(source)
    assert wanted[names[1]].shape[0] % 128
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit(broken, changes, config={"quantization_config": block})
    state = checkpoint.load_model(broken, 2).model.state_dict()
    for name in names:
        assert torch.equal(state[name], wanted[name].bfloat16())


# Bad checkpoints


def test_a_missing_shard(broken):
    shard = weight_map(broken)["model.layers.1.self_attn.kv_b_proj.weight"]
    (broken / shard).unlink()
    with pytest.raises(BadFile, match=f"{shard}, which is not in"):
        checkpoint.load_model(broken, 2)


def test_an_index_that_names_what_its_shard_lacks(broken):
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    shard = weight_map(broken)[name]
    tensors = load_file(broken / shard)
    del tensors[name]
    save_file(tensors, broken / shard)
    with pytest.raises(BadFile, match=f"{name} into {shard}, but that shard lacks it"):
        checkpoint.load_model(broken, 1)


def test_a_tensor_that_no_shard_has(broken):
    edit(broken, {}, drop=["model.layers.0.input_layernorm.weight"])
    with pytest.raises(BadFile, match=r"No shard has model.layers.0.input_layernorm.weight"):
        checkpoint.load_model(broken, 1)


def test_a_tensor_of_another_shape(broken):
    edit(broken, {"model.layers.0.input_layernorm.weight": torch.ones(3).bfloat16()})
    with pytest.raises(BadFile, match=r"shape \(3,\).*\(256,\)"):
        checkpoint.load_model(broken, 1)


def test_a_truncated_shard_and_a_broken_index(broken):
    shard = broken / weight_map(broken)["model.layers.0.input_layernorm.weight"]
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(BadFile, match="not a whole safetensors"):
        checkpoint.load_model(broken, 1)
    (broken / INDEX).write_text("{}")
    with pytest.raises(BadFile, match="lacks weight_map"):
        checkpoint.load_model(broken, 1)


@pytest.mark.parametrize("layers", [0, 5, -1])
def test_layers_outside_the_model(checkpoint_dir, layers):
    with pytest.raises(OutOfRange, match="1 to 4"):
        checkpoint.load_model(checkpoint_dir, layers)


def test_another_architecture(broken):
    edit(broken, {}, config={"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(BadFile, match=r"LlamaForCausalLM.*GlmMoeDsaForCausalLM"):
        checkpoint.load_model(broken, 1)


# Quantisations that are not read


@pytest.mark.parametrize(
    "config, named",
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\]"),
    ],
)
def test_other_quantisations_are_refused_by_name(broken, config, named):
    edit(broken, {}, config={"quantization_config": config})
    with pytest.raises(BadFile, match=named):
        checkpoint.load_model(broken, 1)


@pytest.mark.parametrize("suffix, named", [(".gguf", "GGUF"), (".bin", "pickled")])
def test_other_files_are_refused_by_name(broken, suffix, named):
    for path in broken.glob("*.safetensors*"):
        path.unlink()
    (broken / f"weights{suffix}").write_bytes(b"x")
    with pytest.raises(BadFile, match=named):
        checkpoint.load_model(broken, 1)


def nvfp4(broken, names):
    changes = {n: torch.zeros(8, 8, dtype=torch.uint8) for n in names}
    changes |= {n + "_scale": torch.ones(8).to(torch.float8_e4m3fn) for n in names}
    edit(broken, changes)
    quantised = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (broken / "hf_quant_config.json").write_text(json.dumps(quantised))


def test_nvfp4_experts_are_refused_and_the_bf16_layers_before_them_read(broken):
    experts = [n for n in weight_map(broken) if ".mlp.experts." in n]
    nvfp4(broken, experts)
    assert checkpoint.load_model(broken, 3).layers == 3
    with pytest.raises(BadFile, match=r"experts.*NVFP4.*U8.*layers 0-2"):
        checkpoint.load_model(broken, 4)


def test_fp8_without_block_scales_is_refused(broken):
    name = "model.layers.0.self_attn.q_a_proj.weight"
    edit(broken, {name: torch.zeros(128, 256).to(torch.float8_e4m3fn)})
    with pytest.raises(BadFile, match="F8_E4M3 without weight_scale_inv"):
        checkpoint.load_model(broken, 1)
    edit(broken, {f"{name}_scale_inv": torch.ones(1, 1)})
    with pytest.raises(BadFile, match=r"\(1, 1\), not F32 \(1, 2\)"):
        checkpoint.load_model(broken, 1)


def test_packed_integers_in_place_of_a_weight_are_refused(broken):
    name = "model.layers.0.self_attn.q_a_proj.weight"
    base = name.removesuffix("weight")
    edit(
        broken,
        {base + "qweight": torch.zeros(4, dtype=torch.int32), base + "scales": torch.ones(4)},
        drop=[name],
    )
    with pytest.raises(BadFile, match="qweight"):
        checkpoint.load_model(broken, 1)


def test_a_single_file_checkpoint(checkpoint_dir, tmp_path):
    everything = {}
    for path in checkpoint_dir.glob("*.safetensors"):
        everything |= load_file(path)
    save_file(everything, tmp_path / "model.safetensors")
    shutil.copy(checkpoint_dir / "config.json", tmp_path)
    ours = checkpoint.load_model(tmp_path, 1)
    assert ours.shards == ("model.safetensors",)
    assert ours.sha256 == checkpoint.load_model(checkpoint_dir, 1).sha256

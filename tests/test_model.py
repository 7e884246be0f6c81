"""Sizes against published test vectors, and configs that are not what they should be."""

import json
from pathlib import Path

import pytest

from shadowkv_lab.errors import BadFile, OutOfRange, UnknownName
from shadowkv_lab.model import load_model

GIB = 2**30


@pytest.mark.parametrize(
    "storage, size",
    [("fp8", 576), ("bf16", 1152), ("fp8+bf16", 1728), ("packed", 656), ("index", 132)],
)
def test_bytes_of_a_row(storage, size):
    assert load_model("glm-5").row_bytes(storage) == size


@pytest.mark.parametrize(
    "storage, token, tokens",
    [("fp8", 55_224, 495_612), ("bf16", 100_152, 273_281), ("fp8+bf16", 145_080, 188_652)],
)
def test_glm5_tokens_in_the_case_pool(storage, token, tokens):
    glm = load_model("glm-5")
    assert glm.token_bytes(storage) == token
    assert int(25.49 * GIB) // token == tokens


@pytest.mark.parametrize(
    "name, layers, heads, scale",
    [
        ("glm-5", 78, 64, 256**-0.5),
        ("glm-5.1", 78, 64, 256**-0.5),
        ("glm-5.2", 78, 64, 256**-0.5),
        ("deepseek-r1", 61, 128, 192**-0.5 * 1.8738542070926265),
        ("DeepSeek-V3", 61, 128, 192**-0.5 * 1.8738542070926265),
        ("deepseek-v3.2", 61, 128, 192**-0.5 * 1.8738542070926265),
        ("kimi-k2", 61, 64, 192**-0.5 * 1.813260434039),
    ],
)
def test_models(name, layers, heads, scale):
    # mscale^2: (0.1 ln 40 + 1)^2 and (0.1 ln 32 + 1)^2, worked out apart.
    model = load_model(name)
    assert (model.layers, model.heads, model.row) == (layers, heads, 576)
    assert model.softmax_scale == pytest.approx(scale, rel=1e-9)


def test_index_keys_are_counted_where_they_are_held():
    assert load_model("glm-5").index_layers == 78
    assert load_model("glm-5.2").index_layers == 21
    assert load_model("deepseek-r1").index_layers == 0
    glm = load_model("glm-5")
    assert glm.token_bytes("fp8", index=False) == 78 * 576
    assert glm.token_bytes("fp8", mtp=True) == 79 * (576 + 132)


CONFIG = dict(
    num_hidden_layers=4,
    num_attention_heads=8,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    hidden_size=1024,
    max_position_embeddings=4096,
)


def test_config_from_dict_file_and_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    from_dict = load_model(CONFIG)
    for place in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        model = load_model(place)
        assert model.name == tmp_path.name
        assert (model.layers, model.row, model.softmax_scale) == (4, 576, from_dict.softmax_scale)


@pytest.mark.parametrize(
    ("folder", "fp8", "bf16", "heads", "positions"),
    # By hand: layers that keep a latent x its bytes, and index keys of 132 B where they are kept.
    [
        ("kimi-k2.5", 61 * 576, 61 * 1152, 64, 262_144),  # under text_config
        ("kimi-linear", 7 * 576, 7 * 1152, 32, 1_048_576),  # 7 of 27 layers
        ("glm-5.3-flash", 11 * (512 + 33), 11 * (1024 + 33), 64, 1_048_576),  # no rope, pooled
        ("longcat-flash", 56 * 576, 56 * 1152, 64, 131_072),  # two attentions in each of 28
        ("glm-5.3-topk-freq", 78 * 576 + 21 * 132, 78 * 1152 + 21 * 132, 64, 1_048_576),
        ("glm-4.7-flash", 47 * 576, 47 * 1152, 20, 202_752),
        ("ling-2.5-1t", 10 * 576, 10 * 1152, 64, 131_072),  # every 8th of 80 layers
    ],
)
def test_configs_as_people_have_them(folder, fp8, bf16, heads, positions):
    model = load_model(Path(__file__).parent / "configs" / folder)
    assert (model.token_bytes("fp8"), model.token_bytes("bf16")) == (fp8, bf16)
    assert (model.name, model.heads, model.max_positions) == (folder, heads, positions)


def test_index_layers_by_pattern_types_and_frequency():
    at = {"index_head_dim": 128, "num_hidden_layers": 6}
    for more, layers in (
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"index_topk_freq": 2}, (0, 1, 3, 5)),  # transformers' own test, from offset 2 on
        ({"index_topk_pattern": "FFSSFS"}, (0, 1, 4)),
        ({"indexer_types": ["full", "shared"] * 3}, (0, 2, 4)),
    ):
        model = load_model(CONFIG | at | more)
        assert model.index_at == layers and model.index_layers == len(layers)
    # What GLM-5.2's frequency says is what its list marks: 0, 1, 2, 6, 10, ..., 74.
    assert load_model("glm-5.2").index_at == (0, 1, *range(2, 75, 4))


@pytest.mark.parametrize(
    ("quantised", "word"),
    [
        (None, "bf16"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "int4",
        ),
        ({"quant_method": "exl3"}, ""),
        ({"quant_method": "something new"}, ""),
    ],
)
def test_how_a_config_says_it_is_quantised(quantised, word):
    assert load_model(CONFIG | {"quantization_config": quantised}).quantisations == (word,)


def test_yarn_and_indexer_types_of_a_config():
    yarn = dict(rope_type="yarn", factor=40, mscale_all_dim=1.0)
    config = CONFIG | dict(
        rope_parameters=yarn, index_head_dim=128, indexer_types=["full", "shared", "full", "full"]
    )
    model = load_model(config)
    assert model.softmax_scale == pytest.approx(192**-0.5 * 1.8738542070926265)
    assert model.index_layers == 3
    plain = load_model(CONFIG | dict(rope_scaling=dict(type="linear", factor=4)))
    assert plain.softmax_scale == 192**-0.5


def test_bad_configs_are_named(tmp_path):
    with pytest.raises(BadFile, match="lacks kv_lora_rank, qk_rope_head_dim"):
        load_model(
            {k: v for k, v in CONFIG.items() if k not in ("kv_lora_rank", "qk_rope_head_dim")}
        )
    for broken in (-1, 0, "512", True, 1.5):
        with pytest.raises(BadFile, match="kv_lora_rank"):
            load_model(CONFIG | dict(kv_lora_rank=broken))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadFile, match="not JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BadFile, match="an object"):
        load_model(tmp_path)
    with pytest.raises(BadFile, match="no such file"):
        load_model(tmp_path / "absent.json")


def test_unknown_names_bring_the_nearest():
    with pytest.raises(UnknownName, match="Did you mean 'glm-5'"):
        load_model("glm5")
    with pytest.raises(UnknownName, match="Allowed: bf16, fp8"):
        load_model("glm-5").row_bytes("int4")
    with pytest.raises(OutOfRange, match=r"3 GPUs cannot share 64 heads.*tensor_parallel"):
        load_model("glm-5").heads_per_gpu(3)

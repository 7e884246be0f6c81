"""Sizes against published test vectors, and configs that are not what they should be."""

import json

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

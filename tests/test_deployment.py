"""Deployments from names, configs and publications, against published counts and other servers."""

import math
from dataclasses import replace

import pytest

from shadowkv_lab import machine
from shadowkv_lab.deployment import deployment, published_deployment
from shadowkv_lab.errors import OutOfRange, UnknownName
from shadowkv_lab.load import Load
from shadowkv_lab.model import load_model
from shadowkv_lab.provenance import Kind

GIB = 2**30
SERVER = "rtx-pro-6000-server"


@pytest.mark.parametrize(
    ("name", "billions"),
    # As their makers publish them; DeepSeek-V3's without the 14B of its MTP module.
    [("glm-5", 744), ("deepseek-v3", 671), ("kimi-k2", 1_040)],
)
def test_parameters_of_a_config_are_those_published(name, billions):
    count = load_model(name).parameters()
    assert (sum(count.values()) - count["mtp"]) / 1e9 == pytest.approx(billions, rel=0.015)


def test_the_mtp_module_of_deepseek_v3_is_published_too():
    # 14B: 11.6B of it its own, the rest the embedding and head that it shares.
    count = load_model("deepseek-v3").parameters()
    assert (count["mtp"] + count["embedding"]) / 1e9 == pytest.approx(14, rel=0.05)


@pytest.mark.parametrize(
    ("model", "options", "gib"),
    [
        # rtx6kpro, GLM-5-NVFP4 on 8 GPUs; vLLM's log of DeepSeek-R1 on 16 (log-10).
        ("GLM-5-NVFP4", dict(), 57.06),
        ("deepseek-r1", dict(card="h200", pipeline_parallel=2), 39.66),
    ],
)
def test_estimated_weights_are_near_what_servers_print(model, options, gib):
    at = deployment(model, **options)
    assert at.checkpoint.weights_gib == pytest.approx(gib, rel=0.04)
    assert at.checkpoint.provenance.kind is Kind.ASSUMED
    assert "estimated from the config" in at.checkpoint.provenance.how


def test_no_figure_of_the_glm5_report_is_another_servers_default():
    report = published_deployment("glm5-report")
    assert (report.checkpoint.weights_gib, report.memory_fraction, report.kv_gib) == (
        61,
        0.92,
        25.49,
    )
    assert report.checkpoint.provenance.source.title.startswith("the GLM-5 report")
    for at in (
        deployment("glm-5", SERVER),
        deployment("GLM-5-NVFP4", SERVER),
        deployment("glm-5.2", SERVER),
        deployment("deepseek-r1", "h200"),
        deployment("GLM-5-NVFP4", "h200", tensor_parallel=4),
    ):
        assert at.checkpoint.weights_gib not in (61, 57.06)
        assert at.memory_fraction != 0.92
        assert (at.kv_gib, at.pool_tokens) == (None, None)
    other = published_deployment("rtx6kpro")
    assert (other.checkpoint.weights_gib, other.layout) == (57.06, "bf16")
    assert "rtx6kpro" in other.checkpoint.provenance.source.title


def test_a_change_of_the_report_is_typed():
    typed = published_deployment("glm5-report", "rtx-pro-6000-workstation", weights_gib=50.0)
    assert typed.card.name == "rtx-pro-6000-workstation"
    assert typed.checkpoint.provenance.kind is Kind.ASSUMED
    assert typed.provenance("kv_gib").kind is Kind.PUBLISHED


@pytest.mark.parametrize(
    ("typed", "model", "quantisation"),
    [
        ("zai-org/GLM-5", "glm-5", "fp8"),  # the widest that fits 8 H200
        ("GLM-5-NVFP4", "glm-5", "nvfp4"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek-r1", "fp8"),
        ("zai-org/GLM-5.2-FP8", "glm-5.2", "fp8"),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2", "int4"),
        ("nvidia/DeepSeek-R1-0528-FP4", "deepseek-r1", "nvfp4"),
        ("zai-org/GLM-5.1", "glm-5", "fp8"),
    ],
)
def test_names_as_people_type_them(typed, model, quantisation):
    at = deployment(typed, "h200")
    assert (at.model.name, at.checkpoint.quantisation) == (model, quantisation)


@pytest.mark.parametrize(
    "typed", ["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "glm-5.9", "deepseek-v4", "kimi-k3"]
)
def test_another_model_is_neither_taken_nor_proposed(typed):
    with pytest.raises(UnknownName) as error:
        deployment(typed)
    assert "Did you mean" not in str(error.value)


def test_a_checkpoint_whose_size_nobody_knows():
    at = deployment("GLM-5-GGUF")
    assert at.checkpoint.weights_gib is None and "not known" in at.checkpoint.provenance.how
    with pytest.raises(UnknownName, match="quantisation"):
        deployment("glm-5", quantisation="q4_k_m")


def test_typed_weights_choose_the_checkpoint_of_that_size():
    for gib, kind in ((57.06, "nvfp4"), (88.0, "fp8"), (175.0, "bf16")):
        assert deployment("glm-5", "b300", weights_gib=gib).checkpoint.quantisation == kind
    assert deployment("glm-5", weights_gib=57.06).checkpoint.expert_bits == 4.5


@pytest.mark.parametrize(
    ("options", "heads", "gpus"),
    [
        (dict(), 16, 8),
        (dict(data_parallel=8), 128, 8),  # SGLang splits DP out of TP
        (dict(data_parallel=2), 32, 8),
        (dict(engine="vllm", tensor_parallel=1, data_parallel=8), 128, 8),
        (dict(engine="vllm", data_parallel=2), 16, 16),
        (dict(decode_context_parallel=8), 128, 8),  # gathered, over an eighth of the rows
        (dict(pipeline_parallel=2), 16, 16),
    ],
)
def test_heads_per_gpu(options, heads, gpus):
    at = deployment("deepseek-r1", "h200", **options)
    assert (at.heads, at.gpus) == (heads, gpus)
    assert at.setting(pool_tokens=4096).heads == heads


def test_what_one_gpu_attends_to():
    at = deployment("deepseek-r1", "h200", data_parallel=4, decode_context_parallel=2)
    load = at.setting(Load(10, 4096), pool_tokens=65_536).load
    assert (load.concurrency, load.context) == (3, 2048)
    same = deployment("deepseek-r1", "h200").share(Load(10, 4096))
    assert same == Load(10, 4096)


def test_stages_cover_every_layer_once():
    for stages in range(1, 9):
        at = deployment("deepseek-r1", "h200", pipeline_parallel=stages)
        assert [i for stage in at.stages for i in stage] == list(range(61))
        assert max(map(len, at.stages)) - min(map(len, at.stages)) <= 1


def test_bytes_per_token_by_layout_and_stage():
    wanted = {"fp8_e4m3": 576, "fp8_e5m2": 576, "bf16": 1152, "fp8_ds_mla": 656}
    wanted["nvfp4_ds_mla"] = 432
    for layout, row in wanted.items():
        at = deployment("glm-5.2", SERVER, layout=layout)
        assert at.token_bytes() == 78 * row + 21 * 132
        assert at.index_bytes() == 21 * 132
        # A log says that this server keeps index keys on every layer (log-03).
        assert deployment("glm-5.2", SERVER, layout=layout, index_layers=78).token_bytes() == (
            78 * (row + 132)
        )
    # Layers 0 to 38 hold 12 of the 21 index layers, 39 to 77 the other 9 and the MTP layer's.
    two = deployment("glm-5.2", SERVER, pipeline_parallel=2, mtp=True)
    assert two.token_bytes() == max(39 * 576 + 12 * 132, 40 * 576 + 10 * 132)


def test_sglang_chooses_its_own_memory_fraction():
    # 512 MiB, 1.5 MiB x 8,192 of a chunk, 2 MiB x 512 of graphs and 1 GiB for TP 8.
    reserved = 512 + 1.5 * 8192 + 2 * 512 + 1024
    for card in (SERVER, "h200"):
        mib = machine.card(card).memory_mib
        assert deployment("GLM-5-NVFP4", card).memory_fraction == round(1 - reserved / mib, 3)
    assert deployment("glm-5", "h200", engine="vllm").memory_fraction == 0.9
    assert deployment("glm-5", memory_fraction=0.8).memory_fraction == 0.8


def test_pages_by_model_and_engine():
    assert deployment("glm-5").page_size == 64
    assert deployment("deepseek-r1").page_size == 1
    assert deployment("glm-5", engine="vllm").page_size == 1
    assert deployment("deepseek-r1", page_size=16).page_size == 16


def test_index_keys_can_be_left_out_or_counted_by_a_log():
    assert deployment("glm-5.2").index_layers == 21
    assert deployment("glm-5.2", index_layers=0).token_bytes() == 78 * 576
    with pytest.raises(OutOfRange, match="79 layers"):
        deployment("glm-5.2", index_layers=79)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(memory_fraction=0.0),
        dict(memory_fraction=1.0),
        dict(memory_fraction=92),
        dict(memory_fraction=math.nan),
        dict(engine="vllm", memory_fraction=1.01),
        dict(weights_gib=-1.0),
        dict(weights_gib=0),
        dict(kv_gib=math.inf),
        dict(kv_gib=0),
        dict(pool_tokens=-5),
        dict(tensor_parallel=7),
        dict(tensor_parallel=0),
        dict(data_parallel=3),
        dict(pipeline_parallel=79),
        dict(decode_context_parallel=3),
        dict(page_size=0),
        dict(engine="trt"),
        dict(graphs_gib=math.nan),
        dict(layout="fp4"),
    ],
)
def test_what_no_server_can_be_is_named(wrong):
    with pytest.raises((OutOfRange, UnknownName)):
        deployment("glm-5", SERVER, **wrong)


def test_twenty_heads_name_the_option():
    twenty = replace(load_model("glm-5"), heads=20, name="glm-4.7-flash")
    with pytest.raises(OutOfRange, match=r"20 heads.*1, 2, 4, 5, 10, 20.*--tensor-parallel"):
        deployment(twenty)
    assert deployment(twenty, tensor_parallel=4).heads == 5

"""Start-up logs: what is read, what is ignored, and what is refused by name."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowkv_lab.errors import BadFile
from shadowkv_lab.load import Load
from shadowkv_lab.model import load_model
from shadowkv_lab.server.logs import from_log, parse

SGLANG = """\
[2026-02-01 10:00:00] server_args=ServerArgs(model_path='GLM-5-NVFP4', mem_fraction_static=0.92, tp_size=8, kv_cache_dtype='fp8_e4m3')
[2026-02-01 10:00:01 TP0] Load weight begin. avail mem=94.10 GB
[2026-02-01 10:05:13 TP0] Load weight end. elapsed=312 s, dtype=torch.bfloat16, avail mem=37.04 GB, mem usage=57.06 GB.
[2026-02-01 10:05:15 TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 495616, KV size: 25.49 GB
[2026-02-01 10:05:15 TP0] something nobody knows, mem=1 GB
[2026-02-01 10:06:00 TP0] max_total_num_tokens=495616, chunked_prefill_size=8192, available_gpu_mem=9.1 GB
[2026-02-01 10:07:00 TP0] Decode batch, #running-req: 1, #token: 1204, token usage: 0.00, gen throughput (token/s): 10.46, #queue-req: 0,
[2026-02-01 10:07:04 TP0] Decode batch, #running-req: 1, #token: 1244, token usage: 0.00, gen throughput (token/s): 10.50, #queue-req: 0,
"""  # noqa: E501
VLLM = """\
INFO 02-01 10:05:13 gpu_model_runner.py:1] Model loading took 57.06 GiB memory and 36.2 seconds
INFO 02-01 10:05:13 Available KV cache memory: 25.49 GiB
INFO 02-01 10:05:13 GPU KV cache size: 396,288 tokens
INFO 02-01 10:05:13 Maximum concurrency for 202,752 tokens per request: 1.95x
"""


def test_sglang():
    log = parse(SGLANG)
    assert (log.engine, log.weights_gib, log.kv_gib, log.pool_tokens) == (
        "sglang",
        57.06,
        25.49,
        495_616,
    )
    assert (log.kv_dtype, log.mem_fraction, log.tensor_parallel) == ("fp8", 0.92, 8)
    assert log.free_before_gib == 94.10
    assert log.tokens_per_s == pytest.approx(10.48)
    assert log.missing == ()


def test_vllm_says_what_is_missing():
    log = parse(VLLM)
    assert (log.engine, log.weights_gib, log.kv_gib) == ("vllm", 57.06, 25.49)
    assert (log.pool_tokens, log.reported_tokens) == (None, 396_288)
    assert log.missing == ("KV dtype", "memory fraction", "tensor parallel size")


def test_rows_of_a_vllm_pool_come_from_its_bytes():
    log = parse(VLLM + "engine config: kv_cache_dtype=fp8_e4m3, gpu_memory_utilization=0.92,\n")
    assert log.kv_dtype == "fp8"
    assert log.mem_fraction == 0.92
    assert log.rows(load_model("glm-5")) == 495_612  # DESIGN's vector, not the 396,288 of the log


def test_a_log_fills_the_budget():
    load = Load(1, 2048)
    plan = from_log(SGLANG, "glm-5", "rtx-pro-6000-server", load=load, weights_gib=1.0)
    terms = {t.name: t for t in plan.terms}
    assert terms["weights"].gib == -57.06  # the log comes before what is typed
    assert terms["before weights"].gib == pytest.approx(94.10 - 97_887 / 1024)
    for name in ("weights", "before weights", "not accounted for"):
        assert str(terms[name].provenance) == "recorded"
    assert plan.kv_gib == pytest.approx(25.49)
    assert plan.load == load


def test_a_file(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(SGLANG)
    assert parse(path) == parse(str(path)) == parse(SGLANG)
    path.write_bytes(b"\xff\xfe\x00\x81KV Cache is allocated")
    with pytest.raises(BadFile, match="Cannot read"):
        parse(path)
    with pytest.raises(BadFile):
        parse(tmp_path / "none.log")


@pytest.mark.parametrize("text", ["", "hello", "import torch\nprint(1)\n", "no/such/file.log"])
def test_no_log_at_all(text):
    with pytest.raises(BadFile, match="no start-up log"):
        parse(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("KV size: 25.49", "KV size: nan"),
        ("mem usage=57.06", "mem usage=-3"),
        ("#tokens: 495616", "#tokens: 12.5"),
        ("mem_fraction_static=0.92", "mem_fraction_static=92"),
        ("KV size: 25.49", "KV size: many"),
    ],
)
def test_numbers_that_cannot_be(old, new):
    with pytest.raises(BadFile, match="The log's"):
        parse(SGLANG.replace(old, new))


def test_only_decode_lines_are_not_enough():
    decode = "\n".join(line for line in SGLANG.splitlines() if "Decode batch" in line) + "\n"
    assert parse(decode).tokens_per_s == pytest.approx(10.48)
    with pytest.raises(BadFile, match="lacks"):
        from_log(decode, "glm-5", "rtx-pro-6000-server")


@given(st.text())
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(BadFile):
        parse(text + "\n")

"""`shadowkv simulate --trace FILE`: the samples through the command line."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shadowkv_lab.serving import traces
from shadowkv_lab.serving.contenders import contenders, engine, reported_or_derived
from shadowkv_lab.serving.simulate import simulate

SAMPLES = Path(__file__).resolve().parents[2] / "data" / "traffic" / "samples"


def shadowkv(*arguments, ok=True):
    command = [sys.executable, "-m", "shadowkv_lab", "simulate", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if ok else 2), done.stderr
    return done.stdout if ok else " ".join(done.stderr.split())


def test_a_trace_from_the_command_line_is_the_simulation():
    sample = SAMPLES / "mooncake.jsonl"
    options = ["--rate", 0.04, "--strategies", "full_cast,bf16_pool", "--max-new-tokens", 2048]
    rows = json.loads(shadowkv("--trace", sample, *options, "--json"))
    load = traces.load(sample).scaled(rate=0.04)
    for row, c in zip(
        rows, contenders(reported_or_derived(), ["full_cast", "bf16_pool"]), strict=True
    ):
        ran = simulate(engine(c, max_new_tokens=2048), load)
        assert row == pytest.approx(ran.summary())
        # All prompts begin with the same 512 tokens; whoever finds them computes the others.
        hits = (load.prompt_tokens > 512).sum() - round(ran.scheduler.cached_tokens / 512)
        assert ran.scheduler.cached_tokens > 0 and 1 <= hits < len(load) / 2
        assert 0 < row["cached_share"] < 0.05 and 0 <= row["shared_share"] < 0.05
    assert np.isfinite(rows[0]["p99_itl_ms"])


def test_a_deployment_a_replica_and_an_error():
    azure = SAMPLES / "azure-2023.csv"
    options = ["--deployment", "sglang-35291", "--rest", "sglang-35291", "--strategies", "shadow"]
    said = shadowkv("--trace", azure, *options, "--replicas", 2)
    assert "DeepSeek-R1 on H200 SXM" in said and "2 replicas after a least-loaded router" in said
    busy = shadowkv("--trace", SAMPLES / "mooncake.jsonl", ok=False)
    assert "no strategy can serve it" in busy
    assert "BadFile" in shadowkv("--trace", "none.csv", ok=False)

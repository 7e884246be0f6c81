"""The command line is the notebook's headless twin: same functions, named errors, exit status."""

import json
import subprocess
import sys

import pytest

from shadowkv_lab import machine
from shadowkv_lab.steps import step as steps
from tests.tiny import CONFIG


def shadowkv(*arguments, ok=True):
    """Standard output of a command, or its standard error where it should fail with status 2."""
    command = [sys.executable, "-m", "shadowkv_lab", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if ok else 2), done.stderr
    return done.stdout if ok else " ".join(done.stderr.split())


@pytest.fixture
def small(tmp_path):
    """A two-layer model's config.json, and options for a pool that takes a moment."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return (
        "--model",
        tmp_path,
        "--pool-tokens",
        256,
        "--context",
        16,
        "--heads",
        4,
        "--device",
        "cpu",
    )


def test_measure_prints_json_and_records_the_same_runs(small, tmp_path):
    record = tmp_path / "runs.jsonl"
    out = shadowkv(
        "measure",
        *small,
        "--strategies",
        "full_cast,shadow(layers=1)",
        "--record",
        record,
        "--json",
    )
    runs = json.loads(out)
    assert [r["strategy"]["label"] for r in runs] == ["full_cast", "shadow(layers=1)"]
    assert [s.ms for s in steps.read(record)] == [r["ms"] for r in runs]
    assert "measure --model" in runs[0]["origin"]["command"], "the command that repeats it"
    assert runs[0]["origin"]["device"] == machine.device_title("cpu")


def test_measure_prints_a_table(small):
    out = shadowkv("measure", *small, "--strategies", "bf16_pool")
    assert "bf16_pool" in out and "1 x 16" in out and "measured" in out


@pytest.mark.parametrize(
    "more, said",
    [
        (("--model", "glm5"), "UnknownName: Unknown model 'glm5'. Allowed:"),
        (("--strategies", "shdow"), "Did you mean 'shadow'?"),
        (("--context", "0"), "context '0'. Allowed: 1 or more"),
        (("--context", "16,x"), "whole numbers, separated by commas"),
        (("--context", "5000"), "Context 5000"),
        (("--concurrency", "64"), "DoesNotFit: 64 requests x 16 tokens"),
        (("--pool-tokens", "999999999999"), "DoesNotFit"),
        (("--device", "cuda:7"), "Unknown device 'cuda:7'"),
        (("--backend", "fa9"), "Unknown backend 'fa9'"),
        (("--backend", "flashinfer_fa2"), "--backend reference"),
        (("--strategies", "fused_fp8"), "The Triton kernel 'decode' cannot run"),
        (("--page-size", "64", "--pool-tokens", "100"), "a positive multiple of the page size"),
    ],
)
def test_bad_input_is_one_named_line(small, more, said):
    assert said in shadowkv("measure", *small, *more, ok=False)


def test_rules_of_the_case_and_of_today():
    """The report's dead ends come out of the rules of its day, today's ways out of today's."""
    then = {r["backend"]: r for r in json.loads(shadowkv("rules", "--as-of", "2026-02", "--json"))}
    now = {r["backend"]: r for r in json.loads(shadowkv("rules", "--json"))}
    assert then["flashinfer_fa2"]["runs"] == "no" and "sizeof" in then["flashinfer_fa2"]["why_not"]
    assert then["trtllm_mla"]["runs"] == "no"
    assert now["lab_fused_fp8"]["runs"] == "yes"


def test_doctor_says_what_runs_and_the_remedy():
    findings = json.loads(shadowkv("doctor", "--json"))
    by_name = {f["what"]: f for f in findings}
    assert by_name["full_cast"]["state"] == "ok"
    for finding in findings:
        assert finding["state"] in ("ok", "warn", "no")
        assert finding["remedy"] or finding["state"] == "ok", finding


def test_kernels_cannot_be_timed_on_a_cpu():
    for more in ((), ("--tune",)):
        said = shadowkv("bench", "kernels", "--device", "cpu", *more, ok=False)
        assert "CannotRun" in said and "an NVIDIA GPU" in said

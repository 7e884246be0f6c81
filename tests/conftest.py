"""GPU tests are skipped with a reason without a GPU; `--gpu-record` keeps how they went."""

import importlib.util
import json
import os
from datetime import UTC, datetime

import pytest
import torch

from shadowkv_lab import facts, machine
from shadowkv_lab.model import load_model

# Without a GPU, Triton kernels run in Triton's interpreter. Must be set before a kernel is defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A GPU machine needs no Jupyter to measure, and to test what measures.
collect_ignore = [] if importlib.util.find_spec("plotly") else ["browser", "notebooks", "ui"]

GPU_RECORD = facts.RUNS / "gpu_tests.json"


def pytest_addoption(parser):
    parser.addoption("--gpu-record", action="store_true", help=f"write {GPU_RECORD.name}")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU (make gpu-test)"))


def pytest_report_header():
    if not GPU_RECORD.exists():
        return "GPU tests: no record yet"
    last = json.loads(GPU_RECORD.read_text())
    age = datetime.now(UTC) - datetime.fromisoformat(last["date"])
    return (
        f"GPU tests: {last['result']} on {last['gpu']}, {age.days} days ago, "
        f"revision {last['git_revision']}"
    )


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if not config.getoption("--gpu-record") or not torch.cuda.is_available():
        return
    counts = {
        kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "failed", "error")
    }
    record = {
        "result": ", ".join(f"{n} {kind}" for kind, n in counts.items() if n) or "none ran",
        "gpu": machine.device_title("cuda"),
        "git_revision": machine.git_revision(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": machine.version_of("triton"),
        "flashinfer": machine.version_of("flashinfer-python"),
    }
    GPU_RECORD.write_text(json.dumps(record, indent=2) + "\n")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The CPU always, and a GPU where there is one."""
    return torch.device("cuda:0" if request.param == "cuda" else "cpu")


@pytest.fixture
def tiny():
    """A model with GLM-5's latent row (kernels need it) and two layers."""
    from dataclasses import replace

    return replace(load_model("glm-5"), name="tiny", layers=2, index_layers=2, max_positions=4096)

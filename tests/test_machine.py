"""Cards from data/gpus, and what doctor makes of a machine that is not this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shadowkv_lab import doctor, facts, machine
from shadowkv_lab.errors import UnknownName


def test_cards_have_what_the_drivers_and_datasheets_say():
    server, workstation = (machine.card(f"rtx-pro-6000-{k}") for k in ("server", "workstation"))
    assert (server.bandwidth_gb_per_s, workstation.bandwidth_gb_per_s) == (1597, 1792)
    assert server.memory_mib == workstation.memory_mib == 97_887
    assert server.memory_gib == pytest.approx(95.6, abs=0.01)
    assert server.compute_capability == (12, 0) and server.shared_memory_per_block_bytes == 101_376
    for name in machine.known_cards():
        assert machine.card(name).source
    with pytest.raises(UnknownName, match="Did you mean 'h200'"):
        machine.card("h-200")


@pytest.mark.parametrize("typed", ["h2000", "h100-nvl", "gb300", "b100", "mi300a", "rtx-6000"])
def test_another_product_is_never_proposed(typed):
    with pytest.raises(UnknownName) as error:
        machine.card(typed)
    assert "Did you mean" not in str(error.value)


def test_cards_that_reports_are_about():
    # Memory and capability as the reports print them (cmd-02).
    gib = {"h20": 95, "h20-3e": 139.72, "gb10": 121.69, "b300": 268, "mi355x": 288}
    for name, wanted in gib.items():
        assert machine.card(name).memory_gib == pytest.approx(wanted, rel=0.01)
    capabilities = {"h20": (9, 0), "h20-3e": (9, 0), "gb10": (12, 1), "b300": (10, 3)}
    for name, wanted in capabilities.items():
        assert machine.card(name).compute_capability == wanted
    assert machine.card_of("NVIDIA H20-3e").name == "h20-3e"
    for name in ("mi300x", "mi325x", "mi355x"):
        assert machine.card(name).compute_capability is None
        assert machine.card(name).sm.startswith("gfx9")


def test_driver_names_belong_to_one_card_each():
    names = [n for entry in facts.catalogue("gpus").values() for n in entry["driver_names"]]
    assert len(names) == len(set(names))


def test_memory_of_this_machine():
    memory = machine.memory("cpu")
    assert 0 < memory.free_bytes < memory.total_bytes
    with pytest.raises(UnknownName, match="device"):
        machine.as_device("tpu")


SMI = "NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: {}"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"


@pytest.mark.parametrize(
    ("seen", "state", "finding", "remedy"),
    [
        (dict(), "warn", "no NVIDIA GPU:", "Recorded H200 runs"),
        (dict(container=True), "warn", "no NVIDIA GPU in this container", "--gpus all"),
        (
            dict(smi="nvidia-smi", answer=f"{MISMATCH}\nNVML: 580.95", module="575.57.08"),
            "no",
            f"'{MISMATCH}'; the kernel still has module 575.57.08",
            "Reboot",
        ),
        (
            dict(smi="nvidia-smi", answer="NVIDIA-SMI has failed because it couldn't communicate"),
            "no",
            "does not answer: 'NVIDIA-SMI has failed",
            "modprobe nvidia",
        ),
        (dict(module="580.95"), "no", "this container was given no GPU", "--gpus all"),
        (dict(wsl=True), "no", "WSL2", "/usr/lib/wsl/lib/nvidia-smi"),
        (dict(torch_hip="7.2"), "no", "ROCm build (7.2) and sees no AMD GPU", "AMD"),
        (dict(answered=True, answer=SMI.format("12.4")), "no", "CPU build", "CUDA build of torch"),
        (
            dict(answered=True, answer=SMI.format("12.4"), torch_cuda="13.0"),
            "no",
            "driver 550.54.15, up to CUDA 12.4, is too old for this torch, built for CUDA 13.0",
            "CUDA 12.4 or older",
        ),
        (
            dict(answered=True, answer=SMI.format("13.1"), torch_cuda="13.0", torch_says="No GPU"),
            "no",
            "cannot use it: 'No GPU'",
            "CUDA_VISIBLE_DEVICES",
        ),
        (dict(answered=True, answer=SMI.format("13.1"), torch_hip="7.2"), "no", "ROCm", "CUDA"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_told_apart(seen, state, finding, remedy):
    found = doctor.why_no_gpu(doctor.Seen(**seen))
    assert found.state == state
    assert finding in found.finding and remedy in found.remedy


def shadowkv_doctor(path, script=None):
    """What `shadowkv doctor --json` finds with `path` before PATH, or as `script` runs it."""
    command = [
        sys.executable,
        *([script] if script else ["-m", "shadowkv_lab"]),
        "doctor",
        "--json",
    ]
    root = Path(__file__).resolve().parents[1]
    env = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}", "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return {f["what"]: f for f in json.loads(done.stdout)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_doctor_quotes_a_driver_that_does_not_answer(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\necho "{MISMATCH}"\necho "NVML library version: 580.95"\nexit 18\n')
    smi.chmod(0o755)
    gpu = shadowkv_doctor(tmp_path)["GPU"]
    assert MISMATCH in gpu["finding"] and "Reboot" in gpu["remedy"]


ROCM = """
import types, torch
torch.version.cuda, torch.version.hip = None, "7.2.53211"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_name = lambda *_: {name!r}
torch.cuda.get_device_capability = lambda *_: (9, 5)
torch.cuda.mem_get_info = lambda *_: (300 << 30, 309 << 30)
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(
    name={name!r}, gcnArchName="gfx950:sramecc+:xnack-", total_memory=309 << 30,
    multi_processor_count=256, major=9, minor=5, shared_memory_per_block_optin=163840)
from shadowkv_lab.cli import main
main()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("name", ["AMD Instinct MI355X", "AMD Instinct MI400"])
def test_doctor_on_a_rocm_build(tmp_path, name):
    script = tmp_path / "rocm.py"
    script.write_text(ROCM.format(name=name))
    found = shadowkv_doctor(tmp_path, script)
    card = found["cuda:0 (chosen)"]["finding"]
    assert "gfx950" in card and "SM95" not in card
    assert "ROCm build" in found["torch"]["finding"] and "AMD" in found["torch"]["finding"]
    assert "driver" not in found and "flashinfer-python" not in found
    assert not any("pip install" in f["remedy"] for f in found.values())
    for strategy in ("full_cast", "native_fp8", "fused_fp8"):
        assert found[strategy]["state"] != "ok"
        assert "not tried" in found[strategy]["finding"].lower()


@pytest.mark.gpu
def test_this_gpu_is_detected():
    assert "cuda:0" in machine.devices()
    assert machine.clocks("cuda:0").sm_clock_mhz
    before = machine.memory("cuda:0").free_bytes
    held = torch.empty(1 << 28, dtype=torch.int8, device="cuda:0")
    assert before - machine.memory("cuda:0").free_bytes >= held.nbytes


def test_the_revision_is_dirty_only_where_the_package_differs(tmp_path, monkeypatch):
    monkeypatch.delenv("SHADOWKV_REVISION", raising=False)
    package, notes = tmp_path / "package", tmp_path / "notes.txt"
    package.mkdir()
    monkeypatch.setattr(machine, "__file__", str(package / "hardware.py"))

    def revision():
        machine.git_revision.cache_clear()
        return machine.git_revision()

    def git(*arguments):
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", tmp_path, *names, *arguments], check=True, capture_output=True)

    try:
        assert revision() == "unknown"
        git("init")
        for path in (package / "hardware.py", notes):
            path.write_text("1")
        git("add", ".")
        git("commit", "-m", "x")
        clean = revision()
        assert len(clean) == 12
        notes.write_text("2")
        assert revision() == clean
        (package / "hardware.py").write_text("2")
        assert revision() == f"{clean}-dirty"
        monkeypatch.setenv("SHADOWKV_REVISION", "abc")
        assert revision() == "abc"
    finally:
        machine.git_revision.cache_clear()

"""Cards from data/gpus, and what doctor makes of a machine that is not this one."""

import subprocess

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


def seen(monkeypatch, listed, built):
    """doctor's finding on a machine whose driver lists `listed` and whose torch is `built`."""

    class Done:
        returncode, stdout = (0 if listed else 9), listed

    monkeypatch.setattr(machine, "tool", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: Done)
    return doctor._why_no_gpu(built)


def test_a_gpu_that_torch_does_not_see_is_told_apart(monkeypatch):
    gpu = "GPU 0: NVIDIA H200 (UUID: x)"
    assert seen(monkeypatch, "", None).state == "warn"
    cpu_build, old_driver = seen(monkeypatch, gpu, None), seen(monkeypatch, gpu, "13.0")
    assert "CPU build" in cpu_build.finding and "CUDA build" in cpu_build.remedy
    assert "cannot use it" in old_driver.finding and "driver" in old_driver.remedy


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

"""The decode's launch table: which row a batch takes, and that tuning keeps the fastest."""

import json
from dataclasses import asdict, replace

import pytest
import torch

pytest.importorskip("triton")

from shadowkv_lab import facts, machine
from shadowkv_lab.kernels import launch
from shadowkv_lab.steps import bench as kernels
from shadowkv_lab.steps import timing, tune

ARCHES = ("sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize(
    "requests, live, load",
    [
        (1, 1024, "short"),
        (64, 132 * 128, "short"),
        (1, 131_072, "few"),
        (4, 131_072, "few"),
        (5, 131_072, "many"),
        (64, 131_072, "many"),
    ],
)
def test_the_kind_of_a_load(requests, live, load):
    assert launch.load_of(requests, live, 132) == load


@pytest.mark.parametrize("arch", ARCHES)
def test_every_load_and_head_count_has_a_row_that_says_what_stands_behind_it(arch):
    rows = launch.rows(arch)
    for load in launch.LOADS:
        heads = [r.heads for r in rows if r.load == load]
        assert heads == sorted(set(heads)) and heads[0] == 8 and heads[-1] >= 64
    for row in rows:
        assert row.measured, row
        assert row.tile <= max(8, row.heads) and row.block % 16 == 0
        if arch != "sm_90":
            assert "untuned" in row.measured


def test_a_device_takes_its_own_row_or_the_nearest_lower_architectures(monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    gpu = torch.device("cuda:0")
    for capability, arch in (((9, 0), "sm_90"), ((12, 1), "sm_120"), ((8, 9), "sm_90")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        assert launch.architecture(gpu) == arch
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (9, 0))
    for heads, wanted in ((4, 8), (8, 8), (9, 16), (20, 32), (128, 64)):
        assert launch.launch_row(gpu, heads, 32, 262_144).heads == wanted


def test_tuning_keeps_the_fastest_candidate_and_writes_it_down(tmp_path, monkeypatch, tiny):
    """With made-up times that know one best row a load, the table ends up with that row."""
    (tmp_path / "launch").mkdir()
    rows = [asdict(r) for r in launch.rows("sm_90") if r.heads == 8]
    (tmp_path / "launch/sm_90.json").write_text(
        json.dumps({"name": "sm_90", "source": {"title": "one GPU"}, "rows": rows})
    )
    monkeypatch.setattr(facts, "DATA", tmp_path)
    # A GPU without a table of its own begins with the nearest lower one's, and leaves that alone.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    borrowed = (tmp_path / "launch/sm_90.json").read_text()
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(machine, "memory", lambda device: machine.Memory(1 << 40, 1 << 40))
    monkeypatch.setattr(machine, "device_title", lambda device: "A GPU")
    monkeypatch.setattr(kernels, "SHAPES", ((1, 64), (1, 256), (8, 64)))
    small = kernels.make_pool(tiny, torch.device("cpu"), 512, ("fp8",))
    monkeypatch.setattr(kernels, "make_pool", lambda *a: small)
    compiles = lambda codes, *_: {c for c in codes if c.warps != 8}  # noqa: E731
    monkeypatch.setattr(tune, "compiled", compiles)
    best = {"short": (32, 2, 1), "few": (64, 4, 2), "many": (16, 2, 4)}

    def fake(pool, kernel, batch, heads, row):
        assert row.warps != 8, "does not compile"
        right = (row.block, row.warps, row.blocks_per_sm) == best[row.load]
        wrong_output = row.blocks_per_sm == 2 and row.block == 32  # fast, and wrong
        ms = 0.1 if wrong_output else 1.0 if right and row.pipe else 2.0
        return timing.Timing(ms, 0.0, 5), 1.0 if wrong_output else 1e-3

    monkeypatch.setattr(kernels, "time_attention", fake)
    launch.rows.cache_clear()
    try:
        tune.tune(replace(tiny, layers=2), torch.device("cuda:0"))
        assert (tmp_path / "launch/sm_90.json").read_text() == borrowed
        for row in launch.rows("sm_103"):
            assert (row.block, row.warps, row.blocks_per_sm) == best[row.load] and row.pipe
            assert "1.00 ms, " in row.measured and "tuned" in row.measured
    finally:
        launch.rows.cache_clear()

"""The decode's launch table: which row a batch takes, and that tuning keeps the fastest."""

import contextlib
import itertools
import json
from dataclasses import asdict, replace

import pytest
import torch

pytest.importorskip("triton")

from shadowkv_lab import facts, machine
from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.kernels import launch
from shadowkv_lab.steps import bench as kernels
from shadowkv_lab.steps import step as steps
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


@pytest.mark.parametrize("heads, most", [(8, 16_896), (16, 16_896), (64, 4224), (128, 2112)])
def test_with_many_heads_fewer_tokens_are_a_short_load(heads, most):
    assert launch.load_of(1, most, 132, heads) == "short"
    assert launch.load_of(1, most + 1, 132, heads) == "few"


@pytest.mark.parametrize("arch", ARCHES)
def test_every_load_and_head_count_has_a_row_that_says_what_stands_behind_it(arch):
    rows = launch.rows(arch)
    for load, page in itertools.product(launch.LOADS, (1, 64) if arch == "sm_90" else (1,)):
        heads = [r.heads for r in rows if (r.load, r.page, r.scaled) == (load, page, False)]
        assert heads == sorted(set(heads)) and heads[0] == 8 and heads[-1] >= 64
    for row in rows:
        assert row.measured, row
        assert row.kernel in ("words", "pairs", "warps")[: 3 if arch == "sm_90" else 2]
        assert not (row.scaled and row.kernel == "warps"), "it reads no scales"
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
    for heads, wanted in ((4, 8), (8, 8), (9, 16), (20, 32), (128, 128), (500, 128)):
        for page in (1, 64):
            row = launch.launch_row(gpu, heads, 32, 262_144, page)
            assert (row.heads, row.page, row.kernel) == (wanted, page, "warps")
        row = launch.launch_row(gpu, heads, 32, 262_144, page, scaled=True)
        assert row.heads == min(wanted, 64) and row.kernel != "warps"
    # A card that borrows Hopper's table cannot run Hopper's own kernel.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (8, 9))
    assert launch.launch_row(gpu, 8, 32, 262_144, 64).kernel != "warps"


def test_no_shape_is_both_tuned_and_reported():
    assert not set(tune.SHAPES) & set(kernels.SHAPES)


def test_a_mixed_batch_has_the_traces_lengths():
    lens = kernels.lengths("64 of the Azure trace")
    assert lens == sorted(lens) and 900 < lens[31] < 1189 and 1000 < sum(lens) / 64 < 1400
    assert kernels.lengths("2 x 30") == [30, 30]
    with pytest.raises(OutOfRange):
        kernels.lengths("many")
    for page in (1, 64):
        batch = kernels.scattered(640, [3, 64, 130], page, torch.device("cpu"))
        assert batch.lens == (3, 64, 130) and len(batch.live_slots.unique()) == 197
        assert page <= batch.live_slots.min() and batch.live_slots.max() < 640


def test_a_benchmark_begins_with_the_shapes_that_are_aimed_at():
    cells = kernels.cells((8, 16))
    table = [f"{n} x {context}" for n, context in kernels.TABLE]
    assert [c.shape for c in cells[:10]] == table * 2
    assert {c.page_size for c in cells[:18]} == {64} and cells[18] == kernels.Cell()
    assert len(cells) == len(set(cells)) == 37
    with_mtp = kernels.cells((8,), (64,), (1, 4))
    assert [c.queries for c in with_mtp] == [1] * 10 + [4] * 9


class Peer:
    """Decode attention that fails, or takes its time from `ms`."""

    name = "peer"

    def __init__(self, ms=None):
        self.ms = ms

    def plan(self, batch, heads, sm_scale, **_):
        if self.ms is None:
            raise RuntimeError("no kernel image")


def test_a_peer_that_fails_is_named_and_ends_nothing(tmp_path, monkeypatch, tiny):
    """And what was found stays when the run is killed, and is not measured again."""
    monkeypatch.setattr(kernels, "check", lambda device: None)
    monkeypatch.setattr(kernels, "bandwidth", lambda device: timing.Bandwidth(1000.0, 1000.0))
    peers = {"fused_fp8": lambda: Peer(2.0), "a bf16": lambda: Peer(4.0), "b": Peer, "c": Peer}
    monkeypatch.setattr(kernels, "_peers", lambda device: peers)

    def timed(pool, kernel, batch, heads, queries):
        kernel.plan(batch, heads, 1.0)
        return timing.Timing(kernel.ms * batch.concurrency, 0.0, 5), 1e-3, 0.1

    monkeypatch.setattr(kernels, "time_attention", timed)
    cpu = torch.device("cpu")
    monkeypatch.setattr(kernels, "_compiling", lambda *_: contextlib.nullcontext())
    shapes = (64, 8, "1 x 100"), (64, 8, "9 x 1000"), (1, 8, "2 x 9")
    todo = [kernels.Cell(*shape) for shape in shapes]
    path = tmp_path / "h.json"
    origin = steps.origin(cpu, 1000.0, 1000.0)
    log = kernels.Log(origin, path)
    run = kernels.bench(tiny, cpu, 640, todo)
    log.add(*next(run))
    entry = json.loads(path.read_text())
    assert [(r["kernel"], r["ms"], r["ratio"]) for r in entry["rows"]] == [
        ("fused_fp8", 2.0, 1.0),
        ("a bf16", 4.0, 0.5),
    ]
    assert entry["rows"][0]["gb_per_s"] == pytest.approx(tiny.layers * 100 * tiny.row / 2e6)
    assert entry["rows"][1]["bytes"] == 2 * entry["rows"][0]["bytes"]
    assert [f["kernel"] for f in entry["failed"]] == ["b", "c"]
    assert "no kernel image" in entry["failed"][0]["reason"]
    again = kernels.Log(origin, path)
    assert again.cells == todo[:1]
    for cell, found in kernels.bench(tiny, cpu, 640, todo[1:]):
        again.add(cell, found)
    entry = json.loads(path.read_text())
    assert [r["page_size"] for r in entry["rows"]] == [64, 64, 1, 1], "one shape does not fit"
    assert len(entry["cells"]) == 3
    other = kernels.Log(replace(origin, git_revision="another"), path)
    assert not other.cells
    assert not list(kernels.bench(tiny, cpu, 640, todo, limit_s=-1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter")
@pytest.mark.parametrize("queries", [1, 2])
def test_each_of_ours_is_measured_with_its_error(monkeypatch, tiny, queries):
    """FP8 rows, packed rows and queries in FP8, by the interpreter; peers say what they lack."""

    def once(pool, layer, layers=None):
        for i in range(layers or pool.layers):
            layer(i)
        return timing.Timing(1.0, 0.0, 5)

    monkeypatch.setattr(kernels, "time_layers", once)
    torch.manual_seed(0)
    pool = kernels.make_pool(tiny, torch.device("cpu"), 256, ("fp8", "bf16"), page_size=64)
    (group,) = kernels._decode(pool, kernels.Cell(64, 8, "2 x 70", queries))
    failed = [each for each in group if isinstance(each, kernels.Failure)]
    ours = {name: (size, error) for name, _, size, error, *_ in group[:3]}
    assert len(failed) == 8 and all("GPU" in each.reason for each in failed)
    assert all(each.queries == queries and each.shape == "2 x 70" for each in failed)
    rows = tiny.layers * 140
    assert ours["fused_fp8"][0] == rows * 576 and ours[kernels.PACKED][0] == rows * 656
    # Outputs are truncated to BF16 here.
    assert ours["fused_fp8"][1] < kernels.CHECKED and ours[kernels.PACKED][1] < kernels.CHECKED
    assert ours["fused_fp8(query=fp8)"][1] > kernels.CHECKED


def test_tuning_keeps_the_fastest_candidate_and_writes_it_down(tmp_path, monkeypatch, tiny):
    """With made-up times that know one best row a load, the table ends up with that row."""
    (tmp_path / "launch").mkdir()
    rows = [asdict(r) for r in launch.rows("sm_120") if r.heads == 8]
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
    monkeypatch.setattr(tune, "SHAPES", ((1, 64), (1, 256), (8, 64)))
    small = kernels.make_pool(tiny, torch.device("cpu"), 512, ("fp8",))
    monkeypatch.setattr(kernels, "make_pool", lambda *a, **b: small)
    compiles = lambda codes, *_: {c for c in codes if c.warps != 8}  # noqa: E731
    monkeypatch.setattr(tune, "compiled", compiles)
    best = {"short": (32, 2, 1), "few": (64, 4, 2), "many": (16, 2, 4)}

    def fake(pool, kernel, batch, heads, row):
        assert row.warps != 8, "does not compile"
        right = (row.block, row.warps, row.blocks_per_sm) == best[row.load]
        wrong_output = row.blocks_per_sm == 2 and row.block == 32  # fast, and wrong
        ms = 0.1 if wrong_output else 1.0 if right and row.pipe else 2.0
        return timing.Timing(ms, 0.0, 5), 1.0 if wrong_output else 1e-3, 0.1

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

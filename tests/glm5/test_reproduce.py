"""The reproduction as a whole: scaling, checks that can fail, a small run."""

import pytest
import torch

from shadowkv_lab.errors import BadFile, WrongResult
from shadowkv_lab.glm5 import case, reproduce, verdict
from shadowkv_lab.steps import measure as decode
from shadowkv_lab.steps import trace as profiled
from shadowkv_lab.steps.fit import fit
from shadowkv_lab.steps.rest import Rest
from tests.steps import synthetic_runs as known

FIT = fit(known.runs("full_cast,bf16_pool,shadow"))
REST = Rest(20.0, experts=0)


def test_a_small_pool_is_scaled_by_its_phases_bytes():
    runs = known.runs("full_cast,shadow", pools=(61_952,), loads=((1, 1024),))
    table = reproduce.measured(runs, REST).set_index("strategy")
    cast = runs[0]
    assert table.loc["full_cast"].step_ms == pytest.approx(cast.ms + 7 * cast["cast"].ms)
    assert "x 8.0, by bytes" in table.loc["full_cast"].scaled
    assert table.loc["full_cast"].provenance == "calibrated"
    assert table.loc["shadow"].scaled == ""
    assert table.loc["shadow"].provenance == "recorded"
    assert table.loc["shadow"].tpot_ms == pytest.approx(20 + table.loc["shadow"].step_ms)
    assert set(table.label) == {"replay"}


def test_rest_is_what_the_case_leaves():
    step = verdict.full_cast_of_case("rtx-pro-6000-server", 1024, FIT)
    rest = verdict.case_rest("rtx-pro-6000-server", 1024, FIT)
    assert rest(1) + step.ms == pytest.approx(95.6)
    table = verdict.rest_over_context("rtx-pro-6000-server", (256, 8192), FIT)
    assert table.rest_ms[0] > table.rest_ms[1]


def test_verdict_table():
    table = verdict.verdict("rtx-pro-6000-server", 1024, fitted=FIT).set_index("strategy")
    assert table.loc["full_cast"].tpot_ms == pytest.approx(95.6)
    assert table.loc["full_cast"].tokens_per_s == pytest.approx(1000 / 95.6)
    assert list(table.loc[["full_cast", "bf16_pool", "shadow"]].tokens_that_fit) == [
        495_616,  # as reported; the others are what 25.49 GiB hold
        273_281,
        188_652,
    ]
    # 61 GiB of weights and 495,616 tokens: only one byte a value fits.
    assert list(table.fits) == [True, True, False, False, True, True]
    assert table.loc["bf16_pool"].gib_for_pool == pytest.approx(495_616 * 100_152 / 2**30)
    assert all(table.verdict.str.len() > 20)
    assert table.verdict.is_unique


def test_checks_fail_when_a_published_figure_is_not_the_derived_one(monkeypatch):
    good = reproduce.checks_of(case.arithmetic())
    assert all(c.ok for c in good)
    assert len(good) == 4
    entry = case.published("case")
    wrong = {**entry, "before": {**entry["before"], "tokens_per_s": 10.6}}
    real = case.facts.find
    monkeypatch.setattr(case.facts, "find", lambda *a: wrong if a[2] == "case" else real(*a))
    failed = [c for c in reproduce.checks_of(case.arithmetic()) if not c.ok]
    assert [c.what.split(" =")[0] for c in failed] == ["tokens/s before"]
    assert "10.6" in failed[0].found


def test_a_wrong_strategy_is_a_failed_check(monkeypatch):
    def measure(bench, strategies, pools, loads):
        raise WrongResult(f"{strategies[0].label} is off by 0.5")

    monkeypatch.setattr(decode, "measure", measure)
    runs, checks = reproduce.measure_here(reproduce.bench_here("cpu"), 256, 64, ["shadow"])
    assert runs == []
    assert [c.ok for c in checks] == [False]
    assert "off by 0.5" in checks[0].found
    assert not reproduce.Reproduction("", {}, {}, tuple(checks)).ok


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The whole command at a pool of 256 slots, on the CPU; one thread, as CI shares its cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield reproduce.run("cpu", tmp_path_factory.mktemp("out"), context=64, pool_tokens=256)
    torch.set_num_threads(threads)


def test_a_small_run(small):
    assert small.ok, [c for c in small.checks if not c.ok]
    assert {"arithmetic", "measured", "does_not_add_up", "verdict", "sglang_35291"} <= set(
        small.tables
    )
    assert all(path.exists() and path.stat().st_size for path in small.files)
    ours = small.tables["measured"]
    assert {"full_cast", "bf16_pool", "shadow", "gather_cast"} == set(
        ours[ours.pool_tokens == 256].strategy
    )
    assert "none is established" in small.notes["does_not_add_up"]


def test_a_profile_finds_the_copy(small):
    table = small.tables["profile"]
    full = table[table.strategy == "full_cast"]
    assert "aten::copy_" in set(full.kernel)
    assert full.share.sum() == pytest.approx(1.0)
    assert any(str(path).endswith(".json.gz") for path in small.files)


def test_profiles_are_kept_and_read_back(tmp_path):
    path = profiled.record(reproduce.bench_here("cpu"), 256, 64, tmp_path / "p.json", ["shadow"])
    (found,) = profiled.recorded(path)
    assert (found.strategy, found.provenance, found.pool_tokens) == ("shadow", "recorded", 256)
    path.write_text('{"schema": 9}')
    with pytest.raises(BadFile):
        profiled.recorded(path)
    with pytest.raises(BadFile, match="Record one"):
        profiled.recorded(tmp_path / "none.json")


def test_the_recorded_profile_is_of_the_case_on_a_gpu():
    full, shadow = profiled.recorded()
    assert (full.strategy, shadow.strategy) == ("full_cast", "shadow")
    assert full.pool_tokens == 495_616 and full.device.startswith("NVIDIA")
    top = full.table(1).iloc[0]
    assert "copy_kernel" in top.kernel and top.calls == 78 and top.share > 0.9
    assert "copy" not in shadow.table(1).iloc[0].kernel.split("<")[0]


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda("
            "at::TensorIteratorBase&)::{lambda()#3}, std::array<char*, 2ul>, 4>(int)",
            "unrolled_elementwise_kernel<direct_copy_kernel_cuda>",
        ),
        ("aten::copy_", "aten::copy_"),
        ("_decode_kernel", "_decode_kernel"),
    ],
)
def test_kernel_names(kernel, short):
    assert profiled.short_name(kernel) == short


def test_recorded_steps_pick_the_asked_cell():
    both = [*known.runs(), *known.runs("shadow", device="NVIDIA H100")]
    found = reproduce.recorded_steps(context=8192, concurrency=8, steps=both)
    assert [s.strategy.label for s in found] == ["full_cast", "bf16_pool", "shadow"]
    assert {(s.setting.pool_tokens, s.card) for s in found} == {(495_616, "h200")}

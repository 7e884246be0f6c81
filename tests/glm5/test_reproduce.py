"""The reproduction as a whole: scaling, checks that can fail, a small run."""

import pytest
import torch

from shadowkv_lab.errors import BadFile, WrongResult
from shadowkv_lab.glm5 import reported, reproduce, verdict
from shadowkv_lab.steps import measure as decode
from shadowkv_lab.steps import trace as profiled
from shadowkv_lab.steps.rest import Rest
from tests.steps import synthetic_runs as known

SERVER = "rtx-pro-6000-server"
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


def test_rest_is_what_the_report_leaves():
    for card in (SERVER, "rtx-pro-6000-workstation"):
        step, rest = verdict.full_cast_of_report(card), verdict.report_rest(card)
        assert step["cast"].ms == pytest.approx(64.6)
        assert rest(1) + step.ms == pytest.approx(95.6)
    table = verdict.rest_over_context(SERVER, (256, 8192))
    assert table.rest_ms[0] > table.rest_ms[1]
    typed = verdict.report_rest(SERVER, rest_ms=20.0)
    assert typed(1) == pytest.approx(20.0) and typed.provenance.how.startswith("as typed")


def test_the_rest_grows_as_both_moe_backends_do():
    """rtx6kpro's servers at 64 requests: 1010.6 tok/s with cutlass, 108.3 ms with b12x; 19.8 ms at
    one with cutlass."""
    rest = verdict.report_rest(SERVER)
    low, high = rest.range_ms(64)
    assert low == pytest.approx(rest(1) + 64_000 / 1010.6 - 1000 / 50.4, abs=0.05)
    assert high - low == pytest.approx(108.3 - 63.3, abs=1.5)
    assert low < rest(64) < high


def test_verdict_table():
    table = verdict.verdict(SERVER, 1024).set_index("strategy")
    full = table.loc["full_cast"]
    assert full.tpot_ms == pytest.approx(95.6)
    assert full.tokens_per_s == pytest.approx(1000 / 95.6)
    assert list(table.loc[["full_cast", "bf16_pool", "shadow"]].tokens_that_fit) == [
        495_616,  # as reported; the others are what 25.49 GiB hold
        int(25.49 * 2**30) // (78 * (1152 + 132)),
        int(25.49 * 2**30) // (78 * (1728 + 132)),
    ]
    # 61 GiB of weights and 495,616 tokens: only one byte a value fits.
    fits = {name: bool(row.fits) for name, row in table.iterrows() if not row.cut}
    assert fits == dict(
        full_cast=True,
        vector_cast=True,
        bf16_pool=False,
        shadow=False,
        gather_cast=True,
        fused_fp8=True,
    )
    assert table.loc["bf16_pool"].gib_for_pool == pytest.approx(495_616 * 100_152 / 2**30)
    assert (table.low_tokens_per_s < table.tokens_per_s).all()
    assert (table.tokens_per_s < table.high_tokens_per_s).all()
    assert all(table.verdict.str.len() > 20)
    assert table.verdict.is_unique


def test_a_shadow_is_never_ahead_of_a_bf16_pool():
    for context, concurrency in ((1024, 1), (8192, 16), (131_072, 4)):
        table = verdict.verdict(SERVER, context, concurrency).set_index("strategy")
        shadow, bf16 = table.loc["shadow"], table.loc["bf16_pool"]
        assert shadow.tokens_per_s <= bf16.tokens_per_s
        assert shadow.gib_for_pool > bf16.gib_for_pool


def test_more_requests_than_the_pool_holds_do_not_all_run():
    table = verdict.verdict(SERVER, 131_072, 128).set_index("strategy")
    pools = {"full_cast": 495_616, "bf16_pool": 273_281, "shadow": 188_652}
    assert {n: table.loc[n].running for n in pools} == {n: P // 131_072 for n, P in pools.items()}


def test_the_cheapest_remedy_is_a_flag():
    """31.0 ms, and a cast of 64.6 ms shrunk with the pool: 30, 28 and 21 tok/s by arithmetic."""
    table = verdict.smaller_pools(SERVER)
    assert list(table.pool_tokens) == [16_384, 32_768, 131_072, 495_616]
    for row in table.itertuples():
        hand = 1000 / (31.0 + 64.6 * row.pool_tokens / 495_616)
        assert row.tokens_per_s == pytest.approx(hand, rel=0.02)  # a small cast is less efficient
        assert row.low_tokens_per_s < row.tokens_per_s < row.high_tokens_per_s
    assert [round(r) for r in table.tokens_per_s] == [30, 28, 21, 10]
    words = verdict.flag_first(table)
    assert "--max-total-tokens" in words and "30 tok/s at 16K tokens" in words
    assert next(iter(reproduce.tables_of([], SERVER, 1024)[0])) == "smaller_pools", "said first"


def test_ranges_in_words():
    assert verdict.about(28.2, 33.9) == "about 28 to 34 tok/s"
    assert verdict.about(31.8, 32.3) == "about 32 tok/s"


def test_checks_fail_when_a_published_figure_is_not_the_derived_one(monkeypatch):
    good = reproduce.checks_of(reported.arithmetic())
    assert all(c.ok for c in good)
    assert len(good) == 4
    entry = reported.published()
    wrong = {**entry, "before": {**entry["before"], "tokens_per_s": 10.6}}
    real = reported.facts.find
    monkeypatch.setattr(
        reported.facts, "find", lambda *a: wrong if a[2] == reported.REPORT else real(*a)
    )
    failed = [c for c in reproduce.checks_of(reported.arithmetic()) if not c.ok]
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


def test_the_recorded_profile_is_of_the_report_on_a_gpu():
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

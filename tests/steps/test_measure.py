"""Measurements check themselves, free what they took, and stop when told."""

import dataclasses

import pytest
import torch

from shadowkv_lab import kernels
from shadowkv_lab.deployment import Setting
from shadowkv_lab.errors import CannotRun, DoesNotFit, WrongResult
from shadowkv_lab.load import Load
from shadowkv_lab.steps import measure as decode
from shadowkv_lab.steps import timing
from shadowkv_lab.strategies import STRATEGIES, parse_list

CPU = torch.device("cpu")


@pytest.fixture
def bench(tiny):
    return decode.Bench(tiny, heads=4, device=CPU, budget_s=0.02)


def test_runs_say_what_was_measured(bench):
    runs = list(decode.measure(bench, parse_list("full_cast,shadow"), [256], [(2, 16), (1, 8)]))
    assert [
        (r.strategy.label, r.setting.load.concurrency, r.setting.load.context) for r in runs
    ] == [("full_cast", 2, 16), ("full_cast", 1, 8), ("shadow", 2, 16), ("shadow", 1, 8)]
    for r in runs:
        assert r.mode == "eager" and 0 < r.error < 6e-3 and r.samples >= 5
        assert r.ms > 0 and r["attention"].ms > 0 and r["write"].ms > 0
        assert str(r.provenance) == "measured"
    assert runs[0].kept_bytes == 2 * 257 * 576 and runs[2].kept_bytes == 2 * 257 * 1728
    assert runs[0].scratch_bytes == 257 * 1152, "one layer of scratch"
    assert runs[0]["cast"].bytes == 2 * 256 * 1728 and runs[0]["cast"].curve == "full_cast"
    assert runs[2]["write"].curve == "fp8+bf16" and runs[2]["attention"].curve == "reference"


def test_one_step_from_a_setting(tiny):
    setting = Setting(tiny, 4, 256, Load(2, 16), page_size=64)
    step = decode.measure_step("shadow", setting, "cpu")
    assert step.setting == setting and step.error < 6e-3 and str(step.provenance) == "measured"


def test_several_pools_leave_out_what_does_not_fit(bench):
    runs = decode.measure(bench, parse_list("bf16_pool"), [64, 16], [(2, 16), (1, 8)])
    found = [(r.setting.pool_tokens, r.setting.load.concurrency) for r in runs]
    assert found == [(16, 1), (64, 2), (64, 1)]
    with pytest.raises(DoesNotFit):
        list(decode.measure(bench, parse_list("bf16_pool"), [16], [(2, 16)]))


@pytest.mark.parametrize("phase", ["attend", "cast", "write"])
def test_a_wrong_result_is_not_reported(bench, monkeypatch, phase):
    """A kernel that skips its work, or does it wrong, must not get a time."""
    if phase == "attend":
        monkeypatch.setattr(kernels.reference.ReferenceAttention, "run", lambda *a: None)
    elif phase == "cast":
        monkeypatch.setattr(kernels.reference, "cast", lambda fp8, out: None)
    else:

        def store(rows, slots, fp8, bf16, counters, exact=True):
            if len(rows) > 2:  # the fill is right, the step's write is not
                kernels.reference.to_fp8(rows)
                fp8.view(torch.uint8)[slots] = kernels.reference.to_fp8(rows).view(torch.uint8)

        monkeypatch.setattr(kernels, "mover", lambda name, device: store)
    with pytest.raises(WrongResult):
        list(decode.measure(bench, parse_list("full_cast"), [256], [(1, 16)]))


def test_one_wrong_head_is_not_averaged_away(bench, monkeypatch):
    run = kernels.reference.ReferenceAttention.run

    def one_head_off(self, q_nope, q_pe, kv, out):
        run(self, q_nope, q_pe, kv, out)
        out[-1, -1] *= 1.05

    monkeypatch.setattr(kernels.reference.ReferenceAttention, "run", one_head_off)
    with pytest.raises(WrongResult, match=r"5\.\d+e-02"):
        list(decode.measure(bench, parse_list("bf16_pool"), [256], [(8, 16)]))


def test_cancelling_stops_between_samples(bench):
    answers = iter([False, False, True])
    stopping = dataclasses.replace(bench, cancelled=lambda: next(answers))
    with pytest.raises(decode.Cancelled):
        list(decode.measure(stopping, parse_list("full_cast"), [64], [(1, 8)]))


def test_everything_is_checked_before_anything_is_allocated(bench, monkeypatch):
    monkeypatch.setattr(decode, "make_pool", lambda *a: pytest.fail("allocated"))
    with pytest.raises(DoesNotFit, match="up to"):
        list(decode.measure(bench, parse_list("bf16_pool,full_cast"), [2**40], [(1, 8)]))
    for name in (n for n, s in STRATEGIES.items() if s.needs):
        with pytest.raises(CannotRun, match="not a GPU"):
            list(decode.measure(bench, parse_list(name), [64], [(1, 8)]))
    flashinfer = dataclasses.replace(bench, backend="flashinfer_fa2")
    with pytest.raises(CannotRun, match="reference"):
        list(decode.measure(flashinfer, parse_list("full_cast"), [64], [(1, 8)]))


def test_sample_takes_the_median_and_prepares_each_sample():
    turns, calls = [], []
    found = timing.sample(
        lambda: calls.append(1), CPU, before=turns.append, min_samples=9, max_samples=9, warmup=3
    )
    assert found.samples == 9 and len(calls) == 12 and turns == list(range(12))
    assert found.spread_ms >= 0 and 0 < found.median_ms < 10


def test_bandwidth_is_that_of_the_bytes_moved():
    found = timing.measure_bandwidth(CPU)
    assert 0.5 < found.copy_gb_per_s < 2000 and 0.5 < found.read_gb_per_s < 2000

"""Measurements check themselves, free what they took, and stop when told."""

import dataclasses
from itertools import pairwise

import pytest
import torch

from shadowkv_lab import kernels
from shadowkv_lab.deployment import Setting
from shadowkv_lab.errors import CannotRun, DoesNotFit, OutOfRange, WrongResult
from shadowkv_lab.load import Load, make_batch
from shadowkv_lab.model import load_model
from shadowkv_lab.pool import Pool
from shadowkv_lab.steps import measure as decode
from shadowkv_lab.steps import timing
from shadowkv_lab.steps.step import to_dict
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


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("tokens", [2, 4])
def test_several_tokens_per_step(bench, page_size, tokens):
    """Written together, and each attends to those up to itself; the run says how many there are."""
    bench = dataclasses.replace(bench, tokens_per_step=tokens, page_size=page_size)
    names = "full_cast,bf16_pool,shadow,gather_cast,hot_set(rows=300),shared_shadow"
    for r in decode.measure(bench, parse_list(names), [512], [(2, 70)]):
        assert r.setting.load == Load(2, 70, tokens) and 0 < r.error < 6e-3
        kinds = {"bf16_pool": "bf16", "shadow": "fp8+bf16", "hot_set": "fp8+bf16"}
        row = bench.model.row_bytes(kinds.get(r.strategy.name, "fp8"))
        assert r["write"].bytes == bench.model.layers * 2 * tokens * row
        assert to_dict(r)["setting"]["load"]["tokens_per_step"] == tokens


def test_the_new_tokens_of_a_request_are_its_last(tiny):
    """Before and after the last pages are rotated, also where they lie in two pages."""
    for page_size, context in ((1, 9), (64, 66), (64, 70)):
        pool = Pool(tiny, 640, [("bf16",)] * tiny.layers, page_size=page_size, order="random")
        batch = pool.batch(2, context, 3)
        for turn in range(3):
            wanted = [batch.slots(b)[-3:] for b in range(2)]
            assert torch.equal(batch.new_slots, torch.cat(wanted))
            pages = [batch.pages[a:b] for a, b in pairwise(batch.indptr.tolist())]
            at = torch.arange(context)
            for b in range(2):
                slots = pages[b][at // page_size].long() * page_size + at % page_size
                assert torch.equal(batch.slots(b), slots)
            assert batch.compact().new_slots.tolist() == [
                *range(context - 3, context),
                *range(2 * context - 3, 2 * context),
            ]
            batch.advance(turn)
        pool.release(batch)
    with pytest.raises(OutOfRange, match="3 query tokens of 2"):
        pool.batch(1, 2, 3)


def test_the_reference_masks_what_a_query_token_has_not_seen(tiny):
    """Against one query a request over a batch of as many tokens as each has seen."""
    pool = Pool(tiny, 64, [("bf16",)] * tiny.layers)
    pool.bf16[0].normal_()
    q = torch.randn(1, 3 * 4, tiny.row, dtype=torch.float64)
    parts = q[..., : tiny.kv_lora_rank], q[..., tiny.kv_lora_rank :]
    batch = pool.batch(1, 10, 3)
    together = kernels.reference.attend(*parts, pool.bf16[0], batch, 0.1, torch.float64, 3)
    for i in range(3):
        seen = batch.live_slots[: 8 + i]
        one = make_batch([seen], [8 + i], seen[-1:][None], 1, "cpu")
        mine = [part[:, i * 4 : i * 4 + 4] for part in parts]
        alone = kernels.reference.attend(*mine, pool.bf16[0], one, 0.1, torch.float64)
        assert torch.allclose(together[:, i * 4 : i * 4 + 4], alone, rtol=1e-12)


def test_several_tokens_that_each_choose_their_rows_are_refused(bench):
    bench = dataclasses.replace(bench, tokens_per_step=2, reads="dsa")
    bench = dataclasses.replace(bench, model=load_model("glm-5"))
    with pytest.raises(CannotRun, match="one token per step"):
        decode.measure(bench, parse_list("bf16_pool"), [64], [(1, 8)])


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

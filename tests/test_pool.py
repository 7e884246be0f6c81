"""Slots, and the one write path that a shadow cannot miss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv_lab import machine
from shadowkv_lab.errors import DoesNotFit, OutOfRange, WrongResult
from shadowkv_lab.kernels.reference import FP8, bits, to_fp8
from shadowkv_lab.model import load_model
from shadowkv_lab.pool import Pool, SlotAllocator

BOTH = ("fp8", "bf16")


def rows(count, seed=0, device="cpu", scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, 576, generator=generator) * scale).bfloat16().to(device)


def pool_of(tiny, tokens=64, kinds=BOTH, device="cpu", **options):
    return Pool(tiny, tokens, [kinds] * tiny.layers, device=device, **options)


# Slots


def test_slot_zero_is_never_handed_out():
    slots = SlotAllocator(16).allocate(16)
    assert slots.tolist() == list(range(1, 17))
    pages = SlotAllocator(128, page_size=64).allocate(128)
    assert pages.min() == 64 and pages.max() == 191


def test_random_order_is_a_permutation_by_seed():
    one, two, other = (SlotAllocator(256, order="random", seed=s).allocate(256) for s in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert sorted(one.tolist()) == list(range(1, 257))


@pytest.mark.parametrize("page_size", [1, 4])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_allocator_against_a_set(page_size, data):
    """Against a model that only knows sets: nothing is handed out twice, nothing is lost."""
    allocator = SlotAllocator(64, page_size, order="random", seed=data.draw(st.integers(0, 9)))
    held: list[torch.Tensor] = []
    for _ in range(data.draw(st.integers(1, 20))):
        pages = {int(s) // page_size for slots in held for s in slots}
        assert allocator.free_tokens == 64 - len(pages) * page_size
        if held and data.draw(st.booleans()):
            allocator.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
            continue
        want = data.draw(st.integers(1, 30))
        if -(-want // page_size) * page_size > allocator.free_tokens:
            with pytest.raises(DoesNotFit):
                allocator.allocate(want)
            continue
        slots = allocator.allocate(want)
        assert len(set(slots.tolist())) == want
        assert not {int(s) // page_size for s in slots} & pages
        held.append(slots)


def test_bad_sizes_and_slots():
    for tokens, page in ((0, 1), (-4, 1), (100, 64), (64, 0)):
        with pytest.raises(OutOfRange):
            SlotAllocator(tokens, page)
    allocator = SlotAllocator(8)
    slots = allocator.allocate(2)
    allocator.free(slots)
    with pytest.raises(OutOfRange, match="free slot 1: it is not allocated"):
        allocator.free(slots)
    for slot, why in ((0, "dummy"), (9, "out of range"), (-1, "out of range")):
        with pytest.raises(OutOfRange, match=why):
            allocator.check(torch.tensor([slot]), "write")
    with pytest.raises(OutOfRange):
        allocator.allocate(0)


# Writing


def test_fp8_conversion_against_ml_dtypes():
    """Every finite BF16 value, against another library's conversion of the clamped value."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    clamped = every.double().clamp(-448, 448).numpy()
    expected = clamped.astype(ml_dtypes.float8_e4m3fn).view("uint8")
    assert bits(to_fp8(every)).numpy().tolist() == expected.tolist()


def test_write_saturates_and_counts(tiny, device):
    pool = pool_of(tiny, device=device)
    slots = pool.allocate(3)
    new = rows(3, device=device)
    new[1, 7], new[2, 9] = 1000.0, -3e38
    pool.write(0, slots, new)
    assert pool.clipped == 2
    assert pool.fp8[0][slots[1], 7].float() == 448 and pool.fp8[0][slots[2], 9].float() == -448
    pool.check_integrity()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_numbers_are_refused(tiny, value):
    pool = pool_of(tiny)
    slots, new = pool.allocate(2), rows(2)
    new[1, 3] = value
    with pytest.raises(OutOfRange, match="Row 1 has NaN or Inf"):
        pool.write(0, slots, new)
    assert not bits(pool.fp8[0]).any(), "nothing may be written"
    pool.write_unchecked(0, slots, new)  # inside a captured step: counted instead
    with pytest.raises(OutOfRange, match="1 NaN or Inf"):
        pool.check_counters()


def test_wrong_rows_and_slots_are_refused(tiny):
    pool = pool_of(tiny)
    slots = pool.allocate(2)
    for wrong in (rows(3), rows(2)[:, :512], rows(2).float()):
        with pytest.raises(OutOfRange, match="Rows"):
            pool.write(0, slots, wrong)
    pool.free(slots)
    with pytest.raises(OutOfRange, match="not allocated"):
        pool.write(0, slots, rows(2))
    with pytest.raises(OutOfRange, match="out of range"):
        pool.write(0, torch.tensor([65]), rows(1))
    with pytest.raises(OutOfRange, match="Mirror"):
        pool_of(tiny, mirror="rough")


@pytest.mark.parametrize("page_size", [1, 4])
def test_random_sequences_keep_the_shadow(tiny, device, page_size):
    """Any sequence of allocate, write, move, save, load and free leaves shadow == bf16(fp8)."""

    @given(data=st.data())
    @settings(max_examples=25, deadline=None)
    def run(data):
        pool = pool_of(tiny, device=device, page_size=page_size, order="random")
        expected = torch.zeros_like(bits(pool.fp8[0])).cpu()  # a plain array, told every write
        held, saved = [], None
        for turn in range(data.draw(st.integers(1, 14))):
            action = data.draw(st.sampled_from(["new", "write", "move", "save", "load", "free"]))
            if action == "new" or not held:
                if pool.allocator.free_tokens >= 8:
                    held.append(pool.allocate(data.draw(st.integers(1, 8))))
                continue
            slots = held[data.draw(st.integers(0, len(held) - 1))]
            if action == "write":
                new = rows(len(slots), turn, device, scale=100.0)
                pool.write(0, slots, new)
                expected[slots.cpu()] = bits(to_fp8(new.cpu()))
            elif action == "move":
                target = held[-1]
                n = min(len(slots), len(target))
                pool.move(slots[:n], target[:n])
                expected[target[:n].cpu()] = expected[slots[:n].cpu()]
            elif action == "save":
                saved = pool.save(slots)
            elif action == "load" and saved and len(saved.rows[0]) == len(slots):
                pool.load(slots, saved)
                expected[slots.cpu()] = bits(saved.rows[0])
            elif action == "free":
                held = [h for h in held if h is not slots]
                pool.free(slots)
        pool.check_integrity()
        assert torch.equal(bits(pool.fp8[0]).cpu(), expected)

    run()


def test_untracked_write_is_caught(tiny, device):
    pool = pool_of(tiny, device=device)
    slots = pool.allocate(8)
    pool.write(1, slots, rows(8, device=device))
    pool.check_integrity()
    pool.fp8[1][slots[5]] = to_fp8(rows(1, 9, device))[0]  # a write that no shadow sees
    pool.fp8[1][slots[6]] = to_fp8(rows(1, 9, device))[0]
    with pytest.raises(WrongResult, match=f"Layer 1, slot {int(slots[5])}"):
        pool.check_integrity()


def test_original_mirror_holds_rows_as_they_came_and_loses_that_on_load(tiny):
    pool = pool_of(tiny, mirror="original")
    slots, new = pool.allocate(4), rows(4)
    pool.write(0, slots, new)
    assert torch.equal(pool.bf16[0][slots], new)
    pool.check_integrity()
    pool.load(slots, pool.save(slots))  # the trap: the same prefix, restored, differs
    assert not torch.equal(pool.bf16[0][slots], new)
    assert torch.equal(pool.bf16[0][slots], to_fp8(new).bfloat16())
    pool.check_integrity()
    pool.bf16[0][slots[2]] += 8
    with pytest.raises(WrongResult):
        pool.check_integrity()


def test_load_refuses_rows_of_another_shape(tiny):
    pool, plain = pool_of(tiny), pool_of(tiny, kinds=("bf16",))
    slots = pool.allocate(2)
    with pytest.raises(OutOfRange, match="Saved rows"):
        pool.load(slots, plain.save(plain.allocate(2)))
    with pytest.raises(OutOfRange):
        pool.move(slots, slots[:1])


def test_kept_bytes_are_what_geometry_says(tiny):
    for kinds in (("fp8",), ("bf16",), BOTH):
        pool = pool_of(tiny, 128, kinds, page_size=64)
        assert pool.kept_bytes == (128 + 64) * tiny.layers * tiny.row_bytes("+".join(kinds))


# Batches


@pytest.mark.parametrize("page_size, context", [(1, 7), (4, 7), (4, 8)])
def test_batch_slots_follow_the_page_table(tiny, page_size, context):
    pool = pool_of(tiny, 64, page_size=page_size, order="random")
    batch = pool.batch(3, context)
    seen = set()
    for turn in range(5):
        batch.advance(turn)
        for b in range(3):
            pages = batch.pages[batch.indptr[b] : batch.indptr[b + 1]].long()
            by_hand = [
                int(pages[t // page_size]) * page_size + t % page_size for t in range(context)
            ]
            assert batch.slots(b).tolist() == by_hand
            assert int(batch.new_slots[b]) == by_hand[-1]
        seen |= set(batch.new_slots.tolist())
    assert len(seen) > 3, "new rows go to fresh slots"
    pool.release(batch)
    assert pool.allocator.free_tokens == 64


def test_loads_that_do_not_fit(tiny):
    pool = pool_of(tiny, 64)
    with pytest.raises(
        DoesNotFit, match=r"5 requests x 16 tokens = 80 .*context up to 12 .*4 requests"
    ):
        pool.batch(5, 16)
    for context in (0, -1, tiny.max_positions + 1):
        with pytest.raises(OutOfRange, match="1 to 4096"):
            pool.batch(1, context)
    with pytest.raises(OutOfRange, match="Concurrency"):
        pool.batch(0, 4)
    full = pool.batch(4, 16)  # exactly the pool: no spare slots, and still a step
    full.advance(0)
    assert len(set(full.live_slots.tolist())) == 64


# Memory


def test_a_pool_that_does_not_fit_says_what_would(tiny, monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda device: machine.Memory(1 << 20, 1 << 20))
    with pytest.raises(DoesNotFit) as caught:
        pool_of(tiny, 4096)
    # 1 MiB over 2 layers x 1,728 bytes, the dummy slot taken off.
    assert "up to 302 tokens" in str(caught.value) and "1048576 bytes" in str(caught.value)
    pool_of(tiny, 302)
    with pytest.raises(DoesNotFit):
        pool_of(tiny, 303)


def test_memory_held_by_a_server_is_named(tiny, monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda device: machine.Memory(1 << 30, 1 << 20))
    held = [machine.Holder(4242, "sglang", 1 << 29)]
    monkeypatch.setattr(machine, "holders", lambda device: held)
    with pytest.raises(DoesNotFit, match=r"sglang \(pid 4242, 0.5 GiB\)"):
        pool_of(tiny, 4096)


def test_storage_of_glm5_at_the_case_size():
    assert load_model("glm-5").row_bytes("fp8") * 495_616 * 3 == pytest.approx(856.4e6, rel=1e-4)
    assert FP8.itemsize == 1

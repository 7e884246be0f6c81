"""Slots, and the one write path that a shadow cannot miss."""

import sys
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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


# Wrong input


@pytest.mark.parametrize("wrong", [2.5, float("nan"), -1, 0, True, None, "8", torch.tensor(8)])
def test_only_whole_numbers_are_counts(tiny, wrong):
    pool = pool_of(tiny)
    calls = [
        lambda: pool.allocate(wrong),
        lambda: pool.batch(wrong, 4),
        lambda: pool.batch(2, wrong),
        lambda: SlotAllocator(wrong),
        lambda: SlotAllocator(64, wrong),
    ]
    for call in calls:
        with pytest.raises(OutOfRange, match="whole number, 1 "):
            call()
    assert pool.allocator.free_tokens == 64 and len(pool.allocate(64)) == 64


def test_a_slot_named_twice_and_wrong_tensors_change_nothing(tiny):
    pool = pool_of(tiny)
    slots = pool.allocate(8)
    pool.write(0, slots, rows(8))
    before = pool.fp8[0].clone(), pool.bf16[0].clone()
    saved, twice = pool.save(slots), slots[[0, 0, 1, 1, 2, 2, 3, 3]]
    calls = [
        lambda: pool.write(0, twice, rows(8, 1)),
        lambda: pool.load(twice, saved),
        lambda: pool.move(slots, twice),
        lambda: pool.write(0, slots.float(), rows(8, 1)),
        lambda: pool.write(0, slots.view(2, 4), rows(8, 1)),
        lambda: pool.write(0, slots.tolist(), rows(8, 1)),
        lambda: pool.write(0, slots, rows(8, 1).tolist()),
        lambda: pool.write(0, slots, rows(8, 1).to("meta")),
        lambda: pool.write(-1, slots, rows(8, 1)),
        lambda: pool.write(2, slots, rows(8, 1)),
        lambda: pool.write(0.0, slots, rows(8, 1)),
        lambda: pool.load(slots, replace(saved, rows=saved.rows[:1])),
        lambda: pool.free(slots > 0),
        lambda: pool_of(tiny, kinds=()),
        lambda: pool_of(tiny, kinds=("fp4",)),
        lambda: Pool(tiny, 64, []),
    ]
    for call in calls:
        with pytest.raises(OutOfRange):
            call()
    assert torch.equal(bits(pool.fp8[0]), bits(before[0]))
    assert torch.equal(pool.bf16[0], before[1]) and pool.allocator.free_tokens == 56


def test_strided_rows_and_slots_are_written_as_they_read(tiny, device):
    pool, other = (pool_of(tiny, device=device) for _ in range(2))
    slots, new = pool.allocate(8), rows(16, device=device)
    other.allocate(8)
    pool.write(0, slots[::2], new[::4])
    pool.write(1, slots.int(), new.T.contiguous().T[:8])
    other.write(0, slots[::2].clone(), new[::4].clone())
    other.write(1, slots, new[:8].clone())
    for ours, theirs in zip((*pool.fp8, *pool.bf16), (*other.fp8, *other.bf16), strict=True):
        assert torch.equal(bits(ours), bits(theirs))


def test_a_batch_that_fails_takes_nothing(tiny, monkeypatch):
    pool = pool_of(tiny, 64, page_size=4)
    held = pool.allocate(40)
    with pytest.raises(DoesNotFit):
        pool.batch(4, 10)  # 24 are free
    assert pool.allocator.free_tokens == 24

    def full(*_):
        raise torch.OutOfMemoryError("no memory for the index buffers")

    monkeypatch.setattr("shadowkv_lab.pool.make_batch", full)
    with pytest.raises(torch.OutOfMemoryError):
        pool.batch(2, 8)
    assert pool.allocator.free_tokens == 24
    pool.free(held)
    assert pool.allocator.free_tokens == 64


# Threads and kills


def test_threads_keep_the_mirror(tiny):
    """Eight writers, half of them to one another's slots; and allocations that must not overlap."""
    pool = pool_of(tiny, 256)
    shared, own, errors = pool.allocate(16), [pool.allocate(8) for _ in range(8)], []

    def work(n):
        try:
            for turn in range(30):
                pool.write(0, own[n], rows(8, n))
                pool.write(1, shared, rows(16, 100 * n + turn))
                fresh = pool.allocate(4)
                pool.write(0, fresh, rows(4, n))
                pool.free(fresh)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors and pool.allocator.free_tokens == 256 - 16 - 64
    pool.check_integrity()
    for n in range(8):
        assert torch.equal(bits(pool.fp8[0][own[n]]), bits(to_fp8(rows(8, n))))


class Killed(BaseException):
    """What a signal may raise, between any two lines."""


def killed(call, at, *, files=("pool.py", "reference.py")):
    """Run `call` and raise `Killed` at the `at`-th line that runs in these files; what came."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            seen += 1
            if seen == at:
                sys.settrace(None)
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    except Killed:
        return None
    finally:
        sys.settrace(before)


class PoolMachine(RuleBasedStateMachine):
    """Allocations, writes, moves, saves, loads and frees, right, wrong and stopped at any line.

    The model: which pages are held, and of each slot the FP8 rows that it may hold (two, where a
    write was stopped).
    """

    @initialize(page_size=st.sampled_from([1, 4]), seed=st.integers(0, 9))
    def start(self, page_size, seed):
        shape = replace(load_model("glm-5"), name="tiny", layers=1, index_layers=1)
        self.pool = Pool(shape, 32, [BOTH], page_size=page_size, order="random", seed=seed)
        self.page_size, self.held, self.saved, self.turn = page_size, [], None, 0
        self.may = {slot: {bytes(576)} for slot in range(32 + page_size)}

    def stored(self, slot):
        return bytes(bits(self.pool.fp8[0])[slot].tolist())

    def pages(self):
        return {int(slot) // self.page_size for slots in self.held for slot in slots}

    def drawn(self, data):
        return self.held[data.draw(st.integers(0, len(self.held) - 1))]

    @rule(tokens=st.integers(1, 12), at=st.sampled_from(range(40)))
    def allocate(self, tokens, at):
        needed = -(-tokens // self.page_size) * self.page_size
        if needed > self.pool.allocator.free_tokens:
            with pytest.raises(DoesNotFit):
                self.pool.allocate(tokens)
            return
        slots = killed(lambda: self.pool.allocate(tokens), at)
        if slots is not None:
            assert not {int(s) // self.page_size for s in slots} & self.pages()
            self.held.append(slots)
        else:  # stopped before the caller had them: free them as a caller who knows them would
            self.free_lost(needed)

    def free_lost(self, most):
        free = {int(p) for p in self.pool.allocator._state[0]}
        lost = set(range(1, 32 // self.page_size + 1)) - free - self.pages()
        assert len(lost) * self.page_size <= most
        if lost:
            self.pool.free(torch.tensor(sorted(lost)) * self.page_size)

    @rule(data=st.data(), at=st.sampled_from(range(40)))
    def free(self, data, at):
        if self.held:
            slots = self.drawn(data)
            before = self.pool.allocator.free_tokens
            killed(lambda: self.pool.free(slots), at)
            if self.pool.allocator.free_tokens != before:
                self.held = [h for h in self.held if h is not slots]
                with pytest.raises(OutOfRange, match="not allocated"):
                    self.pool.free(slots)

    @rule(concurrency=st.integers(1, 4), context=st.integers(1, 10), at=st.sampled_from(range(120)))
    def batch(self, concurrency, context, at):
        before = self.pool.allocator.free_tokens
        needed = concurrency * -(-context // self.page_size) * self.page_size
        try:
            batch = killed(lambda: self.pool.batch(concurrency, context), at)
        except DoesNotFit:
            assert needed > before and self.pool.allocator.free_tokens == before
            return
        if batch is not None:
            self.pool.release(batch)
        self.free_lost(before)
        assert self.pool.allocator.free_tokens == before

    @rule(data=st.data(), at=st.sampled_from(range(90)))
    def write(self, data, at):
        if self.held:
            slots, self.turn = self.drawn(data), self.turn + 1
            new = rows(len(slots), self.turn, scale=100.0)
            killed(lambda: self.pool.write(0, slots, new), at)
            self.arrived(slots, to_fp8(new))

    @rule(data=st.data(), at=st.sampled_from(range(90)))
    def move(self, data, at):
        if self.held:
            source, target = self.drawn(data), self.drawn(data)
            n = min(len(source), len(target))
            new = self.pool.fp8[0][source[:n]].clone()
            killed(lambda: self.pool.move(source[:n], target[:n]), at)
            self.arrived(target[:n], new)

    @rule(data=st.data())
    def save(self, data):
        if self.held:
            slots = self.drawn(data)
            self.saved = slots, self.pool.save(slots)

    @rule(data=st.data(), at=st.sampled_from(range(120)))
    def load(self, data, at):
        if self.held and self.saved:
            slots, saved = self.drawn(data), self.saved[1]
            if len(slots) != len(saved.rows[0]):
                with pytest.raises(OutOfRange):
                    self.pool.load(slots, saved)
                return
            killed(lambda: self.pool.load(slots, saved), at)
            self.arrived(slots, saved.rows[0])

    def arrived(self, slots, new):
        """Every slot holds its old row or the new one: what it was is what it is from now on."""
        for slot, row in zip(slots.tolist(), bits(new).tolist(), strict=True):
            assert self.stored(slot) in self.may[slot] | {bytes(row)}
            self.may[slot] = {self.stored(slot)}

    @rule(data=st.data())
    def refused(self, data):
        if self.held:
            slots = self.drawn(data)
            for wrong in (slots[[0, 0]], slots - 1000, slots.float(), torch.tensor([0])):
                with pytest.raises(OutOfRange):
                    self.pool.write(0, wrong, rows(len(wrong)))

    @invariant()
    def books_and_copies_agree(self):
        if hasattr(self, "pool"):
            free, held = self.pool.allocator._state
            taken = set(held.nonzero().flatten().tolist())
            assert taken == self.pages() and not taken & set(free.tolist())
            assert len(taken) + len(free) == 32 // self.page_size == len(taken | set(free.tolist()))
            assert all(self.stored(slot) in rows for slot, rows in self.may.items())
            self.pool.check_integrity()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


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

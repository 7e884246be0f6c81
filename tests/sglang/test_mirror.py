"""The mirror of a real pool through every write path, and what happens to a write past them."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import FP8, attached, exact, layer, pool, runner

from shadowkv_lab.errors import WrongResult

SIZE = 128
slots = st.lists(st.integers(0, SIZE), min_size=1, max_size=9)  # slot 0 and repeats included
writes = st.lists(
    st.tuples(
        st.sampled_from(["row", "parts", "override", "move", "reload", "info"]),
        slots,
        st.integers(0, 2),
        st.sampled_from([0.3, 90.0, 4000.0]),
    ),
    min_size=1,
    max_size=12,
)


def apply(to_pool, kind, at, which, size, seed):
    """One write of `kind` to the real pool."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    where = torch.tensor(at)
    noise = torch.randn(len(at), 1, 576, generator=torch.Generator().manual_seed(seed))
    rows, number = (noise * size).bfloat16(), to_pool.start_layer + which
    if kind == "row":
        to_pool.set_kv_buffer(layer(number), where, rows, None)
    elif kind == "override":
        to_pool.set_kv_buffer(layer(99), where, rows, None, layer_id_override=number)
    elif kind == "info":
        to_pool.set_kv_buffer(layer(number), KVWriteLoc(where), rows, rows[..., :512])
    elif kind == "parts":
        parts = rows[..., :512].contiguous(), rows[..., 512:].contiguous()
        to_pool.set_mla_kv_buffer(layer(number), KVWriteLoc(where), *parts)
    elif kind == "move":
        target = torch.unique(where)
        to_pool.move_kv_cache(target, target.flip(0))
    else:
        target = torch.unique(where)
        to_pool.load_cpu_copy(to_pool.get_cpu_copy(target.flip(0)), target)


@pytest.mark.parametrize(
    "kind, start", [("MLATokenToKVPool", 0), ("MLATokenToKVPool", 5), ("DSATokenToKVPool", 0)]
)
def test_mirror_is_the_pool_after_any_writes(chosen, kind, start):
    chosen("shadow")

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(writes, st.integers(0, 1000))
    def run(steps, seed):
        real = pool(kind, SIZE, start=start)
        attached(real)
        for i, (write, at, which, size) in enumerate(steps):
            apply(real, write, at, which, size, seed + i)
            assert exact(real, real._shadowkv.copies), write
        real._shadowkv.check()

    run()


def test_rows_written_before_the_backend_was_made_are_mirrored(chosen):
    chosen("shadow")
    real = pool()
    apply(real, "row", [3, 4], 1, 1.0, 0)
    attached(real)
    assert real.kv_buffer[1].any() and exact(real, real._shadowkv.copies)


def test_only_the_chosen_layers_are_mirrored(chosen):
    chosen("shadow", layers=[0, 2])
    real = pool()
    view = attached(real).token_to_kv_pool._shadowkv.views[True]
    for which in range(3):
        apply(real, "parts", [7], which, 1.0, which)
    assert set(real._shadowkv.copies) == {0, 2} and exact(real, real._shadowkv.copies)
    assert view.get_key_buffer(0).dtype == torch.bfloat16
    assert view.get_key_buffer(1).data_ptr() == real.kv_buffer[1].data_ptr()


@pytest.mark.parametrize("strategy", ["shadow", "fused_fp8"])
def test_parts_are_stored_in_one_call_as_sglang_stores_them(chosen, monkeypatch, strategy):
    """The same bytes as `.to(float8_e4m3fn)`, and nothing of SGLang's own write."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    chosen(strategy)
    real = pool()
    attached(real)
    rows = torch.randn(5, 1, 576, generator=torch.Generator().manual_seed(3)).bfloat16() * 30
    at = torch.tensor([9, 0, 4, 120, 0])

    def never(*_):
        raise AssertionError("SGLang's own write")

    monkeypatch.setattr(MLATokenToKVPool, "_write_mla_kv_buffer", never)
    real.set_mla_kv_buffer(layer(2), at, rows[..., :512], rows[..., 512:])
    stored = real.kv_buffer[2].view(FP8).flatten(1)
    wanted = rows[[0, 2, 3], 0].to(FP8).view(torch.uint8)
    assert torch.equal(stored[[9, 4, 120]].view(torch.uint8), wanted)
    assert not stored[0].view(torch.uint8).any() and not real.kv_buffer[1].any()


def test_a_write_past_the_class_is_caught_by_the_self_check(chosen):
    from shadowkv_lab.server.plugin import hooks

    chosen("shadow", every=2)
    real = pool()
    attached(real)
    real.kv_buffer[1][17] += 1
    hooks.self_check(None, runner(real))  # the first of two passes: not yet looked at
    with pytest.raises(WrongResult, match="Layer 1, slot 17"):
        hooks.self_check(None, runner(real))


def test_a_subclass_with_a_write_path_of_its_own_would_be_caught(chosen):
    """Why only two classes are let in: an override that does not call its base is never seen."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    chosen("shadow")
    real = pool()
    attached(real)

    class Own(MLATokenToKVPool):
        def set_kv_buffer(self, layer, loc_info, cache_k, cache_v):
            self.kv_buffer[layer.layer_id][loc_info] = cache_k.to(self.dtype).view(torch.uint8)

    real.__class__ = Own
    apply(real, "row", [5], 0, 1.0, 1)
    with pytest.raises(WrongResult, match="Layer 0, slot 5"):
        real._shadowkv.check()


def test_nan_rows_are_no_false_alarm(chosen):
    chosen("shadow")
    real = pool()
    attached(real)
    rows = torch.full((1, 1, 576), float("nan"), dtype=torch.bfloat16)
    real.set_kv_buffer(layer(0), torch.tensor([9]), rows, None)
    assert real._shadowkv.copies[0][9].isnan().all()
    real._shadowkv.check()

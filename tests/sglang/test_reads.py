"""What the real FlashInfer MLA backend reads and returns under each strategy."""

from types import SimpleNamespace

import pytest
import torch
from worlds import Wrapper, attached, backend, exact, layer, pool

LENS = (5, 1, 40)
BATCH = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))


def world(kind="MLATokenToKVPool", size=128):
    """A filled pool, requests at random slots of it, and queries."""
    generator = torch.Generator().manual_seed(3)
    real = pool(kind, size)
    for number in range(3):
        rows = torch.randn(size, 1, 576, generator=generator).bfloat16()
        real.set_kv_buffer(layer(number), torch.arange(1, size + 1), rows, None)
    slots = torch.randperm(size, generator=generator)[: sum(LENS)] + 1
    q = torch.randn(3, 8, 576, generator=generator).bfloat16()
    return real, slots, q


def step(made, q, number=1, **more):
    """One decode of a layer through the hooked method of the real class."""
    return made.forward_decode(
        q[..., :512].reshape(3, -1),
        None,
        None,
        layer(number),
        BATCH,
        q_rope=q[..., 512:].reshape(3, -1),
        **more,
    )


def replay(made, wrapper, slots):
    """The planner's real `update`, as for a graph replay, with the pool's own slots."""
    lens = torch.tensor(LENS, dtype=torch.int32)
    buffer = wrapper._kv_indices_buf
    made.kv_index_translator = SimpleNamespace(
        pack_read_stream=lambda *_, out, **__: out[: len(slots)].copy_(slots) is None,
        needs_read_translate=False,
    )
    indptr = torch.tensor([0, *LENS]).cumsum(0).int()
    made.indices_updater_decode.kv_lora_rank = 512
    made.indices_updater_decode.qk_rope_head_dim = 64
    made.indices_updater_decode.data_type = torch.bfloat16
    made.indices_updater_decode.kv_indptr = torch.zeros(4, dtype=torch.int32)
    made.indices_updater_decode.q_indptr = torch.arange(4, dtype=torch.int32)
    made.indices_updater_decode.update(
        lens,
        sum(LENS),
        decode_wrapper=wrapper,
        init_metadata_replay=True,
        plan=None,
        req_pool_indices=None,
        qo_indptr_cpu=torch.arange(4),
        kv_indptr_cpu=indptr,
        kv_indices=buffer,
        kv_len_arr_cpu=lens,
    )


@pytest.fixture
def case(chosen):
    real, slots, q = world()
    buffer = torch.zeros(400)
    expected = step(backend(real, Wrapper(slots, LENS)), q)  # SGLang as it is
    return real, slots, q, Wrapper(buffer, LENS), expected


@pytest.mark.parametrize("strategy", ["shadow", "vector_cast", "gather_cast"])
def test_output_equals_the_full_casts_bit_for_bit(chosen, case, strategy):
    real, slots, q, wrapper, expected = case
    chosen(strategy)
    made = attached(real, wrapper)
    for _ in range(2):
        replay(made, wrapper, slots)
        assert torch.equal(step(made, q), expected)
    assert made.token_to_kv_pool is real  # the model asks the backend for its pool


def test_shadow_hands_over_the_mirror_itself(chosen, case):
    real, slots, q, wrapper, _ = case
    chosen("shadow")
    made = attached(real, wrapper)
    replay(made, wrapper, slots)
    step(made, q)
    assert wrapper.ckv.data_ptr() == real._shadowkv.copies[1].data_ptr()
    assert real.get_key_buffer(1).data_ptr() == real.kv_buffer[1].data_ptr()
    assert real.get_key_buffer(1).dtype == torch.float8_e4m3fn


def test_a_decode_step_writes_first_and_mirrors_what_it_wrote(chosen, case):
    real, slots, q, wrapper, _ = case
    chosen("shadow")
    made = attached(real, wrapper)
    replay(made, wrapper, slots)
    new = torch.randn(3, 1, 576).bfloat16()
    batch = SimpleNamespace(
        out_cache_loc=slots[:3], out_cache_loc_is_physical=True, forward_mode=BATCH.forward_mode
    )
    made.forward_decode(
        q[..., :512].reshape(3, -1),
        new[..., :512],
        new[..., :512],
        layer(1),
        batch,
        q_rope=q[..., 512:].reshape(3, -1),
        k_rope=new[..., 512:],
    )
    stored = real.kv_buffer[1][slots[:3]].view(torch.float8_e4m3fn)
    assert torch.equal(stored.float(), new.to(torch.float8_e4m3fn).float())
    assert exact(real, real._shadowkv.copies)


def test_gather_reads_live_rows_from_the_front_of_its_scratch(chosen, case):
    real, slots, q, wrapper, _ = case
    chosen("gather_cast")
    made = attached(real, wrapper)
    replay(made, wrapper, slots)
    step(made, q)
    live = real.kv_buffer[1][slots, 0].view(torch.float8_e4m3fn).bfloat16()
    assert torch.equal(real._shadowkv.scratch[: len(slots)], live)
    assert wrapper._kv_indices_buf[: len(slots)].tolist() == list(range(len(slots)))


def test_gather_casts_in_place_where_shared_prefixes_exceed_the_pool(chosen, case):
    real, slots, q, wrapper, expected = case
    chosen("gather_cast")
    made = attached(real, wrapper)
    replay(made, wrapper, slots)
    real._shadowkv.plan(wrapper, made, None, 10_000)
    wrapper._kv_indices_buf[: len(slots)] = slots.int()
    assert torch.equal(step(made, q), expected)


def test_fused_decode_agrees_with_float64_over_the_same_rows(chosen, case):
    real, slots, q, wrapper, expected = case
    chosen("fused_fp8")
    made = attached(real, wrapper)
    for _ in range(2):
        replay(made, wrapper, slots)
        out = step(made, q)
    off = (out - expected).double().norm() / expected.double().norm()
    assert off < 0.01 and out.shape == expected.shape


def test_prefill_sees_bf16_rows_and_the_model_the_pool_itself(chosen, case):
    from sglang.srt.model_executor import forward_context as context

    real, _, _, wrapper, _ = case
    chosen("shadow")
    made = attached(real, wrapper)
    seen = []

    def original(backend, *_):
        seen.append(backend.token_to_kv_pool.get_key_buffer(1).dtype)

    from shadowkv_lab.server.plugin import hooks

    hooks.extend(original, made)
    with context.forward_context(context.ForwardContext(made)):
        assert context.get_token_to_kv_pool() is real
    assert seen == [torch.bfloat16]

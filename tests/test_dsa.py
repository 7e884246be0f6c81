"""Reading by a DSA index: every strategy, choices against numpy, bytes by hand, refusals."""

from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv_lab import kernels
from shadowkv_lab.deployment import Setting, deployment
from shadowkv_lab.errors import CannotRun, OutOfRange, UnknownName, WrongResult
from shadowkv_lab.kernels import index
from shadowkv_lab.load import Load
from shadowkv_lab.model import load_model
from shadowkv_lab.pool import Pool
from shadowkv_lab.steps import measure
from shadowkv_lab.strategies import STRATEGIES, parse
from shadowkv_lab.strategies.check import check, count_bytes, make_step, worst_error
from shadowkv_lab.strategies.step import DecodeStep
from tests.kernels.test_index import by_hand

GLM = load_model("glm-5")
VARIANTS = ["shadow(layers=1)", "hot_set(rows=300)", "shared_shadow(layers=1,rows=300)"]


@pytest.fixture
def small():
    """Four layers of which 0 and 2 choose 16 rows; 1 and 3 read what they have chosen."""
    sizes = dict(layers=4, index_layers=2, index_at=(0, 2), index_topk=16, max_positions=4096)
    return replace(GLM, name="small", **sizes)


@pytest.mark.parametrize("name", [*STRATEGIES, *VARIANTS])
def test_every_strategy_reads_what_the_index_chooses(name):
    """Float64, the choice, the byte meter and a restored request: all by `check`."""
    found = dict(check(parse(name), reads="dsa").found)
    assert "e-03" in found["worst relative error against float64"]


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(
    "name", ["full_cast", "gather_cast", "fused_fp8", "bf16_pool", *VARIANTS[1:]]
)
def test_outputs_against_scores_choice_and_attention_in_numpy(small, name, page_size):
    """Nothing of the lab in the oracle: the choice by argsort, attention row by row."""
    step = make_step(parse(name), small, page_size, "dsa")
    step.advance(1)
    of, batch = step.chooser, step.batch
    for layer in range(4):
        step.run_layer(layer, *step.phases)
        owner = layer // 2 * 2
        if layer == owner:
            i = of.place[layer]
            exact = by_hand(of.q[i], of.weights[i], step.pool.index[layer], batch)
        pool = step.pool
        stored = (pool.bf16 if pool.fp8[layer] is None else pool.fp8)[layer].double().numpy()
        for b, n in enumerate(batch.lens):
            slots = batch.slots(b).numpy()[np.argsort(-exact[b])[:16]]
            assert n > 16 and len(slots) == 16
            rows = stored[slots]
            q = torch.cat([step.q_nope[layer, b], step.q_pe[layer, b]], -1).double().numpy()
            logits = q @ rows.T * 256**-0.5
            weights = np.exp(logits - logits.max(1, keepdims=True))
            wanted = weights / weights.sum(1, keepdims=True) @ rows[:, :512]
            off = step.out[layer, b].double().numpy() - wanted
            error = np.linalg.norm(off, axis=1) / np.linalg.norm(wanted, axis=1)
            assert error.max() < 6e-3, (layer, b)


def test_a_short_request_reads_all_its_rows(small):
    dense = make_step(parse("shadow"), small, 1)
    sparse = make_step(parse("shadow"), replace(small, index_topk=2048), 1, "dsa")
    dense.step()
    sparse.step()
    assert sparse.reading.live_tokens == dense.batch.live_tokens == 120
    # The same rows in another order: float32 sums, rounded to BF16.
    assert (dense.out.float() - sparse.out.float()).abs().max() < 0.02


def test_requests_of_different_lengths_choose_for_themselves(small):
    """The second has fewer live tokens than are chosen."""
    step = make_step(parse("bf16_pool"), small, 1, "dsa")
    from shadowkv_lab.strategies.index import Index
    from tests.kernels.test_index import a_batch

    batch, pool = a_batch([40, 9, 17], 1), step.pool
    of = Index(pool, batch)
    of.score(0)
    of.choose()
    of.require_right(0)
    offsets = of.chosen.token_offsets()
    assert of.chosen.lens == (16, 9, 16) and step.chooser.chosen.lens == (16, 16, 16)
    assert sorted(of.chosen.pages[offsets[1] : offsets[2]].tolist()) == sorted(
        batch.slots(1).tolist()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*STRATEGIES, "hot_set(rows=2000)", "shared_shadow"])
def test_a_captured_step_chooses_anew_at_each_replay(small, name):
    """Other queries, keys and rows in the same graph: the replay reads what they choose."""
    from shadowkv_lab.steps import timing
    from tests.test_strategies import runnable, step_of

    device = torch.device("cuda:0")
    if not runnable(name, device):
        pytest.skip(f"{name} cannot run on this GPU")
    step = step_of(small, name, device, context=500, tokens=4096, page_size=64, reads="dsa")
    replay = timing.capture(step.step, device)
    before = step.reading.pages.clone()
    step.advance(5)
    step.rows.normal_()
    step.chooser.weights.normal_()
    step.out.fill_(float("nan"))
    replay()
    assert not torch.equal(before, step.reading.pages)
    assert worst_error(step, ("index", "top_k")) < 6e-3


def test_bytes_by_hand(small):
    """3 requests of 40 tokens, 16 rows chosen; two of four layers score 120 keys."""
    A, L, R = 3 * 16, 120, 3
    scored = 2 * (132 * (L + R) + 4 * L)
    chosen = 2 * (4 * L + 4 * A)
    for name, moved in (
        ("full_cast", (4 * 1728 * 513, 4 * 1152 * A, 4 * 576 * R)),
        ("shadow", (0, 4 * 1152 * A, 4 * 1728 * R)),
        ("gather_cast", (4 * 1728 * A, 4 * 1152 * A, 4 * 576 * R)),
        ("fused_fp8", (0, 4 * 576 * A, 4 * 576 * R)),
    ):
        counted = count_bytes(make_step(parse(name), small, 1, "dsa"))
        assert tuple(counted.values()) == (*moved, scored, chosen), name


def test_bytes_of_a_whole_model():
    """GLM-5 at 131,072 tokens reads 2,048 rows and 131,072 keys; GLM-5.2 keys in 21 layers."""
    for name, layers in (("glm-5", 78), ("glm-5.2", 21), ("deepseek-v3.2", 61)):
        model = load_model(name)
        setting = Setting(model, 8, 200_000, Load(2, 131_072, reads="dsa"))
        moves = parse("fused_fp8").moves_at(setting)
        assert moves["attention"] == model.layers * 2 * 2048 * 576
        assert moves["index"] == layers * (132 * (2 * 131_072 + 2) + 4 * 2 * 131_072)
        assert moves["top_k"] == layers * (4 * 2 * 131_072 + 4 * 2 * 2048)
    assert load_model("glm-5.2").choosing[:5] == (0, 1, 2, 6, 10)


def test_a_wrong_choice_or_a_stale_one_is_refused(monkeypatch):
    choose = index.choose

    def worst_ones(found, topk):
        return choose(-found, topk)

    def one_off(found, topk):
        places = choose(found, topk)
        places[0, 0] = places[0, 1]
        return places

    for wrong, why in ((worst_ones, "too low"), (one_off, "not its own")):
        monkeypatch.setattr(index, "choose", wrong)
        with pytest.raises(WrongResult, match=why):
            check(parse("shadow"), reads="dsa")
    monkeypatch.undo()
    gathered = kernels.gather_cast

    def always_dense(step, layer):
        gathered(step.pool.fp8[layer], step.batch.slots(0), step.scratch[step.at[layer]])

    monkeypatch.setattr(type(parse("gather_cast")), "cast", lambda s, *a: always_dense(*a))
    with pytest.raises(WrongResult, match="off by"):
        check(parse("gather_cast"), reads="dsa")


def test_a_model_without_an_index_is_refused():
    load = Load(reads="dsa")
    for name in ("deepseek-r1", "kimi-k2"):
        model = load_model(name)
        for ask in (
            lambda m=model: m.read_tokens(load),
            lambda m=model: check(parse("shadow"), m, reads="dsa"),
            lambda m=model: parse("shadow").moves_at(Setting(m, 8, 4096, load)),
            lambda m=model: measure.measure_step("shadow", Setting(m, 8, 4096, load), "cpu"),
        ):
            with pytest.raises(CannotRun, match=r"no sparse-attention index.*glm-5"):
                ask()
    pooled = replace(GLM, index_tokens=4)
    with pytest.raises(CannotRun, match="an index key for 4 tokens"):
        pooled.read_tokens(Load(reads="dsa"))
    with pytest.raises(UnknownName, match="dense, dsa"):
        Load(reads="sparse")
    split = deployment("glm-5", "h200", decode_context_parallel=2)
    with pytest.raises(CannotRun, match="2 DCP ranks"):
        split.share(Load(reads="dsa"))


def test_a_step_is_measured_with_its_index_as_phases_of_their_own(small):
    setting = Setting(small, 4, 512, Load(2, 40, reads="dsa"))
    step = measure.measure_step("gather_cast", setting, "cpu")
    assert [p.name for p in step.phases] == ["cast", "attention", "write", "index", "top_k"]
    assert all(p.ms > 0 and p.bytes > 0 for p in step.phases)
    assert step.setting == setting and step.error < 6e-3
    assert step.strategy.title == "gather cast, DSA"
    pool, keys = 4 * 513 * 576, 2 * -(-513 // 64) * 64 * 132
    assert step.kept_bytes == pool + keys
    hypothetical = measure.measure_step("full_cast", setting, "cpu")
    assert hypothetical.strategy.title == "full cast, DSA, hypothetical"
    dense = measure.measure_step("full_cast", replace(setting, load=Load(2, 40)), "cpu")
    assert [p.name for p in dense.phases] == ["cast", "attention", "write"]
    assert parse("shadow(layers=2)").tag_at(setting.load).title.endswith("hypothetical")


def stored_by_hand(key):
    """The 128 codes and the scale of one key: e4m3 by ml_dtypes, the largest value becomes 448."""
    scale = np.float32(max(np.abs(key).max(), np.float32(1e-4))) / np.float32(448)
    return (key / scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale


def require_keys(pool, expected):
    """Each layer's pages hold the keys of `expected[layer]` (by slot), byte by byte."""
    for layer, keys in expected.items():
        raw = pool.index[layer].cpu().numpy()
        for slot, (codes, scale) in keys.items():
            page, place = raw[slot // 64], slot % 64
            assert (page[128 * place : 128 * place + 128] == codes).all(), (layer, slot)
            at = 64 * 128 + 4 * place
            assert page[at : at + 4].copy().view(np.float32)[0] == scale, (layer, slot)


@pytest.mark.parametrize("page_size", [1, 64])
def test_random_write_paths_keep_every_index_key(small, device, page_size):
    """Writes, a step's writes, moves, restores and stopped writes, against a plain dictionary."""

    def keys_of(n, seed):
        noise = torch.Generator().manual_seed(seed)
        return (torch.randn(n, 128, generator=noise) * 3).bfloat16()

    @given(actions=st.lists(st.sampled_from(ACTIONS), max_size=12), seed=st.integers(0, 99))
    @settings(max_examples=30, deadline=None)
    def run(actions, seed):
        write = kernels.indexing(device).write
        options = dict(page_size=page_size, device=device, order="random", seed=seed, index=True)
        pool = Pool(small, 192, [("fp8",)] * 4, write_keys=write, **options)
        expected: dict[int, dict] = {0: {}, 2: {}}
        one, two = pool.allocate(8), pool.allocate(8)
        rows = torch.zeros(8, 576, dtype=torch.bfloat16, device=device)
        for turn, action in enumerate(actions):
            layer, keys = (0, 2)[turn % 2], keys_of(8, 100 * seed + turn)
            given_keys = keys.to(device)
            if action == "write":
                pool.write(layer, one, rows, given_keys)
            elif action == "unchecked":
                pool.write_unchecked(layer, one, rows, given_keys)
            elif action == "step":
                pool.write_unchecked(layer, one, rows)
                pool.write_keys_unchecked(layer, one, given_keys)
            elif action == "stopped":
                pool.write_keys = half_written
                with pytest.raises(KeyboardInterrupt):
                    pool.write(layer, one, rows, given_keys)
                pool.write_keys = write
            elif action == "move":
                pool.move(one[:5], two[:5])
                for known in expected.values():
                    moved = {int(b): known.get(int(a)) for a, b in zip(one[:5], two, strict=False)}
                    known |= {slot: key for slot, key in moved.items() if key}
            elif action == "overlap":
                pool.move(one[:7], one[1:])
                for known in expected.values():
                    moved = {int(b): known.get(int(a)) for a, b in pairwise(one)}
                    known |= {slot: key for slot, key in moved.items() if key}
            elif action == "load":
                saved = pool.save(one)
                pool.free(one)
                held = pool.allocate(3)
                again = pool.allocate(8)
                pool.load(again, saved)
                for known in expected.values():
                    moved = {
                        int(b): known.pop(int(a), None) for a, b in zip(one, again, strict=True)
                    }
                    known |= {slot: key for slot, key in moved.items() if key}
                pool.free(held)
                one = again
            if action in ("write", "unchecked", "step", "stopped"):
                stored = [stored_by_hand(key) for key in keys.float().numpy()]
                expected[layer] |= dict(zip(one.tolist(), stored, strict=True))
            require_keys(pool, expected)

    run()


ACTIONS = ["write", "unchecked", "step", "stopped", "move", "overlap", "load"]


def half_written(kept, slots, keys):
    """The codes are there, the scales are not."""
    values, _ = index.parts(kept)
    values[slots // 64, slots % 64] = index.bits(index.quantise(keys)[0])
    raise KeyboardInterrupt


def test_a_layer_with_an_index_asks_for_its_keys(small):
    pool = Pool(small, 64, [("fp8",)] * 4, index=True)
    slots, rows = pool.allocate(2), torch.zeros(2, 576).bfloat16()
    keys = torch.ones(2, 128).bfloat16()
    saved = pool.save(slots)
    calls = (
        (lambda: pool.write(0, slots, rows), "Index keys of type NoneType"),
        (lambda: pool.write(0, slots, rows, keys[:1]), "Index keys"),
        (lambda: pool.write(0, slots, rows, keys / 0), "Key 0 has NaN or Inf"),
        (lambda: pool.write(1, slots, rows, keys), r"with an index: \[0, 2\]"),
        (lambda: pool.load(slots, replace(saved, keys=())), "Saved index keys of 0 layers"),
        (lambda: pool.load(slots[:1], saved), "Saved"),
    )
    for call, why in calls:
        with pytest.raises(OutOfRange, match=why):
            call()
    assert not any(pages.any() for pages in pool.index.values())
    plain = Pool(small, 64, [("fp8",)] * 4)
    with pytest.raises(OutOfRange, match="without index keys"):
        DecodeStep(parse("shadow"), plain, plain.batch(1, 9), 4, reads="dsa", backend="reference")
    assert pool.kept_bytes == plain.kept_bytes + 2 * 2 * 64 * 132

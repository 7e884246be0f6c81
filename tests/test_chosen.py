"""A shadow of chosen rows alone: right on every write path, evicted in turn, hits as predicted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv_lab import kernels
from shadowkv_lab.deployment import Setting
from shadowkv_lab.errors import CannotRun, OutOfRange, WrongResult
from shadowkv_lab.load import Load
from shadowkv_lab.model import load_model
from shadowkv_lab.pool import Pool
from shadowkv_lab.sources import synthetic
from shadowkv_lab.steps.predict import predict_at
from shadowkv_lab.strategies import parse
from shadowkv_lab.strategies.check import worst_error
from shadowkv_lab.strategies.chosen import ChosenRows, hit_rate
from shadowkv_lab.strategies.step import DecodeStep
from tests.kernels.test_index import CODES

GLM = load_model("glm-5")
SIZES = dict(layers=3, index_layers=2, index_at=(0, 2), index_topk=16, max_positions=4096)
SMALL = replace(GLM, name="small", **SIZES)


def pool_of(device="cpu", tokens=64, page_size=1, **options):
    device = torch.device(device)
    append, keys = kernels.mover("append", device), kernels.indexing(device).write
    options |= dict(device=device, append=append, write_keys=keys, page_size=page_size)
    pool = Pool(SMALL, tokens, [("fp8",)] * 3, index=True, **options)
    synthetic.fill(pool, 5)
    synthetic.fill_index(pool, 5)
    return pool


def chosen_rows(pool, rows):
    shape = rows + 1, pool.model.row
    made = {i: torch.randn(shape, device=pool.device).bfloat16() for i in range(3)}
    pool.followers["chosen"] = ChosenRows(pool, made)
    return pool.followers["chosen"]


def take(chosen, layer, slots):
    """A choice of a layer, copied in every layer that reads it."""
    rows = chosen.take(layer, slots.to(chosen.pool.device))
    for reader in range(3):
        if chosen.owner[reader] == layer:
            chosen.copy(reader)
    return rows


def require_right(pool, chosen, layer, slots, rows):
    """The rows that a choice reads, code by code, in every layer that reads it."""
    for reader in (i for i in range(3) if chosen.owner[i] == layer):
        stored = CODES[pool.fp8[reader].view(torch.uint8).cpu()[slots].numpy()]
        assert (chosen.buffers[reader][rows].double().cpu().numpy() == stored).all()


@pytest.mark.parametrize("page_size", [1, 4])
def test_random_write_paths_keep_every_chosen_row(device, page_size):
    """Against a model of the ring in plain Python: who is there, who goes, and what they hold."""

    @given(data=st.data())
    @settings(max_examples=40, deadline=None)
    def run(data):
        pool = pool_of(device, page_size=page_size)
        chosen, size = chosen_rows(pool, 20), 20
        ring = {layer: [None] * size for layer in (0, 2)}
        heads, hits, misses = {0: 0, 2: 0}, 0, 0
        one, two = pool.allocate(8), pool.allocate(8)
        keys = torch.zeros(8, 128, device=device).bfloat16()
        actions = ["write", "move", "load", "free", "take", "take", "take"]
        for seed, action in enumerate(data.draw(st.lists(st.sampled_from(actions), max_size=16))):
            noise = torch.Generator().manual_seed(seed)
            rows = (torch.randn(8, 576, generator=noise) * 99).bfloat16().to(device)
            if action == "write":
                pool.write(seed % 3, one, rows, None if seed % 3 == 1 else keys)
            elif action == "move":
                pool.move(one, two)
            elif action == "load":
                pool.load(two, pool.save(one))
            elif action == "free":
                pool.free(one)
                one = pool.allocate(8)
            else:
                layer = data.draw(st.sampled_from([0, 2]))
                some = st.lists(st.integers(1, 60), min_size=1, max_size=size, unique=True)
                slots = data.draw(some)
                there, known = take(chosen, layer, torch.tensor(slots)), ring[layer]
                hits += len(set(slots) & set(known))
                for slot in (s for s in slots if s not in known):
                    misses += 1
                    while known[heads[layer]] in slots:  # chosen in this step: it stays
                        heads[layer] = (heads[layer] + 1) % size
                    known[heads[layer]] = slot
                    heads[layer] = (heads[layer] + 1) % size
                assert there.tolist() == [known.index(slot) + 1 for slot in slots]
                require_right(pool, chosen, layer, slots, there)
                assert chosen.counts.tolist() == [hits, misses]
                resident = {s for s in known if s is not None}
                assert set(chosen.row_of[layer].nonzero().flatten().tolist()) == resident
            pool.check_integrity()

    run()


def test_outputs_equal_full_casts_bit_for_bit_with_room_for_one_choice(device):
    """48 rows for 3 requests of 40 tokens: most of a new choice has to be cast."""
    outputs = []
    backend = "reference"
    for name in ("full_cast", "chosen_set(rows=48)", "chosen_set(rows=60)"):
        pool, strategy = pool_of(device, tokens=256), parse(name)
        batch = pool.batch(3, 40)
        step = DecodeStep(strategy, pool, batch, 4, backend=backend, reads="dsa")
        for turn in range(4):
            step.chooser.weights.copy_(torch.randn(2, 3, 32, generator=torch.manual_seed(turn)))
            step.advance(turn)
            step.step()
            pool.check_integrity()
        outputs.append(step.out.clone())
        assert worst_error(step) < 6e-3
        if rows := pool.followers.get(name):
            assert rows.counts[1] > 30 and rows.counts[0] > 30
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(("rows", "again"), [(64, 0.0), (128, 0.0), (300, 0.0), (128, 0.8)])
def test_the_hit_rate_is_that_of_choices_at_random(rows, again):
    """32 of 256 live rows a step, a share of them those of the last step."""
    pool = pool_of(tokens=256)
    chosen, noise = chosen_rows(pool, rows), np.random.default_rng(rows)
    last = noise.permutation(256)[:32]
    for step in range(160):
        if step == 40:  # warm by now
            chosen.counts.zero_()
        stay = noise.permutation(last)[: int(again * 32)]
        others = np.setdiff1d(np.arange(256), last if again else stay)
        last = np.concatenate([stay, noise.permutation(others)[: 32 - len(stay)]])
        chosen.take(0, torch.from_numpy(last + 1))
    hits, misses = chosen.counts.tolist()
    share = int(again * 32) / 32
    assert hits / (hits + misses) == pytest.approx(hit_rate(rows, 256, 32, share), abs=0.03)


def test_a_prediction_is_hits_and_misses():
    """All live rows fit: a BF16 pool's read. Half of them fit: gather cast of the other half."""
    setting = Setting(GLM, 8, 1 << 17, Load(1, 65_536, reads="dsa"), 64)
    warm, half, none = (
        predict_at(f"chosen_set(rows={rows})", setting, "h200") for rows in (65_536, 32_768, 2048)
    )
    gather = predict_at("gather_cast", setting, "h200")
    assert warm["cast"].ms == 0 == warm["cast"].bytes
    assert half["cast"].bytes == 78 * 1024 * 1728 and half["cast"].curve == "gather_cast"
    assert none["cast"].bytes == 78 * (2048 - 64) * 1728
    assert 0 < half["cast"].ms < none["cast"].ms <= gather["cast"].ms
    assert half["attention"].ms == predict_at("bf16_pool", setting, "h200")["attention"].ms
    assert half.kept_bytes - none.kept_bytes == 78 * 1152 * (32_768 - 2048)


def test_refusals_and_what_writes_past_the_pool():
    pool = pool_of()
    with pytest.raises(CannotRun, match='reads="dsa"'):
        DecodeStep(parse("chosen_set"), pool, pool.batch(1, 9), 4, backend="reference")
    chosen = chosen_rows(pool, 20)
    with pytest.raises(OutOfRange, match="21 chosen rows in a set of 20"):
        chosen.take(0, torch.arange(1, 22))
    take(chosen, 2, torch.arange(5, 15))
    pool.fp8[2].view(torch.uint8)[9, 3] ^= 1
    with pytest.raises(WrongResult, match="Layer 2, slot 9: its chosen row"):
        pool.check_integrity()

"""Partial shadows: hot rows stay right on every write path, are evicted in turn, and are shared."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv_lab.budget import budget
from shadowkv_lab.deployment import published_deployment
from shadowkv_lab.errors import DoesNotFit, WrongResult
from shadowkv_lab.load import Load, make_batch
from shadowkv_lab.model import load_model
from shadowkv_lab.pool import Pool
from shadowkv_lab.serving.contenders import contenders, engine
from shadowkv_lab.serving.simulate import simulate
from shadowkv_lab.serving.traffic import closed_loop, fixed
from shadowkv_lab.sources import synthetic
from shadowkv_lab.steps import measure
from shadowkv_lab.steps.answer import anchored, answer
from shadowkv_lab.steps.predict import at, predict_at
from shadowkv_lab.strategies import OPTIONS, STRATEGIES, parse
from shadowkv_lab.strategies.check import count_bytes, output_error
from shadowkv_lab.strategies.hot import HotRows
from shadowkv_lab.strategies.step import DecodeStep
from tests.kernels.test_index import CODES

TINY = replace(load_model("glm-5"), name="tiny", layers=2, index_layers=2, max_positions=4096)


def pool_of(tokens=64, page_size=1, **options):
    pool = Pool(TINY, tokens, [("fp8",)] * TINY.layers, page_size=page_size, **options)
    synthetic.fill(pool, 5)
    return pool


def hot_rows(pool, rows):
    made = {layer: torch.randn(rows + 1, pool.model.row).bfloat16() for layer in range(pool.layers)}
    pool.followers["hot"] = HotRows(pool, made)
    return pool.followers["hot"]


def counts(hot):
    return hot.hits, hot.misses, hot.evicted


def some_rows(count, seed):
    noise = torch.Generator().manual_seed(seed)
    return (torch.randn(count, 576, generator=noise) * 300).bfloat16()


def require_coherent(pool, hot, resident):
    """By e4m3's own definition, code by code; nothing of the lab converts here."""
    slots = torch.tensor(sorted(resident))
    rows = hot.row_of[slots]
    assert (rows > 0).all() and len(set(rows.tolist())) == len(slots)
    assert int((hot.row_of > 0).sum()) == len(slots)
    for layer in range(pool.layers):
        stored = CODES[pool.fp8[layer].view(torch.uint8)[slots].numpy()]
        assert (hot.buffers[layer][rows].double().numpy() == stored).all()


@pytest.mark.parametrize("page_size", [1, 4])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_random_write_paths_keep_every_hot_row(page_size, data):
    """Against a model of slots and when each was last asked for; checked after every action."""
    pool = pool_of(page_size=page_size)
    hot = hot_rows(pool, 20)
    asked: dict[int, int] = {}  # resident slots
    held, turn = [pool.allocate(8), pool.allocate(8)], 0
    actions = ["write", "unchecked", "move", "load", "free", "hold", "stopped"]
    for seed, action in enumerate(data.draw(st.lists(st.sampled_from(actions), max_size=14))):
        one, two = held
        if action == "write":
            pool.write(seed % 2, one, some_rows(8, seed))
        elif action == "unchecked":
            pool.write_unchecked(seed % 2, two[::2], some_rows(4, seed))
        elif action == "move":
            pool.move(one, two)
        elif action == "load":
            pool.load(two, pool.save(one))
        elif action == "free":
            pool.free(one)
            held = [two, pool.allocate(8)]
        elif action == "stopped":
            stopped(pool, two, seed)
        else:
            slots = torch.tensor(data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=24)))
            wanted = set(slots.tolist())
            if len(wanted) > 20:
                with pytest.raises(DoesNotFit, match=f"{len(wanted)} different live rows"):
                    hot.hold(slots)
            else:
                turn += 1
                before = counts(hot)
                rows = hot.hold(slots)
                assert torch.equal(rows, hot.row_of[slots])
                over = max(0, len(asked.keys() | wanted) - 20)
                new = wanted - asked.keys()
                grown = tuple(
                    n - b for n, b in zip((hot.hits, hot.misses, hot.evicted), before, strict=True)
                )
                assert grown == (len(wanted) - len(new), len(new), over)
                gone = {slot for slot in asked if hot.row_of[slot] == 0}
                assert len(gone) == over and not gone & wanted
                others = asked.keys() - gone - wanted
                if gone and others:
                    assert max(asked[s] for s in gone) <= min(asked[s] for s in others)
                asked = {s: t for s, t in asked.items() if s not in gone} | dict.fromkeys(
                    wanted, turn
                )
        if asked:
            require_coherent(pool, hot, asked)
        pool.check_integrity()


def stopped(pool, slots, seed):
    """A write that is interrupted when the FP8 rows have changed and nothing else has."""
    append = pool.append

    def cut_short(*arguments):
        append(*arguments)
        raise KeyboardInterrupt

    pool.append = cut_short
    with pytest.raises(KeyboardInterrupt):
        pool.write(0, slots, some_rows(len(slots), seed))
    pool.append = append


@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_outputs_equal_full_casts_bit_for_bit(data):
    """A batch, then writes of every kind, then another batch that finds some of its rows there."""
    seed, context = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 40))
    page_size = data.draw(st.sampled_from([1, 4]))
    actions = data.draw(st.lists(st.sampled_from(["write", "move", "load", "free"]), max_size=6))
    outputs = []
    for name in (
        "full_cast",
        "hot_set(rows=90)",
        "shared_shadow",
        "shared_shadow(layers=1,rows=90)",
    ):
        strategy = parse(name)
        pool = Pool(TINY, 128, strategy.storage(TINY), page_size=page_size)
        synthetic.fill(pool, seed)
        first = pool.batch(2, 20)
        DecodeStep(strategy, pool, first, heads=4, seed=seed, backend="reference").step()
        pool.release(first)
        one, two = pool.allocate(8), pool.allocate(8)
        for i, action in enumerate(actions):
            if action == "write":
                pool.write(1, one, some_rows(8, i))
            elif action == "move":
                pool.move(one, two)
            elif action == "load":
                pool.load(one, pool.save(two))
            else:
                pool.free(one)
                one = pool.allocate(8)
        pool.free(one)
        pool.free(two)
        step = DecodeStep(
            strategy, pool, pool.batch(2, context), heads=4, seed=seed, backend="reference"
        )
        for turn in range(2):
            step.step()
            step.advance(turn)
        step.step()
        pool.check_integrity()
        outputs.append(step.out.view(torch.int16))
    for other in outputs[1:]:
        assert torch.equal(outputs[0], other)


def a_shared_batch(page_size=1):
    """Two requests of 40 tokens of which 32 are one prefix, and the pages that only they hold."""
    pages = torch.randperm(60, generator=torch.Generator().manual_seed(2)) + 1
    prefix, own = 32 // page_size, 8 // page_size
    one = torch.cat([pages[:prefix], pages[prefix : prefix + own]])
    two = torch.cat([pages[:prefix], pages[prefix + own : prefix + 2 * own]])
    spares = torch.stack([one[-1], two[-1]])[None]
    return make_batch([one, two], [40, 40], spares, page_size, "cpu")


def test_a_shared_prefix_has_one_copy_and_is_found_again():
    pool = pool_of(64)
    strategy = parse("hot_set(rows=60)")
    step = DecodeStep(strategy, pool, a_shared_batch(), 4, backend="reference")
    hot = strategy.state(step)
    assert (hot.hits, hot.misses, hot.evicted) == (0, 32 + 8 + 8, 0)
    step.step()
    assert output_error(step, 0) < 6e-3 and output_error(step, 1) < 6e-3
    # One request leaves; another comes with the same prefix and eight tokens of its own.
    batch = a_shared_batch()
    again = DecodeStep(strategy, pool, batch, 4, backend="reference")
    assert strategy.state(again) is hot
    assert (hot.hits, hot.misses) == (48, 48), "nothing was cast anew"
    again.step()
    assert output_error(again, 1) < 6e-3
    # A long third one takes the places of the two, the least recently asked for first.
    other = torch.arange(1, 61)
    hot.hold(other)
    assert hot.evicted == len(set(batch.live_slots.tolist()) - set(other.tolist())) == 0
    with pytest.raises(DoesNotFit, match="up to 60 live rows"):
        hot.hold(torch.arange(1, 62))


def test_a_preempted_request_comes_back_to_other_slots():
    pool = pool_of(64)
    strategy = parse("hot_set(rows=50)")
    batch = pool.batch(1, 30)
    step = DecodeStep(strategy, pool, batch, 4, backend="reference")
    step.step()
    wanted = step.out.clone()
    saved = pool.save(batch.live_slots)
    pool.release(batch)
    pool.allocate(9)
    batch = pool.batch(1, 30)
    pool.load(batch.live_slots, saved)  # over slots that may be hot, for another row
    pool.check_integrity()
    again = DecodeStep(strategy, pool, batch, 4, backend="reference")
    again.step()
    assert torch.equal(again.out, wanted)


def test_a_shared_shadow_casts_a_shared_row_once():
    pool = pool_of(64)
    step = DecodeStep(parse("shared_shadow"), pool, a_shared_batch(), 4, backend="reference")
    counted = count_bytes(step)
    assert counted["cast"] == 2 * 1728 * 48, "48 different rows of 80"
    assert counted["attention"] == 2 * 1152 * 80
    assert output_error(step, 0) < 6e-3


def test_what_writes_past_the_pool_is_found():
    pool = pool_of()
    hot = hot_rows(pool, 20)
    hot.hold(torch.arange(5, 15))
    pool.fp8[1].view(torch.uint8)[9, 3] ^= 1
    with pytest.raises(WrongResult, match="Layer 1, slot 9: its hot row"):
        pool.check_integrity()
    pool = pool_of()
    hot = hot_rows(pool, 20)
    hot.hold(torch.arange(5, 15))
    pool.followers.clear()  # a write path that skips them
    pool.write_unchecked(0, torch.tensor([7]), some_rows(1, 3))
    with pytest.raises(WrongResult, match="Layer 0, slot 7"):
        hot.check()


def test_it_is_measured_over_several_loads_of_one_pool():
    bench = measure.Bench(TINY, heads=4, device=torch.device("cpu"), budget_s=0.02)
    loads = [(2, 16), (1, 8), (4, 16)]
    found = list(measure.measure(bench, [parse("hot_set(rows=64)")], [256], loads))
    assert [s.setting.load.concurrency for s in found] == [2, 1, 4]
    for s in found:
        assert s.error < 6e-3 and s["write"].bytes == 2 * 1728 * s.setting.load.concurrency
        assert not sum(p.bytes for p in s.phases if p.name == "cast")
        assert s.kept_bytes == 2 * 257 * 576 + 2 * 65 * 1152
    with pytest.raises(DoesNotFit, match=r"64 live rows for hot_set\(rows=32\)"):
        list(measure.measure(bench, [parse("hot_set(rows=32)")], [256], [(4, 16)]))


def test_they_are_options_and_no_columns():
    assert set(OPTIONS) == {"hot_set", "shared_shadow"} and not OPTIONS.keys() & STRATEGIES.keys()
    colours = [kind().tag.colour for kind in (*STRATEGIES.values(), *OPTIONS.values())]
    assert len(set(colours)) == len(colours)
    report = published_deployment()
    assert {c.strategy.label for c in budget(report).capacities} <= set(STRATEGIES)


def test_capacity_and_time():
    """The buffer is paid once; a step reads as the shadow's and writes as much."""
    report, load = published_deployment(), Load(16, 8192)
    glm = load_model("glm-5")
    chosen = [parse("hot_set"), parse("shared_shadow"), parse("gather_cast")]
    plan = budget(report, load, chosen)
    hot, shared, gather = (plan.of(s) for s in chosen)
    left = 25.49 * 2**30 - 78 * 131_073 * 1152
    assert hot.tokens == int(left) // (78 * 708) // 64 * 64
    assert shared.tokens == gather.tokens and shared.scratch_gib == gather.scratch_gib
    step = predict_at("hot_set", at("glm-5", 400_000, 16, 8192), "h200")
    full = predict_at("shadow", at("glm-5", 400_000, 16, 8192), "h200")
    assert step["attention"].ms == pytest.approx(full["attention"].ms)
    # Torch's ops follow a write (recorded on the H200 with DSA): more than the shadow's one launch.
    assert step["write"].bytes == full["write"].bytes and step["write"].ms > 3 * full["write"].ms
    assert step.kept_bytes == 78 * (576 * 400_001 + 1152 * 131_073)
    casts = predict_at("gather_cast", at("glm-5", 400_000, 16, 8192), "h200")["cast"].ms
    assert predict_at("shared_shadow", at("glm-5", 400_000, 16, 8192), "h200")[
        "cast"
    ].ms == pytest.approx(casts)
    rest = anchored("rtx6kpro", report)
    # 131,072 rows are 16 requests of 8,192 tokens, however many the FP8 pool would hold.
    assert answer("hot_set", report, Load(64, 8192), rest).running == 16
    assert (
        "131,072 tokens do not hold"
        in answer("hot_set", report, replace(load, concurrency=1, context=140_000), rest).reason
    )
    with pytest.raises(DoesNotFit, match="140,000 live rows"):
        predict_at("hot_set", at("glm-5", 400_000, 1, 140_000), "h200")
    assert parse("shared_shadow(layers=9)").fixed_bytes(glm) == 9 * 131_073 * 1152


def test_a_server_runs_as_many_tokens_as_its_hot_rows():
    """In the simulation the hot rows are its pool: at most 32 of 64 requests run at once."""
    named = ["hot_set", "gather_cast"]
    hot, gather = contenders(published_deployment(), named)
    assert (hot.capacity_tokens, gather.capacity_tokens) == (131_072, 495_616)
    traffic = closed_loop(64, 64, fixed(4000, 2000))
    most = [max(simulate(engine(c), traffic).log.running) for c in (hot, gather)]
    assert 131_072 // 6000 <= most[0] <= 131_072 // 4000 and most[1] == 64

"""Every strategy over one matrix: bytes by formula, names, outputs against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv_lab import kernels
from shadowkv_lab.errors import LabError, OutOfRange, UnknownName, WrongResult
from shadowkv_lab.kernels import reference
from shadowkv_lab.model import load_model
from shadowkv_lab.pool import Pool
from shadowkv_lab.sources import synthetic
from shadowkv_lab.strategies import OPTIONS, STRATEGIES, FullCast, Moves, parse, parse_list
from shadowkv_lab.strategies.base import colour_of
from shadowkv_lab.strategies.check import check, count_bytes, make_step, output_error, require_right
from shadowkv_lab.strategies.step import DecodeStep
from tests.own_strategy import hot_set

P, L, R = 495_616, 8_192, 4


def runnable(name: str, device: torch.device) -> bool:
    """Whether a strategy's kernels are on this machine; flashinfer's own FP8 is SM90 only."""
    try:
        kernels.attention(parse(name).reads, device)
        return not (parse(name).needs and kernels.triton_problem(device))
    except LabError:
        return False


def step_of(tiny, name, device, *, context=37, page_size=1, tokens=256, reads="dense"):
    strategy = parse(name)
    pool = Pool(
        tiny,
        tokens,
        strategy.storage(tiny),
        device=device,
        order="random",
        page_size=page_size,
        mirror=getattr(strategy, "mirror", "exact"),
        append=kernels.mover("append", device),
        index=reads == "dsa",
        write_keys=kernels.indexing(device).write,
    )
    synthetic.fill(pool, seed=3)
    synthetic.fill_index(pool, seed=3)
    return DecodeStep(strategy, pool, pool.batch(3, context), heads=8, reads=reads)


VARIANTS = ["shadow(layers=1)", "shadow(layers=0)", "shadow(mirror=original)"]
PARTIAL = ["hot_set(rows=300)", "shared_shadow", "shared_shadow(layers=1,rows=300)"]


@pytest.mark.parametrize("name", [*STRATEGIES, *VARIANTS, *PARTIAL])
def test_a_strategy_is_right_and_moves_the_bytes_that_it_says(name):
    """Float64 at two page sizes, the byte meter, and a restored request: all by `check`."""
    found = dict(check(parse(name)).found)
    assert "e-03" in found["worst relative error against float64"]


def test_the_byte_meter_counts_by_hand(tiny):
    """2 layers, 513 slots, 120 live tokens, 3 new ones, rows of 576 values."""
    for name, counted in (
        ("full_cast", (2 * 1728 * 513, 2 * 1152 * 120, 2 * 576 * 3)),
        ("shadow", (0, 2 * 1152 * 120, 2 * 1728 * 3)),
        ("fused_fp8", (0, 2 * 576 * 120, 2 * 576 * 3)),
    ):
        assert tuple(count_bytes(make_step(parse(name), tiny)).values()) == counted


def test_a_users_own_strategy_has_its_place():
    with hot_set() as HotSet:
        assert parse("hot_set(rows=2048)") == HotSet(2048)
        tag = HotSet(2048).tag
        assert (tag.label, tag.title) == ("hot_set(rows=2048)", "hot set (rows=2048)")
        assert tag.colour not in {kind().tag.colour for kind in list(STRATEGIES.values())[:-1]}
        assert list(STRATEGIES)[-1] == "hot_set"
        text = str(check(HotSet()))
        assert "page size 64" in text
        glm = load_model("glm-5")
        assert HotSet(131_072).fixed_bytes(glm) == 78 * 131_072 * 1152
        with hot_set() as again:  # the cell is run once more
            assert parse("hot_set") == again()
    assert parse("hot_set") == OPTIONS["hot_set"]()  # the lab's own, once the cell's is gone


def test_a_wrong_strategy_of_ones_own_is_refused():
    with hot_set() as HotSet:

        class Forgetful(HotSet):
            """Does not follow the batch to another last page."""

            def advance(self, step, turn):
                pass

        with pytest.raises(WrongResult, match="off by"):
            check(Forgetful())

        class Boastful(HotSet):
            """Says that its writes are free."""

            def moves(self, model, P, L, R):
                return Moves(0, model.row_bytes("bf16") * L, 0)

        with pytest.raises(WrongResult, match=r"its write moves 10,368 bytes, and `moves` says 0"):
            check(Boastful())
        with pytest.raises(OutOfRange, match="hot set of 8 rows"):
            check(HotSet(8))
    with pytest.raises(OutOfRange, match="defined already, by Shadow"):

        class Other(FullCast):
            name = "shadow"


def test_colours_do_not_run_out():
    assert len({colour_of(i) for i in range(36)}) == 36


def test_published_traffic():
    """The GLM-5 report: 856.4 MB per layer, 66.8 GB per step; sglang #35291: 226.5 MB, 13.82 GB."""
    glm, r1 = load_model("glm-5"), load_model("deepseek-r1")
    full = parse("full_cast")
    assert full.moves(glm, P, 1, 1).cast_bytes / 1e6 == pytest.approx(856.4, abs=0.05)
    assert full.step_moves(glm, P, 1, 1).cast_bytes / 1e9 == pytest.approx(66.8, abs=0.05)
    assert full.moves(r1, 131_072, 1, 1).cast_bytes / 1e6 == pytest.approx(226.5, abs=0.05)
    assert full.step_moves(r1, 131_072, 1, 1).cast_bytes / 1e9 == pytest.approx(13.82, abs=0.005)


def test_a_shadow_of_some_layers_is_full_cast_in_the_others():
    glm, partly = load_model("glm-5"), parse("shadow(layers=26)")
    assert partly.token_bytes(glm) == 26 * 1728 + 52 * 576
    assert partly.step_moves(glm, P, L, R).cast_bytes == 52 * 1728 * P
    assert partly.scratch_bytes(glm, P, L) == 1152 * P
    assert parse("shadow").scratch_bytes(glm, P, L) == 0
    assert parse("shadow(layers=0)").step_moves(glm, P, L, R) == parse("full_cast").step_moves(
        glm, P, L, R
    )


def test_names():
    for text in ("full_cast", "shadow(layers=26)", "shadow(layers=26,mirror=original)"):
        assert parse(text).label == text
    assert [s.label for s in parse_list("shadow(layers=26,mirror=original),full_cast")] == [
        "shadow(layers=26,mirror=original)",
        "full_cast",
    ]
    assert parse(" shadow ( layers = 26 ) ").layers == 26
    with pytest.raises(UnknownName, match="Did you mean 'shadow'"):
        parse("shdow")
    with pytest.raises(UnknownName, match="option of shadow 'layer'"):
        parse("shadow(layer=3)")
    for wrong in (
        "shadow(layers=x)",
        "shadow(layers=-1)",
        "shadow(mirror=rough)",
        "shadow(layers=True)",
    ):
        with pytest.raises(OutOfRange):
            parse(wrong)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(
    "name", [*STRATEGIES, "shadow(layers=1)", "shadow(mirror=original)", *PARTIAL]
)
def test_output_against_float64(tiny, name, device, page_size):
    """The worst (request, head) of every layer, over the rows that the strategy stores."""
    if not runnable(name, device):
        pytest.skip(f"{name} cannot run on {device.type}")
    step = step_of(tiny, name, device, page_size=page_size, context=70, tokens=1024)
    step.advance(1)
    step.step()
    for layer in range(2):
        stored = (
            step.pool.bf16[layer] if step.pool.bf16[layer] is not None else step.pool.fp8[layer]
        )
        exact = by_hand(step, layer, stored)
        error = (step.out[layer].double().cpu() - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert error.max() < 6e-3, "BF16 output and probabilities"


def by_hand(step, layer, stored):
    """Float64 attention written out head by head, over the page table."""
    batch, scale = step.batch, 256**-0.5
    out = torch.empty(step.out[layer].shape, dtype=torch.float64)
    rows = stored.double().cpu()
    for b, n in enumerate(batch.lens):
        pages = batch.pages[batch.indptr[b] : batch.indptr[b + 1]].long().cpu()
        slots = [
            int(pages[t // batch.page_size]) * batch.page_size + t % batch.page_size
            for t in range(n)
        ]
        latent, rope = rows[slots, :512], rows[slots, 512:]
        for h in range(out.shape[1]):
            scores = latent @ step.q_nope[layer, b, h].double().cpu()
            scores = (scores + rope @ step.q_pe[layer, b, h].double().cpu()) * scale
            weights = (scores - scores.max()).exp()
            out[b, h] = (weights / weights.sum()) @ latent
    return out


def test_shadow_equals_full_cast_bit_for_bit(tiny, device):
    """For every write path, over random sequences of allocate, write, move, load and free."""

    @given(data=st.data())
    @settings(max_examples=12, deadline=None)
    def run(data):
        seed, context = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 40))
        page_size = data.draw(st.sampled_from([1, 4]))
        actions = data.draw(
            st.lists(st.sampled_from(["write", "move", "load", "free"]), max_size=6)
        )
        outputs = []
        for name in ("full_cast", "shadow"):
            strategy = parse(name)
            pool = Pool(
                tiny,
                128,
                strategy.storage(tiny),
                device=device,
                page_size=page_size,
                append=kernels.mover("append", device),
            )
            synthetic.fill(pool, seed)
            noise = torch.Generator().manual_seed(seed)
            one, two = pool.allocate(8), pool.allocate(8)
            for action in actions:
                if action == "write":
                    new = (torch.randn(8, 576, generator=noise) * 300).bfloat16().to(device)
                    pool.write(1, one, new)
                elif action == "move":
                    pool.move(one, two)
                elif action == "load":
                    pool.load(one, pool.save(two))
                else:
                    pool.free(one)
                    one = pool.allocate(8)
            pool.free(one)  # the batch may now be given slots that were written above
            pool.free(two)
            step = DecodeStep(
                strategy, pool, pool.batch(2, context), heads=4, seed=seed, backend="reference"
            )
            step.step()
            outputs.append(step.out)
        assert not outputs[0].isnan().any()
        assert torch.equal(outputs[0].view(torch.int16), outputs[1].view(torch.int16))

    run()


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 64])
def test_shadow_equals_full_cast_with_flashinfer(tiny, page_size):
    outputs = []
    for name in ("full_cast", "shadow", "shadow(layers=1)"):
        step = step_of(
            tiny, name, torch.device("cuda:0"), page_size=page_size, context=300, tokens=2048
        )
        step.batch.advance(1)
        step.step()
        outputs.append(step.out.view(torch.int16))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*STRATEGIES, "hot_set(rows=2000)", "shared_shadow"])
def test_a_captured_step_replays_on_changed_contents(tiny, name):
    """Graph replay after `advance` and new rows equals an eager step: no stale index, no sync."""
    from shadowkv_lab.steps import timing

    device = torch.device("cuda:0")
    if not runnable(name, device):
        pytest.skip(f"{name} cannot run on this GPU")
    step = step_of(tiny, name, device, context=500, tokens=4096)
    replay = timing.capture(step.step, device)
    step.advance(5)
    step.rows.normal_()
    step.q_nope.normal_()
    step.out.fill_(float("nan"))
    replay()
    replayed = step.out.clone()
    step.out.fill_(float("nan"))
    step.step()
    assert torch.equal(replayed.view(torch.int16), step.out.view(torch.int16))


def test_synthetic_rows_look_like_latents(tiny):
    pool = Pool(tiny, 512, [("bf16",)] * 2)
    synthetic.fill(pool, seed=1)
    latent, rope = pool.bf16[0][:, :512].double(), pool.bf16[0][:, 512:].double()
    assert latent.pow(2).mean(1).sqrt().sub(1).abs().max() < 5e-3, "RMS-normalised"
    channel = latent.pow(2).mean(0).sqrt()
    assert channel.max() > 8 * channel.median(), "heavy-tailed channels"
    assert rope.pow(2).mean().sqrt() > 2, "the rope part is larger"
    again, other = (Pool(tiny, 512, [("fp8", "bf16")] * 2) for _ in range(2))
    synthetic.fill(again, seed=1)
    synthetic.fill(other, seed=2)
    assert torch.equal(
        reference.to_fp8(pool.bf16[1]).view(torch.uint8), again.fp8[1].view(torch.uint8)
    )
    assert not torch.equal(other.bf16[0], again.bf16[0])
    assert not torch.equal(again.bf16[0], again.bf16[1]), "layers differ"


def test_queries_in_fp8_are_an_option_and_checked_as_such(tiny, monkeypatch):
    """Outputs of rounded queries pass, whatever they are off; those of the queries themselves and
    of others do not."""
    strategy = parse("fused_fp8(query=fp8)")
    assert strategy.label == "fused_fp8(query=fp8)" and parse("fused_fp8").label == "fused_fp8"
    with pytest.raises(UnknownName, match="fp8"):
        parse("fused_fp8(query=int8)")
    pool = Pool(tiny, 256, strategy.storage(tiny))
    synthetic.fill(pool)
    step = DecodeStep(strategy, pool, pool.batch(2, 40), 4, backend="reference")
    step.step()
    monkeypatch.setattr(DecodeStep, "backend", "lab_fused_fp8(query=fp8)")
    q = torch.cat([step.q_nope[0], step.q_pe[0]], -1).double()
    top = 2.0 ** (q.abs().amax(-1, keepdim=True).log2().floor() - 7)
    rounded = (q / top).float().to(torch.float8_e4m3fn).double() * top
    for b in range(2):
        rows = pool.fp8[0].view(torch.uint8)[step.batch.slots(b)].view(pool.fp8[0].dtype).double()
        weights = torch.softmax(rounded[b] @ rows.T * tiny.softmax_scale, -1)
        step.out[0][b] = weights @ rows[:, : tiny.kv_lora_rank]
    error = output_error(step, 0)
    assert error > 1e-2, "rounding costs more than a kernel's own error"
    require_right(step, error)
    step.out[0][1] *= 1.05
    with pytest.raises(WrongResult, match="rounded queries"):
        output_error(step, 0)

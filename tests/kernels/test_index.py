"""The DSA index against a formula written out in numpy, and the Triton kernel against it."""

import numpy as np
import pytest
import torch

from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.kernels import index
from shadowkv_lab.kernels.reference import FP8
from shadowkv_lab.load import make_batch

HEADS, WIDTH = 32, 128
# Every e4m3 code by its definition: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity.
CODES = np.array(
    [
        (-1) ** (c >> 7)
        * (
            (c & 7) / 8 * 2.0**-6
            if c >> 3 & 15 == 0
            else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3 & 15) - 7)
        )
        for c in range(256)
    ]
)
CODES[[0x7F, 0xFF]] = np.nan


def a_batch(lens, page_size, device="cpu", seed=0):
    """Requests over pages that lie at random, page 0 left alone."""
    counts = [-(-n // page_size) for n in lens]
    ids = torch.randperm(sum(counts) + 5, generator=torch.Generator().manual_seed(seed))[
        : sum(counts)
    ]
    return make_batch(
        list((ids + 1).split(counts)), lens, ids[None, : len(lens)] + 1, page_size, device
    )


def an_index(batch, device="cpu", seed=0, heads=HEADS):
    """Queries, weights and pages whose every slot holds a key."""
    noise = torch.Generator().manual_seed(seed)
    slots = int(batch.live_slots.max()) + 1
    kept = index.pages(slots, WIDTH, device)
    keys = torch.randn(slots, WIDTH, generator=noise) * torch.rand(slots, 1, generator=noise) * 9
    index.write(kept, torch.arange(slots, device=device), keys.bfloat16().to(device))
    q = torch.randn(batch.concurrency, heads, WIDTH, generator=noise).bfloat16().to(device)
    weights = torch.randn(batch.concurrency, heads, generator=noise).to(device)
    return q, weights, kept


def by_hand(stored, weights, kept, batch):
    """The public formula in float64, byte by byte: page, place, codes, scale, head by head.

    `stored` e4m3 queries; `weights` hold every factor that does not depend on the key.
    """
    raw, codes = kept.cpu().numpy(), CODES[stored.cpu().view(torch.uint8).numpy()]
    found = []
    for b, n in enumerate(batch.lens):
        first, one = int(batch.indptr[b]), []
        for t in range(n):
            slot = int(batch.pages[first + t // batch.page_size]) * batch.page_size
            slot += t % batch.page_size
            page, place = raw[slot // 64], slot % 64
            key = CODES[page[place * WIDTH : (place + 1) * WIDTH]]
            at = 64 * WIDTH + 4 * place
            key = key * float(np.frombuffer(page[at : at + 4].tobytes(), np.float32)[0])
            dots = [max(0.0, float(codes[b, h] @ key)) for h in range(codes.shape[1])]
            one.append(float(np.dot(dots, weights[b].double().cpu().numpy())))
        found.append(np.array(one))
    return found


def test_a_page_is_64_keys_and_then_64_scales():
    kept = index.pages(130, WIDTH)
    assert kept.shape == (3, 64 * 132) and kept.dtype == torch.uint8
    key = torch.linspace(-3, 3, WIDTH).bfloat16()
    index.write(kept, torch.tensor([64 + 7]), key[None])
    page = kept[1].numpy()
    scale = np.frombuffer(page[64 * WIDTH + 28 : 64 * WIDTH + 32].tobytes(), np.float32)[0]
    assert scale == np.float32(np.float32(3.0) / np.float32(448))
    back = CODES[page[7 * WIDTH : 8 * WIDTH]] * scale
    # e4m3 has four significant bits, and its smallest step is 2^-9 of the scale.
    exact = key.double().numpy()
    assert (np.abs(back - exact) <= np.abs(exact) / 16 + scale * 2.0**-10).all()
    page[7 * WIDTH : 8 * WIDTH] = 0
    page[64 * WIDTH + 28 : 64 * WIDTH + 32] = 0
    assert not kept.any(), "and nothing else was written"


def test_every_code_is_what_the_oracle_takes_it_for():
    ours = torch.arange(256, dtype=torch.uint8).view(FP8).double().numpy()
    assert np.array_equal(ours, CODES, equal_nan=True)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("heads", [32, 64])
def test_scores_against_the_formula_in_float64(page_size, heads):
    batch = a_batch([130, 1, 64, 77], page_size)
    q, projected, kept = an_index(batch, heads=heads)
    stored, weights = index.query(q, projected, torch.float64)
    # The weights, from the formula: w_h = weights_proj * H^-0.5, the scale D^-0.5, q's own scale.
    scale = q.float().abs().amax(-1).numpy() / np.float32(448)
    own = projected.numpy().astype(float) * heads**-0.5 * WIDTH**-0.5 * scale
    assert np.allclose(weights.numpy(), own, rtol=1e-6)
    out = torch.full((4, 130), float("-inf"), dtype=torch.float64)
    index.scores(stored, weights, kept, batch, out)
    for b, exact in enumerate(by_hand(stored, weights, kept, batch)):
        n = len(exact)
        assert np.allclose(out[b, :n].numpy(), exact, rtol=1e-12, atol=1e-12)
        assert (out[b, n:] == float("-inf")).all()


def test_the_highest_are_chosen_and_the_rest_is_minus_one():
    found = torch.full((3, 50), float("-inf"))
    noise = torch.Generator().manual_seed(1)
    for b, n in enumerate((50, 16, 3)):
        found[b, :n] = torch.randn(n, generator=noise)
    for topk in (1, 16, 64):
        places = index.choose(found, topk)
        assert places.shape == (3, topk) and places.dtype == torch.int32
        for b, n in enumerate((50, 16, 3)):
            best = np.argsort(-found[b, :n].numpy(), kind="stable")[:topk]
            assert places[b].tolist() == [*best, *[-1] * (topk - len(best))]


def test_a_score_may_be_negative_and_a_head_may_count_against_a_token():
    """relu is of each head's product, not of the sum."""
    batch = a_batch([2], 1)
    kept = index.pages(int(batch.live_slots.max()) + 1, WIDTH)
    keys = torch.zeros(2, WIDTH).bfloat16()
    keys[0, 0], keys[1, 1] = 2.0, 2.0
    index.write(kept, batch.live_slots, keys)
    q = torch.zeros(1, 2, WIDTH)
    q[0, 0, 0], q[0, 1, 1] = 1.0, -1.0  # the second head's product with the second key is negative
    stored, weights = index.query(q, torch.tensor([[-1.0, 5.0]]), torch.float64)
    out = torch.empty(1, 2, dtype=torch.float64)
    index.scores(stored, weights, kept, batch, out)
    assert out[0, 0] == pytest.approx(-2 * 128**-0.5 * 2**-0.5) and out[0, 1] == 0


def run_kernel(lens, page_size, device, heads=HEADS):
    triton_kernel = pytest.importorskip("shadowkv_lab.kernels.indexer")
    batch = a_batch(lens, page_size, device)
    q, projected, kept = an_index(batch, device, heads=heads)
    stored, weights = index.query(q, projected)
    out = torch.full((len(lens), max(lens) + 3), float("-inf"), device=device)
    triton_kernel.scores(stored, weights, kept, batch, out)
    return batch, out.cpu(), by_hand(stored, weights, kept, batch)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("heads", [32, 64])
def test_the_kernel_gives_the_scores_and_leaves_the_rest(device, page_size, heads):
    lens = [300, 1, 128, 65]
    _, out, exact = run_kernel(lens, page_size, device, heads)
    for b, one in enumerate(exact):
        size = np.abs(one).max()
        assert np.abs(out[b, : lens[b]].numpy() - one).max() < 1e-3 * size
        assert (out[b, lens[b] :] == float("-inf")).all()


@pytest.mark.parametrize("count", [1, 70])
def test_the_kernel_writes_keys_as_the_reference_does(device, count):
    """Bit for bit, page and scale, a key of zeros among them.

    On a CPU the keys are those that e4m3 holds exactly: Triton's interpreter rounds FP8 wrongly.
    """
    triton_kernel = pytest.importorskip("shadowkv_lab.kernels.indexer")
    noise = torch.Generator().manual_seed(2)
    keys = torch.randn(count, WIDTH, generator=noise) * torch.logspace(-6, 4, count)[:, None]
    if device.type == "cpu":
        codes = torch.randint(0, 0x7F, (count, WIDTH), generator=noise, dtype=torch.uint8)
        codes[:, 0] = 0x7E  # 448: the scale is a power of two
        keys = codes.view(FP8).float() * 2.0 ** torch.arange(count)[:, None].remainder(9)
    keys[-1] = 0.0
    keys, slots = keys.bfloat16(), torch.randperm(200, generator=noise)[:count]
    wanted, kept = index.pages(200, WIDTH), index.pages(200, WIDTH, device)
    index.write(wanted, slots, keys)
    triton_kernel.write(kept, slots.to(device), keys.to(device))
    assert torch.equal(kept.cpu(), wanted) and wanted.any()
    with pytest.raises(OutOfRange, match="The keys"):
        triton_kernel.write(kept, slots.to(device), keys.half().to(device))


@pytest.mark.parametrize("page_size", [1, 64])
def test_the_kernel_takes_the_slots_of_the_highest(device, page_size):
    """Requests longer and shorter than what is chosen; the oracle sorts."""
    triton_kernel = pytest.importorskip("shadowkv_lab.kernels.indexer")
    for lens, topk in (([90, 7, 33], 16), ([1500, 1400], 1100)):
        batch, short = a_batch(lens, page_size, device), [min(topk, n) for n in lens]
        found = torch.full((len(lens), max(lens)), float("-inf"))
        for b, n in enumerate(lens):
            found[b, :n] = torch.randn(n, generator=torch.Generator().manual_seed(b))
        found, chosen = found.to(device), a_batch(short, 1, device)
        for take in (triton_kernel.take, index.take):
            chosen.pages.fill_(-1)
            take(found, batch, chosen)
            for b, n in enumerate(lens):
                best = np.argsort(-found[b, :n].cpu().numpy())[:topk]
                start = chosen.token_offsets()[b]
                taken = chosen.pages[start : start + short[b]].tolist()
                assert sorted(taken) == sorted(batch.slots(b).cpu().numpy()[best].tolist())


@pytest.mark.gpu
def test_the_kernel_chooses_as_float64_does_at_full_size():
    """2,048 of 20,000 tokens: whatever differs is tied with the last chosen."""
    _, out, exact = run_kernel([20_000, 9_000], 64, torch.device("cuda:0"))
    places = index.choose(out, 2048)
    for b, one in enumerate(exact):
        chosen = places[b].numpy()
        edge = np.sort(one)[-2048]
        assert len(set(chosen.tolist())) == 2048
        assert one[chosen].min() > edge - 1e-3 * np.abs(one).max()


def test_wrong_tensors_are_refused():
    triton_kernel = pytest.importorskip("shadowkv_lab.kernels.indexer")
    batch = a_batch([20, 20], 1)
    q, projected, kept = an_index(batch)
    stored, weights = index.query(q, projected)
    out = torch.empty(2, 20)
    wrong = (
        (q, weights, kept, batch, out),
        (stored, weights.double(), kept, batch, out),
        (stored, weights, kept[:, :-4], batch, out),
        (stored, weights, kept, batch, out[:, :19].contiguous()),
        (stored[:, :8].contiguous(), weights[:, :8].contiguous(), kept, batch, out),
    )
    for tensors in wrong:
        with pytest.raises(OutOfRange):
            triton_kernel.scores(*tensors)

"""The FP8 decode against float64: interpreted on a CPU, and on a GPU over hard cases."""

import math

import pytest
import torch

pytest.importorskip("triton")

from shadowkv_lab.errors import CannotRun, OutOfRange, UnknownName
from shadowkv_lab.kernels import attention, decode, launch
from shadowkv_lab.kernels.reference import FP8, in_fp8, to_fp8
from shadowkv_lab.load import make_batch

SCALE = 256**-0.5


def batch_of(lens, device, page_size=1, seed=0):
    """Requests over random, disjoint pages, one page left free at the start (the dummy)."""
    counts = [-(-n // page_size) for n in lens]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1
    pages = list(order.split(counts))
    spares = torch.stack([p[-1] for p in pages])[None, :]
    return make_batch(pages, list(lens), spares, page_size, device), (sum(counts) + 1) * page_size


def exact(q_nope, q_pe, kv, batch, scale=1.0, scales=None, queries=1):
    """Float64 attention written out, over the dequantised rows; each query token sees the tokens
    up to itself."""
    rows = kv.double()
    if scales is None:
        rows = rows * scale
    else:
        rows[:, :512] *= scales.double().repeat_interleave(128, 1)
    out, start = [], 0
    for b, n in enumerate(batch.lens):
        k = rows[batch.live_slots[start : start + n]]
        start += n
        logits = (q_nope[b].double() @ k[:, :512].T + q_pe[b].double() @ k[:, 512:].T) * SCALE
        heads = len(logits) // queries
        for i in range(queries):
            logits[i * heads : (i + 1) * heads, n - queries + 1 + i :] = -math.inf
        out.append(torch.softmax(logits, -1) @ k[:, :512])
    return torch.stack(out)


def worst(out, wanted):
    """Largest relative L2 error of a (request, head); infinite where an output is not finite."""
    error = (out.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return float(error.nan_to_num(nan=math.inf).max())


def check(q_nope, q_pe, kv, batch, row=None, queries=1, **scales):
    """The kernel's own error in float32, and that its BF16 output adds no more than rounding."""
    wanted = exact(q_nope, q_pe, kv, batch, queries=queries, **scales)
    kernel, heads = decode.FusedDecode(), q_nope.shape[1] // queries
    kernel.plan(batch, heads, SCALE, queries=queries, scaled="scales" in scales, row=row)
    out = torch.full(q_nope.shape, float("nan"), device=q_nope.device)
    kernel.run(q_nope, q_pe, kv, out, **scales)
    assert worst(out, wanted) < 6e-4, "float32 output: FP16 weights, exact rows, exact queries"
    if q_nope.is_cuda:  # the interpreter does not round to BF16
        rounded = torch.full_like(q_nope, float("nan"))
        kernel.run(q_nope, q_pe, kv, rounded, **scales)
        # Rounding a vector that one value rules is alone off by up to 3.9e-3.
        floor = worst(wanted.bfloat16(), wanted)
        assert worst(rounded, wanted) <= max(3e-3, floor + 6e-4)
    return kernel


def random_case(lens, heads, device, page_size=1, seed=0, tail=0.0, size=1.0):
    batch, slots = batch_of(lens, device, page_size, seed)
    noise = torch.Generator().manual_seed(seed)
    gains = torch.exp(torch.randn(576, generator=noise) * tail)
    kv = to_fp8(torch.randn(slots, 576, generator=noise) * gains)
    q = torch.randn(len(lens), heads, 576, generator=noise) * size
    q = q.bfloat16().to(device)
    return q[..., :512].contiguous(), q[..., 512:].contiguous(), kv.to(device), batch


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("heads", [8, 16])
def test_random_rows_and_lengths(device, heads, page_size):
    """Lengths that are a multiple of nothing, more items than one, page tables of both sizes."""
    check(*random_case([1, 37, 70, 16], heads, device, page_size))


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("tile", [8, 16])
def test_pair_kernel(device, tile, page_size):
    """The same, and hard cases, by the kernel that keeps FP8 in shared memory."""
    row = launch.LaunchRow(128, "many", tile, 32, 4, 0, False, 4, "test", stages=2, kernel="pairs")
    q_nope, q_pe, kv, batch = random_case([1, 37, 170, 32], 8, device, page_size, tail=2.0)
    check(q_nope, q_pe, kv, batch, row=row)
    check(q_nope * 0, q_pe * 0, kv, batch, row=row)
    check(q_nope * 1e30, q_pe * 1e30, kv, batch, row=row)
    scales = torch.exp(torch.randn(len(kv), 4, generator=torch.Generator().manual_seed(1)) * 4)
    check(q_nope, q_pe, kv, batch, row=row, scales=scales.to(device))


def packed_rows(count, device, seed=0):
    """Rows of 656 bytes, written field by field, and what they say in float64."""
    noise = torch.Generator().manual_seed(seed)
    latent = to_fp8(torch.randn(count, 512, generator=noise) * 3)
    scales = torch.exp(torch.randn(count, 4, generator=noise) * 3)
    rope = (torch.randn(count, 64, generator=noise) * 4).bfloat16()
    parts = [part.view(torch.uint8) for part in (latent, scales, rope)]
    rows = torch.cat([latent.double() * scales.double().repeat_interleave(128, 1), rope], 1)
    return torch.cat(parts, 1).to(device), rows.to(device)


@pytest.mark.parametrize("kernel", ["words", "pairs"])
@pytest.mark.parametrize("tile, page_size, queries", [(8, 1, 1), (16, 64, 1), (16, 64, 2)])
def test_packed_rows(device, kernel, tile, page_size, queries):
    """Rows with their scales and a BF16 rope part inside, read as they lie."""
    row = launch.LaunchRow(128, "many", tile, 32, 4, 2, True, 4, "test", 2, kernel)
    batch, slots = batch_of([1 + queries, 37, 170], device, page_size)
    packed, rows = packed_rows(slots, device)
    noise = torch.Generator().manual_seed(2)
    q = torch.randn(3, 8 * queries, 576, generator=noise).bfloat16().to(device)
    for size in (1.0, 1e30, 1e-30):  # at 1e30 a score's rounding is more than a scale's logarithm
        q_nope, q_pe = q[..., :512].contiguous() * size, q[..., 512:].contiguous() * size
        wanted = exact(q_nope, q_pe, rows, batch, queries=queries)
        out = torch.full(q_nope.shape, float("nan"), device=device)
        decoder = decode.FusedDecode()
        decoder.plan(batch, 8, SCALE, queries=queries, packed=True, row=row)
        decoder.run(q_nope, q_pe, packed, out)
        assert worst(out, wanted) < 6e-4
        decoder.run(q_nope, q_pe, packed.view(FP8), out)
        assert worst(out, wanted) < 6e-4


def test_packed_rows_that_would_be_misread_are_refused(device):
    q_nope, q_pe, kv, batch = random_case([20, 5], 8, device)
    packed, _ = packed_rows(len(kv), device)
    kernel, out = decode.FusedDecode(), torch.zeros_like(q_nope)
    kernel.plan(batch, 8, SCALE)
    with pytest.raises(OutOfRange, match="uint8"):
        kernel.run(q_nope, q_pe, packed, out)
    kernel.plan(batch, 8, SCALE, packed=True)
    with pytest.raises(OutOfRange, match="float8_e5m2"):
        kernel.run(q_nope, q_pe, packed.view(torch.float8_e5m2), out)
    for pool in (kv, packed[:, :655], packed[:-2], packed.repeat(1, 2)[:, ::2]):
        with pytest.raises(OutOfRange):
            kernel.run(q_nope, q_pe, pool, out)
    with pytest.raises(OutOfRange, match="have their own"):
        kernel.run(q_nope, q_pe, packed, out, scales=torch.ones(len(kv), 4, device=device))
    warps = launch.LaunchRow(128, "many", 8, 128, 8, 0, False, 1, "test", 0, "warps")
    with pytest.raises(OutOfRange, match="packed"):
        kernel.plan(batch, 8, SCALE, packed=True, row=warps)
    assert not out.any()


def rounded(q_nope, q_pe):
    """Each head's query in float64 with the mantissa of e4m3, its largest value in [128, 256)."""
    q = torch.cat([q_nope, q_pe], -1).double()
    top = 2.0 ** (q.abs().amax(-1, keepdim=True).log2().floor() - 7)
    q = (q / top).float().to(FP8).double() * top
    return q[..., :512], q[..., 512:]


@pytest.mark.parametrize("kernel", ["words", "pairs"])
@pytest.mark.parametrize("packed", [False, True])
def test_queries_in_fp8(device, kernel, packed):
    """As exact as ever for the rounded queries, of which some lie below e4m3's least normal."""
    row = launch.LaunchRow(128, "many", 8, 32, 4, 2, True, 4, "test", 2, kernel)
    q_nope, q_pe, kv, batch = random_case([70, 5], 8, device, seed=16)
    spread = torch.logspace(0, -5, 8, device=device).bfloat16()[None, :, None]
    q_nope, q_pe = q_nope * spread, q_pe * spread
    q_nope[..., ::2] *= 2.0**-9
    pool, rows = packed_rows(len(kv), device) if packed else (kv, kv.double())
    kernel = decode.FusedDecode(query="fp8")
    kernel.plan(batch, 8, SCALE, packed=packed, row=row)
    out = torch.full(q_nope.shape, float("nan"), device=device)
    kernel.run(q_nope, q_pe, pool, out)
    assert kernel.name == "lab_fused_fp8(query=fp8)"
    assert worst(out, exact(*rounded(q_nope, q_pe), rows, batch)) < 6e-4
    assert worst(out, exact(q_nope, q_pe, rows, batch)) > 1e-3, "which are other queries"
    for ours, wanted in zip(in_fp8(q_nope, q_pe), rounded(q_nope, q_pe), strict=True):
        assert torch.equal(ours, wanted), "the specification rounds alike"


def test_a_query_of_another_type_is_refused():
    with pytest.raises(UnknownName, match="fp8"):
        decode.FusedDecode(query="fp4")


@pytest.mark.parametrize("kernel", ["words", "pairs"])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("queries", [2, 4])
def test_several_query_tokens(device, kernel, page_size, queries):
    """A causal mask among them, where an item holds none of the tokens that one of them sees."""
    row = launch.LaunchRow(128, "many", 16, 16, 4, 4, True, 4, "test", 2, kernel)
    lens = [17, 5, 70, 33]
    q_nope, q_pe, kv, batch = random_case(lens, 8 * queries, device, page_size, seed=13)
    check(q_nope, q_pe, kv, batch, row=row, queries=queries)


def test_fewer_live_tokens_than_query_tokens_are_refused(device):
    *_, batch = random_case([3, 1], 8, device)
    with pytest.raises(OutOfRange, match="2 query tokens of 1"):
        decode.FusedDecode().plan(batch, 8, SCALE, queries=2)


def test_the_door_refuses_what_the_kernel_would_misread(device):
    q_nope, q_pe, kv, batch = random_case([20, 5], 8, device)
    kernel, out = decode.FusedDecode(), torch.zeros_like(q_nope)
    kernel.plan(batch, 8, SCALE)

    def refused(*tensors, **more):
        with pytest.raises(OutOfRange):
            kernel.run(*tensors, **more)

    refused(q_nope.float(), q_pe, kv, out)
    refused(q_nope[:1], q_pe, kv, out)
    refused(q_nope.repeat(1, 1, 2)[..., ::2], q_pe, kv, out)
    refused(q_nope, q_nope, kv, out)
    refused(q_nope, q_pe, kv.view(torch.uint8).view(torch.float8_e5m2), out)
    refused(q_nope, q_pe, kv[:, :512], out)
    refused(q_nope, q_pe, kv[:-1], out)
    refused(q_nope, q_pe, kv, out.half())
    shifted = torch.zeros(kv.numel() + 1, dtype=torch.uint8, device=device)[1:].view(FP8)
    refused(q_nope, q_pe, shifted.view_as(kv), out)
    refused(q_nope, q_pe, kv, out, scales=torch.ones(len(kv), 3, device=device))
    assert not out.any(), "refused before anything is written"


@pytest.mark.parametrize("page_size", [1, 64])
def test_nothing_is_written_beside_the_output(device, page_size):
    """Three heads fill neither a tile nor a block; what lies around the output stays."""
    q_nope, q_pe, kv, batch = random_case([70, 3], 3, device, page_size, seed=14)
    whole = torch.full((4, 3, 512), 7.0, device=device)
    kernel = decode.FusedDecode()
    kernel.plan(batch, 3, SCALE)
    kernel.run(q_nope, q_pe, kv, whole[1:3])
    assert worst(whole[1:3], exact(q_nope, q_pe, kv, batch)) < 6e-4
    assert (whole[[0, 3]] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("tile, heads", [(8, 8), (8, 20), (16, 12), (32, 32), (32, 50)])
def test_warps_kernel(tile, heads, page_size, queries):
    """The CUDA kernel over lengths that fill nothing and hard values."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's own instructions")
    for block, programs in ((16 * tile // 8, 4), (4096, 1)):
        row = launch.LaunchRow(128, "many", tile, block, 8, 0, False, programs, "test", 0, "warps")
        lens = [1000, 3, 700, 4000, 64]
        rows = heads * queries
        q_nope, q_pe, kv, batch = random_case(lens, rows, "cuda", page_size, seed=15, tail=1.5)
        # What nobody may read: beyond a request's last token, in its last page.
        dead = torch.ones(len(kv), dtype=torch.bool, device="cuda")
        dead[batch.live_slots] = False
        kv.view(torch.uint8)[dead] = 0x7F
        check(q_nope, q_pe, kv, batch, row=row, queries=queries)
        check(q_nope * 0, q_pe * 0, kv, batch, row=row, queries=queries)
        check(q_nope * 1e30, q_pe * 1e30, kv, batch, row=row, queries=queries)
        check(q_nope * 4, q_pe * 4, kv, batch, row=row, queries=queries, scale=0.037)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("tile, heads", [(8, 8), (16, 20), (32, 50), (32, 128)])
def test_warps_kernel_with_queries_in_fp8(tile, heads, page_size):
    """Scores of FP8 by wgmma (tiles of 32), and of rounded queries by FP16."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's own instructions")
    row = launch.LaunchRow(128, "many", tile, 128, 8, 0, False, 1, "test", 0, "warps")
    q_nope, q_pe, kv, batch = random_case([1000, 3, 4000], heads, "cuda", page_size, seed=17)
    q_nope[..., ::2] *= 2.0**-9
    kernel = decode.FusedDecode(query="fp8")
    kernel.plan(batch, heads, SCALE, row=row)
    out = torch.full(q_nope.shape, float("nan"), device="cuda")
    kernel.run(q_nope, q_pe, kv, out)
    # Hopper adds FP8 products with about 14 bits.
    least = 2e-3 if tile == 32 else 6e-4
    assert worst(out, exact(*rounded(q_nope, q_pe), kv, batch)) < least


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("lens", [[1000], [40_000], [3000] * 5])
def test_packed_rows_by_the_table(heads, page_size, lens):
    batch, slots = batch_of(lens, "cuda", page_size)
    packed, rows = packed_rows(slots, "cuda")
    q = torch.randn(len(lens), heads, 576, device="cuda").bfloat16()
    q_nope, q_pe = q[..., :512].contiguous(), q[..., 512:].contiguous()
    for query in decode.QUERIES:
        kernel = decode.FusedDecode(query=query)
        kernel.plan(batch, heads, SCALE, packed=True)
        out = torch.full(q_nope.shape, float("nan"), device="cuda")
        kernel.run(q_nope, q_pe, packed, out)
        asked = (q_nope, q_pe) if query == "bf16" else rounded(q_nope, q_pe)
        assert worst(out, exact(*asked, rows, batch)) < 6e-4


@pytest.mark.parametrize("tail", [1.5, 3.0])
def test_heavy_tailed_rows(device, tail):
    check(*random_case([61, 5], 8, device, seed=2, tail=tail))


def test_one_huge_logit(device):
    q_nope, q_pe, kv, batch = random_case([50], 8, device, seed=3)
    slot = batch.live_slots[23]
    kv.view(torch.uint8)[slot] = (
        to_fp8(q_nope[0, 0].repeat(2)[:576].cpu() * 100).view(torch.uint8).to(device)
    )
    check(q_nope * 10, q_pe, kv, batch)


def test_all_equal_logits(device):
    q_nope, q_pe, kv, batch = random_case([67], 8, device, seed=4)
    check(q_nope * 0, q_pe * 0, kv, batch)


@pytest.mark.parametrize("size", [1e5, 1e30, 3e38, 1e-30])
def test_queries_beyond_fp16(device, size):
    """BF16 queries past 65,504 (and far below its least value) stay finite and right."""
    q_nope, q_pe, kv, batch = random_case([40], 8, device, seed=5)
    spread = torch.logspace(0, -3, 8, device=device).bfloat16()[None, :, None]
    q_nope, q_pe = ((q / q.abs().max() * size * spread).bfloat16() for q in (q_nope, q_pe))
    check(q_nope, q_pe, kv, batch)


def test_per_tensor_scale(device):
    check(*random_case([45, 3], 8, device, seed=6), scale=0.037)


def test_per_group_scales(device):
    q_nope, q_pe, kv, batch = random_case([45, 3], 8, device, seed=7)
    scales = torch.exp(torch.randn(len(kv), 4, generator=torch.Generator().manual_seed(1)))
    check(q_nope, q_pe, kv, batch, scales=scales.to(device))


def test_more_programs_than_blocks(device):
    """Every block its own item, and requests with one item beside requests with many."""
    row = launch.LaunchRow(8, "many", 8, 16, 4, 4, True, 4096, "test")
    kernel = check(*random_case([1, 200, 16, 17], 8, device, seed=8), row=row)
    assert kernel.items == 1 + 13 + 1 + 2


@pytest.mark.parametrize("lens", [(1,), (40,), (5, 1, 40), (17, 16, 15, 1, 2)])
def test_a_fixed_grid_is_right_for_lengths_planned_later(device, lens):
    """Two objects share partial results, and one of them is planned anew for other lengths."""
    partials = {}
    kernel, other = decode.FusedDecode(partials), decode.FusedDecode(partials)
    q_nope, q_pe, kv, batch = random_case(list(lens), 8, device, seed=11)
    first = decode.Listed((33,) * len(lens), torch.zeros(200, dtype=torch.int32, device=device))
    kernel.plan(first, 8, SCALE, fixed=True)
    grid, table = kernel.items, kernel.table.data_ptr()
    other.plan(batch, 8, SCALE, fixed=True)
    kernel.plan(batch, 8, SCALE, fixed=True)
    assert (kernel.items, kernel.table.data_ptr()) == (grid, table)
    assert kernel.partial is other.partial
    out = torch.full(q_nope.shape, float("nan"), device=device)
    kernel.run(q_nope, q_pe, kv, out)
    assert worst(out, exact(q_nope, q_pe, kv, batch)) < 6e-4


@pytest.mark.gpu
def test_one_captured_graph_serves_other_lengths():
    q_nope, q_pe, kv, batch = random_case([1] * 4, 8, "cuda", seed=12)
    pages = torch.zeros(60_000, dtype=torch.int32, device="cuda")
    kv = to_fp8(torch.randn(60_000, 576)).cuda()
    kernel, out = decode.FusedDecode(), torch.empty_like(q_nope)
    kernel.plan(decode.Listed((1,) * 4, pages), 8, SCALE, fixed=True)
    kernel.run(q_nope, q_pe, kv, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(q_nope, q_pe, kv, out)
    for lens in ([1, 1, 1, 1], [1, 9000, 33, 64], [20_000, 1, 700, 15_000]):
        batch, slots = batch_of(lens, "cuda")
        assert slots <= len(kv)
        pages[: sum(lens)] = batch.pages
        kernel.plan(decode.Listed(tuple(lens), pages), 8, SCALE, fixed=True)
        graph.replay()
        assert worst(out, exact(q_nope, q_pe, kv, batch)) < 6e-3


SPLITS = [((1,), 32, 100), ((1000, 3, 64), 32, 8), ((8192,) * 32, 64, 264), ((5,) * 50, 16, 4)]


@pytest.mark.parametrize("lens, block, target", SPLITS)
def test_split_covers_every_token_once(lens, block, target):
    items = decode.split(lens, block, target)
    for b, n in enumerate(lens):
        mine = [(start, end) for request, start, end in items if request == b]
        covered = [t for start, end in mine for t in range(start, end)]
        assert covered == list(range(n)), "each token once, in order"
        assert all(start < end and start % block == 0 for start, end in mine), "no empty item"
    assert len(items) <= max(target, len(lens))


def test_without_a_gpu_it_says_so():
    with pytest.raises(CannotRun, match="not a GPU"):
        attention("fused_fp8", torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("lens", [[1], [1000], [40_000], [3000] * 5, [700, 1, 9000, 64] * 8])
def test_every_row_of_the_table(heads, page_size, lens):
    """Fresh random inputs for every head count, page size and kind of load."""
    seed = int(torch.randint(2**31, ()))
    check(*random_case(lens, heads, "cuda", page_size, seed=seed, tail=1.0))


@pytest.mark.gpu
def test_thousands_of_requests_of_one_token():
    q_nope, q_pe, kv, batch = random_case([1] * 4096, 8, "cuda", seed=9)
    check(q_nope, q_pe, kv, batch)


@pytest.mark.gpu
def test_rows_past_two_to_the_31():
    """The live rows lie at the end of a pool of more than 2^31 values."""
    q_nope, q_pe, kv, batch = random_case([500, 300], 8, "cuda", seed=10)
    far = 2**31 // 576 + 10
    pool = torch.zeros(far + len(kv), 576, dtype=torch.uint8, device="cuda")
    pool[far:] = kv.view(torch.uint8)
    for tensor in (batch.pages, batch.live_slots):
        tensor.add_(far)
    check(q_nope, q_pe, pool.view(FP8), batch)

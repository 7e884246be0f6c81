"""cast, gather_cast, refresh and append against torch: interpreted on a CPU; bit for bit."""

import pytest
import torch

pytest.importorskip("triton")

from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.kernels import append, reference, widen
from shadowkv_lab.kernels.reference import FP8, bits
from shadowkv_lab.sources import formats


def some_fp8(count, device, seed=0):
    """Rows over all e4m3 codes but the two NaNs."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (count, 576), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    return codes.to(device).view(FP8)


@pytest.mark.parametrize("rows", [1, 7, 130])
def test_cast_is_exact(device, rows):
    fp8, out = (
        some_fp8(rows, device),
        torch.full((rows, 576), float("nan"), device=device).bfloat16(),
    )
    widen.cast(fp8, out)
    assert torch.equal(out.view(torch.int16), fp8.bfloat16().view(torch.int16))


@pytest.mark.parametrize("count", [1, 8, 61])
def test_gather_cast_takes_the_rows_named(device, count):
    fp8 = some_fp8(200, device)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:count].to(device)
    out = torch.full((count + 3, 576), float("nan"), device=device).bfloat16()
    widen.gather_cast(fp8, slots, out)
    assert torch.equal(out[:count], fp8.bfloat16()[slots]), "the rows named, in their order"
    assert out[count:].isnan().all(), "and nothing past them"


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_packed_rows_are_gathered_and_scaled(device, kind):
    """Against what the pool file's own reader makes of them; NaN where there is no row."""
    noise = torch.Generator().manual_seed(3)
    rows = torch.randn(50, 576, generator=noise).bfloat16()
    packed = formats.pack(rows, 512)
    if device.type == "cpu":  # the interpreter truncates to BF16: scales that need no rounding
        packed[:, 512:528].view(torch.float32).copy_(2.0 ** torch.arange(-2, 2))
    packed = packed.to(device)
    slots = torch.tensor([3, 49, 0, 3, 50, -1], dtype=kind, device=device)
    out = torch.full((8, 576), 7.0, device=device).bfloat16()
    widen.gather_packed(packed, slots, out)
    wanted = formats.unpack(packed, 512, 64).bfloat16()
    assert torch.equal(out[:4], wanted[slots[:4].long()])
    assert out[4:6].isnan().all() and (out[6:] == 7).all()
    again = torch.full_like(out, 7.0)
    reference.gather_packed(packed, slots[:4], again)
    assert torch.equal(again[:4], out[:4]) and (again[4:] == 7).all()
    for bad in (packed.view(torch.float8_e5m2), packed[:, :576], packed[:, ::2]):
        with pytest.raises(OutOfRange):
            widen.gather_packed(bad, slots, out)
    with pytest.raises(OutOfRange):
        widen.gather_packed(packed, slots, out[:5])


@pytest.mark.parametrize("name", ["gather_cast", "refresh"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [None, 0, 1, 9])
def test_rows_by_slot_equal_the_torch_specification(device, name, kind, count):
    """Slots of both sizes, slots that come twice, a number of them that the device alone knows."""
    fp8 = some_fp8(40, device)
    slots = torch.tensor([3, 0, 39, 3, 0, 17, 8, 21, 38, 4, 5], dtype=kind, device=device)
    total = None if count is None else torch.tensor([count], dtype=torch.int32, device=device)
    ours, theirs = (torch.full((40, 576), 7.0, device=device).bfloat16() for _ in range(2))
    getattr(widen, name)(fp8, slots, ours, total)
    getattr(reference, name)(fp8, slots, theirs, total)
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


@pytest.mark.parametrize("width", [48, 512, 576, 1040])
def test_rows_of_any_width_leave_their_neighbours_alone(device, width):
    codes = torch.arange(6 * width, dtype=torch.int32).remainder(0x77).byte()
    fp8 = codes.view(6, width).to(device).view(FP8)
    out = torch.full((4, width), 7.0, device=device).bfloat16()
    widen.gather_cast(fp8, torch.tensor([5, 0], device=device), out)
    assert torch.equal(out[:2], fp8.bfloat16()[[5, 0]]) and (out[2:] == 7).all()


@pytest.mark.gpu
def test_every_byte_widens_as_torch_widens_it():
    """The interpreter knows no e4m3 NaN."""
    fp8 = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(3, 3)[:, :576].contiguous()
    fp8, out = fp8.view(FP8), torch.zeros(3, 576, device="cuda").bfloat16()
    widen.refresh(fp8, torch.arange(3, device="cuda"), out)
    assert torch.equal(out.nan_to_num(nan=1e9), fp8.bfloat16().nan_to_num(nan=1e9))


@pytest.mark.gpu
def test_one_captured_graph_serves_any_number_of_slots():
    fp8, out = some_fp8(4096, "cuda"), torch.zeros(4096, 576, device="cuda").bfloat16()
    slots = torch.randperm(4096, device="cuda").int()
    count = torch.ones(1, dtype=torch.int32, device="cuda")
    widen.gather_cast(fp8, slots, out, count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        widen.gather_cast(fp8, slots, out, count)
    for total in (0, 1, 1000, 4096):
        out.zero_()
        slots.copy_(torch.randperm(4096, device="cuda"))
        count.fill_(total)
        graph.replay()
        assert torch.equal(out[:total], fp8.bfloat16()[slots[:total].long()])
        assert not out[total:].any()


def buffers(device, rows=40):
    fp8, shadow = some_fp8(rows, device, 3), torch.zeros(rows, 576, device=device).bfloat16()
    return fp8, shadow, torch.zeros(2, dtype=torch.int32, device=device)


@pytest.mark.parametrize("exact", [True, False])
def test_append_writes_what_the_reference_writes(device, exact):
    """Rows that e4m3 holds exactly: the interpreter rounds FP8 wrongly, a GPU is tested below."""
    rows = some_fp8(5, device, 7).bfloat16()
    rows[2, 5], rows[4, 9] = 1024.0, -512.0  # clipped, still without rounding
    slots = torch.tensor([3, 39, 1, 17, 20], device=device)
    ours, theirs = buffers(device), buffers(device)
    append.append(rows, slots, *ours, exact)
    reference.append(rows, slots, *theirs, exact)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(bits(mine), bits(wanted))
    assert ours[2].tolist() == [2, 0]


@pytest.mark.parametrize("kept", ["fp8", "bf16"])
def test_append_to_one_buffer_counts_nan_and_inf(device, kept):
    rows = torch.ones(3, 576, device=device).bfloat16()
    rows[1, 0], rows[1, 1], rows[2, 575] = float("nan"), float("inf"), float("-inf")
    slots = torch.tensor([0, 2, 4], device=device)
    fp8, bf16, counters = buffers(device)
    append.append(
        rows, slots, fp8 if kept == "fp8" else None, bf16 if kept == "bf16" else None, counters
    )
    assert int(counters[1]) == 3
    written = (fp8 if kept == "fp8" else bf16).float()
    assert torch.equal(written[0], torch.ones(576, device=device))


def guarded(rows, width, device, kind=torch.bfloat16):
    """A buffer of rows between two guard rows, and the whole of it."""
    whole = torch.full((rows + 2, width), 7.0, device=device).to(kind)
    return whole[1:-1], whole


def unharmed(whole):
    edges = bits(whole)[[0, -1]]
    return bool((edges == bits(torch.full_like(whole[:1], 7.0))).all())


def test_append_reads_rows_that_lie_apart_and_keeps_the_last_of_a_slot(device):
    """As in a larger activation; both buffers keep the same row, whichever program is first."""
    wide = some_fp8(6, device, 5).bfloat16().repeat(1, 2)
    rows = wide[:, 64:640]
    slots = torch.tensor([2, 5, 2, 0, 5, 2], device=device)
    fp8, fp8_whole = guarded(8, 576, device, FP8)
    bf16, bf16_whole = guarded(8, 576, device)
    append.append(rows, slots, fp8, bf16, torch.zeros(2, dtype=torch.int32, device=device))
    for slot, row in ((2, 5), (5, 4), (0, 3)):
        assert torch.equal(bf16[slot], rows[row]) and torch.equal(fp8[slot].bfloat16(), rows[row])
    assert (bf16[[1, 3, 4, 6, 7]] == 7).all() and unharmed(fp8_whole) and unharmed(bf16_whole)


@pytest.mark.parametrize("function", [append.append, reference.append])
def test_append_joins_a_row_from_its_two_parts_and_leaves_padding_out(device, function):
    """As SGLang holds a new row: the latent, and the rope part a slice of a wider activation."""
    whole_rows = some_fp8(4, device, 6).bfloat16()
    latent, rope = whole_rows[:, :512].contiguous(), whole_rows.repeat(1, 2)[:, 512:576]
    slots = torch.tensor([5, 0, 2, 0], device=device)
    fp8, fp8_whole = guarded(8, 576, device, FP8)
    bf16, bf16_whole = guarded(8, 576, device)
    counters = torch.zeros(2, dtype=torch.int32, device=device)
    function(latent, slots, fp8, bf16, counters, tail=rope, first=1)
    for slot, row in ((5, 0), (2, 2)):
        assert torch.equal(fp8[slot].bfloat16(), whole_rows[row])
        assert torch.equal(bf16[slot], whole_rows[row])
    assert (bf16[[0, 1, 3, 4, 6, 7]] == 7).all() and not counters.any()
    assert unharmed(fp8_whole) and unharmed(bf16_whole)


@pytest.mark.parametrize("size", [2, 3])
def test_append_counts_rows_for_slots_that_do_not_exist_and_writes_none(device, size):
    rows = torch.ones(3, 576, device=device).bfloat16()
    bf16, whole = guarded(4, 576, device)
    counters = torch.zeros(size, dtype=torch.int32, device=device)
    append.append(rows, torch.tensor([-1, 4, 2], device=device), None, bf16, counters)
    assert unharmed(whole) and (bf16[:2] == 7).all() and (bf16[2] == 1).all()
    assert int(counters[-1]) == 2 and int(counters.sum()) == 2


def test_widening_a_slot_that_does_not_exist(device):
    """NaN where its row would be gathered; a mirror is left alone; a count beyond the list, too."""
    fp8, fp8_whole = guarded(4, 576, device, FP8)
    slots = torch.tensor([3, 4, -1, 0], device=device)
    many = torch.tensor([9], dtype=torch.int32, device=device)
    out, whole = guarded(4, 576, device)
    widen.gather_cast(fp8, slots, out, many)
    assert out[[1, 2]].isnan().all() and (out[[0, 3]] == 7).all() and unharmed(whole)
    mirror, whole = guarded(4, 576, device)
    mirror.zero_()
    widen.refresh(fp8, slots, mirror, many)
    assert (mirror[[0, 3]] == 7).all() and not mirror[[1, 2]].any() and unharmed(whole)
    assert unharmed(fp8_whole)


def refused(call, *arguments):
    with pytest.raises(OutOfRange) as error:
        call(*arguments)
    return error.value


def test_the_door_refuses_what_a_kernel_would_misread(device):
    fp8, slots = some_fp8(8, device), torch.arange(4, device=device)
    out = torch.zeros(8, 576, device=device).bfloat16()
    counters = torch.zeros(2, dtype=torch.int32, device=device)
    e5m2 = fp8.view(torch.uint8).view(torch.float8_e5m2)
    assert "e5m2" in refused(widen.cast, e5m2, out).what
    assert "float16" in refused(widen.cast, fp8, out.half()).what
    refused(widen.cast, fp8, out[:4])
    refused(widen.cast, fp8[:, :512], out[:, :512])
    refused(widen.gather_cast, fp8, slots, out[:3])
    refused(widen.gather_cast, fp8, slots, out[:, :512].contiguous())
    refused(widen.gather_cast, fp8, slots.float(), out)
    refused(widen.gather_cast, fp8, slots.repeat(2)[::2], out)
    refused(widen.refresh, fp8, slots, out[:4])
    rows = out[:4] + 1
    refused(append.append, rows.float(), slots, fp8, out, counters)
    refused(append.append, rows[:, :512], slots, fp8, out, counters)
    refused(append.append, rows, slots[:3], fp8, out, counters)
    refused(append.append, rows, slots, e5m2, out, counters)
    refused(append.append, rows, slots, fp8, out[:4], counters)
    refused(append.append, rows, slots, fp8, out, counters[:1])
    head = rows[:, :512]
    refused(append.append, head, slots, fp8, out, counters, True, rows[:3, 512:])
    refused(append.append, head, slots, fp8, out, counters, True, rows[:, 500:])
    refused(append.append, head, slots, fp8, out, counters, True, rows[:, 512:].float())
    assert not out.any(), "refused before anything is written"


@pytest.mark.gpu
def test_append_rounds_as_torch_does_over_all_of_bf16():
    """Every finite BF16 value, bit for bit; and NaN stays NaN."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()].cuda()
    rows = torch.zeros(-(-len(finite) // 576) * 576, device="cuda").bfloat16()
    rows[: len(finite)] = finite
    rows = rows.view(-1, 576)
    slots = torch.randperm(len(rows), device="cuda")
    ours, theirs = buffers("cuda", len(rows)), buffers("cuda", len(rows))
    append.append(rows, slots, *ours)
    reference.append(rows, slots, *theirs)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(bits(mine), bits(wanted))
    assert int(ours[2][0]) == int((finite.abs() > 448).sum())


@pytest.mark.gpu
def test_offsets_past_two_to_the_31():
    """A buffer of more than 2^31 values: the last rows are where a 32-bit offset would miss."""
    count = 2**31 // 576 + 1000
    fp8 = torch.zeros(count, 576, dtype=torch.uint8, device="cuda").view(FP8)
    rows = torch.randn(4, 576, device="cuda").bfloat16()
    slots = torch.arange(count - 4, count, device="cuda")
    counters = torch.zeros(2, dtype=torch.int32, device="cuda")
    append.append(rows, slots, fp8, None, counters)
    wanted = reference.to_fp8(rows)
    assert torch.equal(bits(fp8[-4:]), bits(wanted))
    out = torch.empty(4, 576, device="cuda").bfloat16()
    widen.gather_cast(fp8, slots, out)
    assert torch.equal(out, wanted.bfloat16())
    whole = torch.empty(count, 576, device="cuda").bfloat16()
    widen.cast(fp8, whole)
    assert torch.equal(whole[-4:], wanted.bfloat16())

"""The plug-in's kernels without SGLang: in Triton's interpreter, and on a GPU under its graphs."""

import os
import subprocess
import sys

import pytest
import torch

from shadowkv_lab.kernels.reference import FP8
from shadowkv_lab.server.plugin import rows

D = 576


def stored(count, device, seed=0):
    """Random finite e4m3 rows as uint8."""
    noise = torch.randn(count, D, generator=torch.Generator().manual_seed(seed)) * 3
    return noise.to(FP8).view(torch.uint8).to(device)


def launch(device, *arguments, gather):
    from shadowkv_lab.server.plugin import kernels

    kernels.widen(*arguments, gather)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [None, 0, 1, 9])
def test_kernel_equals_the_torch_specification(device, gather, kind, count):
    pool = stored(40, device)
    slots = torch.tensor([3, 0, 39, 3, 0, 17, 8, 21, 38, 4, 5], dtype=kind, device=device)
    total = None if count is None else torch.tensor([count], dtype=torch.int32, device=device)
    target = torch.full((40, D), 7.0, dtype=torch.bfloat16, device=device)
    launch(device, pool, slots, target, total, gather=gather)
    expected = torch.full((40, D), 7.0, dtype=torch.bfloat16)
    rows.widen(
        pool.cpu(), slots.cpu(), expected, None if total is None else total.cpu(), gather=gather
    )
    assert torch.equal(target.cpu().view(torch.int16), expected.view(torch.int16))


def test_every_byte_widens_as_torch_widens_it(device):
    pool = torch.arange(256, dtype=torch.uint8, device=device).repeat(3, 3)[:, :D].contiguous()
    target = torch.zeros(3, D, dtype=torch.bfloat16, device=device)
    launch(device, pool, torch.arange(3, device=device), target, None, gather=False)
    expected = pool.cpu().view(FP8).float()
    found, known = target.cpu().float(), expected.isfinite()
    assert torch.equal(found[known], expected[known]) and known.sum() > 1600
    if device.type == "cuda":  # the interpreter knows no e4m3 NaN
        assert found[~known].isnan().all()


CHILD = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shadowkv_lab.server.plugin.kernels import ROWS, widen_kernel

names = widen_kernel.arg_names
for slots, on_device, gather in (("*i64", False, False), ("*i32", True, True)):
    kinds = dict(pool="*u8", slots=slots, target="*bf16", count="*i32" if on_device else "i32")
    values = dict(D=576, WIDTH=1024, ROWS=ROWS, DEVICE_COUNT=on_device, GATHER=gather)
    source = ASTSource(widen_kernel, {n: kinds.get(n, "constexpr") for n in names},
                       {(names.index(k),): v for k, v in values.items()})
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    assert triton.compile(source, target=target, options=dict(num_warps=4)).asm["ptx"]
"""


@pytest.mark.parametrize("arch", [90, 100, 120])
def test_kernel_compiles_without_a_gpu(arch):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", CHILD, str(arch)], check=True, env=environment)


@pytest.mark.gpu
def test_one_captured_graph_serves_any_number_of_slots():
    pool, target = stored(4096, "cuda"), torch.zeros(4096, D, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(4096, device="cuda").int()
    count = torch.ones(1, dtype=torch.int32, device="cuda")
    rows.widen(pool, slots, target, count, gather=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.widen(pool, slots, target, count, gather=True)
    for total in (0, 1, 1000, 4096):
        target.zero_()
        slots.copy_(torch.randperm(4096, device="cuda"))
        count.fill_(total)
        graph.replay()
        assert torch.equal(target[:total], pool[slots[:total].long()].view(FP8).bfloat16())
        assert not target[total:].any()


def attend(planned, q, pool, slots, lens):
    """float64 attention over the same rows."""
    out, start = torch.empty(len(lens), q.shape[1], 512, dtype=torch.float64), 0
    for b, n in enumerate(lens):
        c = pool.cpu()[slots.cpu()[start : start + n].long()].view(FP8).double()
        p = (q[b].cpu().double() @ c.T * planned.sm_scale).softmax(-1)
        out[b], start = p @ c[:, :512], start + n
    return out


def worst(out, expected):
    return ((out.cpu().double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max()


@pytest.mark.parametrize("lens", [(1,), (40,), (5, 1, 40), (17, 16, 15, 1, 2)])
def test_fused_decode_with_a_fixed_grid(device, lens):
    from shadowkv_lab.server.plugin.decode import GraphDecode

    pool = stored(200, device)
    slots = torch.randperm(199, generator=torch.Generator().manual_seed(1))[: sum(lens)] + 1
    slots = slots.int().to(device)
    q = torch.randn(len(lens), 8, D, generator=torch.Generator().manual_seed(2)).bfloat16()
    q = q.to(device)
    planned = GraphDecode(len(lens), 8, 0.0625, slots, {})
    planned.update(list(lens), slots)
    parts = q[..., :512].contiguous(), q[..., 512:].contiguous()
    out = torch.full_like(parts[0], float("nan"))
    planned.run(*parts, pool.view(FP8), out)
    assert worst(out, attend(planned, q, pool, slots, lens)) < 0.01


@pytest.mark.gpu
def test_fused_decode_replayed_with_other_lengths():
    from shadowkv_lab.server.plugin.decode import GraphDecode

    pool, B = stored(60_000, "cuda"), 4
    slots = torch.zeros(60_000, dtype=torch.int32, device="cuda")
    q = torch.randn(B, 8, D, device="cuda").bfloat16()
    parts = q[..., :512].contiguous(), q[..., 512:].contiguous()
    out = torch.empty_like(parts[0])
    planned = GraphDecode(B, 8, 0.0625, slots, {})
    planned.update([1] * B, slots)
    planned.run(*parts, pool.view(FP8), out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned.run(*parts, pool.view(FP8), out)
    for lens in ([1, 1, 1, 1], [1, 9000, 33, 64], [20_000, 1, 700, 15_000]):
        slots[: sum(lens)] = torch.randperm(59_999, device="cuda")[: sum(lens)].int() + 1
        planned.update(lens, slots)
        graph.replay()
        assert worst(out, attend(planned, q, pool, slots, lens)) < 0.01

"""Every kernel compiles for SM90, SM100 and SM120 without a GPU, within their shared memory."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from shadowkv_lab.errors import CannotRun
from shadowkv_lab.kernels import nvrtc

LIMITS = {90: 232_448, 100: 232_448, 120: 101_376}  # bytes a block may have (NVIDIA)

# In a process of its own: this one may have Triton's interpreter switched on.
CHILD = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shadowkv_lab.kernels import append, decode, indexer, launch, widen
from shadowkv_lab.kernels import decode_pairs, decode_words

arch = int(sys.argv[1])

def compiled(kernel, pointers, constants, warps, **options):
    names = kernel.arg_names
    signature = {n: pointers.get(n, "constexpr") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
               if signature[n].startswith("*")}
    constants = {(names.index(k),): v for k, v in constants.items()}
    source = ASTSource(kernel, signature, constants, aligned)
    options = dict(num_stages=1, num_warps=warps) | options
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return built.metadata.shared, "mma" in built.asm["ptx"]

found = {}
found["cast"] = compiled(widen.cast_kernel, dict(source="*fp8e4nv", target="*bf16", count="i64"),
                         dict(VALUES=widen.VALUES), 4)
rows = dict(rows="*bf16", slots="*i64", fp8="*fp8e4nv", bf16="*bf16", counters="*i32",
            tail="*bf16", stride="i32", tail_stride="i32", S="i32")
for head in (512, 576):
    found[f"append {head}"] = compiled(append.append_kernel, rows, dict(
        FIRST=1, MAX=448.0, HEAD=head, D=576, WIDTH=1024, HAS_FP8=True, HAS_BF16=True, EXACT=True,
        LOST=1), 4)
uses = ("*i64", True, False), ("*i32", True, True), ("*i64", False, False)
for slots, gather, on_device in uses:
    found[f"widen {slots} {gather} {on_device}"] = compiled(
        widen.rows_kernel,
        dict(source="*fp8e4nv", slots=slots, target="*bf16", listed="i32", S="i32",
             count="*i32" if on_device else "i32"),
        dict(D=576, HEAD=512, TAIL=64, ROWS=widen.ROWS, GATHER=gather, DEVICE_COUNT=on_device), 4)
for slots in ("*i32", "*i64"):
    found[f"gather packed {slots}"] = compiled(
        widen.packed_kernel,
        dict(latent="*fp8e4nv", scales="*fp32", rope="*bf16", slots=slots, target="*bf16",
             count="i32", S="i32"), dict(ROWS=widen.ROWS), 4)
pointers = dict(q_nope="*bf16", q_pe="*bf16", kv="*i32", partial="*fp32", stats="*fp32",
                indptr="*i32", pages="*i32", work="*i32", sm_log2e="fp32")
for row in launch.rows(f"sm_{arch}"):
    if row.kernel == "warps":
        continue
    variants = [(64, False, False, False)]
    if row.heads == 8:
        variants = [(1, False, False, True), (64, True, False, False)]
    if row.scaled or arch > 90:  # the rows that packed pools take
        variants.append((64, True, True, row.heads == 16))
    for page, scaled, packed, eight in variants:
        name = f"decode {row.heads} {row.load} {row.page} {row.scaled} page {page} {packed} {eight}"
        constants = dict(HEADS=row.heads, QUERIES=1, TILE=row.tile, BLOCK=row.block, PAGE=page,
                         SCALED=scaled, PACKED=packed, EIGHT=eight, ASM=True, PDL=True)
        more = (dict(scales="*fp32") if scaled else {}) | (dict(rope="*bf16") if packed else {})
        constants |= {} if scaled else dict(scales=None)
        constants |= {} if packed else dict(rope=None)
        if row.kernel == "pairs":
            kernel, constants["STAGES"] = decode_pairs.pairs_kernel, row.stages
            more["kv"] = "*i16"
        else:
            kernel = decode_words.words_kernel
            constants |= dict(VECTOR=row.vector, PIPE=row.pipe)
        found[name] = compiled(kernel, pointers | more, constants, row.warps, launch_pdl=True,
                               num_stages=row.stages or 1)
found["combine"] = compiled(
    decode.combine_kernel,
    dict(partial="*fp32", stats="*fp32", splits="*i32", out="*bf16", out_scale="fp32"),
    dict(HEADS=8, COLUMNS=16, ROWS=256, FINAL=True, PDL=True), 4, launch_pdl=True)
for heads in (32, 64):
    for slots in (1, 64):
        found[f"index scores {heads} page {slots}"] = compiled(
            indexer.scores_kernel,
            dict(q="*fp8e4nv", weights="*fp32", keys="*fp8e4nv", scales="*fp32", out="*fp32",
                 pages="*i32", indptr="*i32", lens="*i32", stride="i32", longest="i32"),
            dict(HEADS=heads, WIDTH=128, TOKENS=indexer.TOKENS, SLOTS=slots, KEYS=64,
                 WIDE=False), 4)
    found[f"take page {64 if heads == 64 else 1}"] = compiled(
        indexer.take_kernel,
        dict(places="*i64", pages="*i32", indptr="*i32", taken="*i32", ends="*i32", most="i32"),
        dict(SLOTS=64 if heads == 64 else 1, PLACES=indexer.PLACES), 4)
found["write keys"] = compiled(
    indexer.write_kernel,
    dict(fresh="*bf16", slots="*i64", keys="*fp8e4nv", scales="*fp32", stride="i32"),
    dict(MAX=448.0, SMALLEST=1e-4, WIDTH=128, KEYS=64), 1)
print(json.dumps(found))
"""


@pytest.mark.parametrize("arch", LIMITS)
def test_kernels_compile_and_fit(arch):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(arch)], env=env, text=True, capture_output=True
    )
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(child.stdout)
    # Twelve rows, those of 8 heads twice; Hopper's short ones at two page sizes, and scaled ones;
    # packed pools.
    assert len([name for name in found if name.startswith("decode")]) >= 15
    too_large = {name: size for name, (size, _) in found.items() if size > LIMITS[arch]}
    assert not too_large
    # Triton 3.6 compiles tiles of 64 heads to an empty kernel for SM100, without a word.
    dotted = [name for name in found if name.startswith(("decode", "index"))]
    assert sum(name.startswith("index") for name in dotted) == 4
    empty = [name for name in dotted if not found[name][1]]
    assert not empty


@pytest.mark.parametrize("eight", [0, 1])
@pytest.mark.parametrize("tile", [8, 16, 32])
def test_the_cuda_kernel_compiles_for_hopper(tile, eight):
    """By NVRTC, which needs no GPU; its shared memory is checked by `static_assert` and here."""
    try:
        nvrtc.library()
    except CannotRun as missing:
        pytest.skip(str(missing))
    code = nvrtc.compiled("decode_warps.cu", "sm_90a", f"-DGROUP={tile // 8}", f"-DEIGHT={eight}")
    assert code[:4] == b"\x7fELF" and b"warps_kernel" in code

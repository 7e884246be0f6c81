"""Pool files: exact, lazy, honest about what they hold, and a source of the decode lab."""

import ctypes
import json
import math
import mmap
import os
import time
from dataclasses import asdict, replace

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shadowkv_lab.errors import BadFile, OutOfRange
from shadowkv_lab.kernels.reference import FP8, bits
from shadowkv_lab.model import load_model
from shadowkv_lab.pool import Pool
from shadowkv_lab.sources import formats, poolfile, tensorfile
from shadowkv_lab.steps import measure as decode
from shadowkv_lab.strategies import parse

GLM = load_model("glm-5")


def rows(count, layer=0, scale=1.0):
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(count, 576, generator=generator).bfloat16() * scale


def stored(storage, count, layer=0):
    if storage == "packed":
        return formats.pack(rows(count, layer), 512)
    if storage == "fp8":  # every finite code, many times over
        codes = torch.arange(256, dtype=torch.uint8)
        codes = codes[(codes & 127) != 127]
        return codes.repeat(-(-count * 576 // len(codes)))[: count * 576].view(FP8).view(count, 576)
    return rows(count, layer).to(formats.DTYPES[storage])


def write(path, storage="bf16", count=40, layers=(0, 2), shape=GLM, **options):
    return poolfile.write(
        path,
        shape,
        storage,
        layers,
        count,
        lambda i: stored(storage, count, layers[i]),
        source="test",
        **options,
    )


# What is stored


@pytest.mark.parametrize("storage", list(formats.DTYPES))
def test_a_round_trip_is_exact(tmp_path, storage):
    extras = {"queries.0": torch.randn(3, 8, 576).bfloat16(), "query_positions": torch.arange(3)}
    file = write(tmp_path / "p", storage, extras=extras)
    assert (file.model, file.layers, file.tokens, file.storage) == (GLM, (0, 2), 40, storage)
    for i, layer in enumerate(file.layers):
        assert torch.equal(bits(file.stored(i)), bits(stored(storage, 40, layer)))
    assert torch.equal(load_file(tmp_path / "p")["queries.0"], extras["queries.0"])
    assert file.queries(0)[0].shape == (3, 8, 512) and file.queries(1) is None


def test_packed_rows_against_numpy():
    """Layout and values, by another library's e4m3 and by hand."""
    source = rows(9, scale=3.0)
    packed = formats.pack(source, 512).numpy()
    assert packed.shape == (9, 656)
    exact = source.double().numpy()
    groups = exact[:, :512].reshape(9, 4, 128)
    scales = packed[:, 512:528].copy().view(np.float32)
    assert np.allclose(scales, np.abs(groups).max(-1) / 448, rtol=1e-6)
    e4m3 = packed[:, :512].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    wanted = (groups.astype(np.float32) * (1 / scales)[..., None]).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(e4m3, wanted.astype(np.float64).reshape(9, 512))
    rope = packed[:, 528:].copy().view(ml_dtypes.bfloat16).astype(np.float64)
    assert np.array_equal(rope, exact[:, 512:])
    back = formats.unpack(torch.from_numpy(packed), 512, 64).double().numpy()
    assert np.allclose(back[:, :512], e4m3 * np.repeat(scales, 128, 1), rtol=1e-6)
    assert np.array_equal(back[:, 512:], exact[:, 512:])


def test_packing_zeros_and_groups_that_are_not_whole():
    assert not formats.unpack(formats.pack(torch.zeros(2, 576), 512), 512, 64).any()
    odd = torch.ones(2, 200 + 64)
    back = formats.unpack(formats.pack(odd, 200), 200, 64)
    assert back.shape == (2, 264) and torch.allclose(back, odd, rtol=1e-6)


# Lazy


def resident_bytes(path):
    """How much of a file lies in the page cache, as the kernel counts it (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        size = len(view)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = np.frombuffer(view, np.uint8).ctypes.data
        done = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
        assert done == 0, os.strerror(ctypes.get_errno())
        return int((np.frombuffer(pages, np.uint8) & 1).sum()) * mmap.PAGESIZE


def io_counters():
    with open("/proc/self/io") as file:
        return {k: int(v) for k, v in (line.split(":") for line in file)}


def test_a_20_gb_file_opens_at_once_and_one_layer_is_read_alone(tmp_path):
    layers, tokens = 156, 230_000
    shapes = {f"rows.{n}": (FP8, (tokens, 576)) for n in range(layers)}
    meta = dict(
        format="shadowkv-pool",
        schema="1",
        geometry=json.dumps(asdict(GLM)),
        storage="fp8",
        scale="1.0",
        page_size="1",
        layers=json.dumps(list(range(layers))),
    )
    head, path = tensorfile.header(shapes, meta), tmp_path / "20gb"
    layer_bytes = tokens * 576
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + layers * layer_bytes)
        file.seek(len(head) + 70 * layer_bytes)
        file.write(b"\x38" * 576)  # e4m3 1.0
    assert path.stat().st_size > 20e9 and path.stat().st_blocks * 512 < 1e6

    before, start = io_counters(), time.perf_counter()
    pool = poolfile.load(path)
    assert time.perf_counter() - start < 1.0
    assert pool.tokens == tokens and len(pool.layers) == layers
    layer = pool.stored(70)
    assert float(layer[0].float().sum()) == 576.0
    words = bits(layer).view(torch.int64).count_nonzero()  # touches every page of this layer
    assert int(words) == 576 // 8
    after = io_counters()
    # read() calls took the header alone; the rest came by page faults, and only this layer's.
    assert after["rchar"] - before["rchar"] < len(head) + 1e6
    assert after["read_bytes"] - before["read_bytes"] < 1.1 * layer_bytes
    # The kernel's readahead goes a little past the layer, and stays far from the other 155.
    assert layer_bytes <= resident_bytes(path) < 2 * layer_bytes


# Bad files


def test_another_safetensors_file_is_no_pool_file(tmp_path):
    save_file({"rows.0": rows(4)}, tmp_path / "x")
    with pytest.raises(BadFile, match="no pool file of the lab"):
        poolfile.load(tmp_path / "x")
    assert "no pool file" in poolfile.problem(tmp_path / "x")
    write(tmp_path / "good")
    assert poolfile.problem(tmp_path / "good", GLM) is None


def test_a_geometry_that_disagrees(tmp_path):
    write(tmp_path / "p")
    other = replace(GLM, name="other", kv_lora_rank=256)
    with pytest.raises(BadFile, match=r"kv_lora_rank 512.*256 for other"):
        poolfile.load(tmp_path / "p", other)
    pool = Pool(replace(other, layers=1), 64, [("fp8",)])
    with pytest.raises(BadFile):
        poolfile.filler(tmp_path / "p")(pool, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_rows_are_not_written(tmp_path, value):
    write(tmp_path / "p")
    old = (tmp_path / "p").read_bytes()
    bad = rows(40)
    bad[33, 5] = value
    with pytest.raises(OutOfRange, match="Layer 2, token 33"):
        poolfile.write(
            tmp_path / "p", GLM, "bf16", (1, 2), 40, [rows(40), bad].__getitem__, source="test"
        )
    assert (tmp_path / "p").read_bytes() == old and len(list(tmp_path.iterdir())) == 1


def changed(path, target, metadata=None, **tensors):
    """A pool file rewritten by the library with other metadata or tensors."""
    old = tensorfile.TensorFile(path)
    save_file({**load_file(path), **tensors}, target, {**old.metadata, **(metadata or {})})


def test_nan_rows_in_a_file_are_not_read(tmp_path):
    write(tmp_path / "p")
    bad = rows(40)
    bad[7] = math.nan
    changed(tmp_path / "p", tmp_path / "q", **{"rows.2": bad})
    file = poolfile.load(tmp_path / "q")
    file.rows(0)
    with pytest.raises(OutOfRange, match="layer 2, token 7"):
        file.rows(1)


def test_packed_rows_read_as_raw_ones(tmp_path):
    write(tmp_path / "p", "packed")
    changed(tmp_path / "p", tmp_path / "q", {"storage": "fp8"})
    with pytest.raises(OutOfRange, match=r"656.*are packed rows, but were declared fp8"):
        poolfile.load(tmp_path / "q")


@pytest.mark.parametrize(
    "metadata, match",
    [
        ({"schema": "2"}, "schema 2"),
        ({"geometry": "{}"}, "header of q lacks name"),
        ({"scale": "x"}, "broken"),
        ({"layers": "[]"}, "broken"),
        ({"layers": "[0, 9]"}, "no tensor 'rows.9'"),
    ],
)
def test_a_broken_header(tmp_path, metadata, match):
    write(tmp_path / "p")
    changed(tmp_path / "p", tmp_path / "q", metadata)
    with pytest.raises(BadFile, match=match):
        poolfile.load(tmp_path / "q")


def test_layers_of_different_lengths(tmp_path):
    write(tmp_path / "p")
    changed(tmp_path / "p", tmp_path / "q", **{"rows.2": rows(39)})
    with pytest.raises(BadFile, match="layer 2"):
        poolfile.load(tmp_path / "q")


# A source of the decode lab


@pytest.mark.parametrize("storage", list(formats.DTYPES))
def test_a_pool_is_filled_and_tiled(tmp_path, storage):
    file = write(tmp_path / "p", storage)
    fill = poolfile.filler(tmp_path / "p", GLM)
    pool = Pool(replace(GLM, layers=5), 100, [("fp8", "bf16")] * 5, page_size=4)
    seen = []
    fill(pool, 3, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (5, 5)
    for layer in range(5):
        source = file.rows(layer % 2).bfloat16()
        wanted = source[[i % 40 for i in range(104)]].clamp(-448, 448).to(FP8)
        assert torch.equal(bits(pool.fp8[layer]), bits(wanted))
    pool.check_integrity()
    pool.check_counters()


def test_what_is_tiled_says_so(tmp_path):
    write(tmp_path / "p.safetensors")
    fill = poolfile.filler(tmp_path / "p.safetensors")
    assert fill.source(40, 2) == "file:p.safetensors"
    assert fill.source(41, 2) == fill.source(40, 3) == "file:p.safetensors (tiled)"
    strict = poolfile.filler(tmp_path / "p.safetensors", tile=False)
    strict(Pool(replace(GLM, layers=2), 40, [("bf16",)] * 2), 0)
    with pytest.raises(OutOfRange, match="2 layers x 40 tokens"):
        strict(Pool(replace(GLM, layers=2), 41, [("bf16",)] * 2), 0)


def test_the_decode_lab_runs_on_a_file(tmp_path):
    write(tmp_path / "p")
    shape = replace(GLM, layers=2, index_layers=2, max_positions=4096)
    fill = poolfile.filler(tmp_path / "p", shape)
    bench = decode.Bench(
        shape, 2, torch.device("cpu"), fill=fill, budget_s=0.01, source=fill.source(64, 2)
    )
    found = list(decode.measure(bench, [parse("full_cast"), parse("shadow")], [64], [(1, 32)]))
    assert {run.setting.rows for run in found} == {"file:p (tiled)"} and len(found) == 2

"""The lab's safetensors files against the safetensors library, and files that are none."""

import json
import resource

import pytest
import torch
from safetensors.torch import load_file, save_file

from shadowkv_lab.errors import BadFile, CannotWrite
from shadowkv_lab.sources import tensorfile
from shadowkv_lab.sources.tensorfile import TensorFile

DTYPES = list(tensorfile.DTYPES.values())


def tensors():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 120, (5, 7), generator=generator)
    found = {f"t{i}": noise.to(dtype) for i, dtype in enumerate(DTYPES)}
    return {**found, "empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}


def shapes(found):
    return {name: (t.dtype, tuple(t.shape)) for name, t in found.items()}


def same(a, b):
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def test_the_library_reads_what_we_write(tmp_path):
    found, path = tensors(), tmp_path / "ours.safetensors"
    tensorfile.write(path, shapes(found), iter(found.values()), {"who": "we"})
    theirs = load_file(path)
    assert set(theirs) == set(found) and all(same(theirs[n], t) for n, t in found.items())


@pytest.mark.parametrize("how", ["view", "read"])
def test_we_read_what_the_library_writes(tmp_path, how):
    found, path = tensors(), tmp_path / "theirs.safetensors"
    save_file(found, path, metadata={"who": "they"})
    file = TensorFile(path)
    assert file.metadata == {"who": "they"} and set(file.entries) == set(found)
    assert all(same(getattr(file, how)(name), t) for name, t in found.items())


def test_progress_is_shown_and_ends_at_one(tmp_path):
    found, seen = tensors(), []
    tensorfile.write(
        tmp_path / "a",
        shapes(found),
        iter(found.values()),
        {},
        lambda text, done: seen.append(done),
    )
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) == len(found)


def written(tmp_path):
    path = tmp_path / "file.safetensors"
    save_file({"rows": torch.arange(1000.0)}, path)
    return path


@pytest.mark.parametrize("keep", [0, 5, 40, 2000])
def test_truncated(tmp_path, keep):
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadFile, match="not a whole safetensors"):
        TensorFile(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF\x03\x00\x00\x00" + b"\x00" * 64,
        b"PK\x03\x04" + b"\x00" * 64,
        b"\x80\x04" * 50,
        (2).to_bytes(8, "little") + b"[]",
        (8).to_bytes(8, "little") + b"not json",
    ],
)
def test_foreign(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(BadFile, match="not a whole safetensors file"):
        TensorFile(tmp_path / "x")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1]},
    ],
)
def test_a_header_that_lies(tmp_path, entry):
    text = json.dumps({"rows": entry}).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + b"\x00" * 64)
    with pytest.raises(BadFile):
        TensorFile(tmp_path / "x")


def test_no_file_and_no_tensor(tmp_path):
    with pytest.raises(BadFile, match="cannot be read"):
        TensorFile(tmp_path / "none")
    with pytest.raises(BadFile, match=r"no tensor 'queries'.*rows"):
        TensorFile(written(tmp_path)).view("queries")


# Writing whole, or not at all


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError])
def test_an_interrupt_leaves_the_old_file_and_no_half_one(tmp_path, error):
    path = tmp_path / "pool"
    path.write_bytes(b"old")

    def interrupted():
        yield torch.zeros(1 << 16)
        raise error

    shape = {"a": (torch.float32, (1 << 16,)), "b": (torch.float32, (1,))}
    with pytest.raises(error):
        tensorfile.write(path, shape, interrupted(), {})
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_no_half_one(tmp_path):
    path = tmp_path / "pool"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # the kernel refuses to go on
    try:
        with pytest.raises(CannotWrite, match=r"could not be written whole.*untouched"):
            tensorfile.write(
                path,
                {"a": (torch.uint8, (4 << 20,))},
                [torch.zeros(4 << 20, dtype=torch.uint8)],
                {},
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CannotWrite):
        tensorfile.write(tmp_path / "no" / "pool", {}, [], {})

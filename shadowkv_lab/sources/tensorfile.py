"""Safetensors files, read lazily and written whole or not at all.

The format is the safetensors library's (an 8-byte length, a JSON header, the tensors' bytes), and
the tests hold the two against each other. The lab reads and writes it itself for three reasons:
a file too large for memory is written layer by layer, with progress; a 700 GB checkpoint is read
tensor by tensor without its pages staying resident; and what is wrong with a file is named.
"""

import json
import mmap
import os
import warnings
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from shadowkv_lab.errors import BadFile
from shadowkv_lab.files import replacing

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
IS = "safetensors: an 8-byte header length, a JSON header, then the tensors"


class Entry(NamedTuple):
    """One tensor of a header."""

    dtype: str  # the format's name, such as "BF16"
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class TensorFile:
    """A safetensors file: `entries` by name, `metadata`, and its tensors when asked for.

    Opening reads the header alone. `view` maps a tensor's bytes, which are read when they are
    touched; `read` copies them into memory of their own. Raises `BadFile`.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                    raise ValueError(f"its first 8 bytes promise a header of {length} bytes")
                header = json.loads(file.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.entries = {name: _entry(value, 8 + length) for name, value in header.items()}
        except OSError as error:
            raise BadFile(f"{path} cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadFile(f"{self.path.name} is not a safetensors file ({error})", IS) from None
        end = max((entry.stop for entry in self.entries.values()), default=8 + length)
        if end > size:
            raise BadFile(
                f"{self.path.name} is truncated: {size:,} bytes of {end:,}",
                remedy="Copy or download it again",
            )

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def entry(self, name: str) -> Entry:
        """Dtype, shape and place of a tensor; raises `BadFile` if there is none."""
        if name not in self.entries:
            raise BadFile(f"{self.path.name} has no tensor {name!r}", _some(self.entries))
        return self.entries[name]

    @cached_property
    def _map(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            # Shared and read-only: a private map of 20 GB would count against the machine's memory.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def view(self, name: str) -> torch.Tensor:
        """A read-only tensor over the mapped file: only the pages that are touched are read."""
        entry = self.entry(name)
        dtype = self._dtype(name, entry)
        count = entry.nbytes // dtype.itemsize
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.start % dtype.itemsize:  # a foreign writer's header may leave tensors unaligned
            return self.read(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "not writable": nothing here writes
            flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.start)
        return flat.view(entry.shape)

    def read(self, name: str) -> torch.Tensor:
        """A tensor in memory of its own; none of the file stays mapped."""
        entry = self.entry(name)
        raw = torch.empty(entry.nbytes, dtype=torch.uint8)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(entry.start)
            target, done = memoryview(raw.numpy()), 0
            while done < entry.nbytes and (count := file.readinto(target[done:])):
                done += count
        if done < entry.nbytes:
            raise BadFile(f"{self.path.name} ended within {name!r}: it has been truncated")
        return raw.view(self._dtype(name, entry)).view(entry.shape)

    def _dtype(self, name: str, entry: Entry) -> torch.dtype:
        if entry.dtype not in DTYPES:
            raise BadFile(
                f"{name!r} of {self.path.name} has dtype {entry.dtype}", ", ".join(DTYPES)
            )
        return DTYPES[entry.dtype]


def _entry(value: dict, offset: int) -> Entry:
    start, stop = (int(v) for v in value["data_offsets"])
    shape = tuple(int(n) for n in value["shape"])
    count = torch.Size(shape).numel()
    itemsize = DTYPES[value["dtype"]].itemsize if value["dtype"] in DTYPES else None
    if start < 0 or min((0, *shape)) < 0 or (itemsize and stop - start != count * itemsize):
        raise ValueError(f"{value['dtype']} {shape} does not take bytes {start} to {stop}")
    return Entry(value["dtype"], shape, offset + start, offset + stop)


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def header(
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> bytes:
    """The bytes before the tensors, which follow in the order of `shapes`, 8-byte aligned."""
    body, start = {"__metadata__": metadata}, 0
    for name, (dtype, shape) in shapes.items():
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        body[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(body, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the mapped tensors are aligned
    return len(text).to_bytes(8, "little") + text


def write(
    path: Path | str,
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[torch.Tensor],
    metadata: dict[str, str],
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> None:
    """Write `tensors`, one for each of `shapes` and in their order, and replace `path` at the end.

    Tensors may come from a generator, so that one at a time is in memory. Whatever goes wrong,
    also an interrupt, the old file stays and no half file remains. Raises `CannotWrite`.
    """
    path = Path(path)
    with replacing(path) as file:
        file.write(header(shapes, metadata))
        for done, ((name, wanted), tensor) in enumerate(
            zip(shapes.items(), tensors, strict=True), 1
        ):
            if (tensor.dtype, tuple(tensor.shape)) != (wanted[0], tuple(wanted[1])):
                raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, not {wanted}")
            flat = tensor.detach().cpu().contiguous().flatten()
            if flat.numel():
                file.write(memoryview(flat.view(torch.uint8).numpy()))
            progress(f"writing {path.name}: {name}", done / len(shapes))

"""Safetensors files, read lazily and written whole or not at all.

The library checks a file; its tensors are views of a shared, read-only map, so that a pool larger
than the memory can be opened (the library's own map counts against it whole). It also has no
writer that takes one tensor at a time: a file too large for memory is written here layer by layer,
with progress.
"""

import json
import mmap
import warnings
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from shadowkv_lab.errors import BadFile
from shadowkv_lab.files import parse, replacing

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


class Entry(NamedTuple):
    """One tensor of a header: dtype as the format calls it ("BF16"), first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """A safetensors file: `entries` by name, `metadata`, and its tensors when asked for.

    Opening reads the header alone. `view` maps a tensor's bytes, which are read when they are
    touched; `read` copies them into memory of their own. Raises `BadFile`.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        try:
            with safe_open(self.path, "np"), open(self.path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = parse(file.read(length), dict, str(path))
        except OSError as error:
            raise BadFile(f"{path} cannot be read ({error})") from None
        except SafetensorError as error:
            raise BadFile(
                f"{path} is not a whole safetensors file ({error})",
                remedy="Copy or download it again",
            ) from None
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.entries = {
            name: Entry(e["dtype"], tuple(e["shape"]), 8 + length + e["data_offsets"][0])
            for name, e in header.items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def entry(self, name: str) -> Entry:
        """Dtype, shape and place of a tensor; raises `BadFile` if there is none."""
        if name not in self.entries:
            names = sorted(self.entries)
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            raise BadFile(f"{self.path.name} has no tensor {name!r}", ", ".join(names[:6]) + more)
        return self.entries[name]

    @cached_property
    def _map(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def view(self, name: str) -> torch.Tensor:
        """A read-only tensor over the mapped file: only the pages that are touched are read."""
        entry, dtype, count = self._place(name)
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
        entry, dtype, count = self._place(name)
        out = torch.empty(count, dtype=dtype)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(entry.start)
            target, done = memoryview(out.view(torch.uint8).numpy()), 0
            while done < out.nbytes and (got := file.readinto(target[done:])):
                done += got
        if done < out.nbytes:
            raise BadFile(f"{self.path} ended within {name!r}: it has been truncated")
        return out.view(entry.shape)

    def _place(self, name: str) -> tuple[Entry, torch.dtype, int]:
        entry = self.entry(name)
        if entry.dtype not in DTYPES:
            raise BadFile(
                f"{name!r} of {self.path.name} has dtype {entry.dtype}", ", ".join(DTYPES)
            )
        return entry, DTYPES[entry.dtype], torch.Size(entry.shape).numel()


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

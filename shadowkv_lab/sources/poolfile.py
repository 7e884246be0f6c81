"""Pool files: latent rows that colleagues exchange, as safetensors with a metadata header.

Tensors: `rows.L` [T, width] for each captured layer L of the model, and where the source has them
`index_keys.L` [T, 128], `queries.L` [Q, H, rank + rope] (absorbed) at `query_positions` [Q], and
`lens` [R], the tokens of each request. No pickle anywhere.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from shadowkv_lab.errors import BadFile, LabError, OutOfRange
from shadowkv_lab.files import parse
from shadowkv_lab.kernels.reference import bits
from shadowkv_lab.model import Model
from shadowkv_lab.pool import Pool
from shadowkv_lab.sources import formats, tensorfile

FORMAT, SCHEMA = "shadowkv-pool", "1"
CHUNK_ROWS = 32768


@dataclass(frozen=True)
class PoolFile:
    """An opened pool file. Rows are mapped, and read when a layer is asked for."""

    file: tensorfile.TensorFile
    model: Model
    storage: str  # "f32", "bf16", "fp8" or "packed"
    scale: float  # a stored fp8 value times this is the row's value
    layers: tuple[int, ...]  # the model's layers that it holds, in file order
    tokens: int  # rows of each layer
    lens: tuple[int, ...]  # tokens of each request; their sum is `tokens`
    page_size: int

    @property
    def name(self) -> str:
        return self.file.path.name

    @property
    def metadata(self) -> dict[str, str]:
        """The header as it was written: source, hashes, date, ..."""
        return self.file.metadata

    @property
    def title(self) -> str:
        """What a figure says of its data, "random weights" included."""
        weights = ", random weights" if self.metadata.get("weights") == "random" else ""
        count = len(self.layers)
        return f"{self.model.name}{weights}, {count} layers x {self.tokens} tokens, {self.storage}"

    def stored(self, index: int) -> torch.Tensor:
        """The mapped rows [T, width] of the file's layer `index`, as stored and read-only."""
        return self.file.view(f"rows.{self.layers[index]}")

    def rows(self, index: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [n, row] of one layer, dequantised; raises `OutOfRange` for NaN or Inf."""
        return self._decode(index, self.stored(index)[start:stop], start)

    def tiled(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of a layer that repeats without end."""
        wanted = torch.arange(start, stop) % self.tokens
        stored = self.stored(index)
        return self._decode(index, bits(stored)[wanted].view(stored.dtype), start)

    def _decode(self, index: int, stored: torch.Tensor, start: int) -> torch.Tensor:
        rows = formats.decode(stored, self.storage, self.model, self.scale)
        formats.check_finite(rows, f"{self.name}, layer {self.layers[index]}", start)
        return rows

    def extra(self, name: str, index: int | None = None) -> torch.Tensor | None:
        """An optional tensor, of one layer or of the file; None where the source had none."""
        name = name if index is None else f"{name}.{self.layers[index]}"
        return self.file.view(name) if name in self.file else None

    def queries(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Absorbed q_nope [Q, H, rank], q_pe [Q, H, rope] and their positions [Q], or None."""
        queries = self.extra("queries", index)
        if queries is None:
            return None
        rank = self.model.kv_lora_rank
        return queries[..., :rank], queries[..., rank:], self.extra("query_positions")


def load(path: Path | str, geometry: Model | None = None) -> PoolFile:
    """Open a pool file; reads its header and `lens`, no rows.

    Raises `BadFile`, `OutOfRange` for a row width that its storage cannot have, and
    `BadFile` where its rows are not those of `geometry`.
    """
    file = tensorfile.TensorFile(path)
    meta = file.metadata
    if meta.get("format") != FORMAT:
        raise BadFile(
            f"{file.path.name} is a safetensors file, but no pool file of the lab",
            "files that shadowkv capture or sglang_snapshot.convert wrote",
        )
    if meta.get("schema") != SCHEMA:
        raise BadFile(
            f"{file.path.name} has schema {meta.get('schema')}",
            f"schema {SCHEMA}",
            "Update the lab, or write the file again",
        )
    try:
        header = f"the header of {file.path.name}"
        shape = parse(meta["geometry"], Model, header)
        layers = parse(meta["layers"], tuple[int, ...], header)
        if not re.fullmatch(r"[\w .+/()-]{1,120}", shape.name):  # it stands in titles and texts
            raise BadFile(f"{header}: the model is called {shape.name!r:.80}", "a plain name")
        scale, page_size, storage = float(meta["scale"]), int(meta["page_size"]), meta["storage"]
        tokens = file.entry(f"rows.{layers[0]}").shape[0]
        lens = tuple(file.view("lens").tolist()) if "lens" in file else (tokens,)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise BadFile(f"The header of {file.path.name} is broken ({error!r})") from None
    for layer in layers:
        entry = file.entry(f"rows.{layer}")
        formats.identify(shape, tensorfile.DTYPES.get(entry.dtype), entry.shape[-1], storage)
        if entry.shape[:-1] != (tokens,) or sum(lens) != tokens:
            raise BadFile(f"{file.path.name}: layer {layer} has {entry.shape} rows", f"{tokens}")
    if geometry is not None:
        check_geometry(shape, geometry, file.path.name)
    return PoolFile(file, shape, storage, scale, layers, tokens, lens, page_size)


def check_geometry(ours: Model, wanted: Model, name: str) -> None:
    """Raise `BadFile` unless latent and rope parts have the same widths."""
    for field in ("kv_lora_rank", "qk_rope_head_dim"):
        if getattr(ours, field) != getattr(wanted, field):
            raise BadFile(
                f"{name} holds rows of {ours.name} with {field} {getattr(ours, field)}",
                f"{field} {getattr(wanted, field)} for {wanted.name}",
                "Choose a pool file of that model, or that file's model",
            )


def write(
    path: Path | str,
    geometry: Model,
    storage: str,
    layers: Sequence[int],
    tokens: int,
    rows: Callable[[int], torch.Tensor],
    *,
    source: str,
    scale: float = 1.0,
    page_size: int = 1,
    extras: dict[str, torch.Tensor] | None = None,
    header: dict[str, str] | None = None,
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> PoolFile:
    """Write a pool file and open it. `rows(i)` gives the stored rows [T, width] of `layers[i]`.

    Layers are asked for one by one. The old file stays if anything fails: NaN or Inf
    (`OutOfRange`), a full disk (`CannotWrite`), an interrupt.
    """
    extras = extras or {}
    width = formats.width(geometry, storage)
    shapes = {f"rows.{n}": (formats.DTYPES[storage], (tokens, width)) for n in layers}
    shapes |= {name: (t.dtype, tuple(t.shape)) for name, t in extras.items()}
    metadata = {
        "format": FORMAT,
        "schema": SCHEMA,
        "geometry": json.dumps(asdict(geometry)),
        "storage": storage,
        "scale": repr(float(scale)),
        "page_size": str(page_size),
        "layers": json.dumps(list(layers)),
        "source": source,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **(header or {}),
    }

    def tensors():
        for i, layer in enumerate(layers):
            stored = rows(i)
            for start in range(0, len(stored), CHUNK_ROWS):
                part = formats.decode(stored[start : start + CHUNK_ROWS], storage, geometry, scale)
                formats.check_finite(part, f"Layer {layer}", start)
            yield stored
        yield from extras.values()

    tensorfile.write(path, shapes, tensors(), metadata, progress)
    return load(path)


@dataclass(frozen=True)
class Filler:
    """Fills a pool from a pool file: what `Bench.fill` calls in place of the synthetic source.

    A pool with more slots or layers than the file has repeats the file's, and `source` says so.
    """

    file: PoolFile
    tile: bool = True

    def __call__(self, pool: Pool, seed: int = 0, progress=None) -> None:
        """Write every slot of every layer, the dummy page included; rows do not depend on `seed`.

        Raises `BadFile`, `OutOfRange`, and `OutOfRange` if it would have to tile and must not.
        """
        file, total = self.file, pool.pool_tokens + pool.page_size
        check_geometry(file.model, pool.model, file.name)
        if not self.tile and self.repeats(pool.pool_tokens, pool.layers):
            raise OutOfRange(
                f"{file.name} has {len(file.layers)} layers x {file.tokens} tokens, the pool "
                f"{pool.layers} x {pool.pool_tokens}",
                "pools up to the file's size",
                "Allow tiling",
            )
        for layer in range(pool.layers):
            for start in range(0, total, CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, total)
                rows = file.tiled(layer % len(file.layers), start, stop)
                slots = torch.arange(start, stop, device=pool.device)
                pool.write_unchecked(layer, slots, rows.to(pool.device).bfloat16())
            if progress:
                progress(layer + 1, pool.layers)

    def repeats(self, pool_tokens: int, layers: int) -> bool:
        """Whether a pool of this size holds rows more than once."""
        return pool_tokens > self.file.tokens or layers > len(self.file.layers)

    def source(self, pool_tokens: int, layers: int) -> str:
        """The `source` of runs on such a pool: "file:NAME", "(tiled)" where rows repeat."""
        return f"file:{self.file.name}" + (" (tiled)" if self.repeats(pool_tokens, layers) else "")


def filler(path: Path | str, geometry: Model | None = None, *, tile: bool = True) -> Filler:
    """The filler of a pool file; with `geometry`, a mismatch is raised now and not at fill time."""
    return Filler(load(path, geometry), tile)


def problem(path: Path | str, geometry: Model | None = None) -> str | None:
    """Why a file cannot feed a pool, or None: for a file chooser that marks its entries."""
    try:
        load(path, geometry)
    except LabError as error:
        return str(error)
    return None

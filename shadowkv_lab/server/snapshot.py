"""Rows of a running SGLang server: a snapshot of its KV pool, and its conversion to a pool file.

A snapshot holds, as safetensors or as a `torch.save` archive of tensors alone:

    kv_buffer.L   [S, 1, 576] BF16 or uint8 (FP8), or [S, 1, 656] uint8 (packed), for layer L
    req_to_token  int [R, longest], the slots of each request's tokens, in order
    lens          int [R], live tokens of each request
    page_size     int [1], optional
    dtype         text, optional (safetensors: in the metadata), such as "torch.float8_e4m3fn"

`SNIPPET` writes one from inside the server. Paste it at the end of `Scheduler.process_batch_result`
(sglang/srt/managers/scheduler.py) and start the server with SHADOWKV_SNAPSHOT=/path/to/file; the
first decode step with at least SHADOWKV_SNAPSHOT_TOKENS live tokens writes it, once. It copies the
rows of the running requests only. For SGLang 0.5.23, read in its source: `MLATokenToKVPool` and
`DSATokenToKVPool` keep `kv_buffer`, `ReqToTokenPool.req_to_token` has a padding row 0, and
`Req.kv.kv_committed_len` counts the tokens whose rows have been written. Written against that
source and not yet run inside a server.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shadowkv_lab.errors import BadFile, OutOfRange
from shadowkv_lab.kernels.reference import bits
from shadowkv_lab.model import Model
from shadowkv_lab.sources import formats, poolfile, tensorfile

SGLANG_VERSION = "0.5.23"
SNIPPET = """
        import os, torch  # shadowkv snapshot
        path, reqs = os.environ.get("SHADOWKV_SNAPSHOT"), [r for r in batch.reqs if r.kv.holds_kv]
        lens = [r.kv.kv_committed_len for r in reqs]
        enough = sum(lens) >= int(os.environ.get("SHADOWKV_SNAPSHOT_TOKENS", 1)) and min(lens) > 0
        if (path and enough and batch.forward_mode.is_decode() and not os.path.exists(path)
                and get_parallel().tp_rank == 0):
            torch.cuda.synchronize()
            pool, table = self.token_to_kv_pool_allocator.get_kvcache(), self.req_to_token_pool
            slots = [table.req_to_token[r.kv.req_pool_idx, :n] for r, n in zip(reqs, lens)]
            slots, ends = torch.cat(slots).long(), torch.tensor(lens).cumsum(0)
            rows = {f"kv_buffer.{pool.start_layer + i}": b[slots].cpu()
                    for i, b in enumerate(pool.kv_buffer)}
            own = (ends - torch.tensor(lens))[:, None] + torch.arange(max(lens))
            torch.save(rows | dict(req_to_token=own, lens=torch.tensor(lens), dtype=str(pool.dtype),
                                   page_size=torch.tensor([pool.page_size])), path + ".part")
            os.replace(path + ".part", path)
"""


@dataclass(frozen=True)
class Snapshot:
    """An opened snapshot; a layer's rows are read when they are asked for."""

    name: str
    model: Model
    storage: str  # "fp8", "bf16" or "packed"
    layers: tuple[int, ...]
    lens: tuple[int, ...]  # live tokens of each request
    slots: torch.Tensor  # int64 [sum of lens], request by request
    page_size: int
    buffer: Callable[[int], torch.Tensor]  # a layer's kv_buffer, by the layer's number

    def rows(self, index: int) -> torch.Tensor:
        """The stored rows [tokens, width] of `layers[index]`, request by request."""
        buffer = self.buffer(self.layers[index]).flatten(1)
        if int(self.slots.max()) >= len(buffer):
            raise OutOfRange(
                f"{self.name}: req_to_token names slot {int(self.slots.max())}",
                f"0 to {len(buffer) - 1}, the slots of layer {self.layers[index]}",
            )
        stored = bits(buffer)[self.slots]
        return stored.view(formats.DTYPES[self.storage]) if self.storage == "fp8" else stored


def load(path: Path | str, model: Model, storage: str | None = None) -> Snapshot:
    """Open a snapshot. `storage` is checked against the rows' width where it is given.

    Raises `BadFile`, `BadFile`, `OutOfRange` (a width that this model cannot have, or
    packed rows declared as raw ones), `OutOfRange`.
    """
    path = Path(path)
    shapes, get, dtype = _open(path)
    if "float8" in dtype and not dtype.endswith("float8_e4m3fn"):
        raise OutOfRange(f"{path.name} holds {dtype} rows", "float8_e4m3fn, bfloat16")
    layers = sorted(int(n.split(".")[1]) for n in shapes if n.startswith("kv_buffer."))
    if not layers or "req_to_token" not in shapes or "lens" not in shapes:
        raise BadFile(
            f"{path.name} is no snapshot of a KV pool",
            "files with kv_buffer.0, ..., req_to_token and lens",
            "Write it with sglang_snapshot.SNIPPET",
        )
    if layers[-1] >= model.layers + model.mtp_layers:
        raise BadFile(
            f"{path.name} has a layer {layers[-1]}", f"{model.layers} layers of {model.name}"
        )
    kinds = set()
    for layer in layers:
        dtype, shape = shapes[f"kv_buffer.{layer}"]
        kinds.add(formats.identify(model, dtype, torch.Size(shape[1:]).numel(), storage))
    if len(kinds) != 1:
        raise OutOfRange(f"{path.name} mixes {', '.join(sorted(kinds))} layers", "one storage")
    table, lens = get("req_to_token"), get("lens").long().tolist()
    if (
        not lens
        or min(lens) < 1
        or table.ndim != 2
        or len(table) < len(lens)
        or max(lens) > table.shape[1]
    ):
        raise BadFile(f"{path.name}: lens {lens[:8]} do not fit req_to_token {tuple(table.shape)}")
    slots = torch.cat([table[i, :n] for i, n in enumerate(lens)]).long()
    if int(slots.min()) < 0:
        raise OutOfRange(f"{path.name}: req_to_token names slot {int(slots.min())}", "0 or more")
    page_size = int(get("page_size")) if "page_size" in shapes else 1
    return Snapshot(
        path.name,
        model,
        kinds.pop(),
        tuple(layers),
        tuple(lens),
        slots,
        page_size,
        lambda layer: get(f"kv_buffer.{layer}"),
    )


def convert(
    path: Path | str,
    model: Model,
    out: Path | str,
    storage: str | None = None,
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> poolfile.PoolFile:
    """Write a snapshot's live rows, request by request and bit for bit, as a pool file."""
    snapshot = load(path, model, storage)
    return poolfile.write(
        out,
        model,
        snapshot.storage,
        snapshot.layers,
        len(snapshot.slots),
        snapshot.rows,
        source=f"SGLang snapshot {snapshot.name}, {len(snapshot.lens)} requests",
        page_size=snapshot.page_size,
        extras={"lens": torch.tensor(snapshot.lens)},
        header={"weights": "as served"},
        progress=progress,
    )


def _open(path: Path) -> tuple[dict, Callable[[str], torch.Tensor], str]:
    """Dtype and shape of each tensor, how to get one, the pool's dtype; no code is unpickled."""
    try:
        with open(path, "rb") as file:
            archive = file.read(2) == b"PK"  # torch.save writes a zip
    except OSError as error:
        raise BadFile(f"{path} cannot be read ({error.strerror})") from None
    if not archive:
        file = tensorfile.TensorFile(path)
        shapes = {n: (tensorfile.DTYPES.get(e.dtype), e.shape) for n, e in file.entries.items()}
        return shapes, file.view, file.metadata.get("dtype", "")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, zip and torch each raise their own kinds
        raise BadFile(
            f"{path.name} cannot be read with weights_only=True ({str(error).splitlines()[0]})",
            "a dictionary of tensors",
            "Write it with sglang_snapshot.SNIPPET",
        ) from None
    if not isinstance(content, Mapping):
        raise BadFile(f"{path.name} holds {type(content).__name__}", "a dictionary of tensors")
    tensors = {n: t for n, t in content.items() if isinstance(t, torch.Tensor)}
    shapes = {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
    return shapes, tensors.__getitem__, str(content.get("dtype", ""))

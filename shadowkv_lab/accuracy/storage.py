"""Storage error: what a latent row loses by the way it is kept."""

from typing import NamedTuple

import torch

from shadowkv_lab.errors import UnknownName
from shadowkv_lab.kernels.reference import FP8_MAX, to_fp8
from shadowkv_lab.model import Model
from shadowkv_lab.sources import formats
from shadowkv_lab.sources.poolfile import PoolFile

SAMPLE_TOKENS = 16384  # first rows of each layer that are looked at


class Storage(NamedTuple):
    """One way to keep a row."""

    title: str
    row_bytes: str  # the key of `Model.row_bytes`


STORAGES = {
    "bf16": Storage("BF16", "bf16"),
    "fp8": Storage("e4m3 at scale 1.0", "fp8"),
    "fp8_scaled": Storage("e4m3 with one scale a layer", "fp8"),
    "packed": Storage("packed rows (a scale per 128, BF16 rope)", "packed"),
}


class StorageError(NamedTuple):
    """How far stored rows are from the rows as they came, one layer and part."""

    storage: str
    layer: int
    part: str  # "latent" or "rope"
    row_bytes: int  # bytes kept per token and layer, of the whole row
    scale: float  # of `fp8_scaled`; 1.0 elsewhere
    relative_l2: float  # |stored - row| / |row| over all tokens
    cosine: float  # mean over tokens
    max_abs: float  # largest absolute difference
    clipped: float  # share of values beyond the largest that the format holds
    flushed: float  # share of nonzero values stored as zero


def calibrated_scale(rows: torch.Tensor) -> float:
    """The least per-tensor scale that clips nothing: largest absolute value / 448."""
    return max(float(rows.abs().max()) / FP8_MAX, formats.TINY)


def round_trip(
    rows: torch.Tensor, storage: str, rank: int, scale: float | None = None
) -> torch.Tensor:
    """Rows [T, rank + rope] as they read back from a storage; float32, BF16 for "bf16".

    `scale` belongs to "fp8_scaled" and is calibrated on these very rows if left out: the best
    case, where an engine calibrates on other text and may clip.
    """
    if storage not in STORAGES:
        raise UnknownName("storage", storage, STORAGES)
    if storage == "bf16":
        return rows.bfloat16()
    if storage == "packed":
        return formats.unpack(formats.pack(rows, rank), rank, rows.shape[1] - rank)
    scale = 1.0 if storage == "fp8" else scale or calibrated_scale(rows)
    return to_fp8(rows.float() / scale).float() * scale


def storage_errors(file: PoolFile, storages=tuple(STORAGES)) -> list[StorageError]:
    """The error of each storage on each layer of a pool file, latent and rope parts apart."""
    return [
        error
        for index, layer in enumerate(file.layers)
        for storage in storages
        for error in errors_of(file.rows(index, 0, SAMPLE_TOKENS), storage, file.model, layer)
    ]


def errors_of(rows: torch.Tensor, storage: str, model: Model, layer: int = 0) -> list[StorageError]:
    """Latent and rope error of one layer's rows [T, row]."""
    rank = model.kv_lora_rank
    scale = calibrated_scale(rows) if storage == "fp8_scaled" else 1.0
    exact, stored = rows.double(), round_trip(rows, storage, rank, scale).double()
    found = []
    for part, span in (("latent", slice(0, rank)), ("rope", slice(rank, None))):
        a, b = exact[:, span], stored[:, span]
        holds_less = storage in ("fp8", "fp8_scaled")  # elsewhere the range suffices
        found.append(
            StorageError(
                storage,
                layer,
                part,
                model.row_bytes(STORAGES[storage].row_bytes),
                scale,
                relative_l2=float((b - a).norm() / a.norm()),
                cosine=float(torch.cosine_similarity(a, b, dim=1).mean()),
                max_abs=float((b - a).abs().max()),
                clipped=float((a.abs() > FP8_MAX * scale).double().mean()) if holds_less else 0.0,
                flushed=float(((a != 0) & (b == 0)).double().mean()),
            )
        )
    return found


def channel_errors(file: PoolFile, storage: str) -> torch.Tensor:
    """Relative L2 error of each channel of each layer, float64 [layers, row]."""
    found = []
    for index in range(len(file.layers)):
        exact = file.rows(index, 0, SAMPLE_TOKENS)
        stored = round_trip(exact, storage, file.model.kv_lora_rank).double()
        exact = exact.double()
        found.append((stored - exact).norm(dim=0) / exact.norm(dim=0).clamp(min=formats.TINY))
    return torch.stack(found)

"""How one latent row is stored: f32, bf16, fp8 (e4m3) or packed (the 656-byte fp8_ds_mla row).

A packed row holds the latent as e4m3, one fp32 scale per 128 of its values (largest absolute value
/ 448), then the rope part as BF16: SGLang 0.5.23, kernels/ops/quantization/dsa_quant_k_cache.py.
"""

import torch
import torch.nn.functional as F

from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.kernels.reference import FP8, FP8_MAX, to_fp8, unpack
from shadowkv_lab.model import SCALE_GROUP, Model

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8, "packed": torch.uint8}
TINY = torch.finfo(torch.float32).tiny


def width(model: Model, storage: str) -> int:
    """Elements of one stored row, in the storage's own dtype."""
    return model.row_bytes("packed") if storage == "packed" else model.row


def identify(model: Model, dtype: torch.dtype, row_width: int, declared: str | None = None) -> str:
    """The storage of an engine's rows, by dtype and width; FP8 may come as uint8.

    Raises `OutOfRange` where `declared` is something else (packed rows read as raw ones give text
    that looks almost right, then garbles), or where no storage has that width.
    """
    packed, row = model.row_bytes("packed"), model.row
    fits = {
        (torch.bfloat16, row): "bf16",
        (torch.float32, row): "f32",
        (FP8, row): "fp8",
        (torch.uint8, row): "fp8",
        (torch.uint8, packed): "packed",
        (FP8, packed): "packed",
    }
    found = fits.get((dtype, row_width))
    allowed = f"{row} values (BF16, or FP8 as uint8) or {packed} bytes (packed) for {model.name}"
    if found is None:
        raise OutOfRange(f"Rows of {row_width} x {dtype}", allowed)
    if declared not in (None, found):
        raise OutOfRange(
            f"Rows of {row_width} x {dtype} are {found} rows, but were declared {declared}",
            allowed,
            "Reading packed rows as raw ones mixes scales and rope bytes into the latent",
        )
    return found


def pack(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """Rows [T, rank + rope] as packed bytes, uint8 [T, 656] for 512 + 64.

    Differs from SGLang's kernel for a group of zeros only: it divides by zero there.
    """
    latent = rows[:, :rank].float()
    grouped = F.pad(latent, (0, -rank % SCALE_GROUP)).unflatten(1, (-1, SCALE_GROUP))
    scales = (grouped.abs().amax(-1) / FP8_MAX).clamp(min=TINY)
    stored = to_fp8(grouped * (1.0 / scales)[..., None]).flatten(1)[:, :rank]
    rope = rows[:, rank:].bfloat16().contiguous()
    parts = stored.contiguous(), scales.contiguous(), rope
    return torch.cat([part.view(torch.uint8) for part in parts], 1)


def decode(stored: torch.Tensor, storage: str, model: Model, scale: float = 1.0) -> torch.Tensor:
    """The rows [T, row] that stored rows stand for: BF16 where that is exact, else float32."""
    if storage == "packed":
        return unpack(stored.view(torch.uint8), model.kv_lora_rank, model.qk_rope_head_dim)
    if storage == "fp8":
        stored = stored.view(FP8)
        return stored.bfloat16() if scale == 1.0 else stored.float() * scale
    return stored


def check_finite(rows: torch.Tensor, what: str, first: int = 0) -> None:
    """Raise `OutOfRange` naming the first token of `rows` that has NaN or Inf in it."""
    finite = rows.isfinite().all(1)
    if not finite.all():
        token = first + int((~finite).nonzero()[0])
        raise OutOfRange(
            f"{what}, token {token} has NaN or Inf in it",
            "finite values",
            "Capture it again; such a row poisons every request that reads it",
        )

"""What FP8 costs in accuracy: in the rows, in attention, in the model's predictions."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from shadowkv_lab import facts
from shadowkv_lab.accuracy.attention import (
    AttentionError,
    Coherence,
    attention_errors,
    coherence,
    storage_attention,
)
from shadowkv_lab.accuracy.model import ModelError, model_errors
from shadowkv_lab.accuracy.storage import (
    STORAGES,
    StorageError,
    channel_errors,
    round_trip,
    storage_errors,
)
from shadowkv_lab.errors import NoAnswer, OutOfRange
from shadowkv_lab.sources.poolfile import PoolFile

__all__ = [
    "STORAGES",
    "AttentionError",
    "Coherence",
    "ModelError",
    "StorageError",
    "attention_errors",
    "channel_errors",
    "choose",
    "coherence",
    "describe",
    "model_errors",
    "planted",
    "random",
    "round_trip",
    "storage_attention",
    "storage_errors",
]

ENOUGH = 1.25  # a storage this near the least error of the 8-bit ones is as good as it


def describe(
    file: PoolFile,
    rows: Sequence[StorageError],
    attention: Sequence[AttentionError],
    model: Sequence[ModelError] = (),
) -> str:
    """One paragraph: what each storage costs on these rows, and what data they are from.

    `attention` is that of the storages alone, BF16 among them.
    """
    kl, off, kept = _of(attention)
    eight = sorted((name for name in kl if name != "bf16"), key=lambda name: (kept[name], kl[name]))
    clipped = fmean(r.clipped for r in rows if r.storage == "fp8" and r.part == "latent")
    flushed = fmean(r.flushed for r in rows if r.storage == "fp8" and r.part == "latent")
    told = "; ".join(
        f"{STORAGES[n].title}, {kept[n]} B: {off[n]:.1%} off, KL {kl[n]:.1e}" for n in eight
    )
    held = f"{off['bf16']:.2%} off" if off["bf16"] else "it holds these rows as they came"
    parts = [
        f"Data: {file.title}, {len(file.extra('query_positions'))} queries per layer; bytes are "
        "per token and layer, attention is compared with float64 over the rows as they came "
        "(relative L2 of its output, KL of its softmax in nats).",
        f"{told}; BF16, {kept['bf16']} B: {held}. At scale 1.0 e4m3 clips {clipped:.3%} of the "
        f"latent's values and flushes {flushed:.2%} to zero.",
    ]
    if model:
        told = ", ".join(f"{m.storage} {m.kl:.1e}" for m in model)
        parts.append(f"Next-token KL of a whole model over {model[0].tokens} tokens: {told}.")
    if random(file):
        parts.append(
            "The weights are random and their outliers planted: this shows the arithmetic and says "
            "nothing of a trained model."
        )
    return " ".join(parts)


def choose(file: PoolFile, attention: Sequence[AttentionError]) -> str:
    """Which storage these rows speak for, in one sentence.

    The fewest bytes among the 8-bit storages whose attention error is within `ENOUGH` of the
    least, as KL over all layers. Raises `NoAnswer` for rows of random weights.
    """
    if random(file):
        raise NoAnswer(
            f"{file.title}: random weights with planted outliers cannot choose a storage",
            "rows of a real checkpoint",
            "Capture them: shadowkv capture --checkpoint DIR --text FILE --out FILE",
        )
    kl, _, kept = _of(attention)
    eight = [name for name in kl if name != "bf16"]
    good = [name for name in eight if kl[name] <= ENOUGH * min(kl[n] for n in eight)]
    best = min(good, key=lambda name: (kept[name], kl[name]))
    return (
        f"Where the tokens fit, keep BF16 ({kept['bf16']} B). Where they do not, these rows speak "
        f"for {STORAGES[best].title}, {kept[best]} B: of the 8-bit storages with a KL within "
        f"{ENOUGH:g} times the least it keeps the fewest bytes."
    )


def random(file: PoolFile) -> bool:
    """Whether a pool file's rows come from random weights."""
    return file.metadata.get("weights") == "random"


def _of(attention: Sequence[AttentionError]) -> tuple[dict, dict, dict]:
    """KL, output error and kept bytes by storage, means over layers."""
    names = dict.fromkeys(a.name for a in attention)
    kl = {n: fmean(a.kl for a in attention if a.name == n) for n in names}
    off = {n: fmean(a.output for a in attention if a.name == n) for n in names}
    return kl, off, {a.name: a.kept_bytes for a in attention}


def planted(outliers: float, *, tokens: int = 128, seed: int = 0) -> list[StorageError]:
    """Storage errors of a tiny random model's rows, its planted outliers at some strength.

    `outliers` from 0 (none) to 1 (as the shipped demo pool has them). Takes some seconds.
    """
    if not 0 <= outliers <= 1:
        raise OutOfRange(f"Outliers of strength {outliers}", "0 (none) to 1")
    from shadowkv_lab.sources import capture, tiny

    text = facts.path("pools", "tiny-glm-5-random.txt")
    with tempfile.TemporaryDirectory() as folder:
        made = tiny.write(Path(folder) / "tiny", seed, outliers=outliers)
        file = capture.capture(made, text, Path(folder) / "rows.safetensors", max_tokens=tokens)
        return storage_errors(file)

"""What FP8 costs in accuracy: in the rows, in attention, in the model's predictions."""

from collections.abc import Sequence
from statistics import fmean

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
    "model_errors",
    "round_trip",
    "storage_attention",
    "storage_errors",
]

ENOUGH = 1.25  # a storage this near the least error of the 8-bit ones is as good as it


def choose(
    file: PoolFile,
    rows: Sequence[StorageError],
    attention: Sequence[AttentionError],
    model: Sequence[ModelError] = (),
) -> str:
    """One paragraph: which storage these numbers speak for, and what data they are from.

    `attention` is that of the storages alone, BF16 among them.

    Takes the fewest bytes among the 8-bit storages whose attention error is within `ENOUGH` of the
    least, as KL over all layers.
    """
    kl = {n: fmean(a.kl for a in attention if a.name == n) for n in {a.name for a in attention}}
    kept = {a.name: a.kept_bytes for a in attention}
    off = {n: fmean(a.output for a in attention if a.name == n) for n in kl}
    eight = [name for name in kl if name != "bf16"]
    good = [name for name in eight if kl[name] <= ENOUGH * min(kl[n] for n in eight)]
    best = min(good, key=lambda name: (kept[name], kl[name]))
    clipped = fmean(r.clipped for r in rows if r.storage == "fp8" and r.part == "latent")
    flushed = fmean(r.flushed for r in rows if r.storage == "fp8" and r.part == "latent")
    told = "; ".join(
        f"{STORAGES[n].title}, {kept[n]} B: {off[n]:.1%} off, KL {kl[n]:.1e}"
        for n in sorted(eight, key=lambda n: (kept[n], kl[n]))
    )
    parts = [
        f"Data: {file.title}, {len(file.extra('query_positions'))} queries a layer; bytes are per "
        "token and layer, attention is compared with float64 over the rows as they came (relative "
        "L2 of its output, KL of its softmax in nats).",
        f"{told}. At scale 1.0 e4m3 clips {clipped:.3%} of the latent's values and flushes "
        f"{flushed:.2%} to zero.",
        f"Where the tokens fit, keep BF16 ({kept['bf16']} B): "
        + (f"{off['bf16']:.2%} off." if off["bf16"] else "it holds these rows as they came."),
        f"Where they do not, these numbers speak for {STORAGES[best].title}, {kept[best]} B: of "
        f"the 8-bit storages with a KL within {ENOUGH:g} times the least it keeps fewest bytes.",
    ]
    if model:
        told = ", ".join(f"{m.storage} {m.kl:.1e}" for m in model)
        parts.append(f"Next-token KL of a whole model over {model[0].tokens} tokens: {told}.")
    if file.metadata.get("weights") == "random":
        parts.append(
            "The weights are random and their outliers planted: this shows the arithmetic and says "
            "nothing of a trained model. Capture your own checkpoint to decide."
        )
    return " ".join(parts)

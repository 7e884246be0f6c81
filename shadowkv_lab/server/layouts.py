"""Which KV layout a pool has, told by its size: bytes per token against all that a model can have.

A log prints the pool's tokens and its size, and hardly ever how the rows lie. Their ratio names the
layout: flat FP8 rows of 576 B are 61 x 576 = 35,136 B per token of DeepSeek-R1, BF16 rows 70,272.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shadowkv_lab.deployment import GIB, LAYOUTS
from shadowkv_lab.model import Model

WORDS = {
    "fp8_e4m3": "flat FP8 rows",
    "fp8_e5m2": "flat FP8 rows (e5m2)",
    "bf16": "BF16 rows",
    "fp8_ds_mla": "packed FP8 rows (fp8_ds_mla)",
    "nvfp4_ds_mla": "packed NVFP4 rows (nvfp4_ds_mla)",
}
PAGES = (1, 64)  # dummy pages of SGLang's pools, where the page size is not known
BLOCK = 64  # vLLM's tokens per block for MLA, where it is not known
SPLITS = (2, 4, 8, 16, 3, 6)  # PP stages and DCP ranks that are tried where a log does not say


@dataclass(frozen=True)
class Layout:
    """How one GPU's pool lies: `layers` rows of a layout of `deployment.LAYOUTS`, and index keys.

    `index_layers` of the layers have an index key counted in the size. `pipeline` and `dcp` are
    what the model or the tokens are divided over; `dummy` rows come on top of the log's tokens.
    """

    model: Model
    name: str
    layers: int
    index_layers: int = 0
    mtp_layers: int = 0
    pipeline: int = 1
    dcp: int = 1
    dummy: int = 0

    @property
    def row_bytes(self) -> int:
        return self.model.row_bytes(LAYOUTS[self.name])

    @property
    def token_bytes(self) -> int:
        """Bytes per slot of this GPU's pool, as the size counts them."""
        index = self.model.row_bytes("index") if self.index_layers else 0
        return self.layers * self.row_bytes + self.index_layers * index

    @property
    def formula(self) -> str:
        """Its arithmetic: "61 x (656 + 132) = 48,068"."""
        index = self.model.row_bytes("index")
        if self.index_layers == self.layers:
            parts = f"{self.layers} x ({self.row_bytes:,} + {index})"
        else:
            parts = f"{self.layers} x {self.row_bytes:,}"
            parts += f" + {self.index_layers} x {index}" if self.index_layers else ""
        return f"{parts} = {self.token_bytes:,}"

    @property
    def index_counted(self) -> bool:
        """False where a model with an index has a size without index keys."""
        return bool(self.index_layers) or not self.model.dsa

    def __str__(self) -> str:
        words = [WORDS[self.name]]
        if self.index_layers:
            marked = self.model.index_layers + (self.mtp_layers if self.index_layers else 0)
            said = "all " if self.index_layers == self.layers else ""
            words.append(f"index keys on {said}{self.index_layers} layers")
            if self.index_layers != marked and self.pipeline == 1:
                words[-1] += f", although the config marks {marked}"
        elif self.model.dsa:
            words.append("index keys not counted")
        if self.mtp_layers:
            words.append(f"with {self.mtp_layers} MTP layer{'s' * (self.mtp_layers > 1)}")
        if self.pipeline > 1:
            words.append(f"{self.layers} layers, one of {self.pipeline} pipeline stages")
        if self.dcp > 1:
            words.append(f"tokens divided over {self.dcp} DCP ranks")
        return ", ".join(words)


def named(dtype: str | None) -> tuple[str, ...]:
    """The layouts that a log's word for its KV dtype leaves open; all of them for none.

    >>> named("torch.float8_e5m2"), named("bfloat16"), named("fp8")
    (('fp8_e5m2',), ('bf16',), ('fp8_e4m3', 'fp8_ds_mla'))
    """
    word = (dtype or "").removeprefix("torch.").lower()
    if word in LAYOUTS and "ds_mla" in word:
        return (word,)
    if "e5m2" in word:
        return ("fp8_e5m2",)
    if "fp4" in word or "float4" in word:
        return ("nvfp4_ds_mla",)
    if "fp8" in word or "float8" in word:
        return ("fp8_e4m3", "fp8_ds_mla")
    if word in ("bfloat16", "bf16", "float16", "fp16", "half"):
        return ("bf16",)
    return tuple(name for name in LAYOUTS if name != "fp8_e5m2")


def stages(model: Model, pipeline: int) -> list[range]:
    """The layers that a pipeline stage may have: engines differ in who gets what is left over."""
    n, over = divmod(model.layers, pipeline)
    found = {}
    for longer_first in (True, False):
        start = 0
        for i in range(pipeline):
            more = i < over if longer_first else pipeline - 1 - over <= i < pipeline - 1
            stage = range(start, start := start + n + more)
            found[stage] = None
    return list(found)


def possible(
    model: Model, names: Iterable[str], pipeline: int = 1, dcp: int = 1
) -> Iterator[Layout]:
    """Every layout that a model can have, the likeliest first."""
    for stage in stages(model, pipeline):
        last = stage.stop == model.layers
        marked = sum(layer in stage for layer in model.index_at)
        for mtp in (0, model.mtp_layers) if model.mtp_layers and last else (0,):
            layers = len(stage) + mtp
            counts = (marked + mtp, layers, 0) if model.dsa else (0,)
            for index in dict.fromkeys(counts):
                for name in names:
                    yield Layout(model, name, layers, index, mtp, pipeline, dcp)


def fitting(
    model: Model,
    tokens: int,
    kv_gib: float,
    *,
    rounding_gib: float = 0.005,
    dtype: str | None = None,
    page_size: int | None = None,
    pipeline: int | None = None,
    dcp: int | None = None,
    mtp: bool | None = None,
    engine: str = "sglang",
) -> list[Layout]:
    """The layouts whose `tokens` take `kv_gib`, the likeliest first; empty if none does.

    `tokens` are one GPU's slots, or all DCP ranks' where `dcp` says over how many they are divided.
    SGLang prints the size of its buffers, a dummy page included; vLLM what it may use, of which its
    blocks take all but a part of one. Divisions that the log does not name are tried only where
    nothing else fits.
    """
    names = named(dtype)
    found = _fitting(model, tokens, kv_gib, rounding_gib, names, page_size, pipeline, dcp, engine)
    if not found and pipeline is None and dcp is None:
        for split in SPLITS:
            for ways in ((split, 1), (1, split)):
                if ways[0] > model.layers:
                    continue
                found += _fitting(
                    model, tokens, kv_gib, rounding_gib, names, page_size, *ways, engine
                )
    if mtp is not None:
        found.sort(key=lambda layout: bool(layout.mtp_layers) != mtp)
    distinct: dict[tuple, Layout] = {}
    for layout in found:
        key = layout.name, layout.layers, layout.index_layers, layout.pipeline, layout.dcp
        distinct.setdefault(key, layout)
    return list(distinct.values())


def _fitting(model, tokens, kv_gib, rounding, names, page_size, pipeline, dcp, engine):
    slots = math.ceil(tokens / (dcp or 1))
    found = []
    for layout in possible(model, names, pipeline or 1, dcp or 1):
        for dummy in (0, *((page_size,) if page_size else PAGES)):
            used = (slots + dummy) * layout.token_bytes / GIB
            spare = (page_size or BLOCK) * layout.token_bytes / GIB if engine == "vllm" else 0.0
            if used - rounding <= kv_gib <= used + spare + rounding:
                found.append(
                    Layout(
                        model,
                        layout.name,
                        layout.layers,
                        layout.index_layers,
                        layout.mtp_layers,
                        layout.pipeline,
                        layout.dcp,
                        dummy,
                    )
                )
                break
            if engine == "vllm":  # no dummy page
                break
    return found

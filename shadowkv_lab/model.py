"""What an MLA model's latent row, layers, heads and softmax scale are, and what a token costs."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from shadowkv_lab import facts
from shadowkv_lab.errors import BadFile, OutOfRange, UnknownName
from shadowkv_lab.files import read_json
from shadowkv_lab.provenance import Source

SCALE_GROUP = 128  # latent values that share one fp32 scale in a packed fp8_ds_mla row


@dataclass(frozen=True)
class Model:
    """The sizes of one MLA model that its KV cache and its decode attention depend on.

    `layers` are the decoder layers that a decode step runs, without `mtp_layers`. `index_layers`
    of them (DSA models) also keep an index key of `index_head_dim` FP8 values a token.
    """

    name: str
    layers: int
    heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    hidden_size: int
    max_positions: int
    mscale: float = 1.0
    mtp_layers: int = 0
    index_head_dim: int = 0
    index_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    moe_intermediate_size: int = 0
    source: str = field(default="", compare=False)

    @property
    def row(self) -> int:
        """Values of one latent row: `kv_lora_rank + qk_rope_head_dim`."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """`(qk_nope_head_dim + qk_rope_head_dim)^-0.5`, times YaRN's mscale squared."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.mscale**2

    @property
    def dsa(self) -> bool:
        """Whether the model has a sparse-attention index (DSA)."""
        return self.index_head_dim > 0

    def heads_per_gpu(self, tensor_parallel: int) -> int:
        """Query heads on each GPU; the latent row itself is on every GPU, whole."""
        if tensor_parallel < 1 or self.heads % tensor_parallel:
            allowed = ", ".join(str(d) for d in range(1, self.heads + 1) if self.heads % d == 0)
            raise OutOfRange(f"{tensor_parallel} GPUs cannot share {self.heads} heads", allowed)
        return self.heads // tensor_parallel

    def row_bytes(self, storage: str) -> int:
        """Bytes per token and layer of one storage.

        `fp8`: e4m3, no scale. `bf16`. `fp8+bf16`: an FP8 row and its full shadow. `packed`: an
        fp8_ds_mla row (e4m3 latent, one fp32 scale per 128 values, BF16 rope part). `index`: one
        DSA index key (FP8 and one fp32 scale per 128 values).
        """
        sizes = {
            "fp8": self.row,
            "bf16": 2 * self.row,
            "fp8+bf16": 3 * self.row,
            "packed": self.kv_lora_rank + 4 * groups(self.kv_lora_rank) + 2 * self.qk_rope_head_dim,
            "index": self.index_head_dim + 4 * groups(self.index_head_dim),
        }
        if storage not in sizes:
            raise UnknownName("storage", storage, sizes)
        return sizes[storage]

    def token_bytes(self, storage: str, *, index: bool = True, mtp: bool = False) -> int:
        """Bytes of one token over all layers, with its index keys and MTP layer where asked for."""
        layers = self.layers + (self.mtp_layers if mtp else 0)
        index_layers = self.index_layers + (self.mtp_layers if mtp and self.dsa else 0)
        return layers * self.row_bytes(storage) + (
            index_layers * self.row_bytes("index") if index else 0
        )


def groups(values: int) -> int:
    """How many scales of `SCALE_GROUP` values a row of `values` FP8 values needs."""
    return -(-values // SCALE_GROUP)


def load_model(model: "str | Path | dict | Model") -> Model:
    """A geometry from a name under data/models, a config.json (its path or folder), or its dict.

    Raises `UnknownName` with the nearest model, or `BadFile` naming the fields that are missing.
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, dict):
        return from_config(model, model.get("_name_or_path") or "config", "a config dict")
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.is_file():
        return _from_file(path)
    remedy = "Or give the path of a config.json"
    return facts.find("models", "model", str(model), remedy, _Entry).model


def known_models() -> list[str]:
    """Names of the models under data/models, without aliases."""
    return sorted({entry.name for entry in facts.catalogue("models", _Entry).values()})


@dataclass(frozen=True)
class _Entry:
    """A file of data/models. Raises `BadFile` where its config is of no MLA model."""

    name: str
    source: Source
    config: dict

    def __post_init__(self):
        self.model  # noqa: B018

    @property
    def model(self) -> Model:
        return from_config(self.config, self.name, str(self.source))


def _from_file(path: Path) -> Model:
    return from_config(read_json(path), path.resolve().parent.name, path.name)


def from_config(config: dict, name: str, source: str) -> Model:
    """A geometry from the fields of a Hugging Face `config.json`; raises `BadFile`."""
    sizes = {
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_lora_rank": "kv_lora_rank",
        "qk_rope_head_dim": "qk_rope_head_dim",
        "qk_nope_head_dim": "qk_nope_head_dim",
        "v_head_dim": "v_head_dim",
        "hidden_size": "hidden_size",
        "max_positions": "max_position_embeddings",
    }
    extras = {
        "mtp_layers": "num_nextn_predict_layers",
        "index_head_dim": "index_head_dim",
        "experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "shared_experts": "n_shared_experts",
        "dense_layers": "first_k_dense_replace",
        "moe_intermediate_size": "moe_intermediate_size",
    }
    missing = [field for field in sizes.values() if config.get(field) is None]
    if missing:
        raise BadFile(
            f"{name} is not an MLA model: its config lacks {', '.join(missing)}",
            "configs with kv_lora_rank and qk_rope_head_dim (DeepSeek-V2/V3, GLM-5, Kimi-K2, ...)",
        )
    values = {ours: _size(name, theirs, config[theirs], 1) for ours, theirs in sizes.items()}
    values |= {
        ours: _size(name, field, config.get(field) or 0, 0) for ours, field in extras.items()
    }
    return Model(
        name=name,
        mscale=_mscale(config),
        index_layers=_index_layers(config, values["layers"]),
        source=source,
        **values,
    )


def _size(name: str, field: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadFile(f"{name}: {field} is {value!r}", f"a whole number, {least} or more")
    return value


def _mscale(config: dict) -> float:
    """YaRN's `0.1 * mscale_all_dim * ln(factor) + 1`, as DeepSeek-V3 applies it; 1 without YaRN."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("type") or rope.get("rope_type")
    factor, all_dim = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
    if kind != "yarn" or factor <= 1:
        return 1.0
    return 0.1 * all_dim * math.log(factor) + 1.0


def _index_layers(config: dict, layers: int) -> int:
    """Layers that hold index keys: all of a DSA model's, or those marked "full"."""
    if not config.get("index_head_dim"):
        return 0
    if "indexer_type_counts" in config:
        return config["indexer_type_counts"]["full"]
    types = config.get("indexer_types")
    return types[:layers].count("full") if types else layers

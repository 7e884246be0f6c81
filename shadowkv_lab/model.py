"""What an MLA model's latent row, layers, heads and softmax scale are, and what a token costs."""

import math
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from shadowkv_lab import facts
from shadowkv_lab.errors import BadFile, CannotRun, NoAnswer, OutOfRange, UnknownName
from shadowkv_lab.files import read_json
from shadowkv_lab.load import Load
from shadowkv_lab.provenance import Source

SCALE_GROUP = 128  # latent values that share one fp32 scale in a packed fp8_ds_mla row
NVFP4_GROUP = 16  # latent values that share one FP8 scale in a packed nvfp4_ds_mla row

# How checkpoints' names say that they are quantised; "" is a kind whose size the lab cannot tell.
QUANTISED = {
    **{name: name for name in ("bf16", "fp8", "nvfp4", "mxfp4", "int4", "int8")},
    **{"fp4": "nvfp4", "w4a16": "int4", "w8a8": "int8", "awq": "int4", "gptq": "int4"},
    **{"w4a8": "", "gguf": "", "exl3": ""},
}
# What else a checkpoint's name says after the model's: how it is tuned, packed or dated.
TUNED = r"instruct|chat|base|it|thinking|preview|hf|v2|modelopt|block|dynamic|\d{4}"
SUFFIX = re.compile(rf"[-_.]({'|'.join(QUANTISED)}|{TUNED})$")


@dataclass(frozen=True)
class Model:
    """The sizes of one MLA model that its KV cache, its attention and its weights depend on.

    `layers` are the attention layers that keep a latent, in the order in which a decode step runs
    them, without `mtp_layers`; `decoder_layers` counts all blocks where that differs (hybrid
    models have other layers too, LongCat two attentions in each). `index_at` are those of `layers`
    that also keep an index key of `index_head_dim` FP8 values per `index_tokens` tokens (DSA).
    Sizes that only weights depend on are 0 where the config does not give them. `quantisations` are
    those of its checkpoints, the widest first; one where the name or the config says which.
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
    index_tokens: int = 1
    # What only weights and engines ask for: no part of what a step is compared by.
    q_lora_rank: int = field(default=0, compare=False)
    intermediate_size: int = field(default=0, compare=False)
    vocab_size: int = field(default=0, compare=False)
    index_heads: int = field(default=0, compare=False)
    index_topk: int = field(default=0, compare=False)
    decoder_layers: int = field(default=0, compare=False)
    index_at: tuple[int, ...] = field(default=(), compare=False, repr=False)
    architecture: str = field(default="", compare=False)
    quantisations: tuple[str, ...] = field(default=(), compare=False)
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

    @property
    def choosing(self) -> tuple[int, ...]:
        """The layers that choose rows by their own index; the others read what the last one chose.

        Raises `CannotRun` for a model that cannot choose: one without an index, whose first layer
        has none, or whose keys stand for several tokens each.
        """
        found = tuple(layer for layer in self.index_at if layer < self.layers)
        if not self.index_topk or not self.index_heads or self.index_tokens > 1 or 0 not in found:
            why = "has no sparse-attention index (DSA)"
            if self.index_topk and self.index_tokens > 1:
                why = (
                    f"keeps an index key for {self.index_tokens} tokens: how it chooses is unknown"
                )
            raise CannotRun(
                f"{self.name} {why}",
                "models with a key for every token, such as glm-5, glm-5.2 and deepseek-v3.2",
                'Read all live rows: reads="dense"',
            )
        return found

    def read_tokens(self, load: Load) -> float:
        """Rows that one layer's attention reads in a step: the live ones, or those it chooses.

        With DSA each new token has a choice of its own. Raises `CannotRun` as `choosing` does.
        """
        if load.reads == "dense":
            return load.live_tokens
        return load.new_tokens * min(self.index_topk, load.context) if self.choosing else 0

    def parameters(self) -> dict[str, int]:
        """Weights by what an engine does with them, all layers, without the MTP layer.

        `experts` are the routed ones; `split` the projections that tensor parallelism divides (up
        from the low ranks, out, dense and shared experts), `whole` those that every GPU holds (down
        to the low ranks, the indexer); `router` and `embedding` (input and output) stay in 16
        bits; `mtp` is the whole MTP layer. Biases and norms are left out. Raises `NoAnswer`.
        """
        h, moe = self.hidden_size, bool(self.experts)
        blocks = self.decoder_layers or self.layers
        wanted = {"vocab_size": True, "moe_intermediate_size": moe}
        wanted["intermediate_size"] = not moe or self.dense_layers > 0 or self.layers > blocks
        if absent := [f for f, needed in wanted.items() if needed and not getattr(self, f)]:
            raise NoAnswer(f"{self.name}'s config does not give {', '.join(absent)}")
        if self.layers < blocks:
            raise NoAnswer(f"{blocks - self.layers} of {self.name}'s {blocks} layers are not MLA")
        qk = self.qk_nope_head_dim + self.qk_rope_head_dim
        up = self.heads * (
            (self.q_lora_rank or h) * qk
            + self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
            + self.v_head_dim * h
        )
        down = h * (self.q_lora_rank + self.row)
        index_in = self.q_lora_rank or h
        index = index_in * self.index_heads * self.index_head_dim + h * self.index_head_dim
        index += h * self.index_heads
        # LongCat has two attentions and two dense MLPs in each block, beside its experts.
        dense = self.layers if self.layers > blocks or not moe else self.dense_layers
        sparse = (blocks if self.layers > blocks else blocks - self.dense_layers) if moe else 0
        expert = 3 * h * self.moe_intermediate_size
        shared = self.shared_experts * expert
        routed = self.experts * expert
        return {
            "experts": sparse * routed,
            "split": self.layers * up + dense * 3 * h * self.intermediate_size + sparse * shared,
            "whole": self.layers * down + self.index_layers * index,
            "router": sparse * h * self.experts,
            "embedding": 2 * self.vocab_size * h,
            "mtp": self.mtp_layers
            * (up + down + bool(self.dsa) * index + routed + shared + 2 * h * h),
        }

    def heads_per_gpu(self, tensor_parallel: int) -> int:
        """Query heads on each GPU; the latent row itself is on every GPU, whole."""
        if tensor_parallel < 1 or self.heads % tensor_parallel:
            allowed = ", ".join(str(d) for d in range(1, self.heads + 1) if self.heads % d == 0)
            raise OutOfRange(
                f"{tensor_parallel} GPUs cannot share {self.heads} heads",
                f"{allowed} GPUs",
                f"Say over how many GPUs {self.name}'s heads are split: tensor_parallel, or "
                "--tensor-parallel (--heads where a command takes heads)",
            )
        return self.heads // tensor_parallel

    def row_bytes(self, storage: str) -> int:
        """Bytes per token and layer of one storage.

        `fp8`: e4m3 or e5m2, no scale. `bf16`. `fp8+bf16`: an FP8 row and its full shadow.
        `packed`: an fp8_ds_mla row (e4m3 latent, one fp32 scale per 128 values, BF16 rope part).
        `nvfp4`: an nvfp4_ds_mla row (two latent values per byte, one FP8 scale per 16, 16 bytes
        more, BF16 rope part: 432 B for 512 + 64 values, as vLLM's servers report). `index`: one
        DSA index key (FP8 and one fp32 scale per 128 values), of which a model with pooled keys
        keeps one per `index_tokens` tokens.
        """
        rank, rope = self.kv_lora_rank, 2 * self.qk_rope_head_dim
        index = self.index_head_dim + 4 * groups(self.index_head_dim)
        sizes = {
            "fp8": self.row,
            "bf16": 2 * self.row,
            "fp8+bf16": 3 * self.row,
            "packed": rank + 4 * groups(rank) + rope,
            "nvfp4": rank // 2 + rank // NVFP4_GROUP + 16 + rope,
            "index": -(-index // self.index_tokens),
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
    """A model from a name, a config.json (its path or folder), or its dict.

    A name is one under data/models or a checkpoint's, as people type it: "zai-org/GLM-5.1",
    "GLM-5-NVFP4". Raises `UnknownName` with the nearest model, or `BadFile` naming the fields that
    are missing.
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, dict):
        return from_config(model, model.get("_name_or_path") or "config", "a config dict")
    path = Path(model)
    if str(model) and os.path.isfile(path / "config.json"):  # pathlib raises for names too long
        path = path / "config.json"
    if path.suffix == ".json" or os.path.isfile(path):
        return _from_file(path)
    known = facts.catalogue("models", _Entry)
    names = plain_names(str(model))
    plain = next((name for name in names if name in known), names[0])
    remedy = "Or give the path of a config.json"
    entry = facts.find("models", "model", plain, remedy, _Entry)
    said = re.split(r"[-_.]", names[0].removeprefix(plain))
    return entry.model(plain, tuple(QUANTISED[word] for word in said if word in QUANTISED))


def plain_names(name: str) -> list[str]:
    """A typed name without its organisation, then without one more suffix after the other.

    >>> plain_names("zai-org/GLM-5.2-FP8")
    ['glm-5.2-fp8', 'glm-5.2']
    """
    names = [name.strip().rstrip("/").rpartition("/")[2].lower().replace("_", "-")]
    while (shorter := SUFFIX.sub("", names[-1])) != names[-1]:
        names.append(shorter)
    return names


def known_models() -> list[str]:
    """Names of the models under data/models, without aliases."""
    return sorted({entry.name for entry in facts.catalogue("models", _Entry).values()})


@dataclass(frozen=True)
class _Entry:
    """A file of data/models. Raises `BadFile` where its config is of no MLA model.

    `variants` are the fields in which a checkpoint of one of its aliases differs.
    """

    name: str
    source: Source
    config: dict
    quantisations: tuple[str, ...] = ()
    variants: dict[str, dict] = field(default_factory=dict)

    def __post_init__(self):
        self.model(self.name)

    def model(self, alias: str, quantisations: tuple[str, ...] = ()) -> Model:
        config = self.config | self.variants.get(alias, {})
        own = config.pop("quantisations", None) or self.quantisations
        made = from_config(config, self.name, str(self.source))
        return replace(made, quantisations=quantisations or tuple(own) or made.quantisations)


def _from_file(path: Path) -> Model:
    return from_config(read_json(path), path.resolve().parent.name, path.name)


# Our names, and the names that configs give them, the first that is there.
SIZES = {
    "heads": ("num_attention_heads",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "hidden_size": ("hidden_size",),
    "max_positions": ("max_position_embeddings", "model_max_length", "max_sequence_length"),
    "decoder_layers": ("num_hidden_layers", "num_layers"),
}
EXTRAS = {
    "mtp_layers": ("num_nextn_predict_layers",),
    "index_head_dim": ("index_head_dim",),
    "index_heads": ("index_n_heads",),
    "index_topk": ("index_topk",),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "shared_experts": ("n_shared_experts", "num_shared_experts"),
    "dense_layers": ("first_k_dense_replace",),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size"),
    "q_lora_rank": ("q_lora_rank",),
    "vocab_size": ("vocab_size",),
}
WRAPPERS = ("text_config", "language_config", "llm_config", "thinker_config")
# Layers of these kinds keep a state of fixed size and no latent.
STATEFUL = ("linear", "mamba", "kda", "delta", "recurrent", "conv")


def from_config(config: dict, name: str, source: str) -> Model:
    """A model from the fields of a Hugging Face `config.json`; raises `BadFile`.

    Configs of models that also see or hear keep these fields one level deeper, in `text_config`.
    """
    outer = config
    for wrapper in WRAPPERS:
        inner = outer.get(wrapper)
        if config.get("kv_lora_rank") is None and isinstance(inner, dict):
            config = inner
    for holder, fields in ((config, KINDS), (_rope(config), ROPE_KINDS)):
        for told, kinds in fields.items():
            value = holder.get(told)
            if value is not None and (not isinstance(value, kinds) or value is True):
                words = " or ".join(WORDS[kind] for kind in kinds)
                raise BadFile(f"{name}: {told} is {value!r:.60}", words)
    values, missing = {}, []
    for ours, names in SIZES.items():
        theirs = next((n for n in names if config.get(n) is not None), None)
        if theirs is None:
            missing.append(names[0])
        else:
            least = 0 if ours == "qk_rope_head_dim" else 1
            values[ours] = _size(name, theirs, config[theirs], least)
    if missing:
        raise BadFile(
            f"{name} is not an MLA model: its config lacks {', '.join(missing)}",
            "configs with kv_lora_rank and qk_rope_head_dim (DeepSeek-V2/V3, GLM-5, Kimi-K2, ...)",
        )
    for ours, names in EXTRAS.items():
        theirs = next((n for n in names if config.get(n) is not None), names[0])
        values[ours] = _size(name, theirs, config.get(theirs) or 0, 0)
    kinds = _attention_kinds(config, values["decoder_layers"], name)
    latent = [kind for kind in kinds if kind]
    index_at = _index_at(config, latent, name)
    architectures = outer.get("architectures") or config.get("architectures") or [""]
    return Model(
        name=name,
        layers=len(latent),
        mscale=_mscale(config),
        index_layers=len(index_at),
        index_at=index_at,
        index_tokens=_size(name, "index_kpool", config.get("index_kpool") or 1, 1),
        architecture=str(architectures[0]),
        quantisations=(_quantisation(config.get("quantization_config") or outer),),
        source=source,
        **values,
    )


# Of a config's other fields, what they may be; null and absent are alike.
KINDS = {
    **dict.fromkeys(("rope_scaling", "rope_parameters", "linear_attn_config"), (dict,)),
    **dict.fromkeys(("layer_types", "indexer_types", "architectures"), (list,)),
    "index_topk_pattern": (str, list),
    "quantization_config": (dict,),
}
WORDS = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a fraction"}
ROPE_KINDS = {"factor": (int, float), "mscale_all_dim": (int, float)}
MOST_LAYERS, MOST = 10_000, 1 << 40


def _rope(config: dict) -> dict:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return rope if isinstance(rope, dict) else {}


def _size(name: str, field: str, value: object, least: int) -> int:
    most = MOST_LAYERS if field in SIZES["decoder_layers"] else MOST
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not least <= value <= most:
        raise BadFile(f"{name}: {field} is {value!r:.60}", f"a whole number, {least} to {most}")
    return value


def _attention_kinds(config: dict, layers: int, name: str) -> list[str]:
    """Of each attention layer its kind, "" where it keeps no latent."""
    if types := config.get("layer_types"):
        kinds = [str(kind) for kind in types[:layers]]
        return ["" if any(word in kind for word in STATEFUL) else kind for kind in kinds]
    linear = config.get("linear_attn_config") or {}
    if isinstance(full := linear.get("full_attn_layers"), list):  # numbered from 1
        return ["full" if i + 1 in full else "" for i in range(layers)]
    period = config.get("layer_group_size") or config.get("full_attention_interval") or 1
    period = _size(name, "layer_group_size", period, 1)
    # Ling: the last of each group, and what is left over after the last whole group.
    whole = layers // period * period
    kinds = ["full" if (i + 1) % period == 0 or i >= whole else "" for i in range(layers)]
    if "longcat" in f"{config.get('model_type')} {config.get('architectures')}".lower():
        kinds = [kind for kind in kinds for _ in range(2)]  # two attentions in each layer
    return kinds


def _mscale(config: dict) -> float:
    """YaRN's `0.1 * mscale_all_dim * ln(factor) + 1`, as DeepSeek-V3 applies it; 1 without YaRN."""
    rope = _rope(config)
    kind = rope.get("type") or rope.get("rope_type")
    factor, all_dim = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
    if kind not in ("yarn", "deepseek_yarn") or factor <= 1:
        return 1.0
    return 0.1 * all_dim * math.log(factor) + 1.0


def _index_at(config: dict, kinds: list[str], name: str) -> tuple[int, ...]:
    """Which latent layers hold index keys; the others reuse the choice of the one before them.

    By `indexer_types` ("full"), by `index_topk_pattern` ("F", and "S" for shared), or every
    `index_topk_freq` layers from `index_skip_topk_offset` on (transformers' `GlmMoeDsaConfig`).
    """
    if not config.get("index_head_dim"):
        return ()
    layers = range(len(kinds))
    if types := config.get("indexer_types"):
        return tuple(i for i in layers if i < len(types) and types[i] == "full")
    if pattern := config.get("index_topk_pattern"):
        return tuple(i for i in layers if i >= len(pattern) or pattern[i] not in ("S", "shared"))
    freq = _size(name, "index_topk_freq", config.get("index_topk_freq") or 1, 1)
    offset = config.get("index_skip_topk_offset")
    offset = _size(name, "index_skip_topk_offset", 2 if offset is None else offset, 0)
    return tuple(i for i in layers if max(i - offset + 1, 0) % freq == 0)


def _quantisation(config: dict) -> str:
    """How a config's checkpoint is quantised, in `QUANTISED`'s words: "bf16" where it is not."""
    config = config.get("quantization_config") or config
    if not config.get("quant_method") and not config.get("quant_algo"):
        return "bf16"
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = (group.get("weights") if isinstance(group, dict) else None) or {}
        if not isinstance(weights, dict):
            continue
        if bits := weights.get("num_bits"):
            word = {(4, "float"): "nvfp4", (8, "float"): "fp8"}
            return QUANTISED.get(word.get((bits, weights.get("type")), f"int{bits}"), "")
    said = f"{config.get('quant_algo')} {config.get('quant_method')}".lower().split()
    return next((QUANTISED[word] for word in said if word in QUANTISED), "")

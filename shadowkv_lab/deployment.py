"""What is served, and how: a model's checkpoint, the card, its spread over GPUs, its KV cache.

A `Deployment` is made once, at the door, from names, a config.json or a log's facts, and handed
down whole: heads per GPU, bytes per token, weights and the KV memory are read off it. Whatever is
not given is derived for this model, card and spread, and says so; a figure of one server is never
another's default.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shadowkv_lab import facts, machine
from shadowkv_lab.errors import CannotRun, DoesNotFit, NoAnswer, OutOfRange, UnknownName
from shadowkv_lab.load import Load
from shadowkv_lab.machine import Card
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.provenance import Provenance, Source, assumed, calibrated, published, recorded

GIB = 1 << 30
ENGINES = ("sglang", "vllm")
REQUEST_ROWS = 48  # rows of the page table when the engine is not told how many requests may run

# How an engine lays a quantised row out, and the storage of `Model.row_bytes` that it then has.
LAYOUTS = {
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "bf16": "bf16",
    "fp8_ds_mla": "packed",
    "nvfp4_ds_mla": "nvfp4",
}
# Bits per weight of the routed experts, and of the other projections. Embeddings and routers stay
# in 16 bits. fp8: a fp32 scale per 128 x 128; nvfp4: an FP8 scale per 16; mxfp4: 8 bits per 32;
# int4: 16 bits per 32 (Kimi-K2-Thinking). The last three quantise the routed experts alone.
BITS = {
    "bf16": (16.0, 16.0),
    "fp8": (8 + 32 / 16384, 8 + 32 / 16384),
    "int8": (8.0, 8.0),
    "nvfp4": (4.5, 16.0),
    "mxfp4": (4.25, 16.0),
    "int4": (4.5, 16.0),
}
# What changes the slots that a pool of the same server has.
POOLED = {"kv_gib", "layout", "index_layers", "mtp", "pipeline_parallel", "memory_fraction"}
SGLANG_RULE = Source(
    "SGLang's server_args, how --mem-fraction-static is chosen where it is not given",
    "https://github.com/sgl-project/sglang/pull/10975",
    read="2026-12-02",
)
VLLM_RULE = Source(
    "vLLM's default --gpu-memory-utilization", "https://docs.vllm.ai", read="2026-12"
)


@dataclass(frozen=True)
class Setting:
    """What one GPU's decode step depends on, beside the strategy and the card.

    `heads` are the query heads on this GPU; `pool_tokens` (P) the slots of its pool, without the
    dummy page. `order` says how slots lie ("random", "contiguous"), `rows` what fills them.
    """

    model: Model
    heads: int
    pool_tokens: int
    load: Load = field(default_factory=Load)
    page_size: int = 1
    order: str = "random"
    rows: str = "synthetic"

    @property
    def read_tokens(self) -> float:
        """Rows that one layer's attention reads: `Model.read_tokens` of the load."""
        return self.model.read_tokens(self.load)

    def __str__(self) -> str:
        return f"{self.model.name}, pool {self.pool_tokens:,}, {self.load}"


@dataclass(frozen=True)
class Term:
    """One line of the budget: signed GiB, how it comes about in numbers, and its provenance."""

    name: str
    gib: float
    provenance: Provenance

    @property
    def formula(self) -> str:
        return self.provenance.how


@dataclass(frozen=True)
class Memory:
    """One GPU's memory: `terms` add up to `kv_gib`; `spent` is taken from the reserve.

    `terms` is cut short where the weights are not known and the KV memory was given.
    """

    terms: tuple[Term, ...]
    spent: tuple[Term, ...]
    kv_gib: float
    reserve_gib: float | None  # None where the weights are not known
    provenance: Provenance

    @property
    def left_gib(self) -> float | None:
        """What the reserve leaves after graphs, page tables and activations."""
        return (
            None if self.reserve_gib is None else self.reserve_gib - sum(t.gib for t in self.spent)
        )


@dataclass(frozen=True)
class Checkpoint:
    """What is loaded: its quantisation, bits per weight, and the weights of one GPU.

    `expert_bits` are those of the routed experts, `other_bits` those of the other projections.
    `weights_gib` is per GPU at this spread, as logs print it; None where it is not known, and
    `provenance.how` then says why.
    """

    name: str
    quantisation: str
    expert_bits: float | None
    other_bits: float | None
    weights_gib: float | None
    provenance: Provenance


@dataclass(frozen=True)
class Deployment:
    """A model as it is served. Make one with `deployment(...)`, which derives what is not given.

    `tensor_parallel` counts as the engine does: SGLang's DP attention splits `data_parallel` ranks
    out of it, vLLM's ranks are GPUs of their own. `page_size` is in tokens. `mtp` adds the cache of
    the model's MTP layers. `pool_tokens` are slots of one GPU's pool and `kv_gib` its bytes, where
    a log or a user gave them; else the engine's rule says. `max_total_tokens` is the cap that the
    server was given, which explains a pool below the rule's. `given` holds the provenance of what a
    log, a publication or a user gave, `derived` of what was worked out for this deployment.
    """

    model: Model
    card: Card
    checkpoint: Checkpoint
    tensor_parallel: int = 8
    data_parallel: int = 1
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    layout: str = "fp8_e4m3"
    index_layers: int = 0
    page_size: int = 1
    mtp: bool = False
    engine: str = "sglang"
    memory_fraction: float = 0.9
    before_weights_gib: float = 0.0
    graphs_gib: float = 0.0
    activations_gib: float = 0.0
    kv_gib: float | None = None
    pool_tokens: int | None = None
    max_total_tokens: int | None = None
    given: Mapping[str, Provenance] = field(default_factory=dict, compare=False, repr=False)
    derived: Mapping[str, Provenance] = field(default_factory=dict, compare=False, repr=False)

    def provenance(self, name: str) -> Provenance:
        """Where a field's value comes from."""
        known = self.given.get(name) or self.derived.get(name)
        return known or assumed("the lab's default")

    # How the model is spread.

    @property
    def gpus(self) -> int:
        """GPUs that hold the model once."""
        ranks = self.data_parallel if self.engine == "vllm" else 1
        return self.tensor_parallel * ranks * self.pipeline_parallel

    @property
    def attention_parallel(self) -> int:
        """GPUs that share the heads of one request's attention."""
        ranks = self.data_parallel if self.engine == "sglang" else 1
        return self.tensor_parallel // ranks

    @property
    def heads(self) -> int:
        """Query heads that one GPU attends with, over the rows that it holds.

        Under decode context parallelism each GPU holds a part of the rows, and gathers the heads
        of its group.
        """
        return self.model.heads_per_gpu(self.attention_parallel) * self.decode_context_parallel

    @property
    def stages(self) -> tuple[range, ...]:
        """The latent layers of each pipeline stage; the last gets none of what does not divide."""
        n, over = divmod(self.model.layers, self.pipeline_parallel)
        ends, start = [], 0
        for stage in range(self.pipeline_parallel):
            more = self.pipeline_parallel - 1 - over <= stage < self.pipeline_parallel - 1
            ends.append(range(start, start := start + n + more))
        return tuple(ends)

    # What a token costs, on the GPU that keeps the most.

    def token_bytes(self, strategy=None) -> int:
        """Bytes per slot of one GPU's pool: rows, index keys, MTP layer; `None`: as laid out.

        Of pipeline stages, the one that keeps the most.
        """
        return sum(self._bytes(strategy))

    def index_bytes(self, strategy=None) -> int:
        """Of `token_bytes`, the DSA index keys."""
        return self._bytes(strategy)[1]

    def _bytes(self, strategy) -> tuple[int, int]:
        """Bytes of rows and of index keys, of the stage that keeps the most."""
        return max((self._stage_bytes(stage, strategy) for stage in self.stages), key=sum)

    def _stage_bytes(self, stage: range, strategy) -> tuple[int, int]:
        model, stored = self.model, LAYOUTS[self.layout]
        mtp = self.model.mtp_layers if self.mtp and stage.stop == model.layers else 0
        layers = [*stage, *[model.layers - 1] * mtp]
        if strategy is None:
            rows = len(layers) * model.row_bytes(stored)
        else:
            # A strategy's FP8 rows lie as the engine lays a quantised row out.
            quantised = "fp8" if stored == "bf16" else stored
            kinds = Counter(kind for i in layers for kind in strategy.at(i).kinds)
            rows = sum(
                count * model.row_bytes(quantised if kind == "fp8" else kind)
                for kind, count in kinds.items()
            )
        index = self._index_layers(stage) + (mtp if self.index_layers else 0)
        return rows, index * model.row_bytes("index") if model.dsa else 0

    def _index_layers(self, stage: range) -> int:
        """Layers of a stage with index keys: the model's own, or a log's count spread evenly."""
        if self.index_layers == len(self.model.index_at):
            return sum(layer in stage for layer in self.model.index_at)
        return math.ceil(self.index_layers * len(stage) / self.model.layers)

    # What fits.

    def memory(self) -> Memory:
        """The KV memory of one GPU by the engine's own rule, or as given, term by term.

        SGLang: KV = free after weights - (1 - fraction) x free before weights. vLLM: KV = fraction
        x card - before - weights - graphs - activations. A `kv_gib`, or `pool_tokens` slots,
        overrules the rule, and what the rule cannot account for is a term of its own. Raises
        `NoAnswer` where neither the weights nor the KV memory are known, and `DoesNotFit`.
        """
        return _memory(self)

    def rows(self, strategy=None, memory: Memory | None = None) -> int:
        """Slots of one GPU's pool, in whole pages.

        `pool_tokens` for a strategy that keeps just the rows as they are laid out, where given;
        else what the KV memory holds beside the strategy's own buffers.
        """
        a_token, fixed = self.token_bytes(strategy), self.fixed_bytes(strategy)
        if self.pool_tokens is not None and not fixed and a_token == self.token_bytes():
            return self.pool_tokens
        kv_gib = (memory or self.memory()).kv_gib
        held = max(0, int(kv_gib * GIB + 1e-3) - fixed)
        return held // a_token // self.page_size * self.page_size

    def on(self, card: Card) -> Deployment:
        """The same on another card, without what was seen of this one's memory."""
        fraction = self.memory_fraction if "memory_fraction" in self.given else None
        own = ("kv_gib", "pool_tokens", "before_weights_gib", "graphs_gib", "activations_gib")
        given = {n: p for n, p in self.given.items() if n not in own}
        made = replace(
            self,
            card=card,
            kv_gib=None,
            pool_tokens=None,
            before_weights_gib=0.0,
            graphs_gib=0.0,
            activations_gib=0.0,
            given=given,
        )
        return made if fraction else _with_fraction(made)

    def fixed_bytes(self, strategy=None) -> int:
        """Bytes of a strategy's own buffers beside the pool, whatever its size."""
        kept = getattr(strategy, "fixed_bytes", None)
        share = max(map(len, self.stages)) / self.model.layers
        return math.ceil(kept(self.model) * share) if kept else 0

    def tokens(self, strategy=None) -> int:
        """Tokens of different requests that one attention group keeps: DCP splits them."""
        return self.rows(strategy) * self.decode_context_parallel

    def requests(self, context: int, strategy=None) -> int:
        """Requests of `context` tokens that all DP ranks together keep."""
        pages = -(-context // self.page_size) * self.page_size
        return self.tokens(strategy) // pages * self.data_parallel

    def share(self, load: Load) -> Load:
        """The part of a load that one GPU attends to: its DP rank's requests, its DCP rows.

        Raises `CannotRun` for DSA under DCP: how many chosen rows lie on each GPU is not known.
        """
        if load.reads == "dsa" and self.decode_context_parallel > 1:
            raise CannotRun(
                f"DSA over {self.decode_context_parallel} DCP ranks: how many of the chosen rows "
                "lie on each GPU is not known",
                remedy='decode_context_parallel=1, or reads="dense"',
            )
        context = load.context / self.decode_context_parallel
        return replace(
            load,
            concurrency=-(-load.concurrency // self.data_parallel),
            context=int(context) if context == int(context) else context,
        )

    def setting(self, load: Load | None = None, pool_tokens: int | None = None) -> Setting:
        """One GPU's step for a load of the whole server; `pool_tokens` are its slots.

        All layers are in the step, also where pipeline stages run them one after another: a token
        passes through every stage.
        """
        own = pool_tokens if pool_tokens is not None else self.rows()
        return Setting(self.model, self.heads, own, self.share(load or Load()), self.page_size)

    def __str__(self) -> str:
        spread = [f"TP {self.tensor_parallel}"]
        for words, size in (
            ("DP", self.data_parallel),
            ("PP", self.pipeline_parallel),
            ("DCP", self.decode_context_parallel),
        ):
            spread += [f"{words} {size}"] if size > 1 else []
        return f"{self.checkpoint.name} on {self.card.title}, {', '.join(spread)}, {self.layout}"


def deployment(
    model: Model | str | Path | dict = "glm-5",
    card: Card | str = "rtx-pro-6000-server",
    *,
    quantisation: str | None = None,
    weights_gib: float | None = None,
    memory_fraction: float | None = None,
    kv_gib: float | None = None,
    pool_tokens: int | None = None,
    index_layers: int | None = None,
    page_size: int | None = None,
    engine: str | None = None,
    given: Mapping[str, Provenance] | None = None,
    **options,
) -> Deployment:
    """A deployment from names, a config.json (path, folder or dict), or the objects themselves.

    `options` are `Deployment`'s other fields; None is the default of each. `weights_gib` is per
    GPU, as logs print it; without it the weights are estimated from the config. `given` says where
    values come from that a log or a publication gave, by the name of the argument; what is typed is
    assumed. Raises `UnknownName`, `OutOfRange`, `BadFile`.
    """
    options = {name: value for name, value in options.items() if value is not None}
    typed = model if isinstance(model, str) else None
    model = load_model(model)
    card = machine.card(card) if isinstance(card, str) else card
    known = {"quantisation": quantisation, "weights_gib": weights_gib, "engine": engine}
    known |= {"memory_fraction": memory_fraction, "kv_gib": kv_gib, "pool_tokens": pool_tokens}
    known |= {"index_layers": index_layers, "page_size": page_size, **options}
    words = {name: assumed("as typed") for name, value in known.items() if value is not None}
    words |= given or {}
    engine = "sglang" if engine is None else engine
    if index_layers is None:
        index_layers = model.index_layers
    if page_size is None:  # SGLang's pool for models with an index has pages of 64
        page_size = 64 if model.dsa and engine == "sglang" else 1
    blank = Checkpoint(model.name, "", None, None, None, assumed())
    made = Deployment(
        model,
        card,
        blank,
        index_layers=index_layers,
        page_size=page_size,
        engine=engine,
        memory_fraction=0.9 if memory_fraction is None else memory_fraction,
        kv_gib=kv_gib,
        pool_tokens=pool_tokens,
        given=words,
        derived={}
        if "page_size" in words
        else {"page_size": assumed("the engine's, by the model")},
        **options,
    )
    _check(made, weights_gib)
    if memory_fraction is None:
        made = _with_fraction(made)
    name = typed.rpartition("/")[2] if typed and not Path(typed).exists() else model.name
    kinds = model.quantisations if quantisation is None else (quantisation,)
    found = [_checkpoint(made, name, kind, weights_gib) for kind in kinds or ("",)]
    return replace(made, checkpoint=_chosen(made, found))


def published_deployment(
    name: str = "glm5-report", card: Card | str | None = None, **changes
) -> Deployment:
    """The deployment of a published result of data/published; "glm5-report" is the GLM-5 report's.

    What the publication gives is published, with its source; `changes` are `deployment`'s
    arguments, and typed. `card` chooses where the publication names several.
    """
    entry = facts.find("published", "published result", name)
    source = facts.source(entry)
    seen = {
        ours: entry[theirs]
        for ours, theirs in (
            ("weights_gib", "weights_gib"),
            ("memory_fraction", "mem_fraction_static"),
            ("kv_gib", "pool_gib"),
            ("pool_tokens", "pool_tokens"),
            ("quantisation", "quantisation"),
            ("layout", "layout"),
            ("tensor_parallel", "tensor_parallel"),
            ("page_size", "page_size"),
            ("engine", "engine"),
        )
        if theirs in entry
    }
    words = {ours: published(entry.get(f"{ours}_note", "as published"), source) for ours in seen}
    gpus = entry["gpu"] if isinstance(entry["gpu"], list) else [entry["gpu"]]
    chosen = card or gpus[-1]
    chosen = machine.card(chosen) if isinstance(chosen, str) else chosen
    if "free_before_gib" in entry:
        seen["before_weights_gib"] = chosen.memory_gib - entry["free_before_gib"]
        words["before_weights_gib"] = assumed(
            f"{entry['free_before_gib']} GiB free before loading; {entry['free_before_note']}"
        )
    changes = {name: value for name, value in changes.items() if value is not None}
    same = {name for name, value in changes.items() if seen.get(name) == value}
    words = {name: word for name, word in words.items() if name in same or name not in changes}
    if (changes.keys() - same) & POOLED:
        seen.pop("pool_tokens", None)  # the publication's slots are of another pool than this
    made = deployment(entry["model"], chosen, given=words, **{**seen, **changes})
    checkpoint = replace(made.checkpoint, name=entry.get("checkpoint", made.checkpoint.name))
    return replace(made, checkpoint=checkpoint)


def checked(made: Deployment) -> Deployment:
    """A deployment with changed fields, if a server can be so. Raises what `deployment` does."""
    _check(made, made.checkpoint.weights_gib)
    return made


def _check(made: Deployment, weights_gib: float | None) -> None:
    """Raise `OutOfRange` or `UnknownName` for what no server can be."""
    if made.layout not in LAYOUTS:
        raise UnknownName("KV layout", made.layout, LAYOUTS)
    if made.engine not in ENGINES:
        raise OutOfRange(f"Engine {made.engine!r}", ", ".join(ENGINES))
    sizes = dict(weights_gib=weights_gib, kv_gib=made.kv_gib, pool_tokens=made.pool_tokens)
    for name, size in sizes.items():
        if size is not None and not (math.isfinite(size) and size > 0):
            raise OutOfRange(f"{name} of {size}", "a finite number above 0")
    for name in ("before_weights_gib", "graphs_gib", "activations_gib"):
        if not (math.isfinite(size := getattr(made, name)) and size >= 0):
            raise OutOfRange(f"{name} of {size}", "a finite number, 0 or more")
    counts = ("tensor_parallel", "data_parallel", "pipeline_parallel", "decode_context_parallel")
    for name in (*counts, "page_size"):
        size = getattr(made, name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OutOfRange(f"{name} of {size}", "a whole number, 1 or more")
    if not 0 <= made.index_layers <= made.model.layers or made.index_layers != int(
        made.index_layers
    ):
        raise OutOfRange(f"{made.index_layers} layers with index keys", f"0 to {made.model.layers}")
    top = 1 if made.engine == "vllm" else 0.9999
    if not 0 < made.memory_fraction <= top:
        allowed = "above 0 and " + ("up to 1" if made.engine == "vllm" else "below 1")
        raise OutOfRange(f"A memory fraction of {made.memory_fraction}", allowed)
    if made.engine == "sglang" and made.tensor_parallel % made.data_parallel:
        raise OutOfRange(
            f"{made.data_parallel} DP attention ranks of {made.tensor_parallel} GPUs",
            "a number that divides tensor_parallel: SGLang splits the ranks out of it",
        )
    if made.pipeline_parallel > made.model.layers:
        raise OutOfRange(
            f"{made.pipeline_parallel} pipeline stages", f"1 to {made.model.layers}, its layers"
        )
    made.model.heads_per_gpu(made.attention_parallel)
    if made.attention_parallel % made.decode_context_parallel:
        raise OutOfRange(
            f"{made.decode_context_parallel} DCP ranks of {made.attention_parallel} GPUs",
            "a number that divides the GPUs that share one request's attention",
        )


def _with_fraction(made: Deployment) -> Deployment:
    fraction, why = default_fraction(made)
    return replace(made, memory_fraction=fraction, derived={**made.derived, "memory_fraction": why})


def default_fraction(made: Deployment) -> tuple[float, Provenance]:
    """The memory fraction that the engine takes where it is not told one.

    SGLang keeps 512 MiB, 1.5 MiB per token of a prefill chunk, 2 MiB per request of the largest
    CUDA graph, 1 GiB per 8 GPUs, and more under DP attention and speculation.
    """
    if made.engine == "vllm":
        return 0.9, assumed("vLLM's default", VLLM_RULE)
    mib = made.card.memory_mib
    chunk = 8192 if 60 * 1024 <= mib < 160 * 1024 else 16384 if mib >= 160 * 1024 else 4096
    graph = 512 if made.tensor_parallel >= 4 or mib >= 160 * 1024 else 256
    reserved = 512 + 1.5 * chunk + 2 * graph
    reserved += made.tensor_parallel * made.pipeline_parallel / 8 * 1024
    if made.data_parallel > 1:
        reserved += graph * made.data_parallel * (4.5 if graph > 300 else 3)
    reserved = max(reserved, 10 * 1024) + (2048 if made.mtp else 0)
    how = f"SGLang's own default: {reserved:.0f} of {mib} MiB kept for chunks of {chunk} and graphs"
    return max(0.05, round((mib - reserved) / mib, 3)), assumed(how, SGLANG_RULE)


def _checkpoint(made: Deployment, name: str, kind: str, weights_gib: float | None) -> Checkpoint:
    """The checkpoint of one quantisation, its weights as given or estimated."""
    if kind and kind not in BITS:
        raise UnknownName("quantisation of a checkpoint", kind, BITS)
    bits = BITS.get(kind, (None, None))
    if weights_gib is not None:
        return Checkpoint(name, kind, *bits, weights_gib, made.provenance("weights_gib"))
    return Checkpoint(name, kind, *bits, *estimate(made, kind))


def estimate(made: Deployment, kind: str) -> tuple[float | None, Provenance]:
    """GiB of weights on one GPU from the config's sizes, and the arithmetic; None with a reason.

    The routed experts are spread over all GPUs, the split projections over the tensor-parallel
    ones (attention over those that share one request), and what every GPU holds counts whole. Of
    pipeline stages the largest counts.
    """
    if not kind:
        return None, assumed(f"how {made.model.name}'s checkpoint is quantised is not known")
    try:
        count = made.model.parameters()
    except NoAnswer as error:
        return None, assumed(error.what)
    expert_bits, other_bits = BITS[kind]
    share = max(map(len, made.stages)) / made.model.layers
    split = made.attention_parallel if made.data_parallel > 1 else made.tensor_parallel
    experts = count["experts"] * share * expert_bits / 8 / (made.gpus / made.pipeline_parallel)
    other = (count["split"] / split + count["whole"]) * share * other_bits / 8
    rest = 2 * (count["router"] * share + count["embedding"] / split)
    if made.mtp:
        other += count["mtp"] * expert_bits / 8 / made.gpus
    gib = (experts + other + rest) / GIB
    total = sum(count.values()) - count["mtp"]
    how = (
        f"estimated from the config: {total / 1e9:.0f}B parameters, of them "
        f"{count['experts'] / 1e9:.0f}B routed experts at {expert_bits:.2f} bits over {made.gpus} "
        f"GPUs, the rest at {other_bits:.2f} bits, {count['whole'] / 1e9:.1f}B of it on every GPU"
    )
    return gib, assumed(how)


def _chosen(made: Deployment, found: list[Checkpoint]) -> Checkpoint:
    """One of a model's checkpoints, where nobody said which, and why that one.

    Where the weights are known, the one whose estimate is nearest; else the widest that leaves
    room for KV (for as much as was given).
    """
    if len(found) == 1:
        return found[0]
    others = ", ".join(c.quantisation for c in found)
    estimates = {c: estimate(made, c.quantisation)[0] for c in found}
    if "weights_gib" in made.given:
        seen = found[0].weights_gib
        chosen = min(found, key=lambda c: abs((estimates[c] or math.inf) - seen))
        why = f"of its published checkpoints ({others}) the one whose estimate is nearest"
    else:
        reserve = (1 - made.memory_fraction) * made.card.memory_gib + made.before_weights_gib
        room = made.card.memory_gib - max(reserve, _wanted(made)[0] or 0)
        fits = [c for c in found if (estimates[c] or 0) < room]
        chosen = fits[0] if fits else found[-1]
        why = "the widest that fits" if fits else "the smallest, and none fits,"
        why += f" of its published checkpoints ({others})"
    word = chosen.quantisation.upper()
    how = f"{chosen.provenance.how}; {word} is {why}"
    return replace(
        chosen, name=f"{chosen.name}-{word}", provenance=replace(chosen.provenance, how=how)
    )


def _memory(made: Deployment) -> Memory:
    card, checkpoint, fraction = made.card, made.checkpoint, made.memory_fraction
    weights, before = checkpoint.weights_gib, card.memory_gib - made.before_weights_gib
    sure = "weights_gib" in made.given
    pages_gib = 4 * REQUEST_ROWS * made.model.max_positions / GIB
    pages = f"4 B x {REQUEST_ROWS} requests x {made.model.max_positions} positions"
    spent = (
        Term("CUDA graphs", made.graphs_gib, made.provenance("graphs_gib")),
        Term("page tables", pages_gib, calibrated(pages)),
        Term("activations", made.activations_gib, made.provenance("activations_gib")),
    )
    driver = recorded(f"{card.memory_mib} MiB / 1024, as the driver reports it")
    terms = [
        Term("card memory", card.memory_gib, driver),
        Term("before weights", 0 - made.before_weights_gib, made.provenance("before_weights_gib")),
    ]
    wanted, said = _wanted(made)
    if wanted is not None and wanted > before:
        raise DoesNotFit(
            f"{wanted:.2f} GiB of KV on {card.title}", f"below its {before:.2f} GiB before weights"
        )
    # An estimate does not overrule a KV size that somebody saw: the server then loads another one.
    if weights is None or (wanted is not None and not sure and before - weights < wanted):
        if wanted is None:
            raise NoAnswer(
                f"How much of each GPU {made.model.name}'s weights take is not known: "
                f"{checkpoint.provenance.how}",
                remedy="Give weights_gib (--weights-gib): 'mem usage' after 'Load weight end' in "
                "SGLang's log, 'Model loading took' in vLLM's. Or give kv_gib, the KV size",
            )
        return Memory(tuple(terms), spent, wanted, None, said)
    terms.append(Term("weights", -weights, checkpoint.provenance))
    if made.engine == "sglang":
        reserve, rule = (1 - fraction) * before, f"(1 - {fraction}) x {before:.2f} free before"
    else:
        reserve = (1 - fraction) * card.memory_gib
        rule = f"(1 - {fraction}) x {card.memory_gib:.2f} of the card"
        terms += [Term(t.name, 0 - t.gib, t.provenance) for t in spent]
        spent = ()  # vLLM takes them off the KV cache, not off the reserve
    by_rule = calibrated(rule) + made.provenance("memory_fraction")
    terms.append(Term("reserve", -reserve, replace(by_rule, how=rule)))
    rest = sum(t.gib for t in terms)
    if wanted is not None:
        gap = f"{wanted:.2f} GiB of KV as given - {rest:.2f} by {made.engine}'s rule"
        capped = made.max_total_tokens and wanted < rest
        name = "left free by the cap on tokens" if capped else "not accounted for"
        terms.append(Term(name, wanted - rest, replace(said, how=gap)))
    kv = sum(t.gib for t in terms)
    if kv <= 0 or (wanted is not None and before - weights < kv):
        raise DoesNotFit(
            f"{made}: {weights:.2f} GiB of weights ({checkpoint.provenance}) and a reserve of "
            f"{reserve:.2f} GiB leave {rest:.2f} of {card.memory_gib:.2f} GiB for KV"
            + (f", and {wanted:.2f} were asked for" if wanted else ""),
            (
                f"up to {before - weights:.2f} GiB of KV"
                if wanted and before > weights
                else f"weights below {before - reserve:.2f} GiB per GPU"
            ),
            "Use more GPUs, a smaller checkpoint, a larger card, or a larger memory fraction",
        )
    return Memory(
        tuple(terms), spent, kv, reserve, said if wanted else sum(t.provenance for t in terms)
    )


def _wanted(made: Deployment) -> tuple[float | None, Provenance]:
    """The KV memory that was given: its GiB, or those of its slots."""
    if made.kv_gib is not None:
        return made.kv_gib, made.provenance("kv_gib")
    if made.pool_tokens is None:
        return None, assumed()
    gib = made.pool_tokens * made.token_bytes() / GIB
    how = f"{made.pool_tokens:,} slots of {made.token_bytes():,} B"
    return gib, replace(made.provenance("pool_tokens"), how=how)

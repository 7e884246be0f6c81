"""What an SGLang or vLLM log says of its server, and the `Deployment` that it then is.

An engine's "GB" are GiB; here it says GiB. The last start in a log counts, ranks are kept apart,
and the size of the pool names its layout (`layouts`).
"""

import ast
import math
import re
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

from shadowkv_lab import facts, files, machine
from shadowkv_lab.deployment import GIB, LAYOUTS, Deployment, deployment
from shadowkv_lab.errors import BadFile, LabError, NoAnswer
from shadowkv_lab.machine import Card
from shadowkv_lab.model import Model, known_models, load_model
from shadowkv_lab.provenance import recorded
from shadowkv_lab.server import layouts
from shadowkv_lab.server.layouts import Layout
from shadowkv_lab.server.loglines import Record, as_float, number_starts, records

SGLANG = ("begin", "weights", "dtype", "kv", "resized", "pool", "total", "decode")
VLLM = ("loaded", "available", "size", "dcp", "v0", "v0weights", "blocks")
# Pools that are not one pool of latent rows, by a sign in the log: what it is, and the sign.
OTHER_POOLS = (
    ("DeepSeek-V4, which keeps several cache groups", r"DeepSeek-?_?V4|DEEPSEEK_SPARSE_SWA"),
    ("a hybrid model (linear attention beside full attention)", r"hybridlinearattention|hybridGDN"),
    ("a hybrid model (state-space layers)", r"MambaCacheisallocated|mambapagesize"),
    ("a model with sliding windows (two pools)", r"SWAKVPool"),
)
OTHER_SIGNS = re.compile("|".join(f"({sign})" for _, sign in OTHER_POOLS), re.IGNORECASE)
# An argument in a line of them: name, '=' or ':', and a value, which may be one list or dict deep.
ARGUMENT = re.compile(
    r"""(?<![\w.'"-])['"]?([A-Za-z]\w*)['"]?[=:]"""
    r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\{[^{}]*\}|\[[^\[\]]*\]|[^,(){}\[\]]+)"""
)
# Their names in both engines, and ours.
ARGUMENTS = {
    "model": ("model_path", "model", "model_tag"),
    "tensor_parallel": ("tp_size", "tensor_parallel_size"),
    "data_parallel": ("dp_size", "data_parallel_size"),
    "pipeline_parallel": ("pp_size", "pipeline_parallel_size"),
    "expert_parallel": ("ep_size",),
    "decode_context_parallel": ("dcp_size", "decode_context_parallel_size"),
    "kv_dtype": ("kv_cache_dtype",),
    "page_size": ("page_size", "block_size"),
    "mem_fraction": ("mem_fraction_static", "gpu_memory_utilization"),
    "max_total_tokens": ("max_total_tokens",),
    "dp_attention": ("enable_dp_attention",),
    "attention_backend": ("attention_backend",),
    "version": ("version",),
}
WHOLE = ("pool_tokens", "reported_tokens", "tensor_parallel", "data_parallel", "pipeline_parallel")
WHOLE += ("expert_parallel", "decode_context_parallel", "page_size", "max_total_tokens")
WORDS = {
    "free_before_gib": "free memory before weights",
    "weights_gib": "weights",
    "kv_dtype": "KV dtype",
    "pool_tokens": "pool tokens",
    "kv_gib": "KV size",
    "mem_fraction": "memory fraction",
    "tensor_parallel": "tensor parallel size",
    "tokens_per_s": "generation throughput",
    "reported_tokens": "reported tokens",
}
WANTED = {
    "sglang": tuple(n for n in WORDS if n != "reported_tokens"),
    "vllm": tuple(n for n in WORDS if n not in ("free_before_gib", "pool_tokens", "tokens_per_s")),
}
DRAFT = re.compile(r"NextN|MTP|Eagle|EAGLE|DFlash|Medusa")


@dataclass(frozen=True)
class Rank:
    """What one rank of the last start said, in GiB; None where it said nothing."""

    name: str  # "DP0 TP3", "" where lines name no rank
    weights_gib: float | None = None
    free_before_gib: float | None = None
    kv_gib: float | None = None
    pool_tokens: int | None = None
    free_after_pool_gib: float | None = None
    draft_weights_gib: float | None = None
    draft_kv_gib: float | None = None


@dataclass(frozen=True)
class ServerLog:
    """What the last start in a log says of one GPU, None where it says nothing.

    Sizes are those of the rank with the smallest pool, weights those of the largest. `kv_dtype` is
    "fp8", "bf16" or None, `dtype` the log's own word. `reported_tokens` is vLLM's figure, for all
    DCP ranks together; it derives it from its maximum concurrency, so that only with one cache
    group it is the number of rows. `max_total_tokens` is the cap that was asked for. `other_pool`
    says which pool it is where it is not one of latent rows. `strategy` is the one that the lab's
    plug-in put in. `arguments` are the server's own, by
    the names of the engine. `tokens_per_s` is the median of SGLang's decode lines. `missing` names
    what is not in the log, in words.
    """

    engine: str
    version: str | None = None
    model: str | None = None
    architecture: str | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    pipeline_parallel: int | None = None
    expert_parallel: int | None = None
    decode_context_parallel: int | None = None
    dp_attention: bool | None = None
    speculative: str | None = None
    attention_backend: str | None = None
    page_size: int | None = None
    dtype: str | None = None
    weights_gib: float | None = None
    draft: str | None = None
    draft_weights_gib: float | None = None
    free_before_gib: float | None = None
    card_gib: float | None = None
    before_gib: float | None = None
    activations_gib: float | None = None
    graphs_gib: float | None = None
    kv_gib: float | None = None
    rounding_gib: float = 0.005
    draft_kv_gib: float | None = None
    pool_tokens: int | None = None
    reported_tokens: int | None = None
    mem_fraction: float | None = None
    max_total_tokens: int | None = None
    tokens_per_s: float | None = None
    strategy: str | None = None
    other_pool: str = ""
    starts: int = 1
    ranks: tuple[Rank, ...] = ()
    arguments: dict = field(default_factory=dict, compare=False, repr=False)
    missing: tuple[str, ...] = ()

    @property
    def kv_dtype(self) -> str | None:
        """ "fp8" or "bf16", where the log's word says so."""
        kinds = {LAYOUT_KINDS.get(name) for name in layouts.named(self.dtype)}
        return kinds.pop() if len(kinds) == 1 else None


LAYOUT_KINDS = {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "fp8_ds_mla": "fp8", "bf16": "bf16"}


def parse(log: str | Path) -> ServerLog:
    """Read a log, given as text or as the path of a file; unknown lines are ignored.

    Raises `BadFile` for a text that neither engine wrote, and for a number that cannot be one.
    """
    other, known = "", []
    for record in records(_text(log)):
        # Arguments name much that does not run: of them only the model's name is looked at.
        looked = other or record.kind in ("args", "decode")
        if not looked and (sign := OTHER_SIGNS.search(record.text)):
            other = OTHER_POOLS[sign.lastindex - 1][0]
        if record.kind:
            known.append(record)
    kinds = {record.kind for record in known}
    engine = "sglang" if kinds & {*SGLANG} else "vllm" if kinds & {*VLLM} else None
    if engine is None and "args" in kinds:
        engine = "sglang" if any("server_args=" in r.text for r in known) else "vllm"
    if engine is None:
        raise BadFile(
            "This is no start-up log that the lab can read: not one known line is in it",
            "SGLang's ('KV Cache is allocated. ...') and vLLM's ('Available KV cache memory: ...')",
            "Paste the lines from 'Load weight' or 'Model loading took' onwards",
        )
    starts = number_starts(known)
    return _read([r for r in known if r.start == starts], engine, starts, other)


TEXTS = ("class", "label", "version", "kv_dtype", "dcp", "cp", "blocks", "strategy")


def _text(log: str | Path) -> str:
    if isinstance(log, str) and ("\n" in log or not log.strip() or len(log) > 400):
        return log
    if isinstance(log, str):
        try:
            if not Path(log).is_file():
                return log  # one pasted line, or a wrong path: neither is a log if no line is known
        except (OSError, ValueError):
            return log
    return files.read_bytes(log).decode("utf-8", "replace")


def _read(records: list[Record], engine: str, starts: int, other: str) -> ServerLog:
    """The facts of one start."""
    arguments: dict[str, object] = {}
    by_rank: dict[tuple, dict[str, list]] = {}
    found: dict[str, list] = {}
    classes: list[str] = []
    draft: list[str] = []
    decimals = set()
    for record in records:
        if record.kind == "args":
            for name, value in ARGUMENT.findall(record.text.replace("config:", "(")):
                arguments.setdefault(name, _value(value))
        if record.kind == "format":
            found.setdefault("format", []).append("fp8_ds_mla")
        own = by_rank.setdefault(record.rank, {})
        a_draft = _is_draft(record, own)
        for name, text in record.values.items():
            if name in TEXTS:
                value = text
            else:
                value = _number(text, WORDS.get(name, name), record.text, name)
            if name == "kv_gib":
                decimals.add(len(text.partition(".")[2]))
            if name == "class":
                (draft if a_draft else classes).append(value)
            elif a_draft and name in ("weights_gib", "kv_gib"):
                own.setdefault(f"draft_{name}", []).append(value)
            elif not (a_draft and name in ("free_before_gib", "free_after_gib", "kv_dtype")):
                if record.kind == "resized":
                    own[name] = []
                own.setdefault(name, []).append(value)
                found.setdefault(name, []).append(value)
    if "k_gib" in found or "v_gib" in found:
        pools = zip(found.get("k_gib", ()), found.get("v_gib", ()), strict=False)
        sizes = " and ".join(dict.fromkeys(f"{k + v:.2f}" for k, v in pools))
        split = f"separate K and V ({sizes} GiB per rank), not MLA's one latent row"
        other = " with ".join(filter(None, (other, split)))
    values = _arguments(arguments)
    model = str(values.get("model") or "")
    known = OTHER_SIGNS.search("".join([model, *classes]).replace(" ", ""))
    if not other and known:
        other = OTHER_POOLS[known.lastindex - 1][0]
    ranks = tuple(sorted((_rank(r, own) for r, own in by_rank.items()), key=_smallest))
    ranks = tuple(r for r in ranks if any(v is not None for v in list(vars(r).values())[1:]))
    first = ranks[0] if ranks else Rank("")
    values |= {
        "architecture": _majority(classes),
        "draft": _majority(draft),
        "weights_gib": max((r.weights_gib for r in ranks if r.weights_gib), default=None),
        "draft_weights_gib": max(
            (r.draft_weights_gib for r in ranks if r.draft_weights_gib), default=None
        ),
        "free_before_gib": min(
            (r.free_before_gib for r in ranks if r.free_before_gib), default=None
        ),
        "kv_gib": first.kv_gib,
        "draft_kv_gib": first.draft_kv_gib,
        "pool_tokens": first.pool_tokens,
        "graphs_gib": max((sum(o.get("graphs_gib", ())) for o in by_rank.values()), default=0)
        or None,
        "reported_tokens": min(found.get("reported_tokens", ()), default=None),
        "dtype": _last(found.get("format"))
        or _last(found.get("kv_dtype"))
        or values.get("kv_dtype"),
        "tokens_per_s": statistics.median(found["tokens_per_s"])
        if "tokens_per_s" in found
        else None,
    }
    values["strategy"] = _last(found.get("strategy"))
    for name in ("card_gib", "before_gib", "activations_gib"):
        values[name] = max(found.get(name, ()), default=None)
    if "mem_fraction" in found:
        values["mem_fraction"] = min(found["mem_fraction"])
    if dcp := found.get("dcp") or found.get("cp"):
        values["decode_context_parallel"] = int(dcp[-1])
    if version := _last(found.get("version")):
        values["version"] = version
    if blocks := found.get("blocks"):  # vLLM V0, where the block size is known
        size = values.get("page_size")
        values["reported_tokens"] = min(map(int, blocks)) * size if size else None
    values.pop("kv_dtype", None)
    if values["weights_gib"] is None and draft and not classes:
        values["architecture"] = DRAFT.split(draft[-1])[0] or None
    made = ServerLog(
        engine,
        **{name: value for name, value in values.items() if value is not None},
        rounding_gib=0.5 * 10.0 ** -min(decimals, default=2),
        other_pool=other,
        starts=starts,
        ranks=ranks,
        arguments=arguments,
    )
    missing = [
        words
        for name, words in WORDS.items()
        if name in WANTED[engine] and getattr(made, "dtype" if name == "kv_dtype" else name) is None
    ]
    return replace(made, missing=tuple(missing))


def _is_draft(record: Record, own: dict[str, list]) -> bool:
    """Whether a record is about a draft model: by its class, its label, or as the second of two."""
    if record.kind in ("weights", "begin"):
        return bool(DRAFT.search(record.values.get("class", ""))) or "kv_gib" in own
    if record.kind in ("kv", "resized"):
        label = (record.values.get("label") or "").lower() == "draft"
        target = own.get("kv_gib")
        smaller = bool(target) and 0 < as_float(record.values.get("kv_gib")) < target[-1]
        return label or (smaller and record.kind == "kv")
    return False


def _rank(rank: tuple, own: dict[str, list]) -> Rank:
    free = own.get("free_before_gib", [None])[-1]
    weights = own.get("weights_gib", [None])[-1]
    if free is None and weights is not None and own.get("free_after_gib"):
        free = own["free_after_gib"][-1] + weights
    return Rank(
        " ".join(f"{kind}{number}" for kind, number in rank),
        weights,
        free,
        own.get("kv_gib", [None])[-1],
        min(own.get("pool_tokens", ()), default=None),
        own.get("free_after_pool_gib", [None])[-1],
        own.get("draft_weights_gib", [None])[-1],
        own.get("draft_kv_gib", [None])[-1],
    )


def _smallest(rank: Rank) -> tuple:
    """Order of ranks: those with a pool first, by fewest tokens; of equal ones, by most bytes."""
    pool = rank.pool_tokens if rank.kv_gib is None or rank.pool_tokens else rank.kv_gib * 1e9
    return rank.kv_gib is None, pool or math.inf, -(rank.kv_gib or 0), rank.name


def _majority(names: list[str]) -> str | None:
    return max(names, key=names.count) if names else None


def _last(values: list | None):
    return values[-1] if values else None


def _value(text: str) -> object:
    """An argument's value: a number, True, False, None or text."""
    if text[:1] in "'\"":
        return text[1:-1]
    try:
        return ast.literal_eval(text) if text[:1] not in "{[" else text
    except (ValueError, SyntaxError):
        return text.strip()


def _arguments(arguments: dict) -> dict:
    """The server's arguments by our names, checked."""
    values: dict = {}
    for ours, theirs in ARGUMENTS.items():
        value = next((arguments[n] for n in theirs if arguments.get(n) is not None), None)
        if value is None or value == "":
            continue
        if ours in WHOLE or ours == "mem_fraction":
            if isinstance(value, str) and value.lower() in ("auto", "none"):
                continue
            value = _number(str(value), WORDS.get(ours, ours), f"{theirs[0]}={value}", ours)
        elif ours == "dp_attention":
            value = value is True
        else:
            value = str(value)
        values[ours] = value
    if not values.get("kv_dtype", "").strip("'\" "):
        values.pop("kv_dtype", None)
    algorithm = arguments.get("speculative_algorithm") or arguments.get("speculative_config")
    if algorithm not in (None, "None"):
        method = re.search(r"method['\"]?[=:]['\"]?(\w+)", str(algorithm)) or re.search(
            r"^(\w+)$", str(algorithm)
        )
        method = method[1] if method else str(arguments.get("method") or "a draft model")
        values["speculative"] = (
            str(arguments.get("method") or method) if "Config" in method else method
        )
    return values


def _number(text: str, words: str, line: str, name: str) -> float:
    try:
        value = float(text.replace(",", "").rstrip("."))
    except ValueError:
        value = math.nan
    low = 0 if name in ("tokens_per_s", "graphs_gib", "activations_gib", "before_gib") else 1e-9
    if name.startswith("free_after"):
        low = 0
    if not (math.isfinite(value) and value >= low) or (name == "mem_fraction" and value > 1):
        raise BadFile(
            f"The log's {words} is {text!r}, in '{line.strip()[:80]}'", "a number above 0"
        )
    if name in WHOLE:
        if value != int(value):
            raise BadFile(f"The log's {words} is {text!r}", "a whole number")
        return int(value)
    return value


# What the log makes of a model and a card.

DEFAULT_MODEL, DEFAULT_GPUS = "glm-5", 8
FREE = (0.8, 1.005)  # shares of a card that can be free before weights, with nothing else on it
MLA_LOGS = "logs of MLA models, which keep one pool of latent rows"


@dataclass(frozen=True)
class Reading:
    """A log read as a deployment. `layouts` are those that the size of its pool can be, the one
    taken first; empty where there is no size, or none fits. `notes` are sentences for a reader."""

    log: ServerLog
    deployment: Deployment
    layouts: tuple[Layout, ...]
    notes: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """All that a reader must know, whose log it is first."""
        who = f"{self.log.engine} {self.log.version or ''}".strip()
        asked = self.log.speculative and f", speculative: {self.log.speculative}"
        first = f"log of {who}: {self.deployment}{asked or ''}"
        missing = ", ".join(self.log.missing)
        return [first, *self.notes, *([f"not in the log: {missing}"] if missing else [])]


def from_log(
    log: "str | Path | ServerLog",
    model: "Model | str | Path | None" = None,
    card: "Card | str" = "rtx-pro-6000-server",
    **typed,
) -> Deployment:
    """The deployment of the server that wrote a log; see `read`."""
    return read(log, model, card, **typed).deployment


def read(
    log: "str | Path | ServerLog",
    model: "Model | str | Path | None" = None,
    card: "Card | str" = "rtx-pro-6000-server",
    **typed,
) -> Reading:
    """What a log says of a model on a card; without a model, the log's own is taken.

    `typed` are `deployment`'s arguments, used where the log is silent. Raises `BadFile` for the
    log of another model, of a pool that is not MLA's, or without weights, KV size and tokens.
    """
    log = log if isinstance(log, ServerLog) else parse(log)
    card = machine.card(card) if isinstance(card, str) else card
    if log.other_pool:
        who = log.model or log.architecture or "another model"
        raise BadFile(f"The log is of {who}: {log.other_pool}", MLA_LOGS)
    model, notes = _model(log, model)
    if not any((log.weights_gib, log.kv_gib, log.pool_tokens, log.reported_tokens)):
        draft = f"; the {log.draft_weights_gib} GiB are its draft's ({log.draft})"
        raise BadFile(
            f"The log lacks {', '.join(log.missing)}" + (draft if log.draft_weights_gib else ""),
            "weights, KV size or pool tokens",
            "Paste the lines of the start-up, not only of decoding",
        )
    typed = {name: value for name, value in typed.items() if value is not None}
    spread, words = _spread(log, model, typed)
    notes += words
    found, words = _layouts(log, model, spread)
    notes += words
    seen = _memory(log, card) | spread
    layout = found[0] if found else None
    seen |= _pool(log, model, layout, spread, typed)
    if log.max_total_tokens:
        seen["max_total_tokens"] = log.max_total_tokens
    given = {name: recorded("the server's log") for name in seen if name not in spread}
    given |= {name: recorded("the server's log") for name in spread if name not in typed}
    made = deployment(model, card, given=given, **{**typed, **seen})
    notes += _notes(log, made, layout)
    return Reading(log, made, tuple(found), tuple(dict.fromkeys(notes)))


def _model(log: ServerLog, asked) -> tuple[Model, list[str]]:
    """The model of a log; raises `BadFile` naming both where it is not the one asked for."""
    named, cls = known_model(log.model), log.architecture
    if asked is not None:
        model = load_model(asked)
        if named and shape(named) != shape(model):
            raise _another(log, model)
        strange = bool(cls and model.architecture and cls != model.architecture)
        if strange or (log.model and not named and not _names(log.model, model)):
            # A model of other classes can have these rows; then its size and its name say so.
            size, alike = _fits(log, model), bool(named) or _names(log.model, model)
            hub = re.fullmatch(
                r"[\w-][\w.-]*/[\w.-]+", log.model or ""
            )  # names it, as no path does
            if size is False or (strange and not (size and alike)):
                raise _another(log, model)
            if size is None and hub and not alike:
                raise _another(log, model)
            if strange:
                return model, [f"the log's class is {cls}, not {model.architecture}"]
        return model, []
    if named and (not cls or cls == named.architecture):
        return named, []
    if named:
        raise _another(log, named)
    every = known = [load_model(name) for name in known_models()]
    if cls:
        known = [m for m in known if m.architecture == cls]
        by_path = [m for m in every if _names(log.model, m) and _fits(log, m)]
        if len(by_path) == 1 and not any(_fits(log, m) for m in known):
            return by_path[0], [
                f"model: {by_path[0].name}, by the path {log.model} and the size of the pool; its "
                f"class is {cls}"
            ]
    elif log.model:
        known = [m for m in known if _names(log.model, m)]
    if not known:
        raise _another(log, load_model(DEFAULT_MODEL), "the default ")
    if len(known) > 1:
        known = [m for m in known if _fits(log, m)] or known
    if len({shape(m) for m in known}) == 1:
        how = "its class" if cls else "its name" if log.model else "the size of its pool"
        return known[0], [f"model: {known[0].name}, by {how} in the log"]
    default = load_model(DEFAULT_MODEL)
    if cls or log.model or _fits(log, default) is False:
        raise NoAnswer(
            f"The log does not say which model it is of{f' (its class is {cls})' if cls else ''}: "
            f"it can be {', '.join(m.name for m in known)}",
            remedy="Say which: --model NAME, or the path of its config.json",
        )
    return default, [f"the log names no model: {default.name} is taken, assumed"]


def known_model(name: str | None) -> Model | None:
    if not name:
        return None
    try:
        return load_model(name)
    except LabError:
        return None


def shape(model: Model) -> tuple:
    return model.layers, model.row, model.heads, model.kv_lora_rank, model.index_at


def _names(path: str | None, model: Model) -> bool:
    """Whether a checkpoint's path has the model's name in it: "glm5-tp8" is glm-5, 5.3 is not."""
    names = [model.name, *_aliases(model.name)]
    if Path(path or "").name.lower() == model.name.lower():
        return True
    patterns = (re.sub(r"[-_]", "[-_ ]?", re.escape(n).replace("\\-", "-")) for n in names)
    return any(re.search(rf"{p}(?![.\d])", path or "", re.IGNORECASE) for p in patterns)


def _aliases(name: str) -> list[str]:
    entry = facts.catalogue("models").get(name.lower(), {})
    return list(entry.get("aliases", ()))


def _another(log: ServerLog, model: Model, which: str = "") -> BadFile:
    names = dict.fromkeys(filter(None, (log.model, log.draft or log.architecture)))
    who = " / ".join(names) or "another model"
    title = next(
        (t for sign, t in TITLES.items() if sign in who and t.lower() not in who.lower()), ""
    )
    weights = ""
    if log.draft_weights_gib and not log.weights_gib:
        weights = f". Its {log.draft_weights_gib} GiB of weights are the draft's alone"
    return BadFile(
        f"The log is of {who}{f' ({title})' if title else ''}, not of {which}{model.name}{weights}",
        f"logs of {model.name}" + (f" ({model.architecture})" if model.architecture else ""),
        ("" if which else "Leave --model out to take the log's, or ")
        + ("Give" if which else "give")
        + " --model PATH/config.json of that model",
    )


# What people call models by whose classes logs name them.
TITLES = {
    "Glm5Next": "GLM-5.3-Flash",
    "KimiK25": "Kimi-K2.5",
    "GlmMoeDsa": "GLM-5",
    "DeepseekV32": "DeepSeek-V3.2",
}


def _fits(log: ServerLog, model: Model) -> bool | None:
    """Whether the size of the log's pool is one of this model's; None where it has no size."""
    tokens = log.pool_tokens or log.reported_tokens
    if not (tokens and log.kv_gib):
        return None
    return bool(_sized(log, model, log.dtype))


def _sized(log: ServerLog, model: Model, dtype: str | None, spread: dict | None = None):
    spread = spread or {}
    pipeline = spread.get("pipeline_parallel") or log.pipeline_parallel
    dcp = log.decode_context_parallel if log.engine == "vllm" else None
    return layouts.fitting(
        model,
        log.pool_tokens or log.reported_tokens,
        log.kv_gib,
        rounding_gib=log.rounding_gib,
        dtype=dtype,
        page_size=log.page_size,
        pipeline=pipeline,
        dcp=dcp,
        mtp=_mtp(log) if log.engine == "vllm" else False,
        engine=log.engine,
    )


def _mtp(log: ServerLog) -> bool:
    """Whether the model's own MTP layers draft."""
    return any(word in (log.speculative or "").lower() for word in ("mtp", "nextn"))


def _spread(log: ServerLog, model: Model, typed: dict) -> tuple[dict, list[str]]:
    """How the model is spread over GPUs: from arguments, else from the ranks that lines name."""
    ranks = [dict(RANKS.findall(rank.name)) for rank in log.ranks]
    ranks = [{kind: int(number) for kind, number in rank.items()} for rank in ranks]
    top = {k: max((r[k] for r in ranks if k in r), default=-1) + 1 for k in ("TP", "DP", "PP")}
    spread, notes = {}, []
    tp = log.tensor_parallel or typed.get("tensor_parallel")
    if tp is None:
        seen = 1 << (top["TP"] - 1).bit_length() if top["TP"] else 0
        # One rank's line says how many there are at least; several are taken to be all.
        several = len({r.get("TP") for r in ranks}) > 1
        tp = seen if several else max(DEFAULT_GPUS, seen)
        while model.heads % tp and tp > 1:
            tp //= 2
        if several:
            notes.append(f"TP {tp}, by the ranks that the log names")
    elif top["TP"] > tp:
        notes.append(f"the log names {top['TP']} TP ranks, more than TP {tp}")
    if log.tensor_parallel or top["TP"]:
        spread["tensor_parallel"] = tp
    pp = log.pipeline_parallel or (top["PP"] if top["PP"] > 1 else None)
    if pp:
        spread["pipeline_parallel"] = pp
    if log.decode_context_parallel:
        spread["decode_context_parallel"] = log.decode_context_parallel
    if log.engine == "vllm":
        dp = log.data_parallel or (top["DP"] if top["DP"] > 1 else None)
        if dp and dp > 1:
            spread["data_parallel"] = dp
        return spread, notes
    dp, guess = _dp_attention(log, ranks, tp)
    if dp and dp > 1:
        spread["tensor_parallel"], spread["data_parallel"] = tp, dp
    return spread, [*notes, *guess]


RANKS = re.compile(r"([A-Z]+)(\d+)")


def _dp_attention(log: ServerLog, ranks: list[dict], tp: int) -> tuple[int | None, list[str]]:
    """SGLang's DP attention: its ranks, and a note. Of plain replicas each is a server of its own.

    A TP rank t of DP rank d has t // g = d, g being the GPUs that share one request's attention.
    """
    pairs = {(r["DP"], r.get("TP", 0)) for r in ranks if "DP" in r}
    if log.dp_attention is not None or log.data_parallel:
        dp = log.data_parallel or 1
        if dp > 1 and log.dp_attention is False:
            return None, [f"{dp} replicas (DP without DP attention): figures are of one"]
        return dp, []
    if not pairs:
        return None, []
    if len({d for d, t in pairs if t == 0}) > 1:
        return None, ["several DP ranks have a TP0: replicas, figures are of one"]
    groups = [g for g in (1, 2, 4, 8, 16, 32) if tp % g == 0 and all(t // g == d for d, t in pairs)]
    if not groups:
        return None, ["the DP ranks in the log fit no split of DP attention"]
    ranks_named = " and ".join(f"DP{d} TP{t}" for d, t in sorted(pairs)[:3])
    dp = tp // groups[0]
    return dp, [f"DP attention by the log's {ranks_named}: DP {dp} of TP {tp}"] if dp > 1 else []


def _layouts(log: ServerLog, model: Model, spread: dict) -> tuple[list[Layout], list[str]]:
    """The layouts that the pool's size can be, and what to say of it."""
    tokens = log.pool_tokens or log.reported_tokens
    if not (tokens and log.kv_gib):
        return [], []
    dcp = log.decode_context_parallel or 1 if log.engine == "vllm" else 1
    found, notes = _sized(log, model, log.dtype, spread), []
    if not found and (other := _sized(log, model, None, spread)):
        notes.append(f"the log says {log.dtype}, but its size is not that")
        found = other
    ratio = log.kv_gib * GIB / (tokens / dcp)
    over = f"{tokens:,} tokens" + (f" / {dcp} DCP ranks" if dcp > 1 else "")
    said = f"{log.kv_gib:.2f} GiB / {over} = {ratio:,.0f} B per token"
    if not found:
        have = "; ".join(
            f"{layouts.WORDS[x.name]} {x.formula}"
            for x in layouts.possible(model, ("fp8_e4m3", "fp8_ds_mla", "bf16"))
            if not x.mtp_layers and x.index_layers in (0, model.index_layers) and x.index_counted
        )
        why = (
            "vLLM derives its tokens from the maximum concurrency, which is no row count where "
            "layers differ; the table is what the memory holds"
            if log.engine == "vllm"
            else "another model, more caches than its latent rows, or a release that counts "
            "otherwise; the table is what the memory would hold"
        )
        others = [m.name for m in map(load_model, known_models()) if _fits(log, m)]
        fits = f". It would fit {', '.join(others)}" if others else ""
        return [], [*notes, f"layout: none. {said} is none of {model.name}'s ({have}): {why}{fits}"]
    first = found[0]
    if len(found) == 1 and not (first.pipeline > 1 and not spread.get("pipeline_parallel")):
        return found, [*notes, f"layout: {said} = {first.formula}: {first}"]
    names = "; or ".join(f"{x.formula}: {x}" for x in found)
    return found, [*notes, f"layout: {said} may be {names}. The first is taken"]


def _memory(log: ServerLog, card: Card) -> dict:
    """`deployment`'s arguments about memory."""
    before = log.before_gib
    if log.free_before_gib is not None:
        before = max(0.0, card.memory_gib - log.free_before_gib)
    values = dict(
        weights_gib=log.weights_gib,
        memory_fraction=log.mem_fraction,
        before_weights_gib=before,
        graphs_gib=log.graphs_gib,
        activations_gib=log.activations_gib,
        engine=log.engine,
    )
    return {name: value for name, value in values.items() if value is not None}


def _pool(log: ServerLog, model: Model, layout: Layout | None, spread: dict, typed: dict) -> dict:
    """`deployment`'s arguments about the pool."""
    seen: dict = {}
    if log.page_size:
        seen["page_size"] = log.page_size
    if log.engine == "vllm" and _mtp(log) and model.mtp_layers:
        seen["mtp"] = True
    tokens = log.pool_tokens or (log.reported_tokens if layout else None)
    if layout is None:
        open_to = layouts.named(log.dtype)
        if log.dtype and len(open_to) <= 2:
            # vLLM lays FP8 rows of models with an index out in packed form.
            packed = model.dsa and log.engine == "vllm" and log.dtype == "fp8"
            seen["layout"] = open_to[-1] if packed else open_to[0]
        elif log.engine == "vllm" or log.dtype == "auto":
            seen["layout"] = "bf16"
        if log.kv_gib:
            seen["kv_gib"] = log.kv_gib
        elif tokens:
            seen["pool_tokens"] = tokens
        return seen
    seen["layout"], slots = layout.name, math.ceil(tokens / layout.dcp)
    if layout.dcp > 1:
        spread["decode_context_parallel"] = layout.dcp
    if layout.pipeline > 1:
        spread["pipeline_parallel"] = layout.pipeline
    seen["pool_tokens"] = slots
    counted = layout.index_layers - (layout.mtp_layers if layout.index_layers else 0)
    if not model.dsa:
        return seen
    if layout.index_layers == layout.layers:
        seen["index_layers"] = model.layers
    elif layout.pipeline > 1 and counted:
        seen["index_layers"] = model.index_layers
    elif counted:
        seen["index_layers"] = counted
    elif log.architecture and log.architecture != model.architecture:
        seen["index_layers"] = 0  # a class without an index
    else:  # not in the printed size, and there all the same; SGLang has them on all layers
        seen["index_layers"] = model.layers if log.engine == "sglang" else model.index_layers
    if layout.mtp_layers or _draft_row(log, layout):
        seen["mtp"] = True
    return seen


def _draft_row(log: ServerLog, layout: Layout) -> bool:
    """Whether a draft's pool is one more layer of the model's own rows (MTP)."""
    if not (log.draft_kv_gib and log.pool_tokens):
        return False
    rows = (layout.row_bytes, layout.row_bytes + layout.model.row_bytes("index"))
    return any(
        abs(log.pool_tokens * layout.model.mtp_layers * row / GIB - log.draft_kv_gib)
        <= log.rounding_gib + 1e-4
        for row in rows
    )


def _notes(log: ServerLog, made: Deployment, layout: Layout | None) -> list[str]:
    """What a reader of a log's table must know."""
    notes = []
    if log.starts > 1:
        notes.append(f"the log holds {log.starts} starts of the server: the last one counts")
    if made.layout == "bf16":
        sure = "" if layout or log.kv_dtype == "bf16" else f" ({log.engine}'s default, assumed)"
        notes.append(f"a BF16 pool{sure}: nothing is cast")
    if made.layout == "fp8_e5m2":
        notes.append(
            "e5m2: kernels that read e4m3 (native_fp8, fused_fp8) do not read it; it has two bits "
            "of mantissa where e4m3 has three"
        )
    slots = made.rows()
    if layout and not layout.index_counted and made.index_layers:
        index = slots * made.index_bytes() / GIB
        notes.append(
            f"this release's KV size leaves the index keys out: really {slots:,} x "
            f"{made.token_bytes():,} B = {slots * made.token_bytes() / GIB:.2f} GiB, of them "
            f"{index:.2f} GiB of index keys"
        )
    if made.data_parallel > 1:
        notes.append(
            f"DP {made.data_parallel}: {made.heads} heads per GPU, and each rank has its own pool: "
            f"{made.data_parallel} x {slots:,} = {made.data_parallel * slots:,} tokens together"
        )
    if made.decode_context_parallel > 1:
        notes.append(
            f"DCP {made.decode_context_parallel}: {slots:,} rows per GPU, "
            f"{made.tokens():,} tokens together"
        )
    if made.pipeline_parallel > 1:
        counts = sorted({len(stage) for stage in made.stages})
        row, held = made.model.row_bytes(LAYOUTS[made.layout]), made.memory().kv_gib * GIB
        each = "; ".join(f"{n} layers: {int(held) // (n * row):,}" for n in counts)
        notes.append(
            f"PP {made.pipeline_parallel}: {' or '.join(map(str, counts))} of "
            f"{made.model.layers} layers per stage"
            + (f"; tokens by stage ({each})" if not log.pool_tokens and len(counts) > 1 else "")
        )
    if log.draft_weights_gib or log.draft_kv_gib:
        parts = [f"weights {log.draft_weights_gib:.2f} GiB"] if log.draft_weights_gib else []
        parts += [f"pool {log.draft_kv_gib:.2f} GiB"] if log.draft_kv_gib else []
        notes.append(f"draft model ({log.draft or 'unnamed'}): {', '.join(parts)}, beside the rest")
    if log.max_total_tokens:
        notes.append(f"the pool was capped: max_total_tokens {log.max_total_tokens:,}")
    notes += _contradictions(log, made.card)
    notes += _differences(log.ranks)
    return notes


def _contradictions(log: ServerLog, card: Card) -> list[str]:
    """Where the log's memory is not that of the card."""
    least, most = FREE
    if log.card_gib:
        if abs(log.card_gib / card.memory_gib - 1) > 0.05:
            said = f"the log's card has {log.card_gib:.2f} GiB"
        else:
            return []
        free = log.card_gib
    elif log.free_before_gib:
        free = log.free_before_gib
        if least * card.memory_gib <= free <= most * card.memory_gib:
            return []
        said = f"{free:.2f} GiB were free before weights"
    else:
        held = [
            (r.kv_gib or 0) + (r.weights_gib or 0) + (r.free_after_pool_gib or 0) for r in log.ranks
        ]
        free = max(held, default=0.0)
        if free <= most * card.memory_gib:
            return []
        said = f"{free:.2f} GiB of KV, weights and free memory are in the log"
    known = {
        machine.card(name).name: machine.card(name).memory_gib for name in machine.known_cards()
    }
    like = [n for n, gib in known.items() if least * gib <= free <= most * gib]
    taken = card.memory_gib - free
    why = f", or {taken:.1f} GiB of it were taken by others" if taken > 0 else ""
    hint = f"; cards that fit: {', '.join(like)}" if like else ""
    return [
        f"contradicts {card.name}: {said}, and {card.title} has {card.memory_gib:.2f}. It is "
        f"another card{why}{hint}"
    ]


def _differences(ranks: tuple[Rank, ...]) -> list[str]:
    """The ranks' figures where they differ by more than rounding."""
    notes = []
    named = [r for r in ranks if r.name]
    for name, words, unit in (
        ("weights_gib", "weights", " GiB"),
        ("free_before_gib", "free before weights", " GiB"),
        ("pool_tokens", "pool tokens", ""),
        ("kv_gib", "KV size", " GiB"),
        ("free_after_pool_gib", "free after the pool", " GiB"),
    ):
        seen = {r.name: getattr(r, name) for r in named if getattr(r, name) is not None}
        if len(seen) > 1 and max(seen.values()) > 1.005 * min(seen.values()):
            shown = sorted(seen, key=seen.get)
            shown = shown if len(shown) <= 4 else [shown[0], shown[-1]]
            each = ", ".join(f"{n} {seen[n]:,}" for n in sorted(shown))
            notes.append(f"ranks differ in {words}: {each}{unit}")
    return notes

"""What an SGLang or vLLM start-up log says about memory. Their "GB" are GiB; here it says GiB."""

import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from shadowkv_lab import machine
from shadowkv_lab.budget import Budget, budget
from shadowkv_lab.deployment import GIB, deployment
from shadowkv_lab.errors import BadFile
from shadowkv_lab.load import Load
from shadowkv_lab.machine import Card
from shadowkv_lab.model import Model
from shadowkv_lab.provenance import recorded

NUMBER = r"([-+\w.,]+?)"  # anything in a number's place, so that a bad one can be named
END = r"(?:[,\s)}]|$)"
# (field, what it is, pattern). A field that several lines or ranks name is joined by `JOIN`.
SGLANG = (
    ("free_before_gib", "free memory before weights", rf"Load weight begin\..*mem={NUMBER} GB"),
    ("weights_gib", "weights", rf"Load weight end\..*mem usage={NUMBER} GB"),
    ("kv_dtype", "KV dtype", r"KV Cache is allocated\. dtype: ([\w.]+)"),
    ("pool_tokens", "pool tokens", rf"KV Cache is allocated\..*#tokens: {NUMBER}, "),
    ("kv_gib", "KV size", rf"KV Cache is allocated\..*KV size: {NUMBER} GB"),
    ("pool_tokens", "pool tokens", rf"max_total_num_tokens={NUMBER}{END}"),
    ("mem_fraction", "memory fraction", rf"mem_fraction_static={NUMBER}{END}"),
    ("tensor_parallel", "tensor parallel size", rf"tp_size={NUMBER}{END}"),
    ("tokens_per_s", "generation throughput", rf"Decode batch.*\(token/s\): {NUMBER}{END}"),
)
VLLM = (
    ("weights_gib", "weights", rf"Model loading took {NUMBER} GiB"),
    ("kv_gib", "KV size", rf"Available KV cache memory: {NUMBER} GiB"),
    ("reported_tokens", "reported tokens", rf"GPU KV cache size: {NUMBER} tokens"),
    ("kv_dtype", "KV dtype", r"kv_cache_dtype['\"]?[=:] ?['\"]?([\w.]+)"),
    ("mem_fraction", "memory fraction", rf"gpu_memory_utilization['\"]?[=:] ?{NUMBER}{END}"),
    ("tensor_parallel", "tensor parallel size", rf"tensor_parallel_size['\"]?[=:] ?{NUMBER}{END}"),
)
SIGNS = {
    "sglang": r"Load weight (begin|end)\.|KV Cache is allocated|max_total_num_tokens=|Decode batch",
    "vllm": r"Model loading took|Available KV cache memory|GPU KV cache size",
}
JOIN = {"weights_gib": max, "tokens_per_s": statistics.median}  # of the rest: the smallest rank's
WHOLE = ("pool_tokens", "reported_tokens", "tensor_parallel")


@dataclass(frozen=True)
class ServerLog:
    """Numbers of one GPU, None where the log has none; `missing` names those in words.

    `reported_tokens` is vLLM's figure, which it derives from its maximum concurrency: it is not
    the number of rows in the pool. `tokens_per_s` is the median of SGLang's decode lines.
    """

    engine: str
    weights_gib: float | None = None
    kv_gib: float | None = None
    pool_tokens: int | None = None
    reported_tokens: int | None = None
    kv_dtype: str | None = None  # "fp8" or "bf16"
    mem_fraction: float | None = None
    tensor_parallel: int | None = None
    free_before_gib: float | None = None
    tokens_per_s: float | None = None
    missing: tuple[str, ...] = ()

    def rows(self, model: Model, **options: bool) -> int | None:
        """Tokens in the pool: as logged, or what the KV size holds of this dtype."""
        if self.pool_tokens or not (self.kv_gib and self.kv_dtype):
            return self.pool_tokens
        return int(self.kv_gib * GIB // model.token_bytes(self.kv_dtype, **options))


def parse(log: str | Path) -> ServerLog:
    """Read a log, given as text or as the path of a file; unknown lines are ignored.

    Raises `BadFile` for a text that neither engine wrote, and for a number that cannot be one.
    """
    text = _text(log)
    engine = next((name for name, sign in SIGNS.items() if re.search(sign, text)), None)
    if engine is None:
        raise BadFile(
            "This is no start-up log that the lab can read: not one known line is in it",
            "SGLang's ('KV Cache is allocated. ...') and vLLM's ('Available KV cache memory: ...')",
            "Paste the lines from 'Load weight' or 'Model loading took' onwards",
        )
    found: dict[str, list] = {}
    wanted = SGLANG if engine == "sglang" else VLLM
    for field, words, pattern in wanted:
        for match in re.finditer(pattern, text, re.MULTILINE):
            value = match[1] if field == "kv_dtype" else _number(match[1], words, match[0], field)
            found.setdefault(field, []).append(value)
    values = {field: JOIN.get(field, min)(seen) for field, seen in found.items()}
    if "kv_dtype" in values:
        values["kv_dtype"] = _dtype(found["kv_dtype"][-1])
        values = {k: v for k, v in values.items() if v is not None}
    missing = dict.fromkeys(words for field, words, _ in wanted if field not in values)
    return ServerLog(engine, **values, missing=tuple(missing))


def _text(log: str | Path) -> str:
    if isinstance(log, str) and ("\n" in log or not log.strip() or len(log) > 400):
        return log
    path = Path(log)
    if isinstance(log, str) and not path.is_file():
        return log  # one pasted line, or a wrong path: neither is a log if no line is known
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"Cannot read {path}: {error}", "a text file") from None


def _number(text: str, words: str, line: str, field: str) -> float:
    try:
        value = float(text.replace(",", "").rstrip("."))
    except ValueError:
        value = math.nan
    low = 0 if field == "tokens_per_s" else 1e-9
    if not (math.isfinite(value) and value >= low) or (field == "mem_fraction" and value > 1):
        raise BadFile(
            f"The log's {words} is {text!r}, in '{line.strip()[:80]}'", "a number above 0"
        )
    if field in WHOLE:
        if value != int(value):
            raise BadFile(f"The log's {words} is {text!r}", "a whole number")
        return int(value)
    return value


def _dtype(name: str) -> str | None:
    if "8" in name and ("fp8" in name or "float8" in name):
        return "fp8"
    return "bf16" if name.removeprefix("torch.") in ("bfloat16", "bf16") else None


def from_log(
    log: "str | Path | ServerLog",
    model: "Model | str",
    card: "Card | str",
    *,
    load: Load | None = None,
    strategies=None,
    **options,
) -> Budget:
    """The budget of the server that wrote a log; `options` are `deployment`'s and come second.

    Raises `BadFile` if neither KV size nor tokens nor weights are in it.
    """
    log = log if isinstance(log, ServerLog) else parse(log)
    if log.weights_gib is None and log.kv_gib is None and log.pool_tokens is None:
        raise BadFile(
            f"The log lacks {', '.join(log.missing)}",
            "weights, KV size or pool tokens",
            "Paste the lines of the start-up, not only of decoding",
        )
    card = machine.card(card) if isinstance(card, str) else card
    before = None
    if log.free_before_gib is not None:
        before = max(0.0, card.memory_gib - log.free_before_gib)
    seen = dict(
        weights_gib=log.weights_gib,
        memory_fraction=log.mem_fraction,
        kv_gib=log.kv_gib,
        pool_tokens=log.pool_tokens,
        layout={"fp8": "fp8_e4m3", "bf16": "bf16"}.get(log.kv_dtype),
        tensor_parallel=log.tensor_parallel,
        before_weights_gib=before,
        engine=log.engine,
    )
    seen = {name: value for name, value in seen.items() if value is not None}
    given = {name: recorded(f"from {log.engine}'s log") for name in seen}
    at = deployment(model, card, given=given, **{**options, **seen})
    return budget(at, load, strategies)

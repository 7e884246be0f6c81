"""A server's log as records: who said it, in which start of the server, and its numbers.

A wrapped line is one record. Patterns are written without white space and meet records without it,
so that a line that a terminal or a mail has wrapped reads as it was. Read in SGLang 0.5.23 and in
logs of public reports from SGLang 0.4 and vLLM 0.7 on.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

# How a record begins: SGLang's bracketed time and ranks, or vLLM's level with a time or a file.
HEAD = re.compile(
    r"\[(?P<date>\d{4}-\d\d-\d\d(?: \d\d:\d\d:\d\d)?|\d\d:\d\d:\d\d)[\d.,]*"
    r"(?P<ranks>(?: [A-Z_]+\d+)*)\]"
    r"|\b(?:INFO|WARNING|ERROR|DEBUG|CRITICAL):? +"
    r"(?:(?P<day>\d\d-\d\d \d\d:\d\d:\d\d)|[\d:. -]{0,24}(?=\[?[\w./-]+\.py\b))"
)
WORKER = re.compile(r"\((\w+)((?: ?\w+=?\w+)*?) ?pid=(\d+)")
RANK = re.compile(r"(?<![A-Z_])(DP|TP|PP|EP|DCP)(\d+)")
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|#033\[[0-9;]*m")
# Messages that begin a record also where the head was cut off, or is of another kind.
BARE = re.compile(
    r"(?:server_args=|Load weight |KV Cache is |Memory pool end|Using KV cache dtype"
    r"|Decode batch|max_total_num|Model loading took|Loading model weights took|Available KV"
    r"|GPU KV cache|the current vLLM|model weights take|Maximum concurrency"
    r"|# (?:cuda|GPU|CUDA) blocks|Initializing an? )"
)
N = r"([-+\w.,]+?)"  # anything in a number's place, so that a bad one can be named
# What a record is worth reading for, and the numbers in it: (kind, sign, {field: pattern}).
LINES = (
    ("decode", "Decodebatch", {"tokens_per_s": r"\(token/s\):([-+\w.]+)"}),
    ("args", "server_args=", {}),
    ("begin", "Loadweightbegin", {"free_before_gib": rf"availmem={N}GB"}),
    (
        "weights",
        "Loadweightend",
        {
            "class": r"(?<!d)type=(\w+)",
            "free_after_gib": rf"availmem={N}GB",
            "weights_gib": rf"memusage={N}GB",
        },
    ),
    ("dtype", "UsingKVcachedtype:", {"kv_dtype": r"dtype:([\w.]+)"}),
    (
        "kv",
        "KVCacheisallocated",
        {
            "label": r"(\w*)KVCacheis",
            "kv_dtype": r"dtype:([\w.]+)",
            "pool_tokens": r"#tokens:([-+\w.]+)",
            "kv_gib": rf"KVsize:{N}GB",
            "k_gib": rf"[,.]Ksize:{N}GB",
            "v_gib": rf"(?<!K)Vsize:{N}GB",
        },
    ),
    (
        "resized",
        "KVcacheallocated.",
        {
            "label": r"sizing:(draft)?KVcache",
            "kv_dtype": r"dtype:([\w.]+)",
            "pool_tokens": r"#tokens:([-+\w.]+)",
            "kv_gib": rf"KVsize:{N}GB",
        },
    ),
    ("pool", "Memorypoolend", {"free_after_pool_gib": rf"availmem={N}GB"}),
    ("strategy", "shadowkv:", {"strategy": r"shadowkv:(\w+?)readsapoolof"}),
    ("total", "max_total_num_tokens=", {"pool_tokens": r"max_total_num_tokens=([-+\w.]+)"}),
    ("graphs", "graphend.", {"graphs_gib": rf"memusage={N}GB"}),
    ("args", "non-defaultargs", {}),
    ("args", "LLMengine(v", {"version": r"LLMengine\(v([\w.+]+)\)"}),
    ("args", "engineconfig", {}),
    ("version", "APIserverversion", {"version": r"APIserverversion([\w.+]+)"}),
    ("class", "Resolvedarchitecture", {"class": r"Resolvedarchitecture:(\w+)"}),
    ("loaded", "weightstook", {"weights_gib": rf"weightstook{N}Gi?B"}),
    ("loaded", "Modelloadingtook", {"weights_gib": rf"Modelloadingtook{N}Gi?B"}),
    ("available", "AvailableKVcachememory", {"kv_gib": rf"memory:{N}GiB"}),
    (
        "dcp",
        "MultiplyingtheGPUKVcachesize",
        {"dcp": r"dcp_world_size\*?(\d+)", "cp": r"cp_world_size(\d+)"},
    ),
    ("size", "GPUKVcachesize", {"reported_tokens": rf"size:{N}tokens"}),
    ("blocks", "CPUblocks:", {"blocks": r"#(?:cuda|CUDA|GPU)blocks:(\d+)"}),
    ("graphs", "Graphcapturingfinished", {"graphs_gib": rf"took{N}GiB"}),
    (
        "v0",
        "thecurrentvLLMinstancecanuse",
        {
            "card_gib": rf"total_gpu_memory\({N}GiB\)",
            "mem_fraction": rf"gpu_memory_utilization\({N}\)",
        },
    ),
    (
        "v0weights",
        "modelweightstake",
        {
            "weights_gib": rf"weightstake{N}GiB",
            "before_gib": rf"non_torch_memorytakes{N}GiB",
            "activations_gib": rf"activationpeakmemorytakes{N}GiB",
            "kv_gib": rf"reservedforKVCacheis{N}GiB",
        },
    ),
    ("format", "fp8_ds_mlaKVcacheformat", {}),
    ("format", "customfp8kv-cacheformat", {}),
)
LINES = tuple((k, sign, {f: re.compile(p) for f, p in fields.items()}) for k, sign, fields in LINES)
LONGEST = 40_000  # characters of a record: a traceback behind a line is no part of it
AGAIN_S = 60  # the same line of a nameless worker after this long comes from another start


@dataclass
class Record:
    """One message: who wrote it, when, and its text without white space.

    `rank` holds what its head says: (("DP", 0), ("TP", 3)). `kind` and `values` are those of
    `LINES`, empty where the message is none of them; `start` counts from 1.
    """

    worker: str
    pid: str
    rank: tuple[tuple[str, int], ...]
    time: str
    text: str
    kind: str = ""
    values: dict = field(default_factory=dict)
    start: int = 0

    @property
    def rank_name(self) -> str:
        return " ".join(f"{kind}{number}" for kind, number in self.rank)


def records(text: str) -> Iterator[Record]:
    """The messages of a log; lines without a head belong to the one before them."""
    if "\x1b" in text or "#033[" in text:
        text = ANSI.sub("", text)
    record, parts, length = None, [], 0
    for line in text.replace("\r", "\n").split("\n"):
        if not line or line.isspace():
            continue
        head = HEAD.search(line, 0, 300)
        bare = BARE.search(line) if head is None and parts != [""] else None
        if bare or (head is None and record is None):
            start = bare.start() if bare else 0
            before, message = line[:start], line[start:]
        elif head is None:
            if length < LONGEST:
                parts.append("".join(line.split()))
                length += len(line)
            continue
        else:
            before, message = line[: head.start()], line[head.end() :]
        if record is not None:
            yield _finished(record, parts)
        record, parts = _record(before, head), ["".join(message.split())]
        length = len(line)
    if record is not None:
        yield _finished(record, parts)


def _finished(record: Record, parts: list[str]) -> Record:
    """The record with its text, and what `LINES` finds in it."""
    record.text = text = "".join(parts)
    for kind, sign, patterns in LINES:
        if sign in text:
            record.kind = kind
            for name, pattern in patterns.items():
                if match := pattern.search(text):
                    record.values[name] = match[1]
            break
    return record


def _record(before: str, head: "re.Match | None") -> Record:
    worker = pid = ""
    if match := (WORKER.search(before) if "pid=" in before else None):
        worker, pid = match[1] + match[2], match[3]
    # SGLang's ranks stand in its head, vLLM's in the worker's name before it.
    ranks = (head["ranks"] if head else before) or worker.replace("_", " ")
    when = (head["date"] or head["day"] or "") if head else ""
    rank = tuple((kind, int(number)) for kind, number in RANK.findall(ranks)) if ranks else ()
    return Record(worker, pid, rank, when, "")


FORMS = {8: "%H:%M:%S", 10: "%Y-%m-%d", 14: "%Y-%m-%d %H:%M:%S", 19: "%Y-%m-%d %H:%M:%S"}


def _seconds(stamp: str) -> float | None:
    """A head's time in seconds, comparable within one log; None for what is no time."""
    form = FORMS.get(len(stamp), "")
    try:  # vLLM writes no year; 2024 has every day
        when = datetime.strptime(f"2024-{stamp}" if len(stamp) == 14 else stamp, form)
    except ValueError:
        return None
    return (when - datetime(1900, 1, 1)).total_seconds()


def number_starts(records: list[Record]) -> int:
    """Number the records by start, and return how many there are.

    Another start shows in a new process of the same worker, in arguments or weights that come
    again, and in a pool that is allocated again; a draft's pool follows its target's.
    """
    start = 1
    said: dict[tuple, list[Record]] = {}  # of this start, by rank and kind
    pids: dict[str, str] = {}
    for record in records:
        if record.kind == "decode":
            record.start = start
            continue
        kind, rank, text = record.kind, record.rank_name, record.text[:200]
        earlier = said.get((rank, kind), [])
        loaded = any(k in ("weights", "kv", "loaded", "available", "total") for _, k in said)
        unique = record.worker and (record.rank or record.worker.startswith(("Engine", "API")))
        again = False
        if unique and pids.get(record.worker, record.pid) != record.pid:
            again = True
        elif kind == "version" or ("server_args=" in text or "non-default" in text):
            again = loaded
        elif kind in ("begin", "weights", "kv") and (rank, "total") in said:
            again = True
        elif earlier and kind == "weights":
            classes = [r.values.get("class") for r in earlier]
            again = record.values.get("class") in classes and _apart(earlier[-1], record, rank)
        elif earlier and kind == "kv":
            again = not _draft_of(earlier[-1], record) and _apart(earlier[-1], record, rank)
        elif earlier and kind in ("available", "size", "loaded", "v0weights") and not unique:
            gap = _gap(earlier[-1], record)
            again = gap is not None and gap > AGAIN_S
        if again:
            start, said, pids = start + 1, {}, {}
        said.setdefault((rank, kind), []).append(record)
        if unique:
            pids[record.worker] = record.pid
        record.start = start
    return start


def _gap(one: Record, two: Record) -> float | None:
    times = [_seconds(r.time) for r in (one, two)]
    return None if None in times else abs(times[1] - times[0])


def _apart(one: Record, two: Record, rank: str) -> bool:
    """Whether a line that a rank repeats is not only written twice."""
    gap = _gap(one, two)
    return bool(rank) if gap is None else gap > 2


def _draft_of(target: Record, other: Record) -> bool:
    """Whether a second pool of one rank is a draft's: as many tokens, fewer bytes."""
    if (other.values.get("label") or "").lower() == "draft":
        return True
    sizes = [
        sum(as_float(r.values.get(k)) for k in ("kv_gib", "k_gib", "v_gib"))
        for r in (target, other)
    ]
    same = target.values.get("pool_tokens") == other.values.get("pool_tokens")
    return same and sizes[1] < sizes[0]


def as_float(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0

"""Who can serve an MLA model on a GPU: attention backends, and the lab's strategies (`can_run`).

The rules are data (`data/rules/attention_backends.json`): each names its library, the versions
that it holds for, its reason in one sentence and its source. They change with versions, so every
question may be asked as of a day or for given versions; the default is the newest that was read.

>>> glm5_tp8 = Serving((12, 0), "fp8_e4m3", heads=8, page_size=64, qk_nope_head_dim=192, dsa=True)
>>> [v.rule for v in check("flashinfer_fa2", glm5_tp8, as_of="2026-02")]
['fa2-16-bit-fragments']
>>> [v.rule for v in check("flashinfer_fa2", glm5_tp8)]
['fa2-fp8-hopper']
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import cache
from itertools import product
from typing import NamedTuple

from shadowkv_lab import facts
from shadowkv_lab.deployment import LAYOUTS, Deployment
from shadowkv_lab.errors import OutOfRange, UnknownName
from shadowkv_lab.model import Model

KV_DTYPES = ("bf16", "fp8_e4m3", "packed_656", "fp8_e5m2", "packed_432")
# The rules' words for a deployment's layouts; flat ones have the same.
PACKED = {"fp8_ds_mla": "packed_656", "nvfp4_ds_mla": "packed_432"}
NOT_TRIED = "no-cuda-capability"
PAGE_SIZES = (1, 16, 32, 64, 128)  # tried by `runs_if`
COLUMNS = ("backend", "runs", "why_not", "runs_if", "library", "source", "note")

AsOf = date | str | Mapping[str, str] | None


@dataclass(frozen=True)
class Serving:
    """What a rule looks at: a model's rows and heads on one GPU.

    `heads` are query heads per GPU; `page_size` is in tokens. `kv_dtype` is how rows lie in the
    cache: flat "bf16", "fp8_e4m3" or "fp8_e5m2", or "packed_656" and "packed_432", the rows of
    sparse kernels. `dsa` says that the model has a sparse-attention index (`Model.dsa`). Raises
    `UnknownName` or `OutOfRange`.
    """

    compute_capability: tuple[int, int] | None
    kv_dtype: str
    heads: int
    page_size: int
    qk_nope_head_dim: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    dsa: bool = False

    def __post_init__(self):
        if self.kv_dtype not in KV_DTYPES:
            raise UnknownName("KV dtype", self.kv_dtype, KV_DTYPES)
        for name in ("heads", "page_size", "qk_nope_head_dim", "kv_lora_rank"):
            if getattr(self, name) < 1:
                raise OutOfRange(f"{name} is {getattr(self, name)}", "1 or more")

    @classmethod
    def of(
        cls,
        model: Model,
        compute_capability: tuple[int, int] | None,
        kv_dtype: str,
        heads: int,
        page_size: int,
    ) -> "Serving":
        """A model's rows, with `heads` query heads on a GPU."""
        return cls(
            compute_capability,
            kv_dtype,
            heads,
            page_size,
            model.qk_nope_head_dim,
            model.kv_lora_rank,
            model.qk_rope_head_dim,
            model.dsa,
        )

    @property
    def cc_major(self) -> int:
        """12 for compute capability 12.0."""
        return self.compute_capability[0]

    @property
    def sm(self) -> int:
        """120 for compute capability 12.0."""
        return 10 * self.compute_capability[0] + self.compute_capability[1]


class Broken(NamedTuple):
    """One rule that a serving breaks, and that so forbids a backend."""

    rule: str
    backend: str
    reason: str
    library: str
    version: str  # the versions that it holds for, e.g. "0.6.18 on" or "0.6.2 to before 0.6.5"
    source: str
    evidence: str  # read in the source, compiled, measured, or reported by the source named
    other: str = ""  # what another source says instead, and which
    remedy: str = ""

    @property
    def disputed(self) -> bool:
        """Somebody reports it, and the library's own code was not found to say so."""
        return self.evidence == "reported"

    def __str__(self) -> str:
        said = self.reason
        if self.disputed:
            said += f" [{self.source}]"
        return " ".join(filter(None, (said, self.other and f"But: {self.other}", self.remedy)))


@dataclass(frozen=True)
class Verdict:
    """Whether a strategy can run in a deployment; true or false as itself.

    `reason` says why it cannot, in sentences, from the rules in `broken` where backends' rules
    forbid it. `untried` says what was never run where it can: compiled, or plain arithmetic.
    """

    ok: bool
    reason: str = ""
    untried: str = ""
    broken: tuple[Broken, ...] = ()

    def __bool__(self) -> bool:
        return self.ok

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the rules were read or reported, each once."""
        return tuple(dict.fromkeys(rule.source for rule in self.broken))


@cache
def book() -> dict:
    """The rule file: `releases`, `backends` and `rules`."""
    return facts.find("rules", "rule book", "attention_backends")


def backends() -> tuple[str, ...]:
    """Names of the backends that there are rules for."""
    return tuple(backend["name"] for backend in book()["backends"])


def check(backend: str, serving: Serving, as_of: AsOf = None) -> list[Broken]:
    """The rules that forbid `backend` this serving; an empty list means that none does.

    `as_of` is a day (`date`, "2026-02" or "2026-02-28", the whole month counts), or versions
    such as `{"flashinfer": "0.6.18"}` with the newest read for libraries not named. Raises
    `UnknownName` for an unknown backend, `LabError` for a day or version older than those read.
    """
    entry = entry_of(backend)
    if serving.compute_capability is None:
        return [_not_tried(backend, entry["library"])]
    versions = _versions(as_of)
    if versions[entry["library"]] is None:
        return [_unreleased(backend, entry["library"])]
    return [
        _broken(rule, backend)
        for rule in book()["rules"]
        if backend in rule["backends"]
        and _in_force(rule, versions[rule["library"]])
        and _holds(serving, rule.get("when", {}))
        and not (rule["requires"] is not None and _holds(serving, rule["requires"]))
    ]


def can_run(strategy, deployment: Deployment, as_of: AsOf = None) -> Verdict:
    """Whether a strategy can serve a deployment: the one answer that tables, predictions, the
    budget and the applications go by.

    Of `strategy` it reads `at(layer)`, and of each layer's `kinds` (what it keeps), `reads` (what
    its attention takes) and `backend` (the only one that can read it, if so). Whether this machine
    has the libraries and the memory is another question: `steps.measure.check`.

    >>> from shadowkv_lab.deployment import deployment
    >>> from shadowkv_lab.strategies import parse
    >>> can_run(parse("fused_fp8"), deployment("GLM-5-NVFP4", "h200", tensor_parallel=16)).reason
    'The kernel is written for 8 to 128 query heads per GPU.'
    """
    layers = dict.fromkeys(strategy.at(i) for i in range(deployment.model.layers))
    return _all([_of_layer(s, deployment, as_of) for s in layers])


def _all(verdicts: list[Verdict]) -> Verdict:
    """One verdict for layers that differ: the first that forbids, else all that was not tried."""
    for verdict in verdicts:
        if not verdict.ok:
            return verdict
    return Verdict(True, "", "; ".join(dict.fromkeys(v.untried for v in verdicts if v.untried)))


def _of_layer(strategy, deployment: Deployment, as_of: AsOf) -> Verdict:
    card, layout, untried = deployment.card, deployment.layout, []
    if "fp8" in strategy.kinds:
        if layout == "bf16":
            return Verdict(False, "The pool is BF16: it has no FP8 rows to cast, mirror or read.")
        if layout in PACKED:
            return Verdict(False, _only_sparse(deployment, as_of))
        if layout == "fp8_e5m2" and strategy.backend is None:
            untried.append("its times are those of e4m3 rows, of as many bytes")
    if card.compute_capability is None:
        untried.append(f"nothing of the lab was run on an AMD card such as {card.title}")
    if strategy.backend:
        quantised = layout if layout in KV_DTYPES and layout != "bf16" else "fp8_e4m3"
        kv_dtype = "bf16" if strategy.reads == "bf16" else quantised
        own = deployment.heads, deployment.page_size
        serving = Serving.of(deployment.model, card.compute_capability, kv_dtype, *own)
        broken = check(strategy.backend, serving, as_of)
        if any(not rule.disputed for rule in broken):
            return Verdict(False, " ".join(map(str, broken)), "", tuple(broken))
        untried += [str(rule) for rule in broken]
        ran_on = entry_of(strategy.backend).get("ran_on")
        if ran_on and serving.cc_major not in ran_on:
            untried.append(f"its kernel was compiled for {card.sm} and never run on one")
    return Verdict(True, "", "; ".join(untried))


def _only_sparse(deployment: Deployment, as_of: AsOf) -> str:
    """Why packed rows are not for the lab's strategies, and whose they are."""
    layout = deployment.layout
    said = (
        f"The rows are packed ({layout}, {deployment.model.row_bytes(LAYOUTS[layout])} B): scales "
        "and a BF16 part lie among the values, and a dense kernel reads flat rows."
    )
    own = deployment.card.compute_capability, PACKED[layout]
    serving = Serving.of(deployment.model, *own, deployment.heads, deployment.page_size)
    who = [name for name in backends() if not check(name, serving, as_of)]
    return f"{said} {', '.join(who) or 'No backend that the lab has rules for'} can read them here."


def entry_of(backend: str) -> dict:
    """A backend's entry in the book; raises `UnknownName`."""
    entry = {b["name"]: b for b in book()["backends"]}.get(backend)
    if entry is None:
        raise UnknownName("attention backend", backend, backends())
    return entry


def compatibility(serving: Serving, as_of: AsOf = None):
    """One row a backend, as a DataFrame with `COLUMNS`.

    `runs` is "yes", "no", "disputed" where only reported rules forbid it, or "not tried".
    `why_not` joins the rules that fail and, where sources disagree, both views. `runs_if` is the
    smallest change of KV dtype and page size that would satisfy every rule ("" if none does, or
    none is needed).
    """
    import pandas as pd

    versions = _versions(as_of)
    rows = []
    for entry in book()["backends"]:
        verdicts = check(entry["name"], serving, as_of)
        runs = "yes" if not verdicts else "no"
        if verdicts and all(v.disputed for v in verdicts):
            runs = "disputed"
        elif any(v.rule == NOT_TRIED for v in verdicts):
            runs = "not tried"
        rows.append(
            {
                "backend": entry["name"],
                "runs": runs,
                "why_not": " ".join(map(str, verdicts)),
                "runs_if": _runs_if(entry["name"], serving, as_of) if verdicts else "",
                "library": f"{entry['library']} {versions[entry['library']] or 'not released'}",
                "source": "; ".join(dict.fromkeys(v.source for v in verdicts)),
                "note": entry["note"],
            }
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _runs_if(backend: str, serving: Serving, as_of: AsOf) -> str:
    """The change of KV dtype and page size that lets `backend` run, fewest changes first."""
    found = []
    for kv_dtype, page_size in product(KV_DTYPES, (*PAGE_SIZES, serving.page_size)):
        other = replace(serving, kv_dtype=kv_dtype, page_size=page_size)
        if not check(backend, other, as_of):
            changed = [
                f"{f.name}={getattr(other, f.name)}"
                for f in fields(Serving)
                if getattr(other, f.name) != getattr(serving, f.name)
            ]
            found.append((len(changed), ", ".join(changed)))
    return min(found, key=lambda entry: entry[0])[1] if found else ""


def _versions(as_of: AsOf) -> dict[str, str | None]:
    """Each library's version at `as_of`; None where it had no release that was read."""
    releases = book()["releases"]
    if isinstance(as_of, Mapping):
        for library, version in as_of.items():
            if library not in releases:
                raise UnknownName("library", library, releases)
            if _key(version) < _key(oldest := min(releases[library], key=_key)):
                raise OutOfRange(f"No rules were looked up for {library} {version}", f"{oldest} on")
        return {lib: as_of.get(lib) or max(days, key=_key) for lib, days in releases.items()}
    day = as_of.isoformat() if isinstance(as_of, date) else "9999" if as_of is None else as_of
    if not re.fullmatch(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?", day):
        raise OutOfRange(f"{as_of!r} is not a day", "a date, '2026-02', '2026-02-28', or versions")
    # Cut to the precision given, so that '2026-02' means the whole month.
    known = {
        lib: [version for version, released in days.items() if released[: len(day)] <= day]
        for lib, days in releases.items()
    }
    if not all(known[lib] for lib in releases if lib != "shadowkv_lab"):
        first = max(min(days.values()) for lib, days in releases.items() if lib != "shadowkv_lab")
        raise OutOfRange(f"No rules were looked up for {day}", f"{first} or later")
    return {lib: max(found, key=_key, default=None) for lib, found in known.items()}


def _key(version: str) -> tuple[int, ...]:
    """A version as numbers: 0.6.7.post2 comes after 0.6.7 and before 0.6.8."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def _in_force(rule: dict, version: str | None) -> bool:
    if version is None or _key(version) < _key(rule["since"]):
        return False
    return "until" not in rule or _key(version) < _key(rule["until"])


def _holds(serving: Serving, conditions: dict) -> bool:
    for name, wanted in conditions.items():
        value = getattr(serving, name)
        if isinstance(wanted, list):
            holds = value in wanted
        else:
            holds = (
                wanted.get("min", value) <= value <= wanted.get("max", value)
                and value % wanted.get("multiple_of", 1) == 0
            )
        if not holds:
            return False
    return True


def _broken(rule: dict, backend: str) -> Broken:
    version = f"{rule['since']} to before {rule['until']}" if "until" in rule else ""
    return Broken(
        rule["id"],
        backend,
        rule["reason"],
        rule["library"],
        version or f"{rule['since']} on",
        rule["source"],
        rule["evidence"],
        rule.get("other", ""),
        rule.get("remedy", ""),
    )


def _not_tried(backend: str, library: str) -> Broken:
    return Broken(
        NOT_TRIED,
        backend,
        "Not tried: an AMD card has no CUDA compute capability, and no rules were looked up.",
        library,
        "all",
        "this repository: the rules are of NVIDIA's cards",
        "read",
    )


def _unreleased(backend: str, library: str) -> Broken:
    first, day = next(iter(book()["releases"][library].items()))
    return Broken(
        "not-released",
        backend,
        f"{library} {first} is of {day}.",
        library,
        f"before {first}",
        book()["releases_source"],
        "read",
    )

"""Which attention backend can serve an MLA model on a GPU, and if not, which rule forbids it.

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
from shadowkv_lab.errors import LabError, OutOfRange, UnknownName

KV_DTYPES = ("bf16", "fp8_e4m3", "packed_656")
PAGE_SIZES = (1, 16, 32, 64, 128)  # tried by `runs_if`
COLUMNS = ("backend", "runs", "why_not", "runs_if", "library", "source", "note")

AsOf = date | str | Mapping[str, str] | None


@dataclass(frozen=True)
class Serving:
    """What a rule looks at: a model's rows and heads on one GPU.

    `heads` are query heads a GPU; `page_size` is in tokens. `kv_dtype` is how rows lie in the
    cache: flat "bf16" or "fp8_e4m3", or "packed_656", the 656-byte rows of sparse kernels. `dsa`
    says that the model has a sparse-attention index (`Model.dsa`). Raises `UnknownName` or
    `OutOfRange`.
    """

    compute_capability: tuple[int, int]
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

    @property
    def cc_major(self) -> int:
        """12 for compute capability 12.0."""
        return self.compute_capability[0]

    @property
    def sm(self) -> int:
        """120 for compute capability 12.0."""
        return 10 * self.compute_capability[0] + self.compute_capability[1]


class Verdict(NamedTuple):
    """One rule that forbids a backend."""

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


@cache
def book() -> dict:
    """The rule file: `releases`, `backends` and `rules`."""
    return facts.find("rules", "rule book", "attention_backends")


def backends() -> tuple[str, ...]:
    """Names of the backends that there are rules for."""
    return tuple(backend["name"] for backend in book()["backends"])


def check(backend: str, serving: Serving, as_of: AsOf = None) -> list[Verdict]:
    """The rules that forbid `backend` this serving; an empty list means that none does.

    `as_of` is a day (`date`, "2026-02" or "2026-02-28", the whole month counts), or versions
    such as `{"flashinfer": "0.6.18"}` with the newest read for libraries not named. Raises
    `UnknownName` for an unknown backend, `LabError` for a day or version older than those read.
    """
    entry = {b["name"]: b for b in book()["backends"]}.get(backend)
    if entry is None:
        raise UnknownName("attention backend", backend, backends())
    versions = _versions(as_of)
    if versions[entry["library"]] is None:
        return [_unreleased(backend, entry["library"])]
    return [
        _verdict(rule, backend)
        for rule in book()["rules"]
        if backend in rule["backends"]
        and _in_force(rule, versions[rule["library"]])
        and _holds(serving, rule.get("when", {}))
        and not (rule["requires"] is not None and _holds(serving, rule["requires"]))
    ]


def compatibility(serving: Serving, as_of: AsOf = None):
    """One row a backend, as a DataFrame with `COLUMNS`.

    `runs` is "yes", "no", or "disputed" where only reported rules forbid it. `why_not` joins the
    rules that fail and, where sources disagree, both views. `runs_if` is the smallest change of
    KV dtype and page size that would satisfy every rule ("" if none does, or none is needed).
    """
    import pandas as pd

    versions = _versions(as_of)
    rows = []
    for entry in book()["backends"]:
        verdicts = check(entry["name"], serving, as_of)
        runs = "yes" if not verdicts else "no"
        if verdicts and all(v.disputed for v in verdicts):
            runs = "disputed"
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
                raise LabError(f"No rules were looked up for {library} {version}", f"{oldest} on")
        return {lib: as_of.get(lib) or max(days, key=_key) for lib, days in releases.items()}
    day = as_of.isoformat() if isinstance(as_of, date) else as_of or "9999"
    if not re.fullmatch(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?", day):
        raise LabError(f"{as_of!r} is not a day", "a date, '2026-02', '2026-02-28', or versions")
    # Cut to the precision given, so that '2026-02' means the whole month.
    known = {
        lib: [version for version, released in days.items() if released[: len(day)] <= day]
        for lib, days in releases.items()
    }
    if not all(known[lib] for lib in releases if lib != "shadowkv_lab"):
        first = max(min(days.values()) for lib, days in releases.items() if lib != "shadowkv_lab")
        raise LabError(f"No rules were looked up for {day}", f"{first} or later")
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


def _verdict(rule: dict, backend: str) -> Verdict:
    version = f"{rule['since']} to before {rule['until']}" if "until" in rule else ""
    return Verdict(
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


def _unreleased(backend: str, library: str) -> Verdict:
    first, day = next(iter(book()["releases"][library].items()))
    return Verdict(
        "not-released",
        backend,
        f"{library} {first} is of {day}.",
        library,
        f"before {first}",
        book()["releases_source"],
        "read",
    )

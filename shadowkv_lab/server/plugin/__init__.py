"""The strategies inside an unmodified SGLang server, as a plug-in of its own mechanism.

SGLang calls `register` (entry point group `sglang.srt.plugins`) in each of its processes. It does
nothing unless SHADOWKV_STRATEGY is set:

    SHADOWKV_STRATEGY   full_cast (SGLang as it is), vector_cast, shadow, gather_cast, fused_fp8
    SHADOWKV_LAYERS     layers that get a shadow: 26 (the first 26) or 0-25,40; all if left out
    SHADOWKV_CHECK      compare mirror and pool after every so many forward passes, outside graphs

SHADOWKV_WEIGHTS and SHADOWKV_ROWS are for trials with random weights (`plugin/trial.py`).

Run in a live server of SGLang 0.5.23 on one H200 (data/runs/server); what was not run is listed in
notebooks/05_on_your_server.ipynb.
"""

import os
import re
from dataclasses import dataclass

from shadowkv_lab.errors import CannotRun, LabError, OutOfRange, UnknownName

STRATEGIES = ("full_cast", "vector_cast", "shadow", "gather_cast", "fused_fp8")
RELEASES = {"0.5.23": "run on one H200"}  # where the plug-in runs, and what was tried of it
# Of other releases the hooked functions were read in their wheels; none of these was run.
TWO_OTHER = (
    "arguments are checked in ServerArgs.check_server_args, and the decode planner's update begins "
    "with req_pool_indices: two other hooks"
)
SLOTS = "every hook resolves, but set_mla_kv_buffer takes slots where 0.5.23 takes a KVWriteLoc"
READ = {
    "0.5.22": "every hook resolves, with 0.5.23's signatures; it was not run",
    **dict.fromkeys(("0.5.21", "0.5.20", "0.5.19"), SLOTS),
    **dict.fromkeys(("0.5.18", "0.5.17"), TWO_OTHER),
}


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. `layers` are model layers; None: all of them."""

    strategy: str
    layers: frozenset[int] | None = None
    check_every: int = 0

    def covers(self, layer: int) -> bool:
        """Whether a layer gets a shadow; the others are cast in full, as SGLang does."""
        return self.layers is None or layer in self.layers


def settings(environment: "dict[str, str] | None" = None) -> Settings | None:
    """Settings from SHADOWKV_* variables; None where no strategy is asked for.

    Raises `UnknownName` for a strategy that the plug-in lacks, `OutOfRange` for layers or a count
    that are none.
    """
    environment = os.environ if environment is None else environment
    strategy = environment.get("SHADOWKV_STRATEGY", "").strip()
    layers = environment.get("SHADOWKV_LAYERS", "").strip()
    every = environment.get("SHADOWKV_CHECK", "").strip() or "0"
    if not strategy:
        return None
    if strategy not in STRATEGIES:
        raise UnknownName("SHADOWKV_STRATEGY", strategy, STRATEGIES)
    if layers and strategy != "shadow":
        raise OutOfRange(f"SHADOWKV_LAYERS={layers} with {strategy}", "layers of a shadow only")
    if not every.isdecimal():
        raise OutOfRange(f"SHADOWKV_CHECK={every}", "a number of forward passes, 0 for never")
    return Settings(strategy, parse_layers(layers) if layers else None, int(every))


def parse_layers(text: str) -> frozenset[int]:
    """Layers from "26" (the first 26) or from numbers and ranges, "0-25,40"."""
    if text.isdecimal() and int(text) > 0:
        return frozenset(range(int(text)))
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise OutOfRange(f"SHADOWKV_LAYERS={text}", "26 (the first 26), or such as 0-25,40")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def register() -> None:
    """The entry point: read the settings, look for every hook target, hand SGLang the hooks.

    SGLang logs an exception of a plug-in and starts without it. A server that silently ran
    unpatched would be measured as if it were patched, so a named error ends the process instead.
    """
    try:
        chosen = settings()
        if chosen is None and not any(os.environ.get(name) for name in TRIAL):
            return
        from shadowkv_lab.server.plugin import hooks, trial

        beside = trial.targets()
        check_release()
        hooks.install(chosen, beside)
    except LabError as error:
        raise SystemExit(f"shadowkv: {type(error).__name__}: {error}") from None


TRIAL = ("SHADOWKV_WEIGHTS", "SHADOWKV_ROWS")


def check_release(version: str | None = None) -> None:
    """Raise `CannotRun` unless the plug-in was run on this release of SGLang."""
    if version is None:
        import sglang

        version = sglang.__version__
    release = version.split("+")[0].split(".post")[0]
    if release not in RELEASES:
        why = READ.get(release, "it resolves its arguments or writes its pool in ways not read")
        raise CannotRun(
            f"SGLang {version}: {why}",
            f"SGLang {', '.join(f'{r} ({how})' for r, how in RELEASES.items())}",
            f"Install sglang=={list(RELEASES)[-1]}, or unset SHADOWKV_STRATEGY",
        )

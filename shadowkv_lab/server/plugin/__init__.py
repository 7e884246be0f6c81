"""The strategies inside an unmodified SGLang server, as a plug-in of its own mechanism.

SGLang calls `register` (entry point group `sglang.srt.plugins`) in each of its processes. It does
nothing unless SHADOWKV_STRATEGY is set:

    SHADOWKV_STRATEGY   full_cast (SGLang as it is), vector_cast, shadow, gather_cast, fused_fp8
    SHADOWKV_LAYERS     layers that get a shadow: 26 (the first 26) or 0-25,40; all if left out
    SHADOWKV_CHECK      compare mirror and pool after every so many forward passes, outside graphs

Written against SGLang 0.5.23's source and tested on its real classes on a CPU; what has not been
run in a live server is listed in notebooks/05_on_your_server.ipynb.
"""

import os
import re
from dataclasses import dataclass

from shadowkv_lab.errors import CannotRun, LabError, OutOfRange, UnknownName

STRATEGIES = ("full_cast", "vector_cast", "shadow", "gather_cast", "fused_fp8")
RELEASES = ("0.5.23",)  # whose source the hooks were written against


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
        if chosen is None:
            return
        from shadowkv_lab.server.plugin import hooks

        check_release()
        hooks.install(chosen)
    except LabError as error:
        raise SystemExit(f"shadowkv: {type(error).__name__}: {error}") from None


def check_release(version: str | None = None) -> None:
    """Raise `CannotRun` unless this release of SGLang is one that was read."""
    if version is None:
        import sglang

        version = sglang.__version__
    if version.split("+")[0].split(".post")[0] not in RELEASES:
        raise CannotRun(
            f"SGLang {version}",
            f"SGLang {', '.join(RELEASES)}",
            "Other releases resolve their arguments or write their pool in other ways; install "
            f"sglang=={RELEASES[-1]}, or unset SHADOWKV_STRATEGY",
        )

"""The strategies, one file each, and how to name one: `parse("shadow(layers=26)")`."""

import ast
import re

from shadowkv_lab.errors import OutOfRange, UnknownName
from shadowkv_lab.strategies.base import OPTIONS, STRATEGIES, Label, Moves, Strategy
from shadowkv_lab.strategies.bf16_pool import BF16Pool
from shadowkv_lab.strategies.chosen import ChosenSet
from shadowkv_lab.strategies.full_cast import FullCast
from shadowkv_lab.strategies.fused_fp8 import FusedFP8
from shadowkv_lab.strategies.gather_cast import GatherCast
from shadowkv_lab.strategies.hot import HotSet, SharedShadow
from shadowkv_lab.strategies.native_fp8 import NativeFP8
from shadowkv_lab.strategies.shadow import Shadow
from shadowkv_lab.strategies.vector_cast import VectorCast

__all__ = [
    "OPTIONS",
    "STRATEGIES",
    "BF16Pool",
    "ChosenSet",
    "FullCast",
    "FusedFP8",
    "GatherCast",
    "HotSet",
    "Label",
    "Moves",
    "NativeFP8",
    "Shadow",
    "SharedShadow",
    "Strategy",
    "VectorCast",
    "parse",
    "parse_list",
]


def parse(text: "str | Strategy") -> Strategy:
    """A strategy from its label, such as "full_cast" or "shadow(layers=26,mirror=original)"."""
    if isinstance(text, Strategy):
        return text
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    known = OPTIONS | STRATEGIES
    if not match or match[1] not in known:
        raise UnknownName("strategy", match[1] if match else text, known)
    options = {}
    for option in filter(None, (match[2] or "").split(",")):
        key, _, value = (part.strip() for part in option.partition("="))
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    kind = known[match[1]]
    known = kind.__dataclass_fields__
    if unknown := set(options) - set(known):
        raise UnknownName(f"option of {match[1]}", unknown.pop(), known)
    for key, value in options.items():
        default = known[key].default
        wanted = {type(None): int | None, float: int | float}.get(type(default), type(default))
        if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(default, bool):
            raise OutOfRange(f"{match[1]}({key}={value})", f"{key} as {known[key].type}")
    return kind(**options)


def parse_list(text: "str | list[str | Strategy]") -> list[Strategy]:
    """Strategies from a comma-separated list; commas inside brackets belong to one of them."""
    names = re.split(r",(?![^(]*\))", text) if isinstance(text, str) else text
    return [parse(name) for name in names]

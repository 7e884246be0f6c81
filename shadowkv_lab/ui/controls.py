"""Labelled controls with units, and a named error for a start value that they do not have."""

from collections.abc import Mapping, Sequence

import ipywidgets as w

from shadowkv_lab import machine
from shadowkv_lab.errors import OutOfRange, UnknownName

LABEL = {"description_width": "11em"}


def menu(label: str, options: Sequence | Mapping, value: object, kind: str = "") -> w.Dropdown:
    """A dropdown over values, or over a mapping from values to the titles that are shown.

    Raises `UnknownName` or `OutOfRange` for a value that is none of them, in the words of `kind` or
    the label.
    """
    _require(kind or label, value, options)
    if isinstance(options, Mapping):
        options = [(title, name) for name, title in options.items()]
    return w.Dropdown(options=options, value=value, description=label, style=LABEL)


def gpus(label: str, names: Sequence[str], value: str) -> w.Dropdown:
    """A dropdown over cards of data/gpus, shown by their titles. Raises `UnknownName`."""
    return menu(label, {name: machine.card(name).title for name in names}, value, "GPU")


def several(label: str, options: Sequence[str], values: Sequence[str]) -> w.SelectMultiple:
    """A list of names of which any number may be chosen. Raises `UnknownName`."""
    values = (values,) if isinstance(values, str) else tuple(values)
    for value in values:
        _require(label, value, options)
    return w.SelectMultiple(
        options=options, value=values, description=label, style=LABEL, rows=len(options)
    )


def slider(label: str, values: Sequence[float], value: float, unit: str) -> w.SelectionSlider:
    """A slider over the values of a list and the one it starts with. Raises `OutOfRange`."""
    whole = all(isinstance(v, int) for v in values)
    if not _is_number(value, whole) or not 0 < value < 1e15:
        raise OutOfRange(f"{label} of {value!r}", f"{'whole ' if whole else ''}{unit} above 0")
    options = [(f"{v:,} {unit}" if whole else f"{v:g} {unit}", v) for v in sorted({*values, value})]
    return w.SelectionSlider(
        options=options, value=value, description=label, style=LABEL, continuous_update=False
    )


def number(label: str, value: float, step: float = 1, whole: bool = False) -> w.Widget:
    """A field for a number. Raises `OutOfRange`."""
    if not _is_number(value, whole):
        raise OutOfRange(f"{label}: {value!r}", "a whole number" if whole else "a number")
    kind = w.IntText if whole else w.FloatText
    return kind(value=value, step=step, description=label, style=LABEL)


def check(label: str, value: bool) -> w.Checkbox:
    """A box to tick."""
    return w.Checkbox(value=bool(value), description=label, style=LABEL)


def _is_number(value: object, whole: bool) -> bool:
    kinds = int if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool)


def _require(kind: str, value: object, options: Sequence | Mapping) -> None:
    if value in options:
        return
    if all(isinstance(option, str) for option in options):
        raise UnknownName(kind, value, options)
    raise OutOfRange(f"{kind} of {value!r}", ", ".join(map(str, options)))

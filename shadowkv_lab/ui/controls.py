"""What stands in an argument's annotation: its control, its option on the command line, and the
named error for a value that it does not take.

    Context = Annotated[int, Slider("context", [1024, 2048], "tokens")]

A control's options are a list, a mapping from values to titles, or a function of the settings that
gives one of them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import ipywidgets as w

from shadowkv_lab import files, machine
from shadowkv_lab.errors import OutOfRange, UnknownName
from shadowkv_lab.model import known_models, load_model

LABEL = {"description_width": "11em"}
Options = Sequence | Mapping | Callable[[dict], Sequence | Mapping]


@dataclass(frozen=True)
class Control:
    """A labelled control; `help` says more, in a tooltip and on the command line."""

    label: str
    help: str = field(default="", kw_only=True)

    def widget(self, value: object, settings: dict) -> w.Widget:
        """The control at a value; raises `UnknownName` or `OutOfRange` for one that it lacks."""
        more = self._more(value, settings)
        help_ = {"tooltip": self.help} if self.help else {}
        return self._kind(value)(description=self.label, style=LABEL, **more, **help_)

    def check(self, value: object, settings: dict) -> None:
        """Raise what `widget` does, without one; None is what the function fills in."""
        if value is not None:
            self._more(value, settings)

    def put(self, widget: w.Widget, value: object, settings: dict) -> None:
        """Set a widget's value, and its options as they are with these settings."""
        more = self._more(value, settings)
        if "options" in more and list(more["options"]) != list(widget._options_full):
            widget.options = more["options"]
        if widget.value != more["value"]:
            widget.value = more["value"]

    def told(self, kind: type) -> type:
        """The type of its option on the command line, of the argument's."""
        return kind

    def typed(self, text: object) -> object:
        """A value of the command line as the function takes it."""
        return text

    def _kind(self, value: object) -> type[w.Widget]:
        raise NotImplementedError

    def _more(self, value: object, settings: dict) -> dict:
        raise NotImplementedError


@dataclass(frozen=True)
class Menu(Control):
    """One of several values; `kind` is what an error calls it."""

    options: Options = ()
    kind: str = ""

    def _kind(self, value):
        return w.Dropdown

    def _more(self, value, settings):
        options = _options(self.options, settings)
        _require(self.kind or self.label, value, options)
        return {"options": [(str(title), v) for v, title in options.items()], "value": value}


@dataclass(frozen=True)
class Switch(Menu):
    """One of a few values, all of them in sight."""

    def _kind(self, value):
        return w.ToggleButtons


@dataclass(frozen=True)
class Several(Control):
    """Names of which any number may be chosen; on the command line, with commas."""

    options: Options = ()

    def _kind(self, value):
        return w.SelectMultiple

    def _more(self, value, settings):
        options = _options(self.options, settings)
        values = (value,) if isinstance(value, str) else tuple(value)
        for name in values:
            _require(self.label, name, options)
        shown = [(str(title), name) for name, title in options.items()]
        return {"options": shown, "value": values, "rows": len(shown)}

    def told(self, kind):
        return str | None

    def typed(self, text):
        if not isinstance(text, str):
            return text
        return tuple(part.strip() for part in re.split(r",(?![^(]*\))", text))


@dataclass(frozen=True)
class Slider(Control):
    """A value of a list, and any that is given to start with."""

    values: Options = ()
    unit: str = ""

    def _kind(self, value):
        return w.SelectionSlider

    def _more(self, value, settings):
        values = list(_options(self.values, settings))
        whole = all(isinstance(v, int) for v in values)
        zero = 0 in values
        if not _is_number(value, whole) or not (0 < value < 1e15 or (value == 0 and zero)):
            allowed = f"{'whole ' if whole else ''}{self.unit} {'from' if zero else 'above'} 0"
            raise OutOfRange(f"{self.label} of {value!r}", allowed)
        form = "{:,}" if whole else "{:g}"
        one = self.unit.removesuffix("s")
        options = [
            (f"{form.format(v)} {one if v == 1 else self.unit}", v)
            for v in sorted({*values, value})
        ]
        return {"options": options, "value": value}


@dataclass(frozen=True)
class Number(Control):
    """A field for a number."""

    step: float = 1
    whole: bool = False

    def _kind(self, value):
        return w.IntText if self.whole else w.FloatText

    def _more(self, value, settings):
        if not _is_number(value, self.whole):
            allowed = "a whole number" if self.whole else "a number"
            raise OutOfRange(f"{self.label}: {value!r}", allowed)
        return {"value": value, "step": self.step}


@dataclass(frozen=True)
class Tick(Control):
    """A box to tick."""

    def _kind(self, value):
        return w.Checkbox

    def _more(self, value, settings):
        return {"value": bool(value)}


@dataclass(frozen=True)
class Paste(Control):
    """A text, pasted; on the command line the path of a file, or - for standard input."""

    placeholder: str = ""

    def _kind(self, value):
        return w.Textarea

    def _more(self, value, settings):
        return {"value": value, "rows": 3, "placeholder": self.placeholder}

    def typed(self, text):
        return files.read_text("/dev/stdin" if text == "-" else Path(text)) if text else ""


def cards(names: Callable[[], Sequence[str]]) -> Callable[[dict], dict[str, str]]:
    """Options of a menu over cards of data/gpus, shown by their titles."""
    return lambda settings: {name: machine.card(name).title for name in names()}


def models(settings: dict) -> list[str]:
    """Options of a menu over the lab's models, and the config.json that it was started with."""
    return [*dict.fromkeys([*known_models(), named(settings["model"])])]


def named(model: object) -> str:
    """A model of the lab by its own name; any other as it was given. Raises `UnknownName`."""
    name = load_model(model).name
    return name if name in known_models() else str(model)


def spreads(settings: dict) -> list[int]:
    """Options of a menu over tensor parallelism: GPUs that can share the model's heads."""
    heads = load_model(settings["model"]).heads
    return [n for n in (1, 2, 4, 8, 16) if heads % n == 0]


def spread(settings: dict) -> int:
    """The tensor parallelism as it is set, or the most of another model's GPUs below it."""
    asked, found = settings["tensor_parallel"], spreads(settings)
    return max(n for n in found if n <= asked) if max(found) < asked else asked


def powers(first: int, last: int) -> list[int]:
    """Doubled numbers from `first` to `last`."""
    return [first << k for k in range((last // first).bit_length())]


TensorParallel = Annotated[int, Menu("GPUs (TP)", spreads)]
ModelName = Annotated[str, Menu("model", models)]
CardName = Annotated[str, Menu("GPU", cards(machine.known_cards), "GPU")]
Context = Annotated[int, Slider("context", powers(256, 131_072), "tokens")]
Concurrency = Annotated[int, Slider("concurrency", powers(1, 128), "requests")]


def _options(options: Options, settings: dict) -> Mapping:
    """Options as a mapping from values to titles, here and now."""
    found = options(settings) if callable(options) else options
    return found if isinstance(found, Mapping) else {value: value for value in found}


def _is_number(value: object, whole: bool) -> bool:
    kinds = int if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool)


def _require(kind: str, value: object, options: Mapping) -> None:
    if value in options:
        return
    if all(isinstance(option, str) for option in options):
        raise UnknownName(kind, value, options)
    raise OutOfRange(f"{kind} of {value!r}", ", ".join(map(str, options)))

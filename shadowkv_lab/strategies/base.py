"""What a strategy is: what it keeps, what it moves, and how its rows become readable.

Bytes per layer and step, P pool slots, L live tokens, R new tokens, for rows of 576 values:

| strategy | keeps (B/token/layer) | moves |
|---|---|---|
| full_cast, vector_cast | 576, and one layer of BF16 scratch (1152 P) | 1728 P + 1152 L + 576 R |
| bf16_pool | 1152 | 1152 L + 1152 R |
| shadow | 1728 | 1152 L + 1728 R |
| gather_cast | 576, and scratch (1152 L) | 2880 L + 576 R |
| native_fp8, fused_fp8 | 576 | 576 L + 576 R |
| hot_set(rows=n) | 576, and 1152 (n + 1) a layer | 1152 L + 1728 R |
| shared_shadow | 576, and scratch (1152 L) | 2880 L + 576 R; casts a shared row once |

With DSA, L are the rows that a layer chooses. A layer that has an index moves for it 132 (L + R) +
4 L bytes (keys read and written, scores written) and, for the choice, 4 L + 4 A, where L are the
live tokens and A the chosen ones. See `Strategy.moves_at`.
"""

from __future__ import annotations

import colorsys
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from shadowkv_lab.deployment import Setting
from shadowkv_lab.errors import DoesNotFit, OutOfRange
from shadowkv_lab.load import Batch, Load
from shadowkv_lab.model import Model

if TYPE_CHECKING:
    from shadowkv_lab.strategies.step import DecodeStep

# Okabe and Ito's colour-blind-safe palette, without its yellow, which is too pale for thin lines,
# then Paul Tol's "muted" set. One colour means one strategy, in every figure.
PALETTE = (
    *("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
    *("#882255", "#999933", "#332288", "#44AA99", "#661100"),
)

# By name, in the order of legends; a class enters it when it is defined. OPTIONS are those of the
# lab that stand beside the others only where somebody names them.
STRATEGIES: dict[str, type[Strategy]] = {}
OPTIONS: dict[str, type[Strategy]] = {}


def colour_of(order: int) -> str:
    """The colour of the strategy at place `order`; beyond the palette, its colours made lighter."""
    turn, place = divmod(order, len(PALETTE))
    red, green, blue = (int(PALETTE[place][i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    light = 1 - (1 - light) * 0.7**turn
    shade = colorsys.hls_to_rgb(hue, light, saturation)
    return "#" + "".join(f"{round(255 * part):02X}" for part in shade)


class Moves(NamedTuple):
    """Bytes read plus bytes written, by phase."""

    cast_bytes: int
    attention_bytes: int
    write_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.cast_bytes + self.attention_bytes + self.write_bytes


@dataclass(frozen=True)
class Label:
    """What tables and figures need of a strategy; travels with every step of it.

    `label` names it with its options, as `parse` reads them back. `order` is its place in a
    legend. A colleague's strategy that is not defined here keeps its label, title and colour.
    """

    label: str
    title: str
    colour: str
    order: int

    @property
    def name(self) -> str:
        return self.label.split("(")[0]


@dataclass(frozen=True)
class Strategy:
    """One way to keep and read the pool; measurement and prediction use the same object.

    A subclass is a frozen dataclass with a `name` and a `title`; its fields are its options. To
    define it registers it: it then has a colour and a place in every table, figure and widget
    (with `option=True` only where it is asked for by name). It
    sets `kinds` (what each layer of the pool keeps) and `reads` (what its attention takes: "bf16",
    "native_fp8" or "fused_fp8"), gives `moves`, and overrides the hooks that it needs. P, L and R
    are the pool's slots, the live tokens and the new tokens.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    order: ClassVar[int]  # place in legends, which decides the colour; the next free one if unset
    kinds: ClassVar[tuple[str, ...]] = ("fp8",)
    reads: ClassVar[str] = "bf16"
    compact: ClassVar[bool] = False  # attention reads row i for live token i, not the page table
    needs: ClassVar[str | None] = None  # kernel module without which it cannot run
    backend: ClassVar[str | None] = None  # its rules' name, where only one backend can read it
    casts_pool: ClassVar[bool] = False  # its cast grows with the pool, in some layer
    by_row: ClassVar[bool] = False  # attention reads by a table of rows, page size 1
    live_rows: ClassVar[int | None] = None  # live rows that it can serve at once, if limited
    query: ClassVar[str] = "bf16"  # what its attention multiplies queries as, of `kernels.QUERIES`
    # Relative L2 error that outputs may have: BF16 ones from BF16 weights; kernels reach 3e-3.
    tolerance: ClassVar[float] = 1e-2

    def __init_subclass__(cls, option: bool = False, **options):
        super().__init_subclass__(**options)
        name = cls.__dict__.get("name")
        if name is None:  # a variant of its parent, such as a test's
            return
        if option:
            OPTIONS[name] = cls
            return
        known = STRATEGIES.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise OutOfRange(
                f"A strategy named {name!r} is defined already, by {known.__qualname__}",
                "a name of its own",
            )
        if "order" not in cls.__dict__:
            taken = {s.order for s in (*STRATEGIES.values(), *OPTIONS.values())}
            cls.order = known.order if known else next(i for i in count() if i not in taken)
        STRATEGIES[name] = cls
        ordered = sorted(STRATEGIES.items(), key=lambda item: item[1].order)
        STRATEGIES.clear()
        STRATEGIES.update(ordered)

    @property
    def label(self) -> str:
        """The name with the options that are not defaults: what `parse` reads back."""
        options = self._options()
        return f"{self.name}({options})" if options else self.name

    @property
    def tag(self) -> Label:
        """Label, title, colour and place, to travel with a step."""
        options = self._options()
        title = f"{self.title} ({options})" if options else self.title
        return Label(self.label, title, colour_of(self.order), self.order)

    def tag_at(self, load: Load) -> Label:
        """Its tag for the steps of a load: with DSA the title says so.

        A strategy that casts the whole pool is then hypothetical: SGLang casts in its dense
        backends, and none of them reads chosen rows.
        """
        if load.reads == "dense":
            return self.tag
        words = "DSA, hypothetical" if self.casts_pool else "DSA"
        return replace(self.tag, title=f"{self.tag.title}, {words}")

    def _options(self) -> str:
        return ",".join(
            f"{f.name}={v}" for f in fields(self) if (v := getattr(self, f.name)) != f.default
        )

    # What a strategy says of itself.

    def at(self, layer: int) -> Strategy:
        """The strategy of one layer; itself unless layers differ."""
        return self

    def moves(self, model: Model, P: int, L: int, R: int) -> Moves:
        """Bytes that one layer moves in one step; `strategies.check` counts them."""
        raise NotImplementedError

    def buffers(self, model: Model) -> dict[str, int]:
        """BF16 rows per layer that it keeps between steps, beside the pool, by name."""
        return {}

    def scratch_rows(self, P: int, L: int) -> int:
        """BF16 scratch rows, one buffer for all layers."""
        return 0

    @property
    def cast_curve(self) -> str:
        """The name under which its cast kernel's times are recorded and predicted."""
        return self.label

    @property
    def write_curve(self) -> str:
        """The name under which its write kernel's times are recorded and predicted."""
        return "+".join(self.kinds)

    # What it does in a step; `step` is the `DecodeStep` at work, and nothing here may sync.

    def prepare(self, step: DecodeStep) -> None:
        """Fill what it keeps between steps, once per batch; no part of the step's time."""

    def advance(self, step: DecodeStep, turn: int) -> None:
        """Follow the batch to other last pages, between steps; no part of the step's time."""

    def paged(self, step: DecodeStep) -> Batch:
        """The batch that its attention is planned for; asked once, before `prepare`."""
        return step.reading.compact() if self.compact else step.reading

    def write(self, step: DecodeStep, layer: int) -> None:
        """Write the layer's new rows to every buffer it keeps."""
        step.pool.write_unchecked(layer, step.batch.new_slots, step.rows[layer])

    def cast(self, step: DecodeStep, layer: int) -> None:
        """Make a layer's rows readable."""

    def readable(self, step: DecodeStep, layer: int) -> torch.Tensor:
        """The rows [n, row] that attention reads."""
        if self in step.scratch:
            return step.scratch[self]
        return (step.pool.bf16 if self.reads == "bf16" else step.pool.fp8)[layer]

    # What follows is the same for every strategy.

    def storage(self, model: Model) -> list[tuple[str, ...]]:
        """What each layer keeps, for `Pool`."""
        return [self.at(layer).kinds for layer in range(model.layers)]

    def token_bytes(self, model: Model) -> int:
        """Bytes kept per token over all layers, without scratch and index keys."""
        return sum(model.row_bytes("+".join(kinds)) for kinds in self.storage(model))

    def fixed_bytes(self, model: Model) -> int:
        """Bytes kept beside the pool whatever its size, all layers."""
        rows = (sum(self.at(i).buffers(model).values()) for i in range(model.layers))
        return sum(rows) * model.row_bytes("bf16")

    def moves_of(self, setting: Setting) -> Moves:
        """Bytes of one layer at a setting: `moves` of the rows that it reads."""
        P, R = setting.pool_tokens, setting.load.new_tokens
        return self.moves(setting.model, P, setting.read_tokens, R)

    def step_moves(self, model: Model, P: int, L: int, R: int) -> Moves:
        """Bytes that a whole step moves, all layers."""
        layers = [self.at(i).moves(model, P, L, R) for i in range(model.layers)]
        return Moves(*map(sum, zip(*layers, strict=True)))

    def require_rows(self, live_tokens: float) -> None:
        """Raise `DoesNotFit` for more live rows than it can serve at once."""
        if self.live_rows is not None and live_tokens > self.live_rows:
            raise DoesNotFit(
                f"{live_tokens:,.0f} live rows for {self.label}",
                f"up to {self.live_rows:,}",
                "Give it more rows, or ask for fewer or shorter requests",
            )

    def moves_at(self, setting: Setting) -> dict[str, int]:
        """Bytes that one GPU's whole step moves at a setting, by phase: with DSA five of them.

        Raises `CannotRun` where the load reads by an index that the model does not have.
        """
        model, load, A = setting.model, setting.load, setting.read_tokens
        layers = [self.at(i).moves_of(setting) for i in range(model.layers)]
        cast, attention, write = map(sum, zip(*layers, strict=True))
        found = {"cast": cast, "attention": attention, "write": write}
        if load.reads == "dense":
            return found
        layers, L, score, slot = len(model.choosing), load.live_tokens, 4, 4
        keys = model.row_bytes("index") * (L + load.new_tokens)
        index, top_k = keys + score * L, score * L + slot * A
        return found | {"index": layers * index, "top_k": layers * top_k}

    def scratch_bytes(self, model: Model, P: int, L: int) -> int:
        """Bytes of scratch that all layers share."""
        kinds = {self.at(layer) for layer in range(model.layers)}
        return sum(s.scratch_rows(P, L) for s in kinds) * model.row_bytes("bf16")

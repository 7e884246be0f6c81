"""Shadow buffer: keep FP8 and a BF16 copy, cast each row once, when it is written."""

from dataclasses import dataclass

from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.strategies.base import Moves, Strategy
from shadowkv_lab.strategies.full_cast import FullCast


@dataclass(frozen=True)
class Shadow(Strategy):
    """A persistent BF16 mirror of the FP8 pool: O(new tokens) casts instead of O(pool).

    It reads as a BF16 pool reads and keeps three times the FP8 bytes, so it pays only where the
    FP8 copy is needed anyway, or where it covers part of the layers. `layers` shadows the first
    n layers and casts the others in full (None: all layers). `mirror` "exact" holds
    bf16(fp8(row)), so that its output equals full cast's bit for bit; "original" holds the row as
    it came: more accurate, but a row restored from FP8 then gives another output than a fresh one.
    """

    layers: int | None = None
    mirror: str = "exact"

    name = "shadow"
    title = "shadow buffer"
    order = 2
    kinds = ("fp8", "bf16")

    def __post_init__(self):
        if self.layers is not None and self.layers < 0:
            raise OutOfRange(f"A shadow of {self.layers} layers", "0 or more, or None for all")
        if self.mirror not in ("exact", "original"):
            raise OutOfRange(f"Mirror {self.mirror!r}", "exact, original")

    @property
    def casts_pool(self):
        return self.layers is not None

    def at(self, layer):
        shadowed = self.layers is None or layer < self.layers
        return Shadow(mirror=self.mirror) if shadowed else FullCast()

    def moves(self, model, P, L, R):
        return Moves(0, model.row_bytes("bf16") * L, model.row_bytes("fp8+bf16") * R)

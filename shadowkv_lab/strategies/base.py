"""What a strategy is: what it keeps, what it moves, and how its rows become readable."""

from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch

from shadowkv_lab.load import Batch
from shadowkv_lab.model import Model
from shadowkv_lab.pool import Pool
from shadowkv_lab.rules import Serving, check


class Moves(NamedTuple):
    """Bytes read plus bytes written, by phase."""

    cast_bytes: int
    attention_bytes: int
    write_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.cast_bytes + self.attention_bytes + self.write_bytes


@dataclass(frozen=True)
class Strategy:
    """One way to keep and read the pool; measurement and prediction use the same object.

    A subclass sets `name`, `title`, `kinds` (what each layer keeps) and `reads` (what its
    attention takes: "bf16", "native_fp8" or "fused_fp8"), and gives `moves` and, if attention
    does not read the pool itself, `scratch_rows` and `cast`. P, L and R are the pool's slots,
    the live tokens and the new tokens.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ("fp8",)
    reads: ClassVar[str] = "bf16"
    compact: ClassVar[bool] = False  # attention reads gathered rows, live token i in row i
    needs: ClassVar[str | None] = None  # kernel module without which it cannot run
    backend: ClassVar[str | None] = None  # of `kernels.rules`, where only this one can read it

    @property
    def label(self) -> str:
        """The name with the options that are not defaults: what `parse` reads back."""
        changed = [
            f"{f.name}={v}" for f in fields(self) if (v := getattr(self, f.name)) != f.default
        ]
        return f"{self.name}({','.join(changed)})" if changed else self.name

    def at(self, layer: int) -> "Strategy":
        """The strategy of one layer; itself unless layers differ."""
        return self

    def barred(self, model: Model, heads: int, compute_capability: tuple[int, int]) -> str:
        """Why its one backend cannot read this on such a card, by the rules; empty if it can."""
        if self.backend is None:
            return ""
        serving = Serving(
            compute_capability,
            "fp8_e4m3",
            heads,
            1,
            model.qk_nope_head_dim,
            model.kv_lora_rank,
            model.qk_rope_head_dim,
        )
        return " ".join(map(str, check(self.backend, serving)))

    def untried(self, compute_capability: tuple[int, int]) -> bool:
        """Whether its kernel was compiled for such a card and never run on one."""
        return False

    def moves(self, model: Model, P: int, L: int, R: int) -> Moves:
        """Bytes that one layer moves in one step."""
        raise NotImplementedError

    def scratch_rows(self, P: int, L: int) -> int:
        """BF16 scratch rows, one buffer for all layers."""
        return 0

    def cast(self, pool: Pool, layer: int, batch: Batch, scratch: torch.Tensor) -> None:
        """Make a layer's rows readable in `scratch` [scratch_rows, row]; no host sync."""

    def readable(self, pool: Pool, layer: int, scratch: torch.Tensor | None) -> torch.Tensor:
        """The rows that attention reads."""
        if scratch is not None:
            return scratch
        return (pool.bf16 if self.reads == "bf16" else pool.fp8)[layer]

    # What follows is the same for every strategy.

    def storage(self, model: Model) -> list[tuple[str, ...]]:
        """What each layer keeps, for `Pool`."""
        return [self.at(layer).kinds for layer in range(model.layers)]

    def token_bytes(self, model: Model) -> int:
        """Bytes kept per token over all layers, without scratch and index keys."""
        return sum(model.row_bytes("+".join(kinds)) for kinds in self.storage(model))

    def step_moves(self, model: Model, P: int, L: int, R: int) -> Moves:
        """Bytes that a whole step moves, all layers."""
        layers = [self.at(i).moves(model, P, L, R) for i in range(model.layers)]
        return Moves(*map(sum, zip(*layers, strict=True)))

    def scratch_bytes(self, model: Model, P: int, L: int) -> int:
        """Bytes of scratch that all layers share."""
        kinds = {self.at(layer) for layer in range(model.layers)}
        return sum(s.scratch_rows(P, L) for s in kinds) * model.row_bytes("bf16")


def attention_bytes(model: Model, storage: str, L: int) -> int:
    """Bytes that attention over L live rows reads; queries and outputs are left out."""
    return model.row_bytes(storage) * L

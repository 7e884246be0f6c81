"""A partial shadow of the rows that an index chose: kept until their place is needed."""

from dataclasses import dataclass

import torch

from shadowkv_lab.errors import CannotRun, OutOfRange, WrongResult, whole
from shadowkv_lab.pool import Pool
from shadowkv_lab.strategies.base import Strategy
from shadowkv_lab.strategies.hot import HotSet, by_rows, cast, copies_of, require_copies


def hit_rate(rows: int, live: float, chosen: float, again: float = 0.0) -> float:
    """The share of `chosen` rows that a set of `rows` rows holds already, of `live` ones in all.

    At least the share `again` of a step's choice was in the last step's; the rest falls evenly on
    the other live rows, of which the set holds `rows - chosen`. Without anything known of the
    choices `again` is 0, and the rate `rows / live`.
    """
    if rows >= live or chosen >= live:
        return 1.0 if rows >= live else 0.0
    again = max(again, chosen / live)
    return again + (1 - again) * max(0.0, (rows - chosen) / (live - chosen))


class ChosenRows:
    """Which slots have a BF16 copy: a table for each layer that chooses, for those after it too.

    `buffers[layer]` [rows + 1, row] (BF16); row 0 is a dummy. Rows are given out in turn, as on a
    ring, and those that are chosen in this very step are left out: so the ones that came first go
    first. All on the device, in static shapes, without a sync. `counts` [2] are hits and misses.
    """

    def __init__(self, pool: Pool, buffers: dict[int, torch.Tensor]):
        self.pool, self.buffers, owner = pool, buffers, -1
        self.rows, device = len(next(iter(buffers.values()))) - 1, pool.device
        self.owner: dict[int, int] = {}  # the layer whose choice a layer reads
        for layer in range(pool.layers):
            owner = layer if layer in pool.index else owner
            self.owner[layer] = owner
        slots, options = pool.pool_tokens + pool.page_size, dict(device=device, dtype=torch.int64)
        self.row_of = {i: torch.zeros(slots, **options) for i in pool.index}
        self.slot_of = {i: torch.zeros(self.rows + 1, **options) for i in pool.index}
        self.asked = {i: torch.zeros(self.rows + 1, **options) for i in pool.index}
        self.head, self.turn = ({i: torch.zeros(1, **options) for i in pool.index} for _ in "ab")
        self.fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # slots, and rows or 0
        self.counts = torch.zeros(2, **options)

    def take(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Rows [n] of the slots that a layer has chosen, at most `rows`; `copy` must follow."""
        if len(slots) > self.rows:
            raise OutOfRange(f"{len(slots)} chosen rows in a set of {self.rows}", "as many rows")
        row_of, slot_of, asked = self.row_of[layer], self.slot_of[layer], self.asked[layer]
        turn, head = self.turn[layer].add_(1), self.head[layer]
        row = row_of[slots]
        missing = row == 0
        asked[row] = turn
        # Of twice as many places on the ring at least as many are free as rows are missing.
        places = torch.arange(min(self.rows, 2 * len(slots)), device=slots.device)
        ring = (head + places) % self.rows + 1
        free = asked[ring] != turn
        rank = free.cumsum(0)
        ranked = ring.new_zeros(len(ring) + 1).scatter_(0, rank * free, ring)
        misses = missing.sum()
        new = ranked[missing.cumsum(0)] * missing
        used = free & (rank <= misses)
        head.copy_((head + ((places + 1) * used).max()) % self.rows)
        # A slot that came twice has two rows, of which one is its own: the other is just left.
        old = slot_of[new]
        row_of[old * (row_of[old] == new)] = 0
        slot_of[new] = slots * missing
        row_of[slots * missing] = new
        asked[new] = turn * missing
        row_of[:1] = 0
        self.counts += torch.stack([len(slots) - misses, misses])
        self.fresh[layer] = slots * missing, new
        return row_of[slots]

    def copy(self, layer: int) -> None:
        """Cast what the layer's last choice lacked."""
        slots, rows = self.fresh[self.owner[layer]]
        if not slots.is_cuda:  # a graph's shapes do not depend on the data
            slots, rows = slots[rows > 0], rows[rows > 0]
        self.buffers[layer].index_copy_(0, rows, cast(self.pool, layer, slots))

    def follow(self, layer: int, slots: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """New rows [n, row] of a layer's slots, or whatever the pool holds there; no sync."""
        there = self.row_of[self.owner[layer]][slots]
        self.buffers[layer].index_copy_(0, there, copies_of(self.pool, layer, slots, rows))

    def check(self) -> None:
        """Raise `WrongResult` unless each copy is bf16(fp8(row)) of the slot that it stands for."""
        for layer, buffer in self.buffers.items():
            slots = self.row_of[self.owner[layer]].nonzero().squeeze(1)
            rows = self.row_of[self.owner[layer]][slots]
            if len(rows.unique()) < len(rows):
                raise WrongResult(f"Layer {layer}: two slots share a chosen row")
            require_copies(self.pool, layer, slots, buffer[rows], "chosen")


@dataclass(frozen=True)
class ChosenSet(Strategy, option=True):
    """FP8 pool, and BF16 copies of `rows` rows per layer: those that the index chose last.

    For loads that read by an index. A chosen row that has a copy is read as it is, one that has
    none is cast first: hits cost what a BF16 pool costs, misses what gather cast costs. It needs
    room for one step's choices, and not for all live rows. What looking up takes is in no bytes.
    """

    rows: int = 65_536

    name = "chosen_set"
    title = "chosen set"
    order = 12
    by_row = True

    def __post_init__(self):
        whole(self.rows, "Rows of a chosen set:")

    @property
    def cast_curve(self):
        return "gather_cast"

    # As a hot set's: torch's ops follow a write, and attention reads BF16 rows.
    write_curve, moves = HotSet.write_curve, HotSet.moves

    def buffers(self, model):
        return {"chosen": self.rows + 1}

    def moves_of(self, setting):
        """Misses are expected ones, of choices of which nothing is known: see `hit_rate`."""
        moves, load = super().moves_of(setting), setting.load
        misses = setting.read_tokens * (
            1 - hit_rate(self.rows, load.live_tokens, setting.read_tokens)
        )
        return moves._replace(cast_bytes=round(misses * setting.model.row_bytes("fp8+bf16")))

    def state(self, step) -> ChosenRows:
        own = {i: step.buffers[i]["chosen"] for i in range(step.pool.layers)}
        known = step.pool.followers.get(self.label)
        if known is None:
            known = step.pool.followers[self.label] = ChosenRows(step.pool, own)
        return known

    def paged(self, step):
        if not step.chooser:
            raise CannotRun(f"{self.label} with dense reads", 'loads with reads="dsa"')
        return by_rows(step.reading)

    def prepare(self, step):
        """What a warm set holds of the live rows, as far as there is room."""
        rows, live = self.state(step), step.batch.live_slots[: self.rows].long()
        for layer in range(step.pool.layers):
            if layer in step.pool.index:
                rows.take(layer, live)
            rows.copy(layer)
        rows.counts.zero_()

    def cast(self, step, layer):
        rows = self.state(step)
        if layer in step.pool.index:
            taken = rows.take(layer, step.reading.pages.long())
            step.paged[self].pages.copy_(taken)
        rows.copy(layer)

    def readable(self, step, layer):
        return step.buffers[layer]["chosen"]

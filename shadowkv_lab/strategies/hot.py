"""Partial shadows: BF16 copies of the rows that running requests refer to, and of no others."""

from dataclasses import dataclass, replace

import torch

from shadowkv_lab import kernels
from shadowkv_lab.errors import DoesNotFit, OutOfRange, WrongResult, whole
from shadowkv_lab.kernels.reference import to_fp8, widened
from shadowkv_lab.load import Batch
from shadowkv_lab.pool import Pool
from shadowkv_lab.strategies.base import Moves, Strategy
from shadowkv_lab.strategies.gather_cast import GatherCast


class HotRows:
    """Which slots of a pool have a BF16 copy, and in which row; it outlives batches.

    `buffers[layer]` [rows + 1, row] (BF16) are the copies; row 0 is a dummy, as slot 0 is. All
    layers hold the same slots in the same rows. A slot that two requests share has one row. A row
    whose slot is no longer held stays until its place is needed, so a prefix that is used again
    and a request that comes back to its slots find it. Where the rows are full, the least recently
    asked for go. The pool tells it of every write (`Pool.followers`).
    """

    def __init__(self, pool: Pool, buffers: dict[int, torch.Tensor]):
        self.pool, self.buffers = pool, buffers
        self.rows = len(next(iter(buffers.values()))) - 1
        slots = pool.pool_tokens + pool.page_size
        # On the device, for steps; and on the host, where rows are given out.
        self.row_of = torch.zeros(slots, dtype=torch.int64, device=pool.device)
        self.slot_of = torch.full((self.rows + 1,), -1)
        self.asked = torch.full((self.rows + 1,), -1)  # when a row was last asked for
        self.turn = self.hits = self.misses = self.evicted = 0

    def hold(self, slots: torch.Tensor) -> torch.Tensor:
        """Give every slot a row, cast what has none, and return the rows [len(slots)] (syncs).

        Raises `DoesNotFit` where the different slots are more than the rows; nothing has changed.
        """
        with self.pool.locked:
            return self._hold(slots)

    def _hold(self, slots: torch.Tensor) -> torch.Tensor:
        wanted = torch.unique(slots).cpu().long()
        if len(wanted) > self.rows:
            raise DoesNotFit(
                f"{len(wanted)} different live rows in a hot set of {self.rows}",
                f"up to {self.rows} live rows",
                f"hot_set(rows={len(wanted)}), or fewer or shorter requests",
            )
        self.turn += 1
        place = self.row_of.cpu()[wanted]
        self.asked[place[place > 0]] = self.turn
        new = wanted[place == 0]
        self.hits += len(wanted) - len(new)
        self.misses += len(new)
        if len(new):
            # Row 0 is never given out; rows never used have -1 and come first.
            order = self.asked[1:].argsort(stable=True) + 1
            rows = order[: len(new)]
            device, left = self.pool.device, self.slot_of[rows]
            left = left[left >= 0]
            self.evicted += len(left)
            self.slot_of[rows] = -1
            self.row_of[left.to(device)] = 0
            there, source = rows.to(device), new.to(device)
            for layer, buffer in self.buffers.items():
                buffer[there] = cast(self.pool, layer, source)
            self.slot_of[rows], self.asked[rows] = new, self.turn
            self.row_of[source] = there
        return self.row_of[slots.long()]

    def follow(self, layer: int, slots: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """New rows [n, row] of a layer's slots, or whatever the pool holds there; no sync.

        Those of slots without a copy go to the dummy.
        """
        if layer not in self.buffers:
            return
        copies = copies_of(self.pool, layer, slots, rows)
        self.buffers[layer].index_copy_(0, self.row_of[slots], copies)

    def check(self) -> None:
        """Raise `WrongResult` unless each copy is bf16(fp8(row)) of the slot that it stands for."""
        held = (self.slot_of >= 0).nonzero().squeeze(1)
        slots = self.slot_of[held].to(self.pool.device)
        rows = held.to(self.pool.device)
        if not torch.equal(self.row_of[slots], rows) or int((self.row_of > 0).sum()) != len(rows):
            raise WrongResult("The hot set's two tables disagree")
        for layer, buffer in self.buffers.items():
            require_copies(self.pool, layer, slots, buffer[rows], "hot")


def cast(pool: Pool, layer: int, slots: torch.Tensor) -> torch.Tensor:
    """Copies [n, row] (BF16) of a layer's rows, by the kernel that gathers and casts."""
    copies = torch.empty(len(slots), pool.model.row, dtype=torch.bfloat16, device=pool.device)
    kernels.gather_cast(pool.fp8[layer], slots, copies)
    return copies


def copies_of(
    pool: Pool, layer: int, slots: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    """What a copy of new `rows` [n, row] holds, or of whatever the pool holds there; no sync."""
    return widened(pool.fp8[layer], slots) if rows is None else to_fp8(rows).to(torch.bfloat16)


def require_copies(
    pool: Pool, layer: int, slots: torch.Tensor, copies: torch.Tensor, kind: str
) -> None:
    """Raise `WrongResult` unless each copy is bf16(fp8(row)) of its slot."""
    off = widened(pool.fp8[layer], slots).view(torch.int16) != copies.view(torch.int16)
    if off.any():
        slot = int(slots[off.any(1)][0])
        raise WrongResult(
            f"Layer {layer}, slot {slot}: its {kind} row is not bf16(fp8)",
            remedy="Something wrote the FP8 buffer past write, move and load",
        )


def by_rows(batch: Batch) -> Batch:
    """The same requests over a table of rows of their own, page size 1, to be filled in."""
    device, offsets = batch.pages.device, batch.token_offsets()
    table = torch.zeros(batch.live_tokens, dtype=torch.int32, device=device)
    return replace(
        batch,
        page_size=1,
        pages=table,
        live_slots=table,
        indptr=torch.tensor(offsets, dtype=torch.int32, device=device),
        spare_pages=table[None, :0],
        held_pages=torch.empty(0, dtype=torch.int64),
    )


@dataclass(frozen=True)
class HotSet(Strategy, option=True):
    """FP8 pool, and a BF16 copy of the live rows alone: O(new tokens) casts, no second pool.

    Use it where a shadow's memory is the trouble and few of the pool's tokens are live: it reads
    as a BF16 pool reads and keeps `rows` BF16 rows per layer, whatever the pool's size. A request
    that arrives has its rows cast once, unless a prefix of it is still there. It runs as many
    requests as their different rows fit.
    """

    rows: int = 131_072

    name = "hot_set"
    title = "hot set"
    order = 10
    by_row = True

    def __post_init__(self):
        whole(self.rows, "Rows of a hot set:")

    @property
    def live_rows(self):
        return self.rows

    @property
    def write_curve(self):  # torch's ops, and not the one kernel that writes a shadow
        return "fp8+hot"

    def buffers(self, model):
        return {"hot": self.rows + 1}

    def moves(self, model, P, L, R):
        return Moves(0, model.row_bytes("bf16") * L, model.row_bytes("fp8+bf16") * R)

    def state(self, step) -> HotRows:
        """The pool's hot rows; made, and told of every write from then on, at the first batch."""
        own = {i: step.buffers[i]["hot"] for i, s in enumerate(step.at) if s == self}
        known = step.pool.followers.get(self.label)
        if known is None or known.buffers.keys() != own.keys():
            known = step.pool.followers[self.label] = HotRows(step.pool, own)
        return known

    def paged(self, step):
        return by_rows(step.reading)

    def prepare(self, step):
        rows = self.state(step).hold(step.batch.live_slots)
        if not step.chooser:
            step.paged[self].pages.copy_(rows)

    def advance(self, step, turn):
        self.prepare(step)

    def cast(self, step, layer):
        if step.chooser:  # no row: where the chosen ones lie
            chosen = self.state(step).row_of[step.reading.pages.long()]
            step.paged[self].pages.copy_(chosen)

    def readable(self, step, layer):
        return step.buffers[layer]["hot"]


@dataclass(frozen=True)
class SharedShadow(Strategy, option=True):
    """One BF16 buffer that all layers share, for the rows that running requests refer to.

    Each layer casts the referenced rows into it, a row that several requests share once. That is
    the idea of SGLang's pull request #36087 (there by pages, for fa3). With `layers` = n the first
    n layers are a `hot_set` of `rows` rows instead and cast nothing. Use it where prefixes are
    shared and no kernel reads FP8; without shared prefixes it moves what `gather_cast` moves.
    """

    layers: int = 0
    rows: int = 131_072

    name = "shared_shadow"
    title = "shared shadow"
    order = 11
    by_row = True

    def __post_init__(self):
        if self.layers < 0:
            raise OutOfRange(f"A window of {self.layers} layers", "0 or more")

    def at(self, layer):
        return HotSet(self.rows) if layer < self.layers else SharedShadow()

    @property
    def live_rows(self):
        return self.rows if self.layers else None

    @property
    def cast_curve(self):
        return "gather_cast"

    # Bounds: where no row is shared, it casts and keeps what gather cast does.
    moves, scratch_rows = GatherCast.moves, GatherCast.scratch_rows

    def paged(self, step):
        return by_rows(step.reading)

    def prepare(self, step):
        """Which slots are referenced, each once, and where each live token's row will lie."""
        table = step.paged[self]
        if step.chooser:  # they are chosen on the device: each choice has a row of its own
            table.pages.copy_(torch.arange(len(table.pages)))
            return
        slots, rows = torch.unique(step.batch.live_slots, return_inverse=True)
        kept = step.shared.setdefault(self, slots)
        if len(kept) != len(slots):
            raise OutOfRange(f"{len(slots)} different rows after {len(kept)}", "as many as before")
        kept.copy_(slots)
        table.pages.copy_(rows)

    def advance(self, step, turn):
        self.prepare(step)

    def cast(self, step, layer):
        slots = step.reading.live_slots if step.chooser else step.shared[self]
        kernels.gather_cast(step.pool.fp8[layer], slots, step.scratch[self])

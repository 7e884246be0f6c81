"""The KV pool of one GPU: slots, per-layer buffers, and the one write path."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import RLock
from typing import Protocol

import torch

from shadowkv_lab import machine
from shadowkv_lab.errors import DoesNotFit, OutOfRange, WrongResult, whole
from shadowkv_lab.kernels import index as dsa
from shadowkv_lab.kernels import reference
from shadowkv_lab.kernels.reference import FP8, bits
from shadowkv_lab.load import Batch, make_batch
from shadowkv_lab.model import Model

CHECK_ROWS = 65536  # rows a pass of check_integrity compares: 113 MB of FP8 and BF16
SEEDS = 2**46  # the largest: sources multiply it, and torch takes 64 bits
SPARE_TURNS = 64  # fresh last pages a request is given, if the pool has them


class SlotAllocator:
    """Hands out slots in whole pages, as SGLang does; page 0 is the dummy and stays.

    `pool_tokens` counts usable slots. The dummy page comes on top, so slots run from `page_size`
    to `pool_tokens + page_size - 1`. `order` is "contiguous" or "random" (by `seed`). Threads may
    share it; whatever interrupts a call, pages are free or held, and their sum stays.
    """

    def __init__(self, pool_tokens: int, page_size: int = 1, order: str = "contiguous", seed=0):
        check_size(pool_tokens, page_size, order)
        self.pool_tokens, self.page_size = pool_tokens, page_size
        pages = pool_tokens // page_size
        generator = torch.Generator().manual_seed(whole(seed, "Seed", 0, SEEDS))
        ids = (
            torch.randperm(pages, generator=generator) if order == "random" else torch.arange(pages)
        )
        # Free pages, a stack whose end is handed out first, and which pages are held. Neither
        # tensor is ever written to: one assignment replaces both, so that a kill finds them whole.
        self._state = (ids + 1).flip(0), torch.zeros(pages + 1, dtype=torch.bool)
        self._lock = RLock()

    @property
    def free_tokens(self) -> int:
        """Slots in free pages."""
        return len(self._state[0]) * self.page_size

    def allocate_pages(self, pages: int) -> torch.Tensor:
        """int64 ids of `pages` fresh pages; raises `DoesNotFit` and takes none if too few."""
        pages = whole(pages, "Pages asked for:", 0)
        with self._lock:
            free, held = self._state
            if pages > len(free):
                raise DoesNotFit(
                    f"{pages * self.page_size} slots asked for, {self.free_tokens} of "
                    f"{self.pool_tokens} are free",
                    f"up to {self.free_tokens}",
                    "Free requests, shorten their context, or make the pool larger",
                )
            left = len(free) - pages
            taken = free[left:].flip(0)
            self._state = free[:left], held.index_fill(0, taken, True)
        return taken

    def allocate(self, tokens: int) -> torch.Tensor:
        """int64 [tokens] slots in whole fresh pages; what is left of the last page stays held."""
        tokens = whole(tokens, "Slots asked for:")
        pages = self.allocate_pages(-(-tokens // self.page_size))
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()[:tokens]

    def free(self, slots: torch.Tensor) -> None:
        """Give back the pages of `slots`; raises `OutOfRange` for one that is not held."""
        with self._lock:
            self.check(slots, "free")
            pages = torch.unique(slots.cpu().long() // self.page_size)
            free, held = self._state
            self._state = torch.cat([free, pages.flip(0)]), held.index_fill(0, pages, False)

    def check(self, slots: torch.Tensor, action: str) -> None:
        """Raise `OutOfRange` naming the first slot that is out of range, the dummy, or not held."""
        tensor = isinstance(slots, torch.Tensor)
        if not tensor or slots.dtype not in (torch.int64, torch.int32) or slots.ndim != 1:
            found = f"{tuple(slots.shape)} {slots.dtype}" if tensor else repr(slots)[:60]
            raise OutOfRange(f"Cannot {action} slots {found}", "an int64 tensor of one dimension")
        slots = slots.cpu().long()
        bad = (slots < self.page_size) | (slots >= self.pool_tokens + self.page_size)
        if not bad.any():
            bad = ~self._state[1][slots // self.page_size]
        if bad.any():
            slot = int(slots[bad][0])
            if slot < 0 or slot >= self.pool_tokens + self.page_size:
                why = "out of range"
            elif slot < self.page_size:
                why = "in the dummy page"
            else:
                why = "not allocated (freed, or never held)"
            raise OutOfRange(
                f"Cannot {action} slot {slot}: it is {why}",
                f"allocated slots from {self.page_size} to {self.pool_tokens + self.page_size - 1}",
                "Use slots that allocate() returned and free() has not taken back",
            )


class Follower(Protocol):
    """A partial shadow of a pool."""

    def follow(self, layer: int, slots: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Slots of a layer were written: BF16 `rows`, or whatever lies there now; no sync."""

    def check(self) -> None:
        """Raise `WrongResult` where it is stale."""


KEPT = ("fp8",), ("bf16",), ("fp8", "bf16")  # what a layer may keep


@dataclass(frozen=True)
class SavedRows:
    """Rows of some slots, every layer, copied out of a pool: what `Pool.load` restores."""

    rows: tuple[torch.Tensor, ...]  # per layer [n, row], FP8 where the layer keeps FP8, else BF16
    # Of the layers with an index: e4m3 keys [n, D], and their scales [n].
    keys: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


class Pool:
    """Per-layer buffers [pool_tokens + page_size, row] and the one path that writes them.

    `storage` names what each layer keeps: ("fp8",), ("bf16",) or ("fp8", "bf16"); with both, the
    BF16 buffer is the FP8 one's shadow. Every write (`write`, `move`, `load`, a source's fill)
    ends in `_store`, so a shadow cannot miss one, and one thread writes at a time. `mirror` is
    "exact", `bf16(fp8(row))`, or "original", the row as it came; a row that comes back by `load`
    is always the former. `append` is the function that stores rows; kernels.append has a faster
    one. With `index` the layers of `model.choosing` keep pages of index keys too, which travel with
    the rows on every one of these paths; `write_keys` stores them.
    """

    def __init__(
        self,
        model: Model,
        pool_tokens: int,
        storage: Sequence[tuple[str, ...]],
        *,
        page_size: int = 1,
        device: str | torch.device = "cpu",
        order: str = "contiguous",
        seed: int = 0,
        mirror: str = "exact",
        append=reference.append,
        index: bool = False,
        write_keys=dsa.write,
    ):
        if mirror not in ("exact", "original"):
            raise OutOfRange(f"Mirror {mirror!r}", "exact, original")
        self.model, self.pool_tokens, self.page_size = model, pool_tokens, page_size
        self.device, self.mirror = torch.device(device), mirror
        self.append, self.write_keys = append, write_keys
        self.allocator = SlotAllocator(pool_tokens, page_size, order, seed)
        if wrong := [kinds for kinds in storage if tuple(kinds) not in KEPT] or not storage:
            raise OutOfRange(f"Storage {wrong}", " or ".join(map(str, KEPT)) + " for each layer")
        self._lock = RLock()
        layers = model.choosing if index else ()
        keys = len(layers) * model.row_bytes("index")
        check_fits(model, pool_tokens, storage, page_size, self.device, extra_token_bytes=keys)

        def buffer(kept: bool, dtype: torch.dtype) -> torch.Tensor | None:
            shape = (pool_tokens + page_size, model.row)
            return torch.zeros(shape, dtype=dtype, device=self.device) if kept else None

        self.fp8 = [buffer("fp8" in kinds, FP8) for kinds in storage]
        self.bf16 = [buffer("bf16" in kinds, torch.bfloat16) for kinds in storage]
        size = pool_tokens + page_size, model.index_head_dim
        self.index = {layer: dsa.pages(*size, self.device) for layer in layers}
        self.counters = torch.zeros(2, dtype=torch.int32, device=self.device)
        # Partial shadows, which are told of every write, and the buffers of strategies beside it.
        self.followers: dict[str, Follower] = {}
        self.beside: dict[tuple[str, int], dict[str, torch.Tensor]] = {}

    @property
    def layers(self) -> int:
        return len(self.fp8)

    @property
    def locked(self) -> RLock:
        """To hold while a follower changes what it holds: one thread writes at a time."""
        return self._lock

    @property
    def kept_bytes(self) -> int:
        """Bytes of all buffers, dummy page included."""
        return sum(b.nbytes for b in (*self.fp8, *self.bf16, *self.index.values()) if b is not None)

    @property
    def clipped(self) -> int:
        """Values that FP8 conversion has clipped at +-448 since the pool was made (syncs)."""
        return int(self.counters[0])

    def allocate(self, tokens: int) -> torch.Tensor:
        """int64 [tokens] fresh slots on the pool's device."""
        return self.allocator.allocate(tokens).to(self.device)

    def free(self, slots: torch.Tensor) -> None:
        """Give the pages of `slots` back; raises `OutOfRange` on a double free."""
        self.allocator.free(slots)

    def write(
        self, layer: int, slots: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor | None = None
    ) -> None:
        """Write BF16 `rows` [n, row] to allocated `slots` [n] of one layer.

        A layer with an index asks for their index keys too, BF16 `keys` [n, index_head_dim].
        Raises `OutOfRange` before anything is written, for a slot that is named twice too. Looks at
        the data, so it syncs; a captured step uses `write_unchecked` and then `check_counters`.
        """
        layer = whole(layer, "Layer", 0, self.layers - 1)
        with self._lock:
            self._check_targets(slots, "write")
            self._check_rows(rows, len(slots), self.model.row)
            if layer in self.index:
                self._check_rows(keys, len(slots), self.model.index_head_dim, "Index keys", "Key")
            elif keys is not None:
                raise OutOfRange(
                    f"Index keys for layer {layer}", f"layers with an index: {[*self.index]}"
                )
            self._store(layer, slots.to(self.device), rows, keys=keys)

    def write_unchecked(
        self, layer: int, slots: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor | None = None
    ) -> None:
        """`write` without looking at slots or rows: no host sync. NaN and Inf are counted.

        Slots have to differ: of two rows for one slot, either may arrive, in each copy. Index keys
        may come by `write_keys_unchecked` instead.
        """
        self._store(layer, slots, rows, keys=keys)

    def write_keys_unchecked(self, layer: int, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """The index keys of rows that a step has written, in a phase of their own; no host sync."""
        with self._lock, self._mended((), slots, lambda: self._finish(layer, slots, keys)):
            self.write_keys(self.index[layer], slots, keys)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy every layer's rows of `source` slots to `target` slots, which may overlap."""
        with self._lock:
            self.allocator.check(source, "move")
            self._check_targets(target, "move")
            if len(source) != len(target):
                raise OutOfRange(
                    f"Cannot move {len(source)} slots to {len(target)}", "as many as there are"
                )
            source, target = source.to(self.device).long(), target.to(self.device).long()
            keys = [dsa.get(pages, source) for pages in self.index.values()]
            with self._mended(range(self.layers), target, lambda: self._put(target, keys)):
                for buffer in (*self.fp8, *self.bf16):
                    if buffer is not None:  # gathered first: overlap is safe
                        bits(buffer)[target] = bits(buffer)[source]
                self._put(target, keys)
                for follower in self.followers.values():
                    for layer in range(self.layers):
                        follower.follow(layer, target)

    def save(self, slots: torch.Tensor) -> SavedRows:
        """A CPU copy of the rows of `slots`, FP8 where a layer keeps FP8, and of their keys."""
        with self._lock:
            self.allocator.check(slots, "save")
            kept = [f if f is not None else b for f, b in zip(self.fp8, self.bf16, strict=True)]
            slots = slots.to(self.device).long()
            keys = (dsa.get(pages, slots) for pages in self.index.values())
            return SavedRows(
                tuple(bits(k)[slots].cpu().view(k.dtype) for k in kept),
                tuple((stored.cpu(), scale.cpu()) for stored, scale in keys),
            )

    def load(self, slots: torch.Tensor, saved: SavedRows) -> None:
        """Restore saved rows to `slots`, bit for bit; shadows are rebuilt from the FP8 rows."""
        with self._lock:
            self._check_targets(slots, "load")
            for what, has, wanted in (
                ("rows", len(saved.rows), self.layers),
                ("index keys", len(saved.keys), len(self.index)),
            ):
                if has != wanted:
                    raise OutOfRange(f"Saved {what} of {has} layers", f"{wanted} layers")
            width = self.model.index_head_dim
            for stored, scale in saved.keys:
                if (*stored.shape, *scale.shape) != (len(slots), width, len(slots)):
                    raise OutOfRange(
                        f"Saved keys {tuple(stored.shape)} and {tuple(scale.shape)}",
                        f"{(len(slots), width)} and {(len(slots),)}",
                    )
            for rows, fp8 in zip(saved.rows, self.fp8, strict=True):
                wanted = (len(slots), self.model.row), torch.bfloat16 if fp8 is None else FP8
                if (tuple(rows.shape), rows.dtype) != wanted:
                    raise OutOfRange(f"Saved rows {tuple(rows.shape)} {rows.dtype}", f"{wanted}")
            slots = slots.to(self.device)
            keys = [(stored.to(self.device), scale.to(self.device)) for stored, scale in saved.keys]
            with self._mended((), slots, lambda: self._put(slots, keys)):
                self._put(slots, keys)
            for layer, rows in enumerate(saved.rows):
                # e4m3 -> bf16 -> e4m3 is exact: restored rows take the write path of fresh ones.
                rows = rows.to(self.device).to(torch.bfloat16)
                self._store(layer, slots, rows, exact=True)

    def _store(self, layer: int, slots: torch.Tensor, rows: torch.Tensor, exact=None, keys=None):
        exact = self.mirror == "exact" if exact is None else exact
        # Kernels read rows and slots one after another, whatever their strides.
        slots, rows = slots.long().contiguous(), rows.detach().contiguous()
        keys = keys if keys is None else keys.detach().contiguous()
        with self._lock, self._mended([layer], slots, lambda: self._finish(layer, slots, keys)):
            self.append(rows, slots, self.fp8[layer], self.bf16[layer], self.counters, exact)
            if keys is not None:
                self.write_keys(self.index[layer], slots, keys)
            for follower in self.followers.values():
                follower.follow(layer, slots, rows)

    def _finish(self, layer: int, slots: torch.Tensor, keys: torch.Tensor | None) -> None:
        if keys is not None:
            dsa.write(self.index[layer], slots, keys)

    def _put(self, slots: torch.Tensor, keys: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for pages, (stored, scale) in zip(self.index.values(), keys, strict=True):
            dsa.put(pages, slots, stored, scale)

    @contextmanager
    def _mended(self, layers: Iterable[int], slots: torch.Tensor, finish: Callable[[], object]):
        """Where a write is stopped between the two copies, the shadow follows the FP8 rows.

        `finish` stores the index keys, all of them: a key and its scale are two writes.
        """
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the device itself is gone
                finish()
                for fp8, bf16 in ((self.fp8[layer], self.bf16[layer]) for layer in layers):
                    if fp8 is not None and bf16 is not None:
                        bf16[slots] = reference.widened(fp8, slots)
                for follower in self.followers.values():
                    for layer in layers:
                        follower.follow(layer, slots)
            raise

    def _check_targets(self, slots: torch.Tensor, action: str) -> None:
        self.allocator.check(slots, action)
        found, times = torch.unique(slots, return_counts=True)
        if len(found) < len(slots):
            raise OutOfRange(
                f"Cannot {action} slot {int(found[times > 1][0])} twice at once",
                "each slot once",
                "Keep the last row of each slot",
            )

    def _check_rows(
        self, rows: torch.Tensor, count: int, width: int, many: str = "Rows", one: str = "Row"
    ) -> None:
        wanted = (count, width)
        if not isinstance(rows, torch.Tensor):
            raise OutOfRange(f"{many} of type {type(rows).__name__}", f"a tensor {wanted}")
        if tuple(rows.shape) != wanted or rows.dtype != torch.bfloat16:
            raise OutOfRange(f"{many} {tuple(rows.shape)} {rows.dtype}", f"{wanted} torch.bfloat16")
        if rows.device != self.counters.device:
            raise OutOfRange(f"{many} on {rows.device}", f"{self.counters.device}, as the pool is")
        if not rows.isfinite().all():
            bad = int((~rows.isfinite()).any(1).nonzero()[0])
            raise OutOfRange(
                f"{one} {bad} has NaN or Inf in it", "finite values", "Nothing was written"
            )

    def check_counters(self) -> None:
        """Raise `OutOfRange` if an unchecked write has stored NaN or Inf (syncs)."""
        if seen := int(self.counters[1]):
            raise OutOfRange(
                f"{seen} NaN or Inf values were written", "finite values", "Refill the pool"
            )

    def check_integrity(self) -> None:
        """Prove shadow == bf16(fp8) row by row; raises `WrongResult` with the first slot off.

        So for partial shadows: each follower checks itself.
        A pool whose mirror is "original" holds either that or a row whose FP8 is the FP8 row.
        """
        for follower in self.followers.values():
            follower.check()
        for layer, (fp8, bf16) in enumerate(zip(self.fp8, self.bf16, strict=True)):
            if fp8 is None or bf16 is None:
                continue
            for start in range(0, len(fp8), CHECK_ROWS):
                stored, shadow = fp8[start : start + CHECK_ROWS], bf16[start : start + CHECK_ROWS]
                # Compared as bits, so that NaN equals itself and -0 differs from 0.
                off = stored.to(torch.bfloat16).view(torch.int16) != shadow.view(torch.int16)
                if self.mirror == "original":
                    off &= bits(reference.to_fp8(shadow)) != bits(stored)
                off = off.any(1)
                if off.any():
                    slot = start + int(off.nonzero()[0])
                    raise WrongResult(
                        f"Layer {layer}, slot {slot}: the shadow is not bf16(fp8)",
                        remedy="Something wrote the FP8 buffer past write, move and load",
                    )

    def batch(self, concurrency: int, context: int, queries: int = 1) -> Batch:
        """Allocate `concurrency` requests of `context` live tokens, `queries` new ones included.

        Raises `OutOfRange` for a context outside the model's positions, `DoesNotFit` where the
        requests exceed the free slots.
        """
        check_load(self.model, self.pool_tokens, concurrency, context, self.page_size)
        size, taken = -(-context // self.page_size), []
        try:
            with self.allocator._lock:  # what is left is what this batch's spares may take
                taken.append(self.allocator.allocate_pages(size * concurrency))
                turns = self.allocator.free_tokens // self.page_size // concurrency
                turns = min(SPARE_TURNS, turns)
                taken.append(self.allocator.allocate_pages(turns * concurrency))
            pages, spares = taken[0].view(concurrency, size), taken[1].view(-1, concurrency)
            spares = spares if turns else pages[None, :, -1]
            lens = [context] * concurrency
            return make_batch(list(pages), lens, spares, self.page_size, self.device, queries)
        except BaseException:  # a device out of memory, an interrupt: no page stays taken
            for pages in taken:
                self.allocator.free(pages * self.page_size)
            raise

    def release(self, batch: Batch) -> None:
        """Free all slots of a batch that `batch` made."""
        # A last page that was rotated out is either a spare or, after `advance`, still held.
        self.allocator.free(batch.held_pages * self.page_size)


def check_size(pool_tokens: int, page_size: int = 1, order: str = "random") -> None:
    """Raise `OutOfRange` for a pool that no allocator can hand out."""
    whole(page_size, "Page size")
    if whole(pool_tokens, "Pool tokens") % page_size:
        raise OutOfRange(
            f"A pool of {pool_tokens} tokens in pages of {page_size}",
            "a positive multiple of the page size",
        )
    if order not in ("contiguous", "random"):
        raise OutOfRange(f"Slot order {order!r}", "contiguous, random")


def check_load(
    model: Model, pool_tokens: int, concurrency: int, context: int, page_size: int = 1
) -> None:
    """Raise `OutOfRange` or `DoesNotFit` for a load that no pool of this size can hold."""
    whole(concurrency, "Concurrency")
    whole(context, "Context", 1, model.max_positions)
    slots = concurrency * -(-context // page_size) * page_size
    if slots > pool_tokens:
        raise DoesNotFit(
            f"{concurrency} requests x {context} tokens = {slots} slots exceed the pool's "
            f"{pool_tokens}",
            f"context up to {pool_tokens // concurrency // page_size * page_size} at this "
            f"concurrency, or up to {pool_tokens // max(1, slots // concurrency)} requests at "
            "this context",
        )


def check_fits(
    model: Model,
    pool_tokens: int,
    storage: Sequence[tuple[str, ...]],
    page_size: int,
    device: torch.device,
    *,
    extra_bytes: int = 0,
    extra_token_bytes: int = 0,
) -> None:
    """Raise `DoesNotFit` before a pool and its scratch are allocated.

    `extra_token_bytes` is scratch that grows with the pool, `extra_bytes` what does not.
    """
    a_token = extra_token_bytes + sum(model.row_bytes("+".join(kinds)) for kinds in storage)
    needed = a_token * (pool_tokens + page_size) + extra_bytes
    memory = machine.memory(device)
    if needed <= memory.free_bytes:
        return
    largest = max(0, (memory.free_bytes - extra_bytes) // a_token - page_size)
    largest = largest // page_size * page_size
    numbers = (
        f"A pool of {pool_tokens} tokens needs {needed / 2**30:.2f} GiB ({needed} bytes); "
        f"{memory.free_bytes / 2**30:.2f} GiB ({memory.free_bytes} bytes) are free on {device}"
    )
    holders = machine.holders(device)
    if holders and needed <= memory.total_bytes:
        held = ", ".join(f"{h.name} (pid {h.pid}, {h.bytes / 2**30:.1f} GiB)" for h in holders)
        raise DoesNotFit(
            f"{numbers}; held by {held}", f"up to {largest} tokens now", "Stop that process first"
        )
    raise DoesNotFit(numbers, f"up to {largest} tokens")

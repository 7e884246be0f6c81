"""The KV pool of one GPU: slots, per-layer buffers, and the one write path."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shadowkv_lab import machine
from shadowkv_lab.errors import DoesNotFit, OutOfRange, WrongResult
from shadowkv_lab.kernels import reference
from shadowkv_lab.kernels.reference import FP8, bits
from shadowkv_lab.load import Batch, make_batch
from shadowkv_lab.model import Model

CHECK_ROWS = 65536  # rows a pass of check_integrity compares: 113 MB of FP8 and BF16
SPARE_TURNS = 64  # fresh last pages a request is given, if the pool has them


class SlotAllocator:
    """Hands out slots in whole pages, as SGLang does; page 0 is the dummy and stays.

    `pool_tokens` counts usable slots. The dummy page comes on top, so slots run from `page_size`
    to `pool_tokens + page_size - 1`. `order` is "contiguous" or "random" (by `seed`).
    """

    def __init__(self, pool_tokens: int, page_size: int = 1, order: str = "contiguous", seed=0):
        if page_size < 1 or pool_tokens < page_size or pool_tokens % page_size:
            raise OutOfRange(
                f"A pool of {pool_tokens} tokens in pages of {page_size}",
                "a positive multiple of the page size",
            )
        if order not in ("contiguous", "random"):
            raise OutOfRange(f"Slot order {order!r}", "contiguous, random")
        self.pool_tokens, self.page_size = pool_tokens, page_size
        pages = pool_tokens // page_size
        generator = torch.Generator().manual_seed(seed)
        ids = (
            torch.randperm(pages, generator=generator) if order == "random" else torch.arange(pages)
        )
        self._free = (ids + 1).flip(0)  # a stack: its end is handed out first
        self._top = pages
        self.used = torch.zeros(pages + 1, dtype=torch.bool)

    @property
    def free_tokens(self) -> int:
        """Slots in pages that nobody holds."""
        return self._top * self.page_size

    def allocate_pages(self, count: int) -> torch.Tensor:
        """int64 ids of `count` fresh pages; raises `DoesNotFit` and takes none if too few."""
        if count > self._top:
            raise DoesNotFit(
                f"{count * self.page_size} slots asked for, {self.free_tokens} of "
                f"{self.pool_tokens} are free",
                f"up to {self.free_tokens}",
                "Free requests, shorten their context, or make the pool larger",
            )
        self._top -= count
        pages = self._free[self._top : self._top + count].flip(0).clone()
        self.used[pages] = True
        return pages

    def allocate(self, tokens: int) -> torch.Tensor:
        """int64 [tokens] slots in whole fresh pages; what is left of the last page stays held."""
        if tokens < 1:
            raise OutOfRange(f"{tokens} slots asked for", "1 or more")
        pages = self.allocate_pages(-(-tokens // self.page_size))
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()[:tokens]

    def free(self, slots: torch.Tensor) -> None:
        """Give back the pages of `slots`; raises `OutOfRange` for one that is not held."""
        self.check(slots, "free")
        pages = torch.unique(slots.cpu() // self.page_size)
        self.used[pages] = False
        self._free[self._top : self._top + len(pages)] = pages.flip(0)
        self._top += len(pages)

    def check(self, slots: torch.Tensor, action: str) -> None:
        """Raise `OutOfRange` naming the first slot that is out of range, the dummy, or not held."""
        slots = slots.cpu()
        bad = (slots < self.page_size) | (slots >= self.pool_tokens + self.page_size)
        if not bad.any():
            bad = ~self.used[slots // self.page_size]
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


@dataclass(frozen=True)
class SavedRows:
    """Rows of some slots, every layer, copied out of a pool: what `Pool.load` restores."""

    rows: tuple[torch.Tensor, ...]  # per layer [n, row], FP8 where the layer keeps FP8, else BF16


class Pool:
    """Per-layer buffers [pool_tokens + page_size, row] and the one path that writes them.

    `storage` names what each layer keeps: ("fp8",), ("bf16",) or ("fp8", "bf16"); with both, the
    BF16 buffer is the FP8 one's shadow. Every write (`write`, `move`, `load`, a source's fill)
    ends in `_store`, so a shadow cannot miss one. `mirror` is "exact", `bf16(fp8(row))`, or
    "original", the row as it came; a row that comes back by `load` is always the former.
    `append` is the function that stores rows; kernels.append has a faster one.
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
    ):
        if mirror not in ("exact", "original"):
            raise OutOfRange(f"Mirror {mirror!r}", "exact, original")
        self.model, self.pool_tokens, self.page_size = model, pool_tokens, page_size
        self.device, self.mirror, self.append = torch.device(device), mirror, append
        self.allocator = SlotAllocator(pool_tokens, page_size, order, seed)
        check_fits(model, pool_tokens, storage, page_size, self.device)

        def buffer(kept: bool, dtype: torch.dtype) -> torch.Tensor | None:
            shape = (pool_tokens + page_size, model.row)
            return torch.zeros(shape, dtype=dtype, device=self.device) if kept else None

        self.fp8 = [buffer("fp8" in kinds, FP8) for kinds in storage]
        self.bf16 = [buffer("bf16" in kinds, torch.bfloat16) for kinds in storage]
        self.counters = torch.zeros(2, dtype=torch.int32, device=self.device)

    @property
    def layers(self) -> int:
        return len(self.fp8)

    @property
    def kept_bytes(self) -> int:
        """Bytes of all buffers, dummy page included."""
        return sum(b.nbytes for b in (*self.fp8, *self.bf16) if b is not None)

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

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write BF16 `rows` [n, row] to allocated `slots` [n] of one layer.

        Raises `OutOfRange` before anything is written. Looks at the data, so it syncs; a captured
        step uses `write_unchecked` and then asks `check_counters`.
        """
        self._check_rows(rows, len(slots))
        self.allocator.check(slots, "write")
        self._store(layer, slots, rows)

    def write_unchecked(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """`write` without looking at slots or rows: no host sync. NaN and Inf are counted."""
        self._store(layer, slots, rows)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy every layer's rows of `source` slots to `target` slots, which may overlap."""
        for slots in (source, target):
            self.allocator.check(slots, "move")
        if len(source) != len(target) or len(torch.unique(target)) != len(target):
            raise OutOfRange(
                f"Cannot move {len(source)} slots to {len(target)}",
                "as many distinct targets as sources",
            )
        for buffer in (*self.fp8, *self.bf16):
            if buffer is not None:
                bits(buffer)[target] = bits(buffer)[source]  # gathered first: overlap is safe

    def save(self, slots: torch.Tensor) -> SavedRows:
        """A CPU copy of the rows of `slots`, FP8 where a layer keeps FP8."""
        self.allocator.check(slots, "save")
        kept = [f if f is not None else b for f, b in zip(self.fp8, self.bf16, strict=True)]
        return SavedRows(tuple(bits(k)[slots].cpu().view(k.dtype) for k in kept))

    def load(self, slots: torch.Tensor, saved: SavedRows) -> None:
        """Restore saved rows to `slots`, bit for bit; shadows are rebuilt from the FP8 rows."""
        self.allocator.check(slots, "load")
        for rows, fp8 in zip(saved.rows, self.fp8, strict=True):
            wanted = (len(slots), self.model.row), torch.bfloat16 if fp8 is None else FP8
            if (tuple(rows.shape), rows.dtype) != wanted:
                raise OutOfRange(f"Saved rows {tuple(rows.shape)} {rows.dtype}", f"{wanted}")
        for layer, rows in enumerate(saved.rows):
            # e4m3 -> bf16 -> e4m3 is exact, so restored rows take the write path of fresh ones.
            self._store(layer, slots, rows.to(self.device).to(torch.bfloat16), exact=True)

    def _store(self, layer: int, slots: torch.Tensor, rows: torch.Tensor, exact=None) -> None:
        exact = self.mirror == "exact" if exact is None else exact
        self.append(rows, slots, self.fp8[layer], self.bf16[layer], self.counters, exact)

    def _check_rows(self, rows: torch.Tensor, count: int) -> None:
        wanted = (count, self.model.row)
        if tuple(rows.shape) != wanted or rows.dtype != torch.bfloat16:
            raise OutOfRange(f"Rows {tuple(rows.shape)} {rows.dtype}", f"{wanted} torch.bfloat16")
        if not rows.isfinite().all():
            bad = int((~rows.isfinite()).any(1).nonzero()[0])
            raise OutOfRange(
                f"Row {bad} has NaN or Inf in it", "finite values", "Nothing was written"
            )

    def check_counters(self) -> None:
        """Raise `OutOfRange` if an unchecked write has stored NaN or Inf (syncs)."""
        if seen := int(self.counters[1]):
            raise OutOfRange(
                f"{seen} NaN or Inf values were written", "finite values", "Refill the pool"
            )

    def check_integrity(self) -> None:
        """Prove shadow == bf16(fp8) row by row; raises `WrongResult` with the first slot off.

        A pool whose mirror is "original" holds either that or a row whose FP8 is the FP8 row.
        """
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

    def batch(self, concurrency: int, context: int) -> Batch:
        """Allocate `concurrency` requests of `context` live tokens, the new one included.

        Raises `OutOfRange` for a context outside the model's positions, `DoesNotFit` where the
        requests exceed the free slots.
        """
        check_load(self.model, self.pool_tokens, concurrency, context, self.page_size)
        count = -(-context // self.page_size)
        pages = [self.allocator.allocate_pages(count) for _ in range(concurrency)]
        turns = min(SPARE_TURNS, self.allocator.free_tokens // self.page_size // concurrency)
        spares = torch.stack([p[-1] for p in pages])[None, :]
        if turns:
            spares = self.allocator.allocate_pages(turns * concurrency).view(turns, concurrency)
        return make_batch(pages, [context] * concurrency, spares, self.page_size, self.device)

    def release(self, batch: Batch) -> None:
        """Free all slots of a batch that `batch` made."""
        # A last page that was rotated out is either a spare or, after `advance`, still held.
        self.allocator.free(batch.held_pages * self.page_size)


def check_load(
    model: Model, pool_tokens: int, concurrency: int, context: int, page_size: int = 1
) -> None:
    """Raise `OutOfRange` or `DoesNotFit` for a load that no pool of this size can hold."""
    if concurrency < 1:
        raise OutOfRange(f"Concurrency {concurrency}", "1 or more requests")
    if not 1 <= context <= model.max_positions:
        raise OutOfRange(
            f"Context {context} for {model.name}", f"1 to {model.max_positions} tokens"
        )
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
    """Raise `DoesNotFit` or `DoesNotFit` before a pool and its scratch are allocated.

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

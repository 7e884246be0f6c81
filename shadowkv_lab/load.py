"""A load: requests, context and tokens per step; and the batch of slots that it becomes."""

from dataclasses import dataclass
from itertools import accumulate

import torch

from shadowkv_lab.errors import OutOfRange, UnknownName

READS = ("dense", "dsa")


@dataclass(frozen=True)
class Load:
    """Running requests of one size.

    `context` is the live tokens of each request, this step's included (an average where requests
    differ). A step writes `tokens_per_step` new rows per request: 1, more with MTP.
    `reads` says which rows attention reads: "dense", all live ones, or "dsa", those that the
    model's sparse-attention index chooses. Raises `UnknownName` for any other.
    """

    concurrency: int = 1
    context: int | float = 1024
    tokens_per_step: int = 1
    reads: str = "dense"

    def __post_init__(self):
        if self.reads not in READS:
            raise UnknownName("way to read", self.reads, READS)

    @property
    def live_tokens(self) -> float:
        """L: slots that the requests refer to."""
        return self.concurrency * self.context

    @property
    def new_tokens(self) -> int:
        """R: rows written in a step."""
        return self.concurrency * self.tokens_per_step

    def __str__(self) -> str:
        how = ", DSA" if self.reads == "dsa" else ""
        return f"{self.concurrency} x {self.context:,.0f}{how}"


@dataclass(frozen=True)
class Batch:
    """Static index buffers of `concurrency` requests with `lens[b]` live tokens each.

    The tensors keep their addresses and shapes for life, so that a captured CUDA graph stays
    valid; `advance` changes their contents. The step writes each request's last token, or the last
    `queries` ones, and as many query tokens attend.
    """

    page_size: int
    lens: tuple[int, ...]  # live tokens of each request, the new one included
    pages: torch.Tensor  # int32 [sum of pages], page ids, request by request
    indptr: torch.Tensor  # int32 [B + 1], where each request's pages begin
    kv_len: torch.Tensor  # int32 [B], `lens` on the device
    live_slots: torch.Tensor  # int64 [live tokens], request by request
    new_slots: torch.Tensor  # int64 [B * queries], where this step's rows go
    spare_pages: torch.Tensor  # int32 [turns, B], last pages to rotate through
    held_pages: torch.Tensor  # int64, CPU: all pages of the batch, each once

    @property
    def concurrency(self) -> int:
        return len(self.lens)

    @property
    def live_tokens(self) -> int:
        return sum(self.lens)

    @property
    def queries(self) -> int:
        """Query tokens of each request: 1, more with MTP."""
        return len(self.new_slots) // len(self.lens)

    def token_offsets(self) -> list[int]:
        """Where each request's tokens begin in `live_slots`; B + 1 numbers."""
        return [0, *accumulate(self.lens)]

    def slots(self, request: int) -> torch.Tensor:
        """int64 view of one request's slots, in token order."""
        start = self.token_offsets()[request]
        return self.live_slots[start : start + self.lens[request]]

    def advance(self, turn: int) -> None:
        """Give every request another last page, so that the step writes to fresh slots.

        Runs on the device without a sync, between steps. The tokens that share a last page with
        the new one (page size 64) change with it: other stored rows, the same number of them.
        """
        spare = self.spare_pages[turn % len(self.spare_pages)].long()
        lens = self.kv_len.long()
        offset = (lens - 1) % self.page_size
        self.pages[self.indptr[1:].long() - 1] = spare.int()
        ends = lens.cumsum(0)
        within = torch.arange(self.page_size, device=spare.device)
        # Tokens past the new one do not exist: they are pointed at the new one, written alike.
        shift = torch.minimum(within[None, :], offset[:, None])
        place = (ends - 1 - offset)[:, None] + shift
        self.live_slots[place] = spare[:, None] * self.page_size + shift
        self.new_slots.copy_(self.live_slots[_last(ends, self.queries)])

    def compact(self) -> "Batch":
        """The same requests over gathered rows: live token i lies in row i, page size 1."""
        device, offsets = self.pages.device, self.token_offsets()
        rows = torch.arange(self.live_tokens, device=device)
        ends = torch.tensor(offsets[1:], device=device)
        return Batch(
            page_size=1,
            lens=self.lens,
            pages=rows.int(),
            indptr=torch.tensor(offsets, dtype=torch.int32, device=device),
            kv_len=self.kv_len,
            live_slots=rows,
            new_slots=_last(ends, self.queries),
            spare_pages=(ends - 1).int()[None, :],
            held_pages=torch.empty(0, dtype=torch.int64),
        )


def _last(ends: torch.Tensor, count: int) -> torch.Tensor:
    """Where the last `count` tokens of each request lie, that end at `ends` [B]."""
    return (ends[:, None] + torch.arange(-count, 0, device=ends.device)).flatten()


def make_batch(
    pages_of: list[torch.Tensor],
    lens: list[int],
    spares: torch.Tensor,
    page_size: int,
    device: torch.device | str,
    queries: int = 1,
) -> Batch:
    """A batch from each request's page ids (int64, CPU) and its spare last pages [turns, B].

    Raises `OutOfRange` for a request of fewer tokens than `queries`.
    """
    if min(lens) < queries:
        raise OutOfRange(f"{queries} query tokens of {min(lens)} live ones", "live tokens")
    within = torch.arange(page_size)
    slots = [
        (pages[:, None] * page_size + within).flatten()[:n]
        for pages, n in zip(pages_of, lens, strict=True)
    ]
    indptr = torch.tensor([0, *accumulate(len(p) for p in pages_of)], dtype=torch.int32)
    return Batch(
        page_size=page_size,
        lens=tuple(lens),
        pages=torch.cat(pages_of).int().to(device),
        indptr=indptr.to(device),
        kv_len=torch.tensor(lens, dtype=torch.int32).to(device),
        live_slots=torch.cat(slots).to(device),
        new_slots=torch.cat([s[-queries:] for s in slots]).to(device),
        spare_pages=spares.int().to(device),
        held_pages=torch.unique(torch.cat([*pages_of, spares.flatten()])),
    )

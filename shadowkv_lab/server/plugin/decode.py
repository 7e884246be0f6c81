"""The lab's FP8 decode under SGLang's CUDA graphs: one launch grid for all lengths of a batch."""

import torch
import triton

from shadowkv_lab.kernels.decode import COMBINE_VALUES, RANK, FusedAttention, split
from shadowkv_lab.kernels.launch import launch_row, multiprocessors

LONG = 1 << 30  # live tokens for the launch table: a graph is captured before they are known


class Slots:
    """The part of `Batch` that `FusedAttention.run` looks at, in static buffers."""

    page_size = 1

    def __init__(self, requests: int, indptr: torch.Tensor, pages: torch.Tensor):
        self.lens, self.indptr, self.pages = (1,) * requests, indptr, pages


class GraphDecode(FusedAttention):
    """`FusedAttention` whose grid and buffers depend on the number of requests alone.

    A batch is cut into at most `len(work)` items; what is left over repeats the first token of
    request 0 and is read by nobody. `update` is called outside graphs, before each replay.
    """

    def __init__(
        self,
        requests: int,
        heads: int,
        sm_scale: float,
        pages: torch.Tensor,
        partials: dict[int, tuple[torch.Tensor, torch.Tensor]],
    ):
        device = pages.device
        self.requests, self.heads, self.sm_scale = requests, heads, sm_scale
        self.row = launch_row(device, heads, requests, LONG)
        self.tiles = triton.cdiv(heads, self.row.tile)
        programs = self.row.blocks_per_sm * multiprocessors(device)
        self.items = max(requests, programs // self.tiles)
        # One buffer, so that one copy a step brings all of it: work items, splits, indptr.
        self.table = torch.zeros(
            4 * self.items + 2 * (requests + 1), dtype=torch.int32, device=device
        )
        self.work = self.table[: 4 * self.items].view(-1, 4)
        self.splits, indptr = self.table[4 * self.items :].view(2, -1)
        self.batch = Slots(requests, indptr, pages)
        if self.items not in partials:
            shape = self.items, heads
            partials[self.items] = (
                torch.empty(*shape, RANK.value, device=device),
                torch.empty(*shape, 2, device=device),
            )
        self.partial, self.stats = partials[self.items]
        self.rows = min(256, triton.next_power_of_2(triton.cdiv(self.items, requests)))
        self.columns = min(128, max(16, COMBINE_VALUES // self.rows))

    def update(self, lens: list[int], pages: torch.Tensor) -> None:
        """Cut a batch of these lengths; `pages` are its slots, request by request."""
        self.batch.pages = pages
        cut = split(tuple(lens), self.row.block, self.items)
        counts = [0] * (self.requests + 1)
        indptr = [0]
        for n in lens:
            indptr.append(indptr[-1] + n)
        for request, *_ in cut:
            counts[request + 1] += 1
        splits = torch.tensor(counts).cumsum(0).tolist()
        items = [value for item in cut for value in (*item, 0)]
        idle = [0, 0, 1, 0] * (self.items - len(cut))
        table = torch.tensor([*items, *idle, *splits, *indptr], dtype=torch.int32)
        # Pinned memory of torch's own is not used again before the copy out of it is done.
        self.table.copy_(table.pin_memory() if self.table.is_cuda else table, non_blocking=True)

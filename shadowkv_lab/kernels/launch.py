"""Launch parameters of the decode kernel: a small table per architecture, and what stands behind it.

`shadowkv bench kernels --tune` measures the rows of the GPU at hand.
"""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class LaunchRow:
    """How to launch the decode for one range of shapes.

    `tile` heads and `block` tokens a program, `warps` a program, `blocks_per_sm` programs that
    fill a multiprocessor, `vector` 32-bit words a load, `pipe` loads a block ahead, `pdl`
    programmatic dependent launch (SM90 and newer), `columns` and `combine_warps` of the combine.
    `measured` says where the choice comes from, or that it is untuned.
    """

    tile: int
    block: int
    warps: int
    blocks_per_sm: int
    measured: str
    vector: int = 4
    pipe: bool = True
    pdl: bool = True
    columns: int = 64
    combine_warps: int = 2

    def programs(self, device: torch.device) -> int:
        """Programs of one full wave."""
        return self.blocks_per_sm * multiprocessors(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a device; one on a CPU, where kernels are only interpreted."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


UNTUNED = "compiles within this architecture's limits; not measured"


def launch_row(device: torch.device, heads: int, longest: int, live_tokens: int) -> LaunchRow:
    """The row for a GPU, head count and load; kept small on purpose."""
    if device.type != "cuda":
        return LaunchRow(min(8, heads), 16, 4, 1, "interpreter", pdl=False, pipe=True)
    tile = min(16, max(8, heads))
    return LaunchRow(tile, 64, 4, 2, UNTUNED)

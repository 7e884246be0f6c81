"""Launch parameters of the decode kernel: a small table per architecture under data/launch.

A row is chosen by head count and load, and says what measurement stands behind it.
`shadowkv bench kernels --tune` measures the rows of the GPU at hand and rewrites its file.
"""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch

from shadowkv_lab import facts
from shadowkv_lab.files import write
from shadowkv_lab.provenance import Source

SHORT_TOKENS_PER_SM = 128  # below this, latency counts and not the bytes
SHORT_HEADS = 16  # with more query rows, fewer tokens already keep the matrix units busy
FEW_REQUESTS = 4  # up to this, splits are many for each request, and merging them costs
LOADS = ("short", "few", "many")


@dataclass(frozen=True)
class LaunchRow:
    """How to launch the decode for up to `heads` query rows and one kind of load.

    `kernel` is "words" or "pairs" (Triton, any card) or "warps" (CUDA, Hopper).
    `tile` query rows per program of `warps` warps; work items are multiples of `block` tokens;
    `blocks_per_sm` programs fill a multiprocessor. `stages` blocks in flight of the pair kernel;
    of the word kernel `vector` 32-bit words per load and, by `pipe`, loads a block ahead. `page`
    is the page size that the row was tuned at, `scaled` rows are for rows with scales of their
    own, which only the Triton kernels read. `measured` says what stands behind the row.
    """

    heads: int
    load: str
    tile: int
    block: int
    warps: int
    vector: int
    pipe: bool
    blocks_per_sm: int
    measured: str
    stages: int = 0
    kernel: str = "words"
    page: int = 1
    scaled: bool = False


# Triton's interpreter, on a CPU: small tiles, so that few tokens already make several items.
INTERPRETED = LaunchRow(128, "short", 8, 16, 4, 4, True, 4, "interpreter")


def load_of(requests: int, live_tokens: int, multiprocessors: int, heads: int = 1) -> str:
    """ "short", "few" or "many": which row of the table a batch takes, with `heads` query rows."""
    if live_tokens * max(1, heads / SHORT_HEADS) <= SHORT_TOKENS_PER_SM * multiprocessors:
        return "short"
    return "few" if requests <= FEW_REQUESTS else "many"


def launch_row(
    device: torch.device,
    heads: int,
    requests: int,
    live_tokens: int,
    page_size: int = 1,
    scaled: bool = False,
) -> LaunchRow:
    """The row for a device, number of query rows per request, and batch.

    It is the nearest lower architecture's if its own has no table, and the one tuned at the
    nearest page size. `scaled` says that rows have scales of their own.
    """
    if device.type != "cuda":
        return INTERPRETED
    load = load_of(requests, live_tokens, multiprocessors(device), heads)
    fitting = [r for r in rows(architecture(device)) if r.load == load]
    if not hopper(device):
        fitting = [r for r in fitting if r.kernel != "warps"]
    fitting = [r for r in fitting if r.scaled == scaled] or fitting
    fitting = [r for r in fitting if r.page == (64 if page_size >= 64 else 1)] or fitting
    return next((r for r in fitting if heads <= r.heads), fitting[-1])


def own_architecture(device: torch.device) -> str:
    """`sm_90` and the like: a device's own, for which there may be no table yet."""
    return f"sm_{_sm(device)}"


def architecture(device: torch.device) -> str:
    """The architecture whose table a device takes: its own or the nearest lower that has one."""
    known = sorted(int(name.removeprefix("sm_")) for name in facts.catalogue("launch", Table))
    return f"sm_{max([k for k in known if k <= _sm(device)], default=known[0])}"


def hopper(device: torch.device) -> bool:
    """Whether a device runs the CUDA kernel: wgmma is Hopper's own."""
    return _sm(device) // 10 == 9


def _sm(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@dataclass(frozen=True)
class Table:
    """A file of data/launch."""

    name: str
    source: Source
    rows: tuple[LaunchRow, ...]


@cache
def rows(arch: str) -> tuple[LaunchRow, ...]:
    """An architecture's table, by ascending head count."""
    return tuple(sorted(facts.catalogue("launch", Table)[arch].rows, key=lambda r: r.heads))


def save(arch: str, table: list[LaunchRow]) -> Path:
    """Write an architecture's table, one row per line, where `facts.target` says."""
    today = datetime.now(UTC).date().isoformat()
    source = Source("shadowkv bench kernels --tune", date=today, read=today)
    head = f'"name": "{arch}",\n "source": {json.dumps(asdict(source))}'
    lines = ",\n  ".join(json.dumps(asdict(row)) for row in table)
    text = f'{{\n {head},\n "rows": [\n  {lines}\n ]\n}}\n'
    path = write(facts.target("launch", f"{arch}.json"), text)
    rows.cache_clear()
    return path


@cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a device; one on a CPU, where kernels are only interpreted."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count

"""What a GPU is: cards from data/gpus, what this machine has, and its measured ceilings."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from shadowkv_lab import facts
from shadowkv_lab.errors import UnknownName
from shadowkv_lab.provenance import Source

GPU_RESERVE_BYTES = 1 << 30  # left for the CUDA context, library workspaces and graphs
CPU_RESERVE_BYTES = 1 << 29


@dataclass(frozen=True)
class Card:
    """A GPU model. Bandwidth is the datasheet's (GB/s, decimal), memory the driver's (MiB).

    `compute_capability` is CUDA's; None on AMD's cards, whose `architecture` is a gfx name, `sms`
    the compute units, `l2_mb` the last cache before memory and the shared memory the LDS.
    """

    name: str
    title: str
    memory_mib: int
    bandwidth_gb_per_s: float
    sms: int
    l2_mb: int
    shared_memory_per_block_bytes: int
    compute_capability: tuple[int, int] | None
    source: Source
    driver_names: tuple[str, ...] = ()
    architecture: str = ""
    fp32_tflops: float | None = None
    measured_copy_gb_per_s: float | None = None
    measured_read_gb_per_s: float | None = None

    @property
    def memory_gib(self) -> float:
        return self.memory_mib / 1024

    @property
    def issue_rate(self) -> float:
        """SMs x clock, as the datasheet's FP32 TFLOP/s give it; SMs at an H200's clock without.

        What a kernel that is bound by its instructions scales with.
        """
        return self.fp32_tflops or self.sms * 67 / 132

    @property
    def sm(self) -> str:
        """ "SM120" for compute capability 12.0; an AMD card's gfx name."""
        if self.compute_capability is None:
            return self.architecture
        return "SM{}{}".format(*self.compute_capability)


class Memory(NamedTuple):
    """Bytes of one device: all of it, and what a new pool may take."""

    total_bytes: int
    free_bytes: int


class Holder(NamedTuple):
    """Another process that holds memory of a GPU."""

    pid: int
    name: str
    bytes: int


def card(name: str) -> Card:
    """The card `name` of data/gpus, or that the driver calls so; raises `UnknownName`."""
    return card_of(name) or facts.find("gpus", "GPU", name, "Or add a file under data/gpus", Card)


def known_cards() -> list[str]:
    """Names of the cards under data/gpus."""
    return sorted(facts.catalogue("gpus", Card))


def detect_card(device: str | torch.device = "cuda") -> Card | None:
    """The card of a CUDA device by its driver name; None if data/gpus lacks it, or on a CPU."""
    return card_of(device_title(device)) if torch.device(device).type == "cuda" else None


def card_of(title: str) -> Card | None:
    """The card that the driver calls `title`, or that has this name; None if there is none."""
    cards = facts.catalogue("gpus", Card)
    named = cards.get(title.lower())
    if named is not None and named.name == title:
        return named
    return next((card for card in cards.values() if title in card.driver_names), None)


def card_here(device: str | torch.device) -> Card | None:
    """The card of a GPU in this machine: of data/gpus, or what torch says of it; None on a CPU.

    A card that data/gpus lacks has no bandwidth (NaN) and no source.
    """
    if torch.device(device).type != "cuda":
        return None
    if known := detect_card(device):
        return known
    seen = torch.cuda.get_device_properties(torch.device(device))
    return Card(
        name=seen.name,
        title=seen.name,
        memory_mib=seen.total_memory >> 20,
        bandwidth_gb_per_s=float("nan"),
        sms=seen.multi_processor_count,
        l2_mb=getattr(seen, "L2_cache_size", 0) >> 20,
        shared_memory_per_block_bytes=getattr(seen, "shared_memory_per_block_optin", 0),
        compute_capability=None if rocm() else (seen.major, seen.minor),
        source=Source("torch, on this machine"),
        architecture=getattr(seen, "gcnArchName", "").split(":")[0] if rocm() else "",
    )


def rocm() -> str | None:
    """The ROCm release that torch was built for, or None: its "cuda" devices are AMD's then."""
    return torch.version.hip


def devices() -> list[str]:
    """Torch device names that a pool can live on here: the GPUs, or the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"cuda:{i}" for i in range(count)] or ["cpu"]


def default_device() -> torch.device:
    """The GPU with the most free memory, or the CPU."""
    best = max(devices(), key=lambda d: memory(d).free_bytes)
    return torch.device(best)


def as_device(device: "str | torch.device | None") -> torch.device:
    """A device that is here; raises `UnknownName` naming those that are."""
    if device is None:
        return default_device()
    known = [*devices(), "cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if str(device) not in known:
        raise UnknownName("device", str(device), set(known), "shadowkv doctor says what is missing")
    return torch.device(device)


def device_title(device: str | torch.device) -> str:
    """What people call the device: the driver's GPU name, or the CPU's model and cores."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x.split(":", 1)[1] for x in cpuinfo.read_text().splitlines() if "model name" in x]
        model = names[0].strip() if names else model
    return f"CPU {model}, {len(os.sched_getaffinity(0))} cores"


def memory(device: str | torch.device) -> Memory:
    """Total bytes, and bytes that a new pool may take (a reserve is left for everything else)."""
    device = torch.device(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Memory(total, max(0, free + unused - GPU_RESERVE_BYTES))
    ram = psutil.virtual_memory()
    return Memory(ram.total, max(0, ram.available - CPU_RESERVE_BYTES))


def nvml():
    """The initialised NVML module, or None where the library or a driver is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # ImportError, or any of NVML's own errors: no driver, no permission
        return None
    return pynvml


def nvml_handle(lib, device: str | torch.device):
    """NVML's handle of a torch CUDA device, found by PCI bus id (the two count differently)."""
    properties = torch.cuda.get_device_properties(torch.device(device))
    p = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return lib.nvmlDeviceGetHandleByPciBusId("{:08X}:{:02X}:{:02X}.0".format(*p).encode())


def holders(device: str | torch.device) -> list[Holder]:
    """Other processes that hold memory of a CUDA device, as far as NVML shows them."""
    if torch.device(device).type != "cuda" or (lib := nvml()) is None:
        return []
    found = []
    try:
        for process in lib.nvmlDeviceGetComputeRunningProcesses(nvml_handle(lib, device)):
            if process.pid == os.getpid():
                continue
            try:
                name = psutil.Process(process.pid).name()
            except psutil.Error:
                name = "another container's process"
            found.append(Holder(process.pid, name, process.usedGpuMemory or 0))
    except lib.NVMLError:
        return []
    return found


class Clocks(NamedTuple):
    """The card's state at the time of a run; None where NVML does not say."""

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    driver: str | None = None


def clocks(device: str | torch.device) -> Clocks:
    """SM and memory clock, power and driver version of a CUDA device now."""
    if torch.device(device).type != "cuda" or (lib := nvml()) is None:
        return Clocks()
    try:
        handle = nvml_handle(lib, device)
        driver = lib.nvmlSystemGetDriverVersion()
        return Clocks(
            lib.nvmlDeviceGetClockInfo(handle, lib.NVML_CLOCK_SM),
            lib.nvmlDeviceGetClockInfo(handle, lib.NVML_CLOCK_MEM),
            round(lib.nvmlDeviceGetPowerUsage(handle) / 1000, 1),
            driver.decode() if isinstance(driver, bytes) else driver,
        )
    except lib.NVMLError:
        return Clocks()


def version_of(package: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def git_revision() -> str:
    """The checkout's revision, with `-dirty` where the package differs; "unknown" outside git.

    Notebooks and recorded runs may differ: they change while notebooks run and runs are recorded.
    SHADOWKV_REVISION names the revision where files were copied without their commit.
    """
    if told := os.environ.get("SHADOWKV_REVISION"):
        return told
    package = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        found = subprocess.run(
            ["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True
        )
        return found.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def tool(name: str) -> str | None:
    """Path of a build tool on PATH, or in CUDA_HOME/bin."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which(name) or shutil.which(name, path=f"{home}/bin")

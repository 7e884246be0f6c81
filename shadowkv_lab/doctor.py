"""What this machine can run, what not, and the remedy for each."""

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import torch

from shadowkv_lab import machine
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.strategies import STRATEGIES


class Finding(NamedTuple):
    """One thing looked at. `state` is "ok", "warn" or "no"; a remedy stands where it is not ok."""

    what: str
    state: str
    finding: str
    remedy: str = ""


def examine(
    model: "str | Model" = "glm-5", tensor_parallel: int = 8, device: str | None = None
) -> list[Finding]:
    """Everything that decides what the lab can measure here, the strategies last."""
    geometry = load_model(model)
    chosen = machine.as_device(device)
    findings = list(_gpus(chosen))
    findings += _libraries(chosen)
    findings += _strategies(geometry, geometry.heads_per_gpu(tensor_parallel), chosen)
    return findings


def _gpus(chosen: torch.device) -> Iterator[Finding]:
    built = torch.version.cuda
    if not torch.cuda.is_available():
        yield _why_no_gpu(built)
        memory = machine.memory("cpu")
        yield Finding("memory", "ok", f"{memory.free_bytes / 2**30:.1f} GiB free on the CPU")
        return
    for name in machine.devices():
        card, memory = machine.detect_card(name), machine.memory(name)
        major, minor = torch.cuda.get_device_capability(name)
        mark = " (chosen)" if torch.device(name) == chosen else ""
        yield Finding(
            f"{name}{mark}",
            "ok" if card else "warn",
            f"{machine.device_title(name)}, SM{major}{minor}, "
            f"{memory.free_bytes / 2**30:.1f} of {memory.total_bytes / 2**30:.1f} GiB free; "
            + (f"{card.title}, {card.bandwidth_gb_per_s:.0f} GB/s" if card else "not in data/gpus"),
            "" if card else "Add a file under data/gpus: predictions for this card need it",
        )
        for holder in machine.holders(name):
            yield Finding(
                f"{name} memory",
                "warn",
                f"{holder.name} (pid {holder.pid}) holds {holder.bytes / 2**30:.1f} GiB",
                "Stop it, or choose another GPU with --device",
            )
    yield Finding(
        "driver", "ok", f"{machine.clocks(chosen).driver or 'unknown'}, torch for CUDA {built}"
    )


def _why_no_gpu(built: str | None) -> Finding:
    """The GPU that torch does not see: no driver, or a torch that cannot use it."""
    listed = ""
    if smi := machine.tool("nvidia-smi"):
        asked = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
        listed = asked.stdout.strip() if asked.returncode == 0 else ""
    if not listed:
        return Finding(
            "GPU",
            "warn",
            "no NVIDIA GPU: measurements run on the CPU, at small pools",
            "Recorded H200 runs are shown beside them",
        )
    if built is None:
        return Finding(
            "GPU",
            "no",
            f"{listed.splitlines()[0]}, but torch is a CPU build",
            "Install a CUDA build of torch in this environment",
        )
    return Finding(
        "GPU",
        "no",
        f"{listed.splitlines()[0]}, but torch (CUDA {built}) cannot use it",
        "Update the driver, or install a torch built for an older CUDA",
    )


def _libraries(device: torch.device) -> Iterator[Finding]:
    on_gpu = device.type == "cuda"
    for package, module, use in (
        ("flashinfer-python", "flashinfer", "16-bit attention on a GPU"),
        ("triton", "triton", "the lab's own kernels"),
        ("nvidia-ml-py", "pynvml", "clocks, power, and who holds a GPU"),
    ):
        version = machine.version_of(package)
        if importlib.util.find_spec(module):
            yield Finding(package, "ok", f"{version}: {use}")
        elif on_gpu:
            yield Finding(package, "no", f"missing: {use}", "pip install -e '.[gpu]'")
    if on_gpu and importlib.util.find_spec("flashinfer"):
        for name in ("nvcc", "ninja"):
            path = machine.tool(name)
            yield Finding(
                name,
                "ok" if path else "no",
                "found: flashinfer can compile its kernels"
                if path
                else "missing: flashinfer compiles its MLA kernels on first use",
                ""
                if path
                else "Install the CUDA toolkit and set CUDA_HOME"
                if name == "nvcc"
                else "pip install ninja",
            )
    revision = os.environ.get("TRITON_INTERPRET")
    if revision == "1":
        yield Finding(
            "triton",
            "warn",
            "TRITON_INTERPRET=1: kernels run in Python, times are void",
            "Unset it",
        )


def _strategies(geometry: Model, heads: int, device: torch.device) -> Iterator[Finding]:
    from shadowkv_lab.errors import LabError
    from shadowkv_lab.steps.measure import Bench, check

    bench = Bench(geometry, heads, device)
    for name, kind in STRATEGIES.items():
        try:
            check(bench, kind(), bench.page_size, [(1, 1)])
        except LabError as error:
            yield Finding(name, "no", error.what, error.remedy)
        else:
            yield Finding(name, "ok", f"runs here for {geometry.name}, {heads} heads a GPU")

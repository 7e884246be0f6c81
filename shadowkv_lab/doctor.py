"""What this machine can run, what not, and the remedy for each."""

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from shadowkv_lab import machine
from shadowkv_lab.deployment import deployment
from shadowkv_lab.errors import LabError
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.rules import can_run
from shadowkv_lab.strategies import STRATEGIES

WSL_SMI = "/usr/lib/wsl/lib/nvidia-smi"


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
    shape = load_model(model)
    shape.heads_per_gpu(tensor_parallel)
    chosen = machine.as_device(device)
    findings = list(_gpus(chosen))
    findings += _libraries(chosen)
    findings += _strategies(shape, tensor_parallel, chosen)
    return findings


def _gpus(chosen: torch.device) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield why_no_gpu(look())
        memory = machine.memory("cpu")
        yield Finding("memory", "ok", f"{memory.free_bytes / 2**30:.1f} GiB free on the CPU")
        return
    for name in machine.devices():
        known, card = machine.detect_card(name), machine.card_here(name)
        memory = machine.memory(name)
        listed = (
            f"{card.title}, {card.bandwidth_gb_per_s:.0f} GB/s" if known else "not in data/gpus"
        )
        mark = " (chosen)" if torch.device(name) == chosen else ""
        yield Finding(
            f"{name}{mark}",
            "ok" if known else "warn",
            f"{machine.device_title(name)}, {card.sm}, "
            f"{memory.free_bytes / 2**30:.1f} of {memory.total_bytes / 2**30:.1f} GiB free; "
            + listed,
            "" if known else "Add a file under data/gpus: predictions for this card need it",
        )
        for holder in machine.holders(name):
            yield Finding(
                f"{name} memory",
                "warn",
                f"{holder.name} (pid {holder.pid}) holds {holder.bytes / 2**30:.1f} GiB",
                "Stop it, or choose another GPU with --device",
            )
    if hip := machine.rocm():
        yield Finding(
            "torch",
            "warn",
            f"a ROCm build ({hip}): nothing of the lab was run on an AMD card",
            "Recorded runs and predictions are shown; measure on an NVIDIA GPU",
        )
    else:
        driver = machine.clocks(chosen).driver or "unknown"
        yield Finding("driver", "ok", f"{driver}, torch for CUDA {torch.version.cuda}")


@dataclass(frozen=True)
class Seen:
    """What is to be seen where torch has no GPU.

    `smi` and `answer` are the path of nvidia-smi and all that it prints (its exit status 0 in
    `answered`), `module` the version of the kernel's NVIDIA module, `nodes` whether /dev has its
    device files, `torch_cuda` the CUDA release that torch is built for and `torch_says` why torch
    cannot use it.
    """

    smi: str | None = None
    answer: str = ""
    answered: bool = False
    module: str | None = None
    nodes: bool = False
    wsl: bool = False
    container: bool = False
    torch_cuda: str | None = None
    torch_hip: str | None = None
    torch_says: str = ""


def look() -> Seen:
    """Look at the driver, the kernel, the container and torch of this machine."""
    smi, answer, answered = machine.tool("nvidia-smi"), "", False
    if smi:
        try:
            asked = subprocess.run([smi], capture_output=True, text=True, check=False, timeout=30)
            answer, answered = asked.stdout + asked.stderr, asked.returncode == 0
        except (OSError, subprocess.TimeoutExpired) as error:
            answer = f"{smi}: {error}"
    version = _text("/proc/driver/nvidia/version")
    module = re.search(r"(?:Module|x86_64|aarch64)\s+([\d.]+)", version)
    kernel = _text("/proc/version").lower()
    says = ""
    if torch.version.cuda:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            says = str(error).splitlines()[0]
    return Seen(
        smi=smi,
        answer=answer.strip(),
        answered=answered,
        module=module[1] if module else None,
        nodes=Path("/dev/nvidiactl").exists(),
        wsl=bool(os.environ.get("WSL_DISTRO_NAME")) or "microsoft" in kernel,
        container=any(Path(p).exists() for p in ("/.dockerenv", "/run/.containerenv")),
        torch_cuda=torch.version.cuda,
        torch_hip=torch.version.hip,
        torch_says=says,
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def why_no_gpu(seen: Seen) -> Finding:
    """Why torch sees no GPU: there is none, its driver does not answer, or it is torch's fault."""
    if seen.answered:
        return _torch_cannot(seen)
    quoted = seen.answer.splitlines()[0] if seen.answer else ""
    if "mismatch" in seen.answer.lower():
        kernel = f"; the kernel still has module {seen.module}" if seen.module else ""
        return Finding(
            "GPU",
            "no",
            f"an NVIDIA driver is installed and does not answer: '{quoted}'{kernel}",
            "Reboot: the driver was updated and its old kernel module is still loaded "
            "(in a container: reboot the host)",
        )
    if seen.smi and quoted:
        return Finding(
            "GPU",
            "no",
            f"an NVIDIA driver is installed and does not answer: '{quoted}'",
            "Load its kernel module (sudo modprobe nvidia), or reinstall the driver for this "
            "kernel, and reboot",
        )
    if seen.module and not seen.nodes:
        return Finding(
            "GPU",
            "no",
            f"the host has NVIDIA driver {seen.module}, but this container was given no GPU",
            "Start it with --gpus all, with the NVIDIA Container Toolkit on the host",
        )
    if seen.wsl:
        return Finding(
            "GPU",
            "no",
            "WSL2, and no nvidia-smi on PATH",
            f"Look for {WSL_SMI} (add /usr/lib/wsl/lib to PATH). If it is not there, install or "
            "update NVIDIA's driver in Windows; install none in WSL",
        )
    if seen.torch_hip:
        return Finding(
            "GPU",
            "no",
            f"torch is a ROCm build ({seen.torch_hip}) and sees no AMD GPU",
            "Nothing of the lab was run on AMD cards; recorded runs and predictions are shown",
        )
    inside = " in this container" if seen.container else ""
    return Finding(
        "GPU",
        "warn",
        f"no NVIDIA GPU{inside}: measurements run on the CPU, at small pools",
        "Recorded H200 runs are shown beside them"
        + ("; if the host has a GPU, start the container with --gpus all" if inside else ""),
    )


def _torch_cannot(seen: Seen) -> Finding:
    """The driver answers, and torch cannot use the GPU."""
    driver = re.search(r"Driver Version:\s*([\d.]+)", seen.answer)
    offers = re.search(r"CUDA (?:UMD )?Version:\s*(\d+(?:\.\d+)?)", seen.answer)
    what = f"NVIDIA driver {driver[1]}" if driver else "an NVIDIA driver answers"
    if seen.torch_hip:
        return Finding(
            "GPU",
            "no",
            f"{what}, but torch is a ROCm build ({seen.torch_hip})",
            "Install a CUDA build of torch in this environment",
        )
    if seen.torch_cuda is None:
        return Finding(
            "GPU",
            "no",
            f"{what}, but torch is a CPU build",
            "Install a CUDA build of torch in this environment",
        )
    old = offers and int(offers[1].split(".")[0]) < int(seen.torch_cuda.split(".")[0])
    if old or "too old" in seen.torch_says:
        upto = f", up to CUDA {offers[1]}" if offers else ""
        return Finding(
            "GPU",
            "no",
            f"{what}{upto}, is too old for this torch, built for CUDA {seen.torch_cuda}",
            "Update the driver, or install a torch built for "
            + (f"CUDA {offers[1]} or older" if offers else "an older CUDA"),
        )
    said = f": '{seen.torch_says}'" if seen.torch_says else ""
    return Finding(
        "GPU",
        "no",
        f"{what}, but torch (CUDA {seen.torch_cuda}) cannot use it{said}",
        "Look at CUDA_VISIBLE_DEVICES; then update the driver, or install a torch built for an "
        "older CUDA",
    )


def _libraries(device: torch.device) -> Iterator[Finding]:
    on_gpu = device.type == "cuda" and not machine.rocm()  # NVIDIA's libraries help NVIDIA's cards
    for package, module, use in (
        ("flashinfer-python", "flashinfer", "16-bit attention on a GPU"),
        ("triton", "triton", "the lab's own kernels"),
        ("nvidia-ml-py", "pynvml", "clocks, power, and who holds a GPU"),
    ):
        version = machine.version_of(package)
        if importlib.util.find_spec(module) and version:
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
    if os.environ.get("TRITON_INTERPRET") == "1":
        yield Finding(
            "triton",
            "warn",
            "TRITON_INTERPRET=1: kernels run in Python, times are void",
            "Unset it",
        )


def _strategies(model: Model, tensor_parallel: int, device: torch.device) -> Iterator[Finding]:
    """Each strategy by the rules for this card, then by this machine's libraries and memory."""
    from shadowkv_lab.steps.measure import Bench, check

    heads = model.heads_per_gpu(tensor_parallel)
    bench, card = Bench(model, heads, device), machine.card_here(device)
    at = None
    if card:
        own = dict(tensor_parallel=tensor_parallel, page_size=bench.page_size)
        at = deployment(model, card, **own)
    for name, kind in STRATEGIES.items():
        verdict = can_run(kind(), at) if at else None
        if verdict is not None and not verdict.ok:
            yield Finding(name, "no", verdict.reason, "shadowkv rules shows who can")
            continue
        if machine.rocm() and card:
            yield Finding(name, "warn", f"not tried: {verdict.untried}", "Run it on an NVIDIA GPU")
            continue
        try:
            check(bench, kind(), bench.page_size, [(1, 1)])
        except LabError as error:
            yield Finding(name, "no", error.what, error.remedy or error.allowed)
        else:
            note = f"; {verdict.untried}" if verdict and verdict.untried else ""
            yield Finding(name, "ok", f"runs here for {model.name}, {heads} heads per GPU{note}")

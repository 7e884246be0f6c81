"""Who moves and attends: the torch reference, flashinfer, and the lab's own Triton kernels.

Nothing here imports triton or flashinfer until one of their kernels is asked for.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch

from shadowkv_lab import rules
from shadowkv_lab.errors import CannotRun, UnknownName
from shadowkv_lab.kernels import index, reference
from shadowkv_lab.load import Batch
from shadowkv_lab.machine import version_of
from shadowkv_lab.model import Model

QUERIES = ("bf16", "fp8")  # what our own decode multiplies queries as
BACKENDS = ("auto", "reference", "flashinfer_fa2", "flashinfer_fa3")


class Attention(Protocol):
    """One attention kernel: planned once for a batch, run once a layer."""

    name: str

    def plan(self, batch: Batch, heads: int, sm_scale: float, *, rank: int, rope: int) -> None:
        """Prepare for a batch; may copy to the host and block, so it is no part of a step."""

    def run(self, q_nope: torch.Tensor, q_pe: torch.Tensor, kv: torch.Tensor, out: torch.Tensor):
        """Attend over `kv` [S, row] into `out` [B, H, rank]; no host sync."""


def attention(
    reads: str, device: torch.device, backend: str = "auto", query: str = "bf16"
) -> Attention:
    """The attention kernel for what a strategy reads ("bf16", "native_fp8" or "fused_fp8").

    `backend` chooses who reads BF16. "auto" is flashinfer on a GPU and the reference on a CPU;
    where flashinfer is missing, `CannotRun` names the remedy instead of falling back.
    "reference" reads whatever is stored, anywhere. `query` is what "fused_fp8" multiplies queries
    as; the reference takes them as they are.
    """
    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    on_a_cpu = reads == "bf16" and (backend, device.type) == ("auto", "cpu")
    if backend == "reference" or on_a_cpu:
        return reference.ReferenceAttention()
    if reads == "fused_fp8":
        return _triton("decode", device).FusedDecode(query=query)
    flashinfer = importlib.import_module("shadowkv_lab.kernels.flashinfer")
    variant = backend.removeprefix("flashinfer_")
    return flashinfer.FlashInferAttention(variant, reads, device)


def check(
    reads: str, device: torch.device, backend: str, model: Model, heads: int, page_size: int
) -> None:
    """Raise before anything is allocated if the kernel that `attention` would give cannot run.

    `CannotRun` names the rule that fails, `CannotRun` what is missing.
    """
    kernel = attention(reads, device, backend)  # its constructor looks for library and device
    if kernel.name == "reference":
        return
    rule_name = {"fused_fp8": "lab_fused_fp8", "native_fp8": "flashinfer_native_fp8"}
    capability = torch.cuda.get_device_capability(device)
    kv_dtype = "bf16" if reads == "bf16" else "fp8_e4m3"
    serving = rules.Serving.of(model, capability, kv_dtype, heads, page_size)
    installed = {"flashinfer": version} if (version := version_of("flashinfer-python")) else None
    if failed := rules.check(rule_name.get(reads, kernel.name), serving, installed):
        raise CannotRun(
            f"{kernel.name} cannot serve {model.name} here: {failed[0]}",
            remedy=failed[0].remedy or "shadowkv rules shows who can",
        )


def mover(name: str, device: torch.device) -> Callable:
    """`append`, `cast`, `gather_cast` or `refresh` for a device: our Triton kernel, or torch."""
    if triton_problem(device):
        return getattr(reference, name)
    return getattr(_triton("append" if name == "append" else "widen", device), name)


def indexing(device: torch.device):
    """The module whose `write`, `scores` and `take` do a DSA index's work: our Triton, or torch."""
    return index if triton_problem(device) else _triton("indexer", device)


def gather_cast(fp8: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """`out[i] = bf16(fp8[slots[i]])`, by the kernel of the device that the rows lie on.

    fp8 [S, row] e4m3, slots [n] int64, out [n or more, row] BF16.
    """
    mover("gather_cast", fp8.device)(fp8, slots, out)


def require(module: str, device: torch.device) -> None:
    """Raise `CannotRun` with the remedy if a Triton kernel cannot run on a device."""
    if problem := triton_problem(device):
        raise CannotRun(
            f"The Triton kernel {module!r} cannot run: {problem}",
            "an NVIDIA GPU with triton installed",
            "Choose another strategy, or run it on a GPU machine",
        )


def library(module: str, called: str, remedy: str):
    """A library's module; raises `CannotRun` with the remedy where it is missing or broken."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise CannotRun(f"{called} cannot be imported ({error})", remedy=remedy) from None


def _triton(module: str, device: torch.device):
    require(module, device)
    return importlib.import_module(f"shadowkv_lab.kernels.{module}")


@cache
def triton_problem(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, or None."""
    if device.type != "cuda":
        return f"{device} is not a GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return None

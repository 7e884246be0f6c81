"""FlashInfer's MLA decode: BF16 rows on any GPU it supports, its own FP8 rows on SM90."""

import os

import torch

from shadowkv_lab import kernels
from shadowkv_lab.errors import CannotRun
from shadowkv_lab.load import Batch

WORKSPACE_BYTES = 128 << 20  # flashinfer's recommended size for split-KV partial results
REMEDY = "pip install 'shadowkv-lab[gpu]', or ask for the slow reference with --backend reference"


def library():
    """The flashinfer module; raises `CannotRun` naming what is missing."""
    return kernels.library("flashinfer", "flashinfer", REMEDY)


class FlashInferAttention:
    """`BatchMLAPagedAttentionWrapper` behind the lab's attention interface.

    `variant` is "auto", "fa2" or "fa3"; `reads` "bf16" or "native_fp8" (SM90 only; both scales
    are passed as 1.0, as the pool keeps e4m3 without a scale). Captured by CUDA graphs: its index
    buffers are the batch's own.
    """

    def __init__(self, variant: str, reads: str, device: torch.device):
        if device.type != "cuda":
            raise CannotRun(
                f"flashinfer needs an NVIDIA GPU, this is {device}",
                remedy="Use --backend reference"
                if reads == "bf16"
                else "Choose another strategy, or run it on a GPU machine",
            )
        self.flashinfer = library()
        if variant == "auto":
            # Measured on an H200: fa2 is ahead of fa3 for FP8 rows at one short request only.
            variant = "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"
        self.variant, self.reads, self.device = variant, reads, device
        self.name = f"flashinfer_{variant}" + ("_fp8" if reads == "native_fp8" else "")

    def plan(
        self, batch: Batch, heads: int, sm_scale: float, *, rank: int, rope: int, queries: int = 1
    ) -> None:
        """Plan for a batch; compiles the kernel on first use (about 20 s).

        The last `queries` tokens of each request attend, each to those up to itself.
        """
        device = self.device
        self.page_size, self.rank, self.heads = batch.page_size, rank, heads
        kv_dtype = torch.bfloat16 if self.reads == "bf16" else torch.float8_e4m3fn
        qo_indptr = torch.arange(batch.concurrency + 1, dtype=torch.int32, device=device) * queries
        self.wrapper = self.flashinfer.mla.BatchMLAPagedAttentionWrapper(
            torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=device),
            use_cuda_graph=True,
            qo_indptr=qo_indptr,
            kv_indptr=batch.indptr,
            kv_indices=batch.pages,
            kv_len_arr=batch.kv_len,
            backend=self.variant,
        )
        try:
            self.wrapper.plan(
                qo_indptr=qo_indptr.clone(),
                kv_indptr=batch.indptr.clone(),
                kv_indices=batch.pages.clone(),
                kv_len_arr=batch.kv_len.clone(),
                num_heads=heads,
                head_dim_ckv=rank,
                head_dim_kpe=rope,
                page_size=batch.page_size,
                causal=queries > 1,
                sm_scale=sm_scale,
                q_data_type=torch.bfloat16,
                kv_data_type=kv_dtype,
            )
        except ValueError as error:
            raise CannotRun(f"{self.name}: {error}", remedy="See shadowkv rules") from error
        except (RuntimeError, OSError) as error:
            nvcc = os.environ.get("CUDA_HOME", "/usr/local/cuda")
            raise CannotRun(
                f"{self.name} could not be compiled or planned: {str(error)[-400:]}",
                remedy=f"shadowkv doctor checks nvcc ({nvcc}) and ninja; or --backend reference",
            ) from error

    def run(self, q_nope: torch.Tensor, q_pe: torch.Tensor, kv: torch.Tensor, out: torch.Tensor):
        """Attend over `kv` [S, rank + rope] into `out` [B, queries * H, rank]."""
        paged = kv.view(-1, self.page_size, kv.shape[-1])
        q_nope, q_pe, out = (t.view(-1, self.heads, t.shape[-1]) for t in (q_nope, q_pe, out))
        scales = {} if self.reads == "bf16" else {"ckv_scale": 1.0, "kpe_scale": 1.0}
        self.wrapper.run(
            q_nope, q_pe, paged[..., : self.rank], paged[..., self.rank :], out=out, **scales
        )

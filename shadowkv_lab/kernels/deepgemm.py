"""DeepGEMM's index scores, a peer: what SGLang scores a DSA index with on Hopper and Blackwell."""

import torch

from shadowkv_lab import kernels
from shadowkv_lab.errors import CannotRun
from shadowkv_lab.kernels.index import PAGE
from shadowkv_lab.load import Batch


class DeepGEMM:
    """`fp8_paged_mqa_logits` of `sgl-deep-gemm`, planned once for a batch of page size 64.

    It takes what `indexer.scores` takes, and compiles its kernels at first use. Its schedule is
    made at `plan` and is no part of its time, as an engine makes it once a step for all layers.
    """

    name = "deep_gemm"

    def __init__(self, device: torch.device):
        if device.type != "cuda":
            raise CannotRun(f"DeepGEMM on {device}", "an NVIDIA GPU")
        self.library = kernels.library("deep_gemm", "DeepGEMM", "pip install sgl-deep-gemm")
        found = getattr(self.library, "fp8_paged_mqa_logits", None)
        self.logits = found or self.library.fp8_fp4_paged_mqa_logits  # since 0.2

    def plan(self, batch: Batch) -> None:
        """A table of pages, padded with each request's last, and DeepGEMM's own schedule."""
        if batch.page_size != PAGE:
            raise CannotRun(f"DeepGEMM at page size {batch.page_size}", f"page size {PAGE}")
        pages = batch.pages.split(batch.indptr.diff().tolist())
        most = max(map(len, pages))
        padded = [torch.cat([p, p[-1:].expand(most - len(p))]) for p in pages]
        self.table, self.longest = torch.stack(padded).contiguous(), most * PAGE
        self.lens = batch.kv_len[:, None].contiguous()
        self.schedule = self.library.get_paged_mqa_logits_metadata(
            self.lens, PAGE, self.library.get_num_sms()
        )

    def scores(self, q: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Scores [B, longest or more] (float32) of every live token; beyond them anything."""
        paged = kept.view(len(kept), PAGE, 1, -1)
        found = self.logits(
            q[:, None], paged, weights, self.lens, self.table, self.schedule, self.longest
        )
        return found if isinstance(found, torch.Tensor) else torch.from_dlpack(found)

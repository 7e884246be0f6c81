"""FlashMLA's dense decode for Hopper, a peer: BF16 rows, or FP8 rows and queries.

Upstream dropped it in its 2026.09.30 release; SGLang's fork, `sgl-flash-mla`, has it.
"""

import importlib

import torch

from shadowkv_lab.errors import CannotRun
from shadowkv_lab.kernels.reference import to_fp8
from shadowkv_lab.load import Batch

PAGE = 64
RANK = 512


class FlashMLA:
    """`flash_mla_with_kvcache`, planned once for a batch; `reads` is "bf16" or "native_fp8".

    Its FP8 kernel multiplies FP8 queries, so that `pack` rounds them: that, and the concatenation
    of the query's two parts, is left out of its time.
    """

    def __init__(self, reads: str, device: torch.device):
        if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
            raise CannotRun(f"FlashMLA's dense decode on {device}", "a Hopper GPU")
        try:
            self.library = importlib.import_module("flash_mla")
        except ImportError as error:
            raise CannotRun(
                f"FlashMLA cannot be imported ({error})", remedy="pip install sgl-flash-mla"
            ) from None
        self.reads, self.device, self.fp8 = reads, device, reads == "native_fp8"
        self.name = f"flashmla_{'fp8' if self.fp8 else 'bf16'}"

    def plan(
        self, batch: Batch, heads: int, sm_scale: float, *, queries: int = 1, **_: object
    ) -> None:
        """A table of pages, padded with each request's last, and FlashMLA's own schedule."""
        if batch.page_size != PAGE:
            raise CannotRun(f"FlashMLA at page size {batch.page_size}", f"page size {PAGE}")
        self.sm_scale, self.queries, self.lens = sm_scale, queries, batch.kv_len
        pages = batch.pages.split(batch.indptr.diff().tolist())
        most = max(map(len, pages))
        padded = [torch.cat([p, p[-1:].expand(most - len(p))]) for p in pages]
        self.table = torch.stack(padded).contiguous()
        self.schedule = self.library.get_mla_metadata()[0]
        self.more = {}
        if self.fp8:
            self.schedule.tile_scheduler_metadata, self.schedule.num_splits = (
                self.library.get_mla_decoding_metadata(
                    self.lens, queries * heads, 1, is_fp8_kvcache=True, use_legacy=True
                )
            )
            one = torch.ones(1, device=self.device)
            self.more = {"is_fp8_kvcache": True, "descale_q": one, "descale_k": one}

    def pack(self, q_nope: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """Both parts of queries [B, queries * H, ...] as it takes them, [B, queries, H, 576]."""
        q = torch.cat([q_nope, q_pe], -1).unflatten(1, (self.queries, -1))
        return to_fp8(q) if self.fp8 else q

    def run(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Attend over `kv` [S, 576]; returns [B, queries * H, 512], memory of its own."""
        paged = kv.view(-1, PAGE, 1, kv.shape[-1])
        out, _ = self.library.flash_mla_with_kvcache(
            q,
            paged,
            self.table,
            self.lens,
            RANK,
            self.schedule,
            softmax_scale=self.sm_scale,
            causal=self.queries > 1,
            use_legacy=True,
            **self.more,
        )
        return out.flatten(1, 2)

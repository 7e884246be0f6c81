"""FlashMLA for Hopper, a peer: dense decode of BF16 or FP8 rows, and decode of chosen rows.

Upstream dropped these in its 2026.09.30 release; SGLang's fork, `sgl-flash-mla`, has them.
"""

import torch

from shadowkv_lab import kernels
from shadowkv_lab.errors import CannotRun
from shadowkv_lab.kernels.reference import to_fp8
from shadowkv_lab.load import Batch

PAGE = 64
RANK = 512
SPARSE_HEADS = 64  # its kernels for chosen rows take 64 heads or 128


def library(device: torch.device):
    """The flash_mla module; raises `CannotRun` off Hopper, and where it is missing."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        raise CannotRun(f"FlashMLA's kernels for Hopper on {device}", "a Hopper GPU")
    return kernels.library("flash_mla", "FlashMLA", "pip install sgl-flash-mla")


class FlashMLA:
    """`flash_mla_with_kvcache`, planned once for a batch; `reads` is "bf16" or "native_fp8".

    Its FP8 kernel multiplies FP8 queries, so that `pack` rounds them: that, and the concatenation
    of the query's two parts, is left out of its time.
    """

    def __init__(self, reads: str, device: torch.device):
        self.library = library(device)
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


class FlashMLASparse:
    """Attention over the rows that an index chose, as many for each request; page size 1 or 64.

    `reads` "bf16" is `flash_mla_sparse_fwd`, SGLang's for BF16 rows; "packed" is
    `flash_mla_with_kvcache` with `indices`, over 656-byte rows whose FP8 has scales of its own.
    Fewer heads are padded to 64, as SGLang pads them: `pack` does it, outside the time.
    """

    def __init__(self, reads: str, device: torch.device):
        self.library, self.reads = library(device), reads
        self.name = f"flashmla_sparse_{reads}"

    def plan(self, batch: Batch, heads: int, sm_scale: float, **_: object) -> None:
        """The chosen slots as [B, topk], and a schedule that the first run fills."""
        if len(set(batch.lens)) > 1 or batch.page_size > 1:
            raise CannotRun("FlashMLA over requests that read unlike many rows", "one number")
        self.indices = batch.pages.view(len(batch.lens), 1, -1)
        self.heads, self.sm_scale = heads, sm_scale
        self.schedule = self.library.get_mla_metadata()[0]

    def pack(self, q_nope: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """Both parts of queries [B, H, ...] as it takes them, [B, 64 or 128, 576]."""
        q = torch.cat([q_nope, q_pe], -1)
        padded = q.new_zeros(len(q), -(-self.heads // SPARSE_HEADS) * SPARSE_HEADS, q.shape[-1])
        padded[:, : self.heads] = q
        return padded

    def run(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Attend over `kv` [S, 576] BF16 or [S, 656] packed; returns [B, H, 512]."""
        if self.reads == "bf16":
            out = self.library.flash_mla_sparse_fwd(
                q, kv[:, None], self.indices, self.sm_scale, use_legacy=True
            )[0]
            return out[:, : self.heads]
        paged = kv.view(-1, PAGE, 1, kv.shape[-1])
        out, _ = self.library.flash_mla_with_kvcache(
            q[:, None],
            paged,
            None,
            None,
            RANK,
            self.schedule,
            softmax_scale=self.sm_scale,
            is_fp8_kvcache=True,
            indices=self.indices,
            use_legacy=True,
        )
        return out[:, 0, : self.heads]

"""SGLang's own Triton decode, a peer: BF16 rows, or FP8 rows with queries rounded to FP8.

As SGLang's Triton backend calls it on an NVIDIA GPU (0.5.23): the number of splits is the one that
its scheduler chooses, up to the next power of two of the multiprocessors.
"""

import torch

from shadowkv_lab import kernels
from shadowkv_lab.errors import CannotRun
from shadowkv_lab.kernels.launch import multiprocessors
from shadowkv_lab.load import Batch

HOME = "sglang.kernels.ops.attention"
MOST_REQUESTS = 256  # of its scheduler's one program; more would need a wider one


class SGLangTriton:
    """`decode_attention_fwd`, planned once for a batch; `reads` is "bf16" or "native_fp8".

    It wants both parts of a query side by side: that is left out of its time. Slots are listed one
    by one whatever the page size, as SGLang does.
    """

    def __init__(self, reads: str, device: torch.device):
        if device.type != "cuda":
            raise CannotRun(f"SGLang's Triton decode on {device}", "an NVIDIA GPU")
        told = "SGLang's Triton decode", "pip install 'sglang>=0.5.23'"
        self.forward = kernels.library(f"{HOME}.decode_attention", *told).decode_attention_fwd
        self.split = kernels.library(f"{HOME}.metadata", *told).get_num_kv_splits_triton
        self.reads, self.device = reads, device
        self.name = f"sglang_triton_{'bf16' if reads == 'bf16' else 'fp8'}"

    def plan(
        self, batch: Batch, heads: int, sm_scale: float, *, rank: int, queries: int = 1, **_: object
    ) -> None:
        """A list of slots, the number of splits of each request, and its partial results."""
        if queries > 1:
            raise CannotRun(f"SGLang's Triton decode with {queries} query tokens", "1")
        if (requests := batch.concurrency) > MOST_REQUESTS:
            raise CannotRun(f"{requests} requests here", f"up to {MOST_REQUESTS}")
        device, cores = self.device, multiprocessors(self.device)
        self.sm_scale, self.page_size, self.rank = sm_scale, batch.page_size, rank
        self.slots = batch.live_slots
        offsets = torch.tensor(batch.token_offsets(), dtype=torch.int32)
        self.indptr = offsets.to(device)
        self.most = max(8, 1 << (cores - 1).bit_length())
        self.splits = torch.empty(requests, dtype=torch.int32, device=device)
        arguments = self.splits, batch.kv_len, requests, 1, heads, 1, self.most, cores
        self.split[(1,)](*arguments, MAX_NUM_SEQ=MOST_REQUESTS)
        self.partial = torch.empty(requests, heads, self.most, rank, device=device)
        self.masses = torch.empty(requests, heads, self.most, device=device)

    def pack(self, q_nope: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """Both parts of queries as it takes them, [B, H, 576]."""
        return torch.cat([q_nope, q_pe], -1)

    def run(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Attend over `kv` [S, 576]; returns [B, H, 512], memory of its own."""
        keys, out = kv.unsqueeze(1), q.new_empty(*q.shape[:-1], self.rank)
        self.forward(
            q,
            keys,
            keys[..., : self.rank],
            out,
            self.indptr,
            self.slots,
            self.partial,
            self.masses,
            self.splits,
            self.most,
            self.sm_scale,
            1.0,
            1.0,
            has_mla=True,
            use_pdl=torch.cuda.get_device_capability(self.device) >= (9, 0),
            page_size=self.page_size,
        )
        return out

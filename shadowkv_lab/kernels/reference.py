"""The specification: every move and MLA decode attention, in plain torch, on any device.

Each Triton kernel and each library kernel is tested against the functions here.
"""

import torch

from shadowkv_lab.load import Batch
from shadowkv_lab.model import SCALE_GROUP, groups

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest finite e4m3 value
PRECISE = {torch.float32, torch.float64}


def to_fp8(rows: torch.Tensor) -> torch.Tensor:
    """Rows as e4m3, saturating at +-448.

    The clamp matters: torch itself saturates from 2.13 on only, and gives NaN before.
    """
    return rows.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def bits(rows: torch.Tensor) -> torch.Tensor:
    """FP8 rows as uint8, for the index operations that FP8 lacks; other rows as they are."""
    return rows.view(torch.uint8) if rows.dtype == FP8 else rows


def widened(fp8: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """bf16(fp8[slots]): what a copy of FP8 rows [S, D] holds of `slots` [n]."""
    return bits(fp8)[slots].view(FP8).to(torch.bfloat16)


def append(
    rows: torch.Tensor,
    slots: torch.Tensor,
    fp8: torch.Tensor | None,
    bf16: torch.Tensor | None,
    counters: torch.Tensor,
    exact: bool = True,
    tail: torch.Tensor | None = None,
    first: int = 0,
) -> None:
    """Write `rows` [R, D] (BF16) to `slots` [R] (int64) of one layer's buffers [S, D].

    With both buffers the BF16 one is the FP8 one's shadow: `bf16(fp8(row))` when `exact`, else
    the row itself. `tail` [R, E] holds the last E values of each row where they lie elsewhere;
    `rows` are [R, D - E] then. Slots below `first` are not written: padding goes there.
    `counters` (int32 [2]) gains the values clipped at +-448 and the NaN or Inf values seen; no
    host sync, so a captured graph can run it, unless `first` leaves rows out.
    """
    if tail is not None:
        rows = torch.cat([rows, tail], 1)
    if first:
        rows, slots = rows[slots >= first], slots[slots >= first]
    if fp8 is None:
        bf16.index_copy_(0, slots, rows)
        counters[1:] += (~rows.isfinite()).sum().int()
        return
    finite = rows.isfinite()
    counters += torch.stack([(rows.abs() > FP8_MAX).logical_and(finite).sum(), (~finite).sum()])
    stored = to_fp8(rows)
    bits(fp8).index_copy_(0, slots, bits(stored))
    if bf16 is not None:
        bf16.index_copy_(0, slots, stored.to(torch.bfloat16) if exact else rows)


def cast(fp8: torch.Tensor, out: torch.Tensor) -> None:
    """A whole layer's FP8 rows [S, D] to BF16: what `.to(q.dtype)` does, without allocating."""
    out.copy_(fp8)


def gather_cast(
    fp8: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    count: torch.Tensor | None = None,
    gathered: torch.Tensor | None = None,
) -> None:
    """`out[i] = bf16(fp8[slots[i]])`, for the first `count` slots if given.

    `gathered` is optional FP8 scratch [L, D]; with `count` this syncs with the device.
    """
    slots = slots if count is None else slots[: int(count)]
    if gathered is None:
        gathered = torch.empty(len(slots), fp8.shape[1], dtype=FP8, device=fp8.device)
    torch.index_select(bits(fp8), 0, slots, out=bits(gathered))
    out[: len(slots)].copy_(gathered)


def unpack(packed: torch.Tensor, rank: int, rope: int) -> torch.Tensor:
    """The float32 rows [T, rank + rope] that packed bytes (fp8_ds_mla) stand for.

    A row is `rank` e4m3 values, float32 scales of 128 of them each, and `rope` BF16 values.
    """
    ends = rank, rank + 4 * groups(rank)
    latent = packed[:, : ends[0]].contiguous().view(FP8).float()
    scales = packed[:, ends[0] : ends[1]].contiguous().view(torch.float32)
    latent *= scales.repeat_interleave(SCALE_GROUP, 1)[:, :rank]
    return torch.cat([latent, packed[:, ends[1] :].contiguous().view(torch.bfloat16).float()], 1)


def gather_packed(packed: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """`out[i]` [L, 576] (BF16) = the row of 656 bytes (fp8_ds_mla) at `packed[slots[i]]`."""
    out[: len(slots)] = unpack(packed[slots.long()], 512, 64)


def refresh(
    fp8: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, count: torch.Tensor | None = None
) -> None:
    """`out[slots[i]] = bf16(fp8[slots[i]])`, for the first `count` slots if given (syncs)."""
    slots = (slots if count is None else slots[: int(count)]).long()
    out[slots] = widened(fp8, slots)


def attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    batch: Batch,
    sm_scale: float,
    dtype: torch.dtype = torch.float32,
    queries: int = 1,
) -> torch.Tensor:
    """MLA decode attention in its absorbed form.

    q_nope [B, H, rank], q_pe [B, H, rope], kv [S, rank + rope] of any dtype. Returns [B, H, rank]
    in `dtype`: softmax((q_nope . c + q_pe . k_pe) * sm_scale) . c over each request's slots. With
    several `queries` a request, H is queries x heads: the last `queries` of its live tokens
    attend, each to those up to itself.
    """
    rank = q_nope.shape[-1]
    q = torch.cat([q_nope, q_pe], -1).to(dtype)
    out = torch.empty(*q_nope.shape, dtype=dtype, device=q.device)
    offsets = batch.token_offsets()
    for b, n in enumerate(batch.lens):
        slots = batch.live_slots[offsets[b] : offsets[b] + n]
        rows = bits(kv).index_select(0, slots).view(kv.dtype).to(dtype)
        scores = (q[b] @ rows.T * sm_scale).unflatten(0, (queries, -1))
        for i in range(queries - 1):
            scores[i, :, n - queries + 1 + i :] = float("-inf")
        p = torch.softmax(scores.flatten(0, 1), -1)
        out[b] = p @ rows[:, :rank]
    return out


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """The worst relative L2 error of outputs [..., rank], of all heads; of NaN it is inf."""
    error = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return float(error.nan_to_num(nan=float("inf")).max())


def in_fp8(q_nope: torch.Tensor, q_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries rounded as `FusedDecode(query="fp8")` rounds them, in float64.

    To e4m3, after scaling each head by the power of two that puts its largest value just below
    2^8, and scaled back.
    """
    q = torch.cat([q_nope, q_pe], -1).double()
    _, exponent = torch.frexp(q.abs().amax(-1, keepdim=True))
    up = ((8 - exponent + 1023).long() << 52).view(torch.float64)  # 2^(8 - exponent), exactly
    q = to_fp8((q * up).float()).double() / up
    return q.split([q_nope.shape[-1], q_pe.shape[-1]], -1)


class ReferenceAttention:
    """`attend` in float32 behind the interface that every attention kernel has."""

    name = "reference"

    def plan(
        self, batch: Batch, heads: int, sm_scale: float, *, queries: int = 1, **_: object
    ) -> None:
        """Remember the batch; nothing to prepare."""
        self.batch, self.sm_scale, self.queries = batch, sm_scale, queries

    def run(self, q_nope: torch.Tensor, q_pe: torch.Tensor, kv: torch.Tensor, out: torch.Tensor):
        """Attend over `kv` [S, row] into `out` [B, queries * H, rank]."""
        out.copy_(attend(q_nope, q_pe, kv, self.batch, self.sm_scale, queries=self.queries))

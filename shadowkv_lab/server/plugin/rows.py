"""Rows from FP8 to BF16 by slot, in place or gathered, for a pool of SGLang's.

One Triton launch on a GPU, a few torch operations on a CPU; the latter are the specification.
"""

from functools import cache

import torch

from shadowkv_lab.kernels.reference import FP8


def widen(
    pool: torch.Tensor,
    slots: torch.Tensor,
    target: torch.Tensor,
    count: torch.Tensor | None = None,
    *,
    gather: bool = False,
) -> None:
    """`target[slots[i]] = bf16(pool[slots[i]])`; with `gather`, `target[i]` of the same.

    pool [S, D] uint8 (e4m3 bits), slots int32 or int64, target [S', D] BF16. `count` (int32 [1],
    on the device) says how many slots count, so that a captured graph serves any number of them.
    A slot that comes twice is written twice with the same bits.
    """
    if pool.is_cuda:
        _kernels().widen(pool, slots, target, count, gather)
        return
    slots = (slots if count is None else slots[: int(count)]).long()
    rows = pool[slots].view(FP8).to(torch.bfloat16)
    if gather:
        target[: len(slots)] = rows
    else:
        target[slots] = rows


def widen_all(pool: torch.Tensor, target: torch.Tensor) -> None:
    """`target` [S, D] BF16 = every row of `pool` [S, D] uint8 (e4m3 bits)."""
    if pool.is_cuda:
        from shadowkv_lab.kernels import cast

        cast.cast(pool.view(FP8), target)
    else:
        target.copy_(pool.view(FP8))


@cache
def _kernels():
    from shadowkv_lab.server.plugin import kernels

    return kernels

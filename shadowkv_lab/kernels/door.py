"""What a kernel asks of its tensors before it touches them: a kernel itself sees only addresses."""

import torch

from shadowkv_lab.errors import OutOfRange

FP8 = torch.float8_e4m3fn
INDICES = (torch.int32, torch.int64)
PACKED_ROW = 656  # bytes (fp8_ds_mla): 512 of e4m3, four float32 scales, 64 BF16 values


def need(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], *shape: int | None):
    """Raise `OutOfRange` unless a tensor is contiguous, of one of `dtypes` and of `shape`.

    None stands for any size. e5m2 rows are refused like any other type: read as e4m3 they would
    give wrong numbers and no error.
    """
    fits = tensor.dim() == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=False)
    )
    if fits and tensor.dtype in dtypes and tensor.is_contiguous():
        return
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    types = " or ".join(str(kind).removeprefix("torch.") for kind in dtypes)
    found = str(tensor.dtype).removeprefix("torch.")
    raise OutOfRange(
        f"{name} is {found} {list(tensor.shape)} with strides {list(tensor.stride())}",
        f"contiguous {types} [{wanted}]",
        "Convert it, or take .contiguous(), first",
    )


def room(name: str, has: int, needs: int) -> None:
    """Raise `OutOfRange` if `name` has fewer rows than are written or read."""
    if has < needs:
        raise OutOfRange(f"{name} has {has:,} rows", f"{needs:,} or more")


def aligned(name: str, tensor: torch.Tensor, size: int) -> None:
    """Raise `OutOfRange` unless a tensor begins at a multiple of `size` bytes."""
    if past := tensor.data_ptr() % size:
        raise OutOfRange(f"{name} begins at {past} of {size} bytes", "0", "Copy it first")

"""For trials with random weights: draw them so that the pool holds numbers, and say that it does.

SGLang's dummy weights lie within 1e-3, those of norms too: every FP8 row would be zero, and any two
strategies would give equal tokens. Two variables, each by itself and without a strategy as well:

    SHADOWKV_WEIGHTS=drawn   with --load-format dummy: matrices from N(0, 1/columns), norms one
    SHADOWKV_ROWS=1          the log tells how many of the first prefills' rows are all zero
"""

import logging
import os
import zlib

import torch

from shadowkv_lab.errors import OutOfRange

log = logging.getLogger("shadowkv")

WEIGHTS = "sglang.srt.model_loader.loader.initialize_dummy_weights"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
LOOKS = 4  # prefills whose rows are counted: the warm-up's, which nobody times
ROWS = "shadowkv: rows of layer %d: %d written, %d all zero"

looks = 0


def targets(environment: "dict[str, str] | None" = None) -> dict[str, tuple[str, object]]:
    """What the two variables hook, in the form of `hooks.targets`. Raises `OutOfRange`."""
    environment = os.environ if environment is None else environment
    found = {}
    for name, allowed, path, hook in (
        ("SHADOWKV_WEIGHTS", "drawn", WEIGHTS, draw),
        ("SHADOWKV_ROWS", "1", FORWARD, count_rows),
    ):
        value = environment.get(name, "").strip()
        if value and value != allowed:
            raise OutOfRange(f"{name}={value}", f"{allowed}, or unset")
        if value:
            found[path] = ("AFTER", hook)
    return found


def draw(_result, model, *_args, **_more) -> None:
    """After `initialize_dummy_weights`: the same weights again for the same names and shapes."""
    for name, param in model.state_dict().items():
        if not torch.is_floating_point(param) or torch.finfo(param.dtype).bits < 16:
            continue
        if "rotary" in name or "cos_sin" in name:  # tables, not weights
            continue
        if param.dim() < 2:
            param.data.fill_(0.0 if "bias" in name else 1.0)
            continue
        generator = torch.Generator(device=param.device).manual_seed(zlib.crc32(name.encode()))
        size = 1.0 if "embed_tokens" in name else param.shape[-1] ** -0.5
        param.data.normal_(0, size, generator=generator)
    log.info("shadowkv: dummy weights drawn")


def count_rows(_result, runner, forward_batch, *_args, **_more) -> None:
    """After the first prefills: how many of the rows just written to the last layer are zero."""
    global looks
    if looks >= LOOKS or not forward_batch.forward_mode.is_extend():
        return
    pool = runner.token_to_kv_pool
    slots = forward_batch.out_cache_loc
    if slots is None or not slots.numel():
        return
    looks += 1
    stored = pool.kv_buffer[-1].flatten(1)
    rows = stored[slots.long()]
    if rows.element_size() == 1:
        rows = rows.view(torch.uint8) & 0x7F  # e4m3 without its sign: -0 is zero too
    zero = int((rows == 0).all(1).sum())
    log.info(ROWS, pool.start_layer + pool.layer_num - 1, len(rows), zero)

"""The hooks: which functions of SGLang 0.5.23 the plug-in wraps, and what it does there."""

import importlib
import logging

import torch

from shadowkv_lab.errors import CannotRun
from shadowkv_lab.server.plugin import Settings, refusals
from shadowkv_lab.server.plugin.readers import READERS, Reader

log = logging.getLogger("shadowkv")

POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool"
MLA = "sglang.srt.layers.attention.flashinfer_mla_backend"
BACKEND = f"{MLA}.FlashInferMLAAttnBackend"
PLANNER = f"{MLA}.FlashInferMLAIndicesUpdaterDecode"
ARGUMENTS = "sglang.srt.arg_groups.validation_hook.check_server_args"
ROOM = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"

chosen: Settings | None = None
room_bytes: int | None = None  # what SGLang found for KV in this process
passes = 0  # forward passes since the start, for the self-check


def targets(settings: Settings) -> dict[str, tuple[str, object]]:
    """Every function that a strategy hooks: its path, the hook's type and the hook."""
    found = {ARGUMENTS: ("AFTER", check_arguments)}
    if settings.strategy == "full_cast":
        return found
    found |= {
        f"{BACKEND}.__init__": ("AFTER", attach),
        f"{BACKEND}.forward_decode": ("AROUND", decode),
        f"{BACKEND}.forward_extend": ("AROUND", extend),
        f"{POOL}.set_mla_kv_buffer": ("AROUND", write),
    }
    if settings.strategy == "shadow":
        found |= {
            f"{POOL}.set_kv_buffer": ("AFTER", wrote),
            f"{POOL}.move_kv_cache": ("AFTER", moved),
            f"{POOL}.load_cpu_copy": ("AFTER", loaded),
            ROOM: ("AFTER", found_room),
        }
        if settings.check_every:
            found[FORWARD] = ("AFTER", self_check)
    if settings.strategy in ("gather_cast", "fused_fp8"):
        found[f"{PLANNER}.update"] = ("AROUND", planned)
    return found


def install(
    settings: Settings | None, beside: "dict[str, tuple[str, object]] | None" = None
) -> None:
    """Look for every target and register its hook; SGLang applies them when all plug-ins ran.

    `beside` are hooks of a trial, which need no strategy. Raises `CannotRun` naming the first
    target that this SGLang does not have.
    """
    global chosen
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wanted = [*(targets(settings) if settings else {}).items(), *(beside or {}).items()]
    for path, _ in wanted:
        resolve(path)
    for path, (kind, hook) in wanted:
        HookRegistry.register(path, hook, HookType[kind])
    chosen = settings
    log.info("shadowkv: %s, %d hooks", settings, len(wanted))


def resolve(path: str) -> object:
    """The function at a dotted path; raises `CannotRun`.

    A method must be the class's own: a wrapper around an inherited one would be put on the
    subclass, and the base's other subclasses would go unhooked.
    """
    parts = path.split(".")
    classes = [i for i, part in enumerate(parts) if part[:1].isupper()]
    cut = classes[0] if classes else len(parts) - 1
    try:
        found = importlib.import_module(".".join(parts[:cut]))
        for name in parts[cut:]:
            found = vars(found)[name]
    except (ImportError, KeyError) as error:
        raise CannotRun(
            f"SGLang has no {path} ({type(error).__name__}: {error})",
            "the functions that the plug-in was written against",
            "This SGLang was changed, or a package that it needs is missing",
        ) from None
    return found


def check_applied() -> None:
    """Raise `CannotRun` for a hook that SGLang's registry has not applied.

    The registry logs a hook that it could not apply, and goes on.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for path in targets(chosen):
        if path not in HookRegistry._patched:
            raise CannotRun(
                f"SGLang did not apply the hook on {path}",
                remedy="Its log says why, at 'Failed to apply hooks'",
            )


def check_arguments(_result, server_args) -> None:
    """Before weights are loaded: refuse arguments under which the strategy would be wrong."""
    refusals.check_arguments(server_args.resolved_dict(), chosen)


def found_room(result, *_args, **_more) -> None:
    """Remember how many bytes SGLang has for KV on this GPU."""
    global room_bytes
    room_bytes = int(result)


def attach(_result, backend, model_runner, *_args, **_more) -> None:
    """When the backend is made: check pool and sizes, and hang a reader on the pool."""
    check_applied()
    if type(backend).__name__ != BACKEND.rsplit(".", 1)[-1]:
        raise CannotRun(
            f"The attention backend is a {type(backend).__name__}",
            "FlashInferMLAAttnBackend (--attention-backend flashinfer)",
        )
    if model_runner.is_draft_worker:
        raise CannotRun("This is the worker of a draft model", "servers without one")
    if model_runner.dtype != torch.bfloat16:
        raise CannotRun(f"The model runs in {model_runner.dtype}", "torch.bfloat16")
    pool = model_runner.token_to_kv_pool
    if reader_of(pool) is not None:
        return
    refusals.check_pool(pool, chosen)
    if chosen.strategy == "shadow":
        covered = sum(map(chosen.covers, pool.model_layer_ids))
        if room_bytes is None:
            raise CannotRun(f"SGLang has sized its pool without {ROOM}")
        refusals.check_room(pool, covered, room_bytes)
    pool._shadowkv = READERS[chosen.strategy](pool, chosen)
    log.info("shadowkv: %s reads a pool of %d tokens", chosen.strategy, pool.size)


def reader_of(pool: object) -> Reader | None:
    """The reader that hangs on a pool."""
    return getattr(pool, "_shadowkv", None)


def write(original, pool, layer, loc_info, nope, rope, layer_id_override=None):
    """Around `set_mla_kv_buffer`: rows in BF16 are converted, stored and mirrored in one launch."""
    reader = reader_of(pool)
    number = layer.layer_id if layer_id_override is None else layer_id_override
    slots = getattr(loc_info, "loc", loc_info)
    if reader and nope.dtype == rope.dtype == torch.bfloat16:
        reader.write(number, slots, nope.flatten(1), rope.flatten(1))
        return
    original(pool, layer, loc_info, nope, rope, layer_id_override)
    if reader:  # rows that came in FP8
        reader.wrote(number, slots)


def wrote(_result, pool, layer, loc_info, *_rows, layer_id_override=None, **_more) -> None:
    """After `set_kv_buffer`."""
    if reader := reader_of(pool):
        if layer_id_override is None and len(_rows) > 2:
            layer_id_override = _rows[2]
        number = layer.layer_id if layer_id_override is None else layer_id_override
        reader.wrote(number, getattr(loc_info, "loc", loc_info))


def moved(_result, pool, tgt_loc, src_loc) -> None:
    """After `move_kv_cache`."""
    if (reader := reader_of(pool)) and tgt_loc.numel():
        reader.wrote_all(tgt_loc)


def loaded(_result, pool, kv_cache_cpu, indices, *_args, **_more) -> None:
    """After `load_cpu_copy`, which ends in a synchronisation; so does this."""
    if reader := reader_of(pool):
        reader.wrote_all(indices.to(pool.kv_buffer[0].device))
        if pool.kv_buffer[0].is_cuda:
            torch.cuda.synchronize()


def decode(original, backend, *args, **kwargs):
    """Around `forward_decode`: let only the backend see the reader's rows."""
    reader = reader_of(backend.token_to_kv_pool)
    if reader is not None and reader.decodes:
        return reader.decode(backend, *args, **kwargs)
    return _viewed(original, reader, True, backend, args, kwargs)


def extend(original, backend, *args, **kwargs):
    """Around `forward_extend`, likewise."""
    reader = reader_of(backend.token_to_kv_pool)
    return _viewed(original, reader, False, backend, args, kwargs)


def _viewed(original, reader, decoding, backend, args, kwargs):
    # Only for this call: `get_token_to_kv_pool` hands the backend's pool to the model, which
    # asks for its class and writes through its buffers.
    if reader is None:
        return original(backend, *args, **kwargs)
    pool = backend.token_to_kv_pool
    backend.token_to_kv_pool = reader.views[decoding]
    try:
        return original(backend, *args, **kwargs)
    finally:
        backend.token_to_kv_pool = pool


def planned(original, planner, seq_lens, seq_lens_sum, decode_wrapper, *args, **kwargs):
    """Around the decode planner, outside graphs: the lengths are known on the host here."""
    result = original(planner, seq_lens, seq_lens_sum, decode_wrapper, *args, **kwargs)
    backend = planner.attn_backend
    reader = reader_of(backend.token_to_kv_pool)
    if reader is not None:
        lens = None
        if (on_host := kwargs.get("kv_len_arr_cpu")) is not None:
            lens = on_host.tolist()
        elif reader.decodes or seq_lens_sum is None:
            # An eager step, or a capture: FlashInfer's own plan syncs there as well.
            lens = seq_lens.tolist()
        total = int(seq_lens_sum) if lens is None else sum(lens)
        reader.plan(decode_wrapper, backend, lens, total)
    return result


def self_check(_result, runner, *_args, **_more) -> None:
    """After every SHADOWKV_CHECK-th forward pass: compare mirror and pool, outside graphs."""
    global passes
    reader = reader_of(runner.token_to_kv_pool)
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if reader is None or capturing:
        return
    passes += 1
    if passes % chosen.check_every == 0:
        reader.check()

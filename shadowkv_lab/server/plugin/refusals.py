"""What the plug-in refuses to run under: arguments of the server, kinds of pool, sizes.

A mirror is right only if every write to the pool is seen. Some of SGLang's features write by raw
address, from another process or from a fused kernel, where no hook of a class can see it. They
are told from the server's resolved arguments, before weights are loaded.
"""

from collections.abc import Mapping
from typing import NamedTuple

from shadowkv_lab.errors import BadFile, CannotRun, DoesNotFit
from shadowkv_lab.server.plugin import Settings

ROW = 576  # latent 512 and rope 64: what the FlashInfer MLA backend reads of a row
PACKED = 656  # fp8_ds_mla: 512 e4m3, 4 fp32 scales, 64 bf16
BF16_ROW_BYTES = 2 * ROW
GIB = 1 << 30


class Rule(NamedTuple):
    """One argument: the values under which the plug-in runs, and why not under others."""

    argument: str
    allowed: tuple
    why: str
    shadow_only: bool = False  # a strategy that keeps no copy cannot miss a write

    @property
    def flag(self) -> str:
        return "--" + self.argument.replace("_", "-")


UNSEEN = "rows then reach the pool past its class's write paths, and the mirror would miss them"
OFF = (False, None)
RULES = (
    Rule("kv_cache_dtype", ("fp8_e4m3",), "there is no cast to save for another KV dtype"),
    Rule(
        "dtype",
        ("auto", "bfloat16"),
        "the mirror holds BF16, and another query dtype would cast it again",
    ),
    Rule("pp_size", (1,), "pipeline stages share out the layers; not written for"),
    Rule("dcp_size", (1,), "decode context parallelism spreads a request's rows over GPUs"),
    Rule("attn_cp_size", (1,), "context parallelism writes gathered rows"),
    Rule("attn_dp_size", (1,), "data-parallel attention pads batches in ways not tested"),
    Rule("enable_dp_attention", OFF, "data-parallel attention pads batches in ways not tested"),
    Rule("speculative_algorithm", (None,), "a draft model has a pool and steps of its own"),
    Rule("enable_two_batch_overlap", OFF, "two batches at once would share one scratch buffer"),
    Rule("enable_pdmux", OFF, "prefill and decode at once would share one scratch buffer"),
    Rule("enable_unified_memory", OFF, "the pool is then of another class"),
    Rule("enable_page_major_kv_layout", OFF, "the pool is then of another class"),
    Rule("enable_kv_cache_sharding", OFF, "the pool is then of another class"),
    Rule("enable_dsa_cache_layer_split", OFF, "the pool is then of another class"),
    Rule("enable_hisparse", OFF, f"HiSparse swaps rows in by address: {UNSEEN}"),
    Rule("enable_hierarchical_cache", OFF, f"HiCache loads rows from the host: {UNSEEN}", True),
    Rule("enable_lmcache", OFF, f"LMCache loads rows from outside: {UNSEEN}", True),
    Rule("enable_flexkv", OFF, f"FlexKV loads rows from outside: {UNSEEN}", True),
    Rule("enable_unified_cache_external_linker", OFF, f"an external cache: {UNSEEN}", True),
    Rule("radix_cache_backend", (None,), f"a cache of another maker: {UNSEEN}", True),
    Rule(
        "disaggregation_mode",
        ("null",),
        f"disaggregated prefill sends rows by RDMA: {UNSEEN}",
        True,
    ),
    Rule("disaggregation_decode_enable_offload_kvcache", OFF, f"KV offload: {UNSEEN}", True),
    Rule(
        "enable_memory_saver",
        OFF,
        "a pool that is released and taken back holds other bytes than its mirror",
        True,
    ),
)


def check_arguments(arguments: Mapping[str, object], chosen: Settings) -> None:
    """Raise `CannotRun` naming the first argument under which `chosen` cannot run.

    `arguments` are the resolved ones (`ServerArgs.resolved_dict()`); one that is not among them
    is taken as not in use.
    """
    decode = arguments.get("decode_attention_backend") or arguments.get("attention_backend")
    if decode != "flashinfer":
        raise CannotRun(
            f"Attention backend {decode!r} for decoding",
            "flashinfer",
            "Only its MLA backend is hooked: start with --attention-backend flashinfer",
        )
    for rule in RULES:
        value = arguments.get(rule.argument, rule.allowed[0])
        if value in rule.allowed or (rule.shadow_only and chosen.strategy != "shadow"):
            continue
        allowed = ", ".join("off" if v is False else str(v) for v in rule.allowed if v is not None)
        raise CannotRun(
            f"SHADOWKV_STRATEGY={chosen.strategy} with {rule.flag} ({value}): {rule.why}",
            allowed or "not set",
            f"Start without {rule.flag}, or unset SHADOWKV_STRATEGY",
        )


def check_pool(pool: object, chosen: Settings) -> None:
    """Raise for a pool whose rows are not 576 raw FP8 bytes, or whose writes are not hooked.

    `BadFile`: a pool without latent rows. `CannotRun`: a class with write paths of its own,
    packed 656-byte rows, another dtype, a pool whose memory is given out after graph capture.
    """
    kind = type(pool).__name__
    if not hasattr(pool, "kv_lora_rank"):
        raise BadFile(
            f"The server's KV pool is a {kind}",
            "MLATokenToKVPool, DSATokenToKVPool",
            "The plug-in is for models with multi-head latent attention",
        )
    if kind not in ("MLATokenToKVPool", "DSATokenToKVPool"):
        raise CannotRun(
            f"The server's KV pool is a {kind}, which writes its rows by itself",
            "MLATokenToKVPool, DSATokenToKVPool",
        )
    width = pool.kv_buffer[0].shape[-1]
    if width == PACKED:
        raise CannotRun(
            f"The pool's rows are packed, {PACKED} bytes with scales and a BF16 rope part, where "
            f"--attention-backend flashinfer reads {ROW} raw values: it would attend over noise",
            f"{ROW}-byte rows",
            "For a DSA model, --dsa-prefill-backend trtllm --dsa-decode-backend trtllm makes "
            "SGLang keep raw rows (kv_cache_configurator.calculate_mla_kv_cache_dim)",
        )
    if width != ROW or str(pool.dtype) != "torch.float8_e4m3fn":
        raise CannotRun(
            f"The pool holds rows of {width} x {pool.dtype}", f"{ROW} x torch.float8_e4m3fn"
        )
    if getattr(pool, "post_capture_active", False):
        raise CannotRun(
            "The pool's memory is given out after graph capture",
            "a pool that is allocated before it",
        )
    if chosen.layers is not None:
        here = range(pool.start_layer, pool.start_layer + pool.layer_num)
        if outside := sorted(chosen.layers - set(here)):
            raise CannotRun(f"SHADOWKV_LAYERS names layer {outside[0]}", f"{here[0]} to {here[-1]}")


def check_room(pool: object, layers: int, room_bytes: int) -> None:
    """Raise `DoesNotFit` unless pool and mirror of `layers` layers fit the KV memory.

    `room_bytes` is what SGLang found for KV: free after weights less its reserve. The message
    tells the `--max-total-tokens` that fits.
    """
    rows = pool.size + pool.page_size
    kept = pool.get_kv_size_bytes()
    mirror = rows * layers * BF16_ROW_BYTES
    if kept + mirror <= room_bytes:
        return
    a_token = kept / rows + layers * BF16_ROW_BYTES
    tokens = int(room_bytes / a_token) // pool.page_size * pool.page_size - pool.page_size
    raise DoesNotFit(
        f"A mirror of {layers} layers takes {mirror / GIB:.2f} GiB beside the pool's "
        f"{kept / GIB:.2f} GiB for {pool.size} tokens; {room_bytes / GIB:.2f} GiB are for KV",
        f"up to {max(0, tokens)} tokens",
        f"Start with --max-total-tokens {tokens}" if tokens > 0 else "Shadow fewer layers",
    )

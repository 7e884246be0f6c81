"""The line that launches a server with a strategy; none for what no server can launch."""

from shadowkv_lab.deployment import LAYOUTS, Deployment
from shadowkv_lab.errors import CannotRun
from shadowkv_lab.load import Load
from shadowkv_lab.server.plugin import STRATEGIES as PLUGGED
from shadowkv_lab.strategies import Strategy, parse

PLAIN = ("full_cast", "bf16_pool")  # what an SGLang without the plug-in does


def launch_line(
    strategy: "Strategy | str",
    deployment: Deployment,
    max_total_tokens: int | None = None,
    load: Load | None = None,
) -> str:
    """The command for SGLang, with the plug-in's variables where the strategy needs it.

    `max_total_tokens` caps the pool. Of a load counts how it reads, and its tokens per step: more
    than one is drafted by the model's MTP layer. Raises `CannotRun` with the reason where there is
    no such server.
    """
    strategy = parse(strategy)
    if why := no_line(strategy, deployment, load):
        raise CannotRun(f"No server with {strategy.tag.title}: {why}")
    dtype = "bfloat16" if strategy.kinds == ("bf16",) else deployment.layout
    flags = [f"--model-path {deployment.checkpoint.name}", f"--tp {deployment.tensor_parallel}"]
    flags += ["--attention-backend flashinfer", f"--kv-cache-dtype {dtype}"]
    if deployment.data_parallel > 1:
        flags += [f"--dp {deployment.data_parallel} --enable-dp-attention"]
    if deployment.model.dsa and strategy.kinds != ("bf16",):  # else its FP8 rows are packed
        flags += ["--dsa-prefill-backend trtllm --dsa-decode-backend trtllm"]
    elif deployment.page_size > 1 and not deployment.model.dsa:
        flags += [f"--page-size {deployment.page_size}"]
    if "memory_fraction" in deployment.given:
        flags += [f"--mem-fraction-static {deployment.memory_fraction:g}"]
    if max_total_tokens is None and len(strategy.kinds) > 1:
        max_total_tokens = deployment.rows(strategy)  # SGLang sizes its pool without the copy
    if max_total_tokens:
        flags += [f"--max-total-tokens {max_total_tokens}"]
    if (tokens_per_step := load.tokens_per_step if load else 1) > 1:
        flags += [f"--speculative-algorithm EAGLE --speculative-num-steps {tokens_per_step - 1}"]
        flags += [f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens_per_step}"]
    variables = ""
    if strategy.name not in PLAIN:
        variables = f"SHADOWKV_STRATEGY={strategy.name} "
        if layers := getattr(strategy, "layers", None):
            variables += f"SHADOWKV_LAYERS={layers} "
    return f"{variables}python -m sglang.launch_server {' '.join(flags)}"


def no_line(strategy: Strategy, deployment: Deployment, load: Load | None = None) -> str:
    """Why no server can be launched with a strategy there; "" where one can."""
    if load and load.reads == "dsa":
        if strategy.casts_pool:
            return "SGLang casts in its dense backends, and none of them reads chosen rows"
        return "the lab's lines and its plug-in are for dense reads"
    if deployment.engine != "sglang":
        return "the lab knows SGLang's flags only"
    if strategy.name not in (*PLAIN, *PLUGGED):
        return "SGLang 0.5.23 does not call it, and the lab's plug-in does not either"
    if strategy.kinds != ("bf16",) and LAYOUTS[deployment.layout] != "fp8":
        return f"its rows lie as {deployment.layout}"
    if strategy.name not in PLAIN:
        if deployment.mtp:
            return "the plug-in was not written for a draft's steps"
        if deployment.layout != "fp8_e4m3":
            return f"the plug-in reads fp8_e4m3 rows, and these are {deployment.layout}"
        if deployment.data_parallel > 1 or deployment.pipeline_parallel > 1:
            return "the plug-in was not written for DP attention or pipeline stages"
        if deployment.decode_context_parallel > 1:
            return "the plug-in was not written for decode context parallelism"
    return ""

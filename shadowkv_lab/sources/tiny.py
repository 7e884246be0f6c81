"""Write a tiny GLM-5-architecture checkpoint with random weights and planted outliers.

    python -m shadowkv_lab.sources.tiny DIRECTORY [--seed 0]

The latent row has GLM-5's 512 + 64 values and its head dimensions, so that captured rows feed the
decode lab; everything else is small (4 layers, 3 of them dense, 8 heads, 26 MB). A language model
it is not: what it shows is the arithmetic, and every figure of its rows says "random weights".

Planted in every layer, in kv_a_layernorm and undone in kv_b_proj, so that the function stays and
the cached rows carry it: a log-normal spread of channel gains, CLIPPED channels that exceed e4m3's
448 at times, and FLUSHED channels whose values are mostly below its least subnormal, 2^-9.
"""

import argparse
from pathlib import Path

import torch

from shadowkv_lab.files import read_json, write_json

VOCAB = 258  # bytes, begin of text, padding
CLIPPED, FLUSHED = 2, 24  # channels of each layer
CLIPPED_GAIN, FLUSHED_GAIN, SPREAD = 250.0, 1e-3, 1.0
SHARDS = 4

CONFIG = dict(
    vocab_size=VOCAB,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=3,
    q_lora_rank=128,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=192,
    v_head_dim=256,
    index_topk=2048,
    index_head_dim=128,
    index_n_heads=4,
    max_position_embeddings=4096,
    bos_token_id=256,
    eos_token_id=None,
    pad_token_id=257,
)


def build(seed: int = 0, dtype: torch.dtype = torch.bfloat16, outliers: float = 1.0):
    """The model, in eval mode; `outliers` is the strength of the planted ones, 0 for none."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    torch.manual_seed(seed)
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**CONFIG)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:  # unit variance in, unit variance out, whatever the width
                weight.normal_(std=weight.shape[-1] ** -0.5)
            if name.endswith("embed_tokens.weight"):
                weight.normal_()
        for layer in model.model.layers:
            _plant(layer.self_attn, outliers)
    return model.to(dtype)


def _plant(attention, outliers: float) -> None:
    gains = (torch.randn(attention.kv_lora_rank) * SPREAD).exp()
    order = torch.randperm(attention.kv_lora_rank)
    gains[order[:CLIPPED]] = CLIPPED_GAIN
    gains[order[CLIPPED : CLIPPED + FLUSHED]] = FLUSHED_GAIN
    gains = gains**outliers
    attention.kv_a_layernorm.weight.mul_(gains)
    attention.kv_b_proj.weight.div_(gains)
    attention.q_b_proj.weight.mul_(2.0)  # scores spread over a few nats, as in a trained model


def write_tokenizer(directory: Path) -> None:
    """One token a byte: a tokenizer that every text fits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.add_special_tokens(["<bos>", "<pad>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_level, bos_token="<bos>", pad_token="<pad>"
    )
    fast.save_pretrained(directory)


def write(
    directory: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, outliers: float = 1.0
) -> Path:
    """Write the checkpoint, its index, its tokenizer, and the mark that it is random."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = build(seed, dtype, outliers)
    size = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(directory, max_shard_size=size // SHARDS)
    write_tokenizer(directory)
    # capture passes the mark on to every pool file
    config = read_json(directory / "config.json") | {"shadowkv_weights": "random"}
    write_json(directory / "config.json", config, indent=2)
    return directory


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.directory, arguments.seed)

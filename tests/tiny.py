"""A small model's config.json, for several tests."""

CONFIG = dict(
    num_hidden_layers=2,
    num_attention_heads=8,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=192,
    v_head_dim=256,
    hidden_size=1024,
    max_position_embeddings=4096,
)

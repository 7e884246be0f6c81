"""Small real pools, and a real FlashInfer MLA backend around a wrapper that attends in float64."""

from types import SimpleNamespace

import torch

FP8 = torch.float8_e4m3fn


def pool(kind="MLATokenToKVPool", size=128, layers=3, start=0, dtype=FP8, width=576):
    """A real pool of SGLang's; DSA pools have pages of 64."""
    from sglang.srt.mem_cache import memory_pool

    common = dict(
        dtype=dtype,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
        start_layer=start,
        end_layer=start + layers - 1,
    )
    if kind == "DSATokenToKVPool":
        return memory_pool.DSATokenToKVPool(
            size, 64, index_head_dim=128, kv_cache_dim=width, **common
        )
    return memory_pool.MLATokenToKVPool(size, 1, **common)


def layer(number, heads=8):
    """What the pool and the backend ask of a RadixAttention."""
    return SimpleNamespace(
        layer_id=number,
        tp_q_head_num=heads,
        v_head_dim=512,
        head_dim=576,
        scaling=0.0625,
        logit_cap=0.0,
    )


class Wrapper:
    """In flashinfer's place: attends over its list of slots, and remembers what it was given."""

    def __init__(self, slots, lens):
        self._kv_indices_buf, self.lens = slots.int(), lens

    def plan(self, *_):
        pass

    def run(self, q_nope, q_rope, ckv, kpe, out, return_lse=False):
        self.ckv = ckv
        start = 0
        for b, n in enumerate(self.lens):
            at = self._kv_indices_buf[start : start + n].long()
            c, pe = ckv[at, 0].double(), kpe[at, 0].double()
            s = (q_nope[b].double() @ c.T + q_rope[b].double() @ pe.T) * 0.0625
            out[b] = (s.softmax(-1) @ c).to(out.dtype)
            start += n
        return out


def backend(of_pool, wrapper=None, heads=8):
    """A real backend, without the constructor that wants a GPU."""
    from sglang.srt.layers.attention import flashinfer_mla_backend as mla

    made = object.__new__(mla.FlashInferMLAAttnBackend)
    made.token_to_kv_pool = of_pool
    made.forward_metadata = SimpleNamespace(decode_wrapper=wrapper)
    planner = object.__new__(mla.FlashInferMLAIndicesUpdaterDecode)
    planner.attn_backend, planner.num_local_heads, planner.scaling = made, heads, 0.0625
    made.indices_updater_decode = planner
    return made


def runner(of_pool, **changes):
    """What `attach` asks of a ModelRunner."""
    return SimpleNamespace(
        **{
            "token_to_kv_pool": of_pool,
            "dtype": torch.bfloat16,
            "is_draft_worker": False,
            **changes,
        }
    )


def attached(of_pool, wrapper=None, heads=8):
    """A backend whose pool has the chosen strategy's reader."""
    from shadowkv_lab.server.plugin import hooks

    made = backend(of_pool, wrapper, heads)
    hooks.attach(None, made, runner(of_pool))
    return made


def exact(of_pool, copy_of):
    """Whether every mirrored layer is bf16(pool), bit for bit."""
    return all(
        torch.equal(
            copy.view(torch.int16),
            of_pool.kv_buffer[n - of_pool.start_layer]
            .flatten(1)
            .view(FP8)
            .to(torch.bfloat16)
            .view(torch.int16),
        )
        for n, copy in copy_of.items()
    )

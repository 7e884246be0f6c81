"""`shadowkv bench dsa` without its GPU: what it compares, with stand-ins for the peers' libraries.

The stand-ins read their arguments as the libraries' documentation has them, byte by byte.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shadowkv_lab.errors import CannotRun
from shadowkv_lab.kernels import flashmla
from shadowkv_lab.kernels.deepgemm import DeepGEMM
from shadowkv_lab.model import load_model
from shadowkv_lab.steps import bench, bench_dsa, timing
from tests.kernels.test_index import CODES

SMALL = replace(load_model("glm-5"), layers=2, index_layers=2, index_at=(0, 1), index_topk=64)


def logits(q, kept, weights, lens, table, schedule, longest):
    """[B, longest]: pages [n, 64, 1, 132] are 64 keys of 128 bytes, then 64 scales."""
    assert q.shape[1] == 1 and kept.shape[1:] == (64, 1, 132) and lens.shape == (len(q), 1)
    raw, out = kept.reshape(len(kept), -1).numpy(), torch.full((len(q), longest), float("nan"))
    queries = CODES[q.view(torch.uint8).numpy()]
    for b in range(len(q)):
        for t in range(int(lens[b])):
            page, place = raw[int(table[b, t // 64])], t % 64
            key = CODES[page[place * 128 : place * 128 + 128]]
            scale = page[8192 + 4 * place : 8196 + 4 * place].copy().view(np.float32)[0]
            heads = np.maximum(queries[b, 0] @ key, 0)
            out[b, t] = float(heads @ weights[b].numpy()) * float(scale)
    return out


def attention(q, rows, chosen, scale):
    """One request: q [H, 576] over the rows that `chosen` names."""
    rows = rows[chosen.long()].double()
    return torch.softmax(q.double() @ rows.T * scale, -1) @ rows[:, :512]


def sparse(q, kv, indices, scale, use_legacy):
    assert use_legacy and q.shape[1] in (64, 128) and kv.shape[1] == 1 and indices.shape[1] == 1
    out = [attention(*of, scale) for of in zip(q, [kv[:, 0]] * len(q), indices[:, 0], strict=True)]
    return [torch.stack(out).bfloat16(), None, None]


def packed(q, kept, table, lens, rank, schedule, *, softmax_scale, indices, **flags):
    assert flags == {"is_fp8_kvcache": True, "use_legacy": True} and kept.shape[1:] == (64, 1, 656)
    raw = kept.reshape(-1, 656).numpy()
    latent = CODES[raw[:, :512]].reshape(-1, 4, 128)
    latent = latent * raw[:, 512:528].copy().view(np.float32)[..., None]
    rope = torch.from_numpy(raw[:, 528:].copy()).view(torch.bfloat16).double()
    rows = torch.cat([torch.from_numpy(latent.reshape(-1, 512)), rope], 1)
    out = [attention(q[b, 0], rows, indices[b, 0], softmax_scale) for b in range(len(q))]
    return torch.stack(out)[:, None].bfloat16(), None


@pytest.fixture
def on_a_cpu(monkeypatch):
    def once(pool, layer_fn, layers=None):
        for layer in range(layers or pool.layers):
            layer_fn(layer)
        return timing.Timing(2.0, 0.1, 5)

    monkeypatch.setattr(bench, "time_layers", once)
    monkeypatch.setattr(bench_dsa, "LOADS", ((2, 100), (1, 300), (9, 9000)))
    monkeypatch.setattr(bench_dsa, "READERS", (2,))
    monkeypatch.setattr(bench_dsa, "ROWS", 192)
    deep_gemm = SimpleNamespace(
        get_paged_mqa_logits_metadata=lambda lens, page, sms: None,
        get_num_sms=lambda: 132,
        fp8_fp4_paged_mqa_logits=logits,
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm)
    gpu = torch.device("cuda")
    monkeypatch.setattr(bench_dsa, "DeepGEMM", lambda device: DeepGEMM(gpu))
    library = SimpleNamespace(
        get_mla_metadata=lambda: (None, None),
        flash_mla_sparse_fwd=sparse,
        flash_mla_with_kvcache=packed,
    )
    monkeypatch.setattr(flashmla, "library", lambda device: library)


def test_scores_and_choices_beside_the_peer(on_a_cpu):
    groups = list(bench_dsa._choices(SMALL, torch.device("cpu"), 512))
    names = [[(name, load) for name, load, *_ in group] for group in groups]
    loads = "2 x 100", "1 x 300"  # the third does not fit
    kernels = ["index_scores", "deep_gemm"], ["choose"], ["index_write"]
    assert names == [[(k, load) for k in names] for load in loads for names in kernels]
    assert all(error < 1e-5 for _, _, _, _, _, error in groups[0] + groups[3])
    moved = {(name, load): size for group in groups for name, load, _, _, size, _ in group}
    assert moved["deep_gemm", "2 x 100"] == moved["index_scores", "2 x 100"] == 2 * 136 * 200
    assert moved["choose", "1 x 300"] == 2 * 4 * (300 + 64)


def test_attention_over_chosen_rows_beside_the_peers(on_a_cpu):
    torch.manual_seed(0)  # queries are drawn, and the interpreter truncates outputs to BF16
    one, two = bench_dsa._reads(SMALL, torch.device("cpu"), (8, 64))
    for group, heads in ((one, 8), (two, 64)):
        assert [row[0] for row in group] == [
            "fused_fp8",
            "flashmla_sparse bf16",
            "flashmla_sparse packed",
        ]
        for name, load, count, _, size, error in group:
            row = {"fused_fp8": 576, "flashmla_sparse bf16": 1152}.get(name, 656)
            assert (load, count, size) == ("2 x 64 chosen", heads, 2 * 2 * 64 * row)
            assert error < 6e-3, name


def test_a_peer_that_fails_is_said_and_left_out(on_a_cpu, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(DeepGEMM, "scores", broken)
    with pytest.warns(UserWarning, match="deep_gemm failed: RuntimeError.*no such kernel"):
        groups = list(bench_dsa._choices(SMALL, torch.device("cpu"), 512))
    assert [row[0] for group in groups for row in group] == [
        *("index_scores", "choose", "index_write")
    ] * 2


def test_it_asks_for_a_gpu():
    with pytest.raises(CannotRun, match="cannot be timed on cpu"):
        next(bench_dsa.run(SMALL, torch.device("cpu")))

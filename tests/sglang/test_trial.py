"""Drawn weights and counted rows: what a trial without a checkpoint rests on."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from worlds import layer, pool, runner

from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.server.plugin import trial


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(64, 32)
        self.up = torch.nn.Linear(256, 64)
        self.norm = torch.nn.RMSNorm(32)
        self.register_buffer("rotary_cos", torch.full((4, 4), 0.5))
        self.to(torch.bfloat16)


def test_the_variables():
    assert trial.targets({}) == {}
    assert list(trial.targets({"SHADOWKV_WEIGHTS": "drawn"})) == [trial.WEIGHTS]
    assert list(trial.targets({"SHADOWKV_ROWS": "1"})) == [trial.FORWARD]
    with pytest.raises(OutOfRange, match="drawn"):
        trial.targets({"SHADOWKV_WEIGHTS": "scaled"})


def test_drawn_weights_have_the_size_of_trained_ones_and_are_the_same_again(sglang):
    """After SGLang's own dummy weights: within 1e-3, as its source says."""
    from sglang.srt.model_loader.loader import initialize_dummy_weights

    models = [Model(), Model()]
    for model in models:
        initialize_dummy_weights(model)
        assert model.norm.weight.abs().max() <= 1.1e-3
        trial.draw(None, model)
    model = models[0]
    assert (model.norm.weight == 1).all() and (model.up.bias == 0).all()
    assert model.up.weight.std().item() == pytest.approx(256**-0.5, rel=0.05)
    assert model.embed_tokens.weight.std().item() == pytest.approx(1, rel=0.05)
    assert torch.equal(model.up.weight, models[1].up.weight)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_zero_rows_are_counted_in_the_first_prefills_only(sglang, dtype, caplog, monkeypatch):
    monkeypatch.setattr(trial, "looks", 0)
    real = pool(dtype=dtype)
    rows = torch.randn(3, 1, 576).bfloat16()
    rows[1] = -0.0
    rows[2] = 1e-5 if dtype != torch.bfloat16 else 0.0  # below half of the smallest e4m3: zero
    slots = torch.tensor([4, 7, 9])
    real.set_kv_buffer(layer(2), slots, rows, None)
    decoding, prefill = (
        SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda e=extends: e), out_cache_loc=slots
        )
        for extends in (False, True)
    )
    with caplog.at_level(logging.INFO, logger="shadowkv"):
        for batch in (decoding, *[prefill] * (trial.LOOKS + 2)):
            trial.count_rows(None, runner(real), batch)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["shadowkv: rows of layer 2: 3 written, 2 all zero"] * trial.LOOKS
    assert re.search(r"rows of layer \d+: (\d+) written, (\d+) all zero", said[0])


def test_the_trial_s_hooks_are_loaded_by_sglang_without_a_strategy(sglang):
    from test_plugin import load

    done = load(SHADOWKV_STRATEGY="", SHADOWKV_WEIGHTS="drawn", SHADOWKV_ROWS="1")
    assert trial.WEIGHTS in done.stdout and trial.FORWARD in done.stdout, done.stderr
    assert "set_kv_buffer" not in done.stdout
    assert load(SHADOWKV_WEIGHTS="x").returncode == 1

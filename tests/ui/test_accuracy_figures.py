"""Figures of accuracy: what the titles state is what was computed."""

import numpy as np

from shadowkv_lab import accuracy, facts
from shadowkv_lab.accuracy import model
from shadowkv_lab.sources import poolfile
from shadowkv_lab.strategies import parse
from shadowkv_lab.ui import accuracy as figures


def test_figures_state_their_finding_and_their_data():
    pool = poolfile.load(facts.DATA / "pools" / "tiny-glm-5-random.safetensors")
    errors, alone = accuracy.storage_errors(pool), accuracy.storage_attention(pool)
    whole = accuracy.attention_errors(pool, [parse("full_cast"), parse("bf16_pool")])
    channels = accuracy.channel_errors(pool, "fp8")
    bars = [
        model.ModelError(n, 10.0**-i, 0.1, 0.9, 5.0, 0.1, 9)
        for i, n in enumerate(accuracy.STORAGES)
    ]
    found = {
        "rows": figures.storage_lines(pool, errors),
        "channels": figures.channel_map(pool, channels, "fp8"),
        "bytes": figures.error_against_bytes(pool, alone, whole),
        "split": figures.attention_split(pool, whole),
        "model": figures.model_bars(bars, pool.model, "tiny, random weights"),
    }
    for fig in found.values():
        title = fig.layout.title
        assert any(c.isdigit() for c in title.text) and "random weights" in title.subtitle.text
        assert fig.layout.xaxis.title.text
    latent = np.mean([e.relative_l2 for e in errors if (e.storage, e.part) == ("fp8", "latent")])
    assert f"{latent:.1%}" in found["rows"].layout.title.text
    assert {f.layout.yaxis.type for n, f in found.items() if n in ("rows", "bytes", "model")} == {
        "log"
    }

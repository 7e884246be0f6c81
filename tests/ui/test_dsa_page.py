"""The page on DSA: where the lines cross, the published points, and what its first lines say."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from shadowkv_lab import facts
from shadowkv_lab.deployment import Setting
from shadowkv_lab.load import Load
from shadowkv_lab.model import load_model
from shadowkv_lab.steps.fit import by_published_index
from shadowkv_lab.steps.predict import predict_at
from shadowkv_lab.steps.step import frame, recorded
from shadowkv_lab.ui import decode, dsa

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "a6_with_dsa.ipynb"


def lead(strategy, n, model, card, heads, concurrency):
    """By how much DSA is ahead, in ms, over a pool of the live tokens."""
    pool = -(-n // 64) * 64 * concurrency
    dense, sparse = (
        predict_at(
            strategy,
            Setting(load_model(model), heads, pool, Load(concurrency, n, reads=reads), 64),
            card,
        ).ms
        for reads in ("dense", "dsa")
    )
    return dense - sparse


@pytest.mark.parametrize(
    ("strategy", "model", "card", "heads", "concurrency"),
    [
        ("bf16_pool", "glm-5.2", "h200", 8, 1),
        ("fused_fp8", "glm-5.2", "h200", 8, 1),
        ("fused_fp8", "glm-5", "h200", 8, 16),
        ("bf16_pool", "glm-5.2", "rtx-pro-6000-server", 8, 1),
    ],
)
def test_the_lines_cross_where_it_says(strategy, model, card, heads, concurrency):
    where = model, card, heads, concurrency
    names = dict(zip(("model", "card", "heads", "concurrency"), where, strict=True))
    found = dsa.worth_from(strategy, **names)
    assert lead(strategy, int(found * 0.9), *where) < 0 < lead(strategy, int(found * 1.1), *where)
    longest = load_model(model).max_positions
    for n in (2 * found, longest // 2, longest):
        assert lead(strategy, n, *where) > 0


def test_never_means_at_no_context():
    assert dsa.worth_from("fused_fp8", model="glm-5", card="h200", heads=8) is None
    for n in (1024, 2049, 10_000, 50_000, 202_752):
        assert lead("fused_fp8", n, "glm-5", "h200", 8, 1) < 0


def test_the_figures_say_and_draw_what_was_computed():
    found = dsa.over_contexts(("bf16_pool", "fused_fp8"))
    figure = dsa.against_context(found)
    title = figure.layout.title.text
    for name, called in (("bf16_pool", "BF16 pool"), ("fused_fp8", "fused FP8")):
        assert f"{dsa.rounded(dsa.worth_from(name))} ({called})" in title
    assert {t.name for t in figure.data} == {
        "BF16 pool, dense",
        "BF16 pool, DSA",
        "fused FP8 (this lab), dense",
        "fused FP8 (this lab), DSA",
    }
    for trace in figure.data:
        rows = found[found.title == trace.name.removesuffix(", dense")]
        assert list(trace.y) == rows.sort_values("context").step_ms.tolist()
        assert trace.x[0] == 1024 and trace.x[-1] > 1_000_000


@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_published_points_are_differences_of_published_rows(concurrency):
    rows = pd.read_csv(facts.path("published", "tables", "dsa_decode_module.csv"))
    rows = rows[rows.requests == concurrency]
    cells = rows.pivot_table(index=["gpu", "heads", "kv_dtype"], columns="context", values="us")
    grown = cells.sub(cells[2049], axis=0).groupby("gpu").median()
    figure = dsa.costs_and_saves(concurrency)
    points = [t for t in figure.data if t.name.startswith("published")]
    assert [t.name for t in points] == [
        f"published, {name}" for name in ("B200", "GB200", "H100 SXM", "H200 SXM")
    ]
    for trace, card in zip(points, ("b200", "gb200", "h100", "h200"), strict=True):
        own = grown.loc[card].dropna()
        own = own[own.index > 2049]
        assert list(trace.x) == own.index.tolist()
        assert list(trace.y) == pytest.approx(own.tolist(), rel=1e-9)


def test_index_and_top_k_are_parts_of_the_bars():
    steps = frame(dsa.step_at(name, "dsa", 65_536) for name in ("full_cast", "shadow", "fused_fp8"))
    figure = decode.step_by_phase(steps)
    parts = {t.name: list(t.x) for t in figure.data if t.y[0] is not None}
    assert list(parts) == ["cast", "attention", "write", "index", "top-k"]
    ordered = steps.sort_values("step_ms")
    assert parts["top-k"] == ordered.top_k_ms.tolist() and min(parts["index"]) > 0
    assert sum(parts[name][0] for name in parts) == pytest.approx(ordered.step_ms.iloc[0])
    assert "hypothetical" in "".join(figure.data[0].y)
    assert "full cast" not in figure.layout.title.text
    dense = frame(dsa.step_at(name, "dense", 65_536) for name in ("full_cast", "shadow"))
    assert "top-k" not in {t.name for t in decode.step_by_phase(dense).data}


def test_the_first_lines_of_the_notebook_are_what_is_predicted():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    text = "".join(cells[0]["source"])

    def start(strategy, **where):
        return dsa.rounded(dsa.worth_from(strategy, **where))

    h200, rtx = dict(card="h200", heads=8), dict(card="rtx-pro-6000-server", heads=8)
    said = re.search(r"from (\S+) tokens on with a BF16 pool, and never with fused FP8", text)
    assert said[1] == start("bf16_pool", model="glm-5", **h200)
    assert start("fused_fp8", model="glm-5", **h200) == "never"
    said = re.findall(r"from (\S+) tokens on with a BF16 pool, from (\S+) with fused FP8", text)
    published = dict(fitted=by_published_index(), **h200)
    for found, where in zip(said, (h200, published), strict=True):
        assert found == (start("bf16_pool", **where), start("fused_fp8", **where))
    said = re.search(r"RTX PRO 6000 Server from (\S+) and (\S+)\.\n", text)
    assert said.groups() == (start("bf16_pool", **rtx), start("fused_fp8", **rtx))
    said = re.search(r"GLM-5 gains from (\S+) \(BF16 pool\) and (\S+) \(fused FP8\)", text)
    many = dict(model="glm-5", concurrency=16, **h200)
    assert said.groups() == (start("bf16_pool", **many), start("fused_fp8", **many))
    said = re.search(r"takes (\S+) ms from .* shadow, (\S+) ms with gather .* and (\S+) ms", text)
    names = "bf16_pool", "gather_cast", "fused_fp8"
    at_128k = [f"{dsa.step_at(name, 'dsa', 131_072).ms:.1f}" for name in names]
    assert list(said.groups()) == at_128k
    assert f"{dsa.step_at('shadow', 'dsa', 131_072).ms:.1f}" == at_128k[0]
    table = dsa.table(dsa.crossovers(models=("glm-5",), cards=("h200",), heads=(8,)))
    assert table.iloc[0].tolist() == ["180K", "17K", "never", "38K"]


def test_what_the_notebook_says_of_recorded_steps_and_peers():
    text = "".join(json.loads(NOTEBOOK.read_text())["cells"][0]["source"])
    steps = [s for s in recorded() if s.setting.load.reads == "dsa"]
    assert f"recorded: {len(steps)} steps of GLM-5 (78 layers) by every strategy" in text
    at_8k = [s for s in steps if s.setting.load == Load(1, 8192, reads="dsa")]
    share = {s.strategy.label: s["top_k"].ms / s.ms for s in at_8k}
    named = "bf16_pool", "shadow", "gather_cast", "fused_fp8"
    assert all(share[name] > 0.5 for name in named)
    rows = json.loads(facts.path("runs", "h200_dsa_peers.json").read_text())["rows"]
    packed, scores = ([r for r in rows if r["kernel"] == n] for n in (PACKED, "deep_gemm"))
    eight, many = ([r["ratio"] for r in packed if r["heads"] == heads] for heads in (8, 64))
    said = re.search(r"takes (\S+) to (\S+) of .*packed.* and (\S+) to (\S+) at 64", text)
    ends = (f"{end(of):.2f}" for of in (eight, many) for end in (min, max))
    assert said.groups() == tuple(ends)
    said = re.search(r"scores take (\S+) to (\S+) times DeepGEMM's", text)
    ratios = [r["ratio"] for r in scores]
    assert said.groups() == (f"{min(ratios):.2f}", f"{max(ratios):.2f}")


PACKED = "flashmla_sparse packed"

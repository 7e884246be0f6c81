"""Waits against the rate: drawn or recorded traffic, by the percentiles of the simulation's own."""

import json
from pathlib import Path

import numpy as np
import pytest

from shadowkv_lab import errors
from shadowkv_lab.serving import traces
from shadowkv_lab.serving.contenders import contenders, engine, reported_or_derived
from shadowkv_lab.serving.simulate import simulate

latencies = pytest.importorskip("shadowkv_lab.ui.latencies")
AZURE = Path(__file__).resolve().parents[2] / "data" / "traffic" / "samples" / "azure-2023.csv"


def test_a_trace_of_ones_own_gives_its_percentiles_against_the_rate(monkeypatch):
    monkeypatch.setattr(latencies, "FACTORS", (0.5, 4.0))
    chosen, load = ("full_cast", "bf16_pool"), traces.load(AZURE)
    view = latencies.waits_view(trace=str(AZURE), strategies=chosen)
    own = load.demand.requests_per_s
    runs = {
        (c.name, factor): simulate(engine(c), load.scaled(rate=factor), overload=True)
        for c in contenders(reported_or_derived(), chosen)
        for factor in latencies.FACTORS
    }
    for name, figure in zip(("ttft", "tpot"), view.figures, strict=False):
        assert [line.name for line in figure.data] == ["full cast", "BF16 pool"] * 2
        for line, (q, label) in zip(
            figure.data, ((q, s) for q in (99, 50) for s in chosen), strict=True
        ):
            assert list(line.x) == pytest.approx([0.5 * own, 4 * own], rel=1e-5)
            each = [getattr(runs[label, f], f"{name}_ms") for f in latencies.FACTORS]
            assert list(line.y) == pytest.approx([np.nanpercentile(ms, q) for ms in each])
    limit = max(rate for s, rate in runs if np.nanpercentile(runs[s, rate].tpot_ms, 99) <= 100)
    assert f"up to {limit * own:.2g} requests/s: BF16 pool" in view.figures[1].layout.title.text
    assert len(view.figures) == 3 and "Azure CSV azure-2023.csv" in view.note
    assert len(view.shown) == 4 and view.columns == latencies.TABLE


def test_traffic_without_a_rate_and_a_file_that_is_not_there_are_named(tmp_path):
    loop = {"output_throughput": 5.0, "max_concurrency": 3, "request_rate": "inf"}
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(loop | {"input_lens": [5, 6], "output_lens": [7, 8]}))
    with pytest.raises(errors.OutOfRange, match="has no rate"):
        latencies.load_of(str(path))
    app = latencies.waits_view.open(trace="nowhere.csv", strategies=("bf16_pool",))
    app.worker.join(60)
    assert "no such file" in app.error.value

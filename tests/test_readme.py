"""The README shows what the lab says: its Python, its picture, its names."""

import contextlib
import io
import json
import re
import statistics
from pathlib import Path

import pytest

from shadowkv_lab.server import runs
from shadowkv_lab.server.plugin import STRATEGIES as SERVED
from shadowkv_lab.steps.step import recorded
from shadowkv_lab.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
LOADS = ((1, 1024), (1, 8192), (1, 32_768), (8, 2048), (32, 2048))
SIDES = [
    ("plain SGLang", "plain"),
    ("`shadow`", "shadow"),
    ("`gather_cast`", "gather_cast"),
    ("`fused_fp8`", "fused_fp8"),
    ("BF16 pool", "bf16"),
]


def test_its_python_prints_what_it_shows():
    (code,), (shown,) = (re.findall(rf"```{k}\n(.*?)```", README, re.S) for k in ("python", "text"))
    assert len(code.strip().splitlines()) <= 8
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert printed.getvalue() == shown


def test_its_picture_is_small_and_described_by_the_recorded_steps():
    said, name = re.search(r"!\[(.*?)\]\((.*?)\)", README).groups()
    assert (ROOT / name).stat().st_size < 120_000
    steps = {
        s.strategy.title.split(" (")[0]: s.ms
        for s in recorded()
        if s.mode == "graph"
        and s.setting.model.name == "glm-5"
        and (s.setting.heads, s.setting.pool_tokens) == (8, 495_616)
        and (s.setting.load.concurrency, s.setting.load.context) == (1, 1024)
        and s.strategy.label in STRATEGIES
    }
    shown = dict(re.findall(r"([A-Za-z][\w ]*?) (\d+\.\d\d)", said.split(": ")[1]))
    assert len(shown) == len(steps) == 7
    assert {title: f"{ms:.2f}" for title, ms in steps.items()} == shown


@pytest.mark.parametrize(("name", "file"), SIDES)
def test_its_server_times_are_those_of_the_servers_results(name, file):
    """TPOT of one stream; of several the time between tokens once all have started."""
    results = ROOT / "data" / "runs" / "server" / "h200-0924" / file / "bench.jsonl"
    seen = {}
    for run in map(json.loads, results.read_text().splitlines()):
        if not run["warm_up"]:
            one = run["max_concurrency"] == 1
            load = run["max_concurrency"], run["random_input_len"]
            seen.setdefault(load, []).append(run["mean_tpot_ms" if one else "steady_itl_ms"])
    section = README.split("## In a real server")[1].split("\n## ")[0]
    cells = re.search(rf"^\| {name}[^|]*\|(.*)\|$", section, re.M)[1].split("|")[:5]
    predicted = runs.find("h200-0924").table().set_index(["side", "requests", "input"]).off
    for load, cell in zip(LOADS, cells, strict=True):
        ms, off = re.fullmatch(r"([\d.]+)(?: \((-?\d+) %\))?", cell.strip()).groups()
        digits = len(ms.partition(".")[2])
        assert f"{statistics.median(seen[load]):.{digits}f}" == ms, load
        assert off is None or abs(100 * predicted[(file, *load)] - int(off)) <= 1, load
        assert (off is None) == (file == "bf16")


def test_its_lists_are_the_labs():
    table = README.split("| strategy | keeps")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == set(STRATEGIES)
    listed = re.search(r"`SHADOWKV_STRATEGY` is (.*?);", README)[1]
    assert tuple(re.findall(r"`(\w+)`", listed)) == SERVED
    notebooks = re.findall(r"^\| `(\w\d+_\w+)` \|", README, re.M)
    assert notebooks == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))

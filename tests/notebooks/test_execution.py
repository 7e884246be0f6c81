"""Every notebook runs from a clean kernel, and its numbers are those computed elsewhere."""

import inspect
import json
import re
from pathlib import Path

import nbformat
import pytest

from shadowkv_lab.ui.display import PLOTLY
from shadowkv_lab.ui.notebooks import WIDGET_VIEW

ROOT = Path(__file__).resolve().parents[2]
NAMES = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def titles(notebook):
    return [o.data["text/plain"] for o in outputs(notebook) if PLOTLY in o.get("data", {})]


def everything(notebook):
    """All text of a notebook's outputs, tables too."""
    found = [o.get("text", "") or "" for o in outputs(notebook)]
    for o in outputs(notebook):
        found += [str(v) for k, v in o.get("data", {}).items() if k.startswith("text/")]
    return "\n".join(found)


def prose(name):
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4).cells
    return "\n".join(c.source for c in cells if c.cell_type == "markdown")


@pytest.mark.parametrize("name", NAMES)
def test_runs_and_gives_what_is_committed(executed, name):
    """No error; the outputs' kinds are the committed ones, and so are titles without a timing."""
    fresh = executed(name)
    committed = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4)
    assert not [o for o in outputs(fresh) if o.output_type == "error"]
    assert not [o for o in outputs(fresh) if WIDGET_VIEW in o.get("data", {})]
    kinds = [
        [
            [sorted(o.get("data", {o.output_type: 0})) for o in c.outputs]
            for c in of.cells
            if c.cell_type == "code"
        ]
        for of in (fresh, committed)
    ]
    assert kinds[0] == kinds[1]
    assert len(_untimed(fresh)) == len(_untimed(committed)), "run make notebooks"
    for now, then in zip(_untimed(fresh), _untimed(committed), strict=True):
        assert _alike(now, then), f"{now!r}, committed as {then!r}: run make notebooks"


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def _alike(one, other):
    """The same words and counts; numbers with decimals may differ by 1 % or in the last digit.

    Another CPU, or another number of threads, sums float32 in another order: 2.57 % or 2.55 %.
    """
    numbers = [[float(n.replace(",", "")) for n in NUMBER.findall(t)] for t in (one, other)]
    digits = [len(n.partition(".")[2]) for n in NUMBER.findall(one)]
    return NUMBER.sub("#", one) == NUMBER.sub("#", other) and all(
        abs(a - b) <= (max(1.01 * 10.0**-d, 0.01 * abs(a)) if d else 0)
        for a, b, d in zip(*numbers, digits, strict=True)
    )


def test_alike_forgives_a_rounding_and_nothing_else():
    assert _alike("off by 2.56%", "off by 2.57%")
    assert not _alike("off by 2.56%", "off by 2.62%")
    assert not _alike("65 of 78 layers", "66 of 78 layers")
    assert not _alike("a shadow wins: 2.5", "a BF16 pool wins: 2.5")


def _untimed(notebook):
    """Titles of figures that hold nothing measured during the run."""
    return [
        o.data["text/plain"]
        for o in outputs(notebook)
        if PLOTLY in o.get("data", {}) and "measured" not in json.dumps(o.data[PLOTLY])
    ]


@pytest.mark.parametrize("name", NAMES)
def test_ends_with_its_provenance(executed, name):
    footer = outputs(executed(name))[-1].data["text/plain"]
    assert "executed on" in footer and "torch" in footer
    assert re.search(r"\d{4}-\d\d-\d\d", footer)


def recorded(strategy, pool_tokens, concurrency=1, context=1024):
    """A recorded step in ms, read without the library."""
    for line in (ROOT / "data" / "runs" / "h200_grid.jsonl").read_text().splitlines():
        run = json.loads(line)
        setting = run["setting"]
        load = {"concurrency": 1, "context": 1024, **setting.get("load", {})}
        found = (run["strategy"]["label"], setting["pool_tokens"], load, setting["model"]["name"])
        asked = {"concurrency": concurrency, "context": context}
        if found == (strategy, pool_tokens, asked, "glm-5") and setting.get("mode") != "eager":
            return run["ms"]
    raise LookupError(strategy)


def test_recorded_runs_state_the_recorded_ratio(executed):
    said = titles(executed("a5_recorded_runs"))
    ratio = recorded("full_cast", 495_616) / recorded("shadow", 495_616)
    grown = recorded("full_cast", 495_616) / recorded("full_cast", 65_536)
    assert f"{ratio:.1f} times shorter" in said[0]
    assert f"grows {grown:.1f} times" in said[1]


def test_the_budget_states_the_report(executed):
    """25.49 GiB, the report's 495,616 FP8 rows, in rows of 576, 1152 and 1728 B and index keys."""
    kept = 495_616 * (576 + 132)  # bytes per layer; an engine keeps whole pages of 64
    held = [kept // (row + 132) // 64 * 64 for row in (576, 1152, 1728)]
    text = everything(executed("03_memory_and_card"))
    assert all(f"{tokens:,}" in text for tokens in held), held
    heading = ", ".join(f"{tokens / 1000:.1f}K" for tokens in held)
    assert heading in prose("03_memory_and_card")


def test_the_reproduction_states_the_report(executed):
    text = everything(executed("02_glm5_report"))
    before, after, cast = 95.6, 74.1, 64.6
    for number in (before - after, after - (before - cast), before - cast):
        assert f"{number:.1f}" in text
    assert f"{78 * 495_616 * 1728 / 1e9:.1f}" in text, "GB that a step's cast moves"
    assert f"{1000 / before:.1f} to {1000 / after:.1f} tok/s" in prose("02_glm5_report")


def test_the_serving_notebook_states_its_assumptions(executed):
    from shadowkv_lab.serving.blocks import BlockManager
    from shadowkv_lab.serving.simulate import PREFILL_TOKENS_PER_S

    text, ran = prose("04_under_traffic"), executed("04_under_traffic")
    watermark = inspect.signature(BlockManager).parameters["watermark"].default
    assert f"{PREFILL_TOKENS_PER_S:,.0f} tokens/s" in text
    assert f"watermark of {100 * watermark:.0f} %" in text
    check = next(
        o.data["text/html"]
        for o in outputs(ran)
        if "off by %" in o.get("data", {}).get("text/html", "")
    )
    # The first heading is that of the row numbers, which are no <td> cells.
    columns = re.findall(r"<th>(.*?)</th>", check.partition("</thead>")[0])[1:]
    cells = re.findall(r"<td>(.*?)</td>", check)
    width = len(columns)
    off = [float(value) for value in cells[columns.index("off by %") :: width]]
    assert off and max(map(abs, off)) <= 2, "the text says within 2 %"


def test_accuracy_orders_the_storages(executed):
    """A scale per 128 values beats none, in every title that compares them."""
    said = titles(executed("a2_accuracy"))[0]
    unscaled, scaled = (float(x) for x in re.findall(r"([\d.]+)%", said)[:2])
    assert scaled < unscaled

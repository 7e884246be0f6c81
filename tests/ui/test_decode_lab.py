"""The decode lab without a browser: settings in, figures whose bars are the runs' own numbers."""

import html
import re
import threading
from pathlib import Path
from typing import Annotated

import pandas as pd
import plotly.graph_objects as go
import pytest

from shadowkv_lab.errors import BadFile, LabError
from shadowkv_lab.steps import step as steps
from shadowkv_lab.strategies import STRATEGIES, parse
from shadowkv_lab.ui import charts, decode, display, kernels
from shadowkv_lab.ui.app import Cancelled, View, Work
from shadowkv_lab.ui.application import application
from shadowkv_lab.ui.controls import Number


@pytest.fixture(scope="module")
def runs():
    return decode.recorded("glm-5", 8)


def bars(fig):
    """{(phase, strategy title): ms} of a stacked bar figure."""
    return {
        (trace.name, name): value
        for trace in fig.data
        if trace.y[0] is not None
        for name, value in zip(trace.y, trace.x, strict=True)
    }


def test_bars_are_the_recorded_phases(runs):
    view = decode.step_view(pool_tokens=495_616)
    drawn = bars(view.figures[0])
    wanted = ("glm-5", 495_616, 1, 1024)
    seen = 0
    for s in steps.replays(steps.recorded()):
        at = s.setting
        cell = (at.model.name, at.pool_tokens, at.load.concurrency, at.load.context)
        if cell == wanted and s.strategy.label in STRATEGIES:
            seen += 1
            assert drawn["attention", s.strategy.title] == s["attention"].ms
            assert drawn["cast", s.strategy.title] == sum(
                p.ms for p in s.phases if p.name == "cast"
            )
    assert seen == len(STRATEGIES)
    assert "recorded" in view.note and "H200" in view.note


def test_full_cast_climbs_with_the_pool_and_the_others_do_not(runs):
    """O(pool) against O(new), in the recorded runs themselves."""
    at = runs[(runs.concurrency == 1) & (runs.context == 1024)]
    growth = {
        s: part.step_ms.max() / part.step_ms.min()
        for s, part in at.groupby("strategy")
        if part.pool_tokens.nunique() == 4
    }
    assert growth["full_cast"] > 6 and growth["vector_cast"] > 4
    assert all(growth[s] < 1.3 for s in ("bf16_pool", "shadow", "gather_cast", "fused_fp8"))
    title = decode.against_pool(at).layout.title.text
    assert f"{growth['full_cast']:.1f} times" in title


def test_the_reports_pool_on_an_h200(runs):
    """The bounds: a cast near 65 ms, a shadow's step 15 times shorter or more."""
    at = runs[(runs.pool_tokens == 495_616) & (runs.concurrency == 1) & (runs.context == 1024)]
    at = at.set_index("strategy")
    assert at.cast_ms["full_cast"] == pytest.approx(65, abs=3)
    assert at.step_ms["full_cast"] / at.step_ms["shadow"] > 15
    assert at.kept_bytes["shadow"] >= 78 * 495_616 * 1728


@pytest.mark.parametrize(
    "asked, got",
    [
        ((500_000, 1, 1000), (495_616, 1, 1024)),
        ((70_000, 40, 1024), (65_536, 32, 1024)),
        ((495_616, 1, 100_000), (495_616, 1, 131_072)),
    ],
)
def test_the_nearest_recorded_cell(runs, asked, got):
    cell = decode.nearest(runs, *asked)
    assert (cell.pool_tokens, cell.concurrency, cell.context) == got


def grey(app):
    return "shadowkv-stale" in app.plots._dom_classes


def test_the_app_follows_its_controls_and_shows_errors_in_place():
    app = decode.step_view.open()
    before = bars(app.view.figures[0])
    app.controls["pool_tokens"].value = 65_536
    assert bars(app.view.figures[0]) != before and "65,536" in app.note.value
    assert "pool_tokens=65536" in app.code.value
    app.controls["strategies"].value = ()
    assert "No recorded run of no strategy" in app.error.value
    assert "Choose at least one" in app.error.value, "the remedy"
    assert 'strategies=("full_cast"' in app.code.value, "the line is that of the grey figures"
    assert grey(app)
    app.reset()
    assert app.error.value == "" and bars(app.view.figures[0]) == before
    assert not grey(app)


def test_disturbed_times_are_called_so_and_not_compared():
    calm = decode.step_view().table
    assert not steps.noisy(calm)
    disturbed = calm.assign(noisy=calm.strategy == "shadow")
    assert steps.noisy(disturbed) == ["shadow"]
    view = decode.views(disturbed, disturbed)
    title = view.figures[0].layout.title.text
    assert "shadow buffer cannot be compared" in title and "times shorter" not in title
    assert "Noisy: shadow; the samples spread" in view.note


def test_shown_figures_change_in_place():
    app = decode.step_view.open()
    shown = app.plots.children[0]
    app.controls["concurrency"].value = 32
    assert app.plots.children[0] is shown
    assert bars(shown.figure) == bars(app.view.figures[0])


def test_no_strategy_chosen_is_an_error_in_place():
    app = decode.step_view.open()
    app.controls["strategies"].value = ()
    assert "at least one strategy" in app.error.value


def slow_app(release, log):
    """An app whose worker waits for `release[value]`."""

    @application("demo.demo", columns=1, slow=lambda settings: True)
    def demo(n: Annotated[int, Number("n", whole=True)] = 0, *, work: Work) -> View:
        """A number."""
        log.append(("start", n))
        work.report("working", 0.5)
        release[n].wait(10)
        if work.cancelled():
            log.append(("cancelled", n))
            raise Cancelled
        if n == 3:
            raise LabError("three is too many", "up to 2", "Choose fewer")
        return View([go.Figure(go.Bar(x=[n], y=["a"]))], note=f"n is {n}")

    return demo.open()


def test_the_last_setting_wins():
    release, log = {n: threading.Event() for n in range(10)}, []
    app = slow_app(release, log)
    release[0].set()
    app.worker.join(10)
    assert app.note.value == "n is 0"
    app.controls["n"].value = 1
    assert grey(app), "shown in grey"
    app.controls["n"].value = 2
    release[1].set()
    release[2].set()
    app.worker.join(10)
    assert app.note.value == "n is 2" and ("cancelled", 1) in log
    assert not grey(app)
    app.controls["n"].value = 3
    release[3].set()
    app.worker.join(10)
    assert "three is too many" in app.error.value and app.note.value == "n is 2"


def test_measuring_here_through_the_app():
    app = decode.step_view.open(pool_tokens=2048, context=256, strategies=("shadow",))
    app.controls["live"].value = True
    app.worker.join(120)
    assert app.error.value == "" and "measured" in app.note.value


def test_every_strategy_has_a_colour_of_its_own():
    colours = [charts.tag(s).colour for s in STRATEGIES]
    assert len(set(colours)) == len(colours)
    assert charts.tag("shadow(layers=26)").colour == charts.tag("shadow").colour
    assert parse("shadow(layers=26)").tag.title == "shadow buffer (layers=26)"


def test_kernel_figures_state_the_recorded_numbers(tmp_path):
    rows, origin = kernels.recorded()
    big = rows[rows["shape"] == "495616 slots"].set_index("kernel")
    title = kernels.bandwidth(rows, origin).layout.title.text
    assert f"{big.of_copy['cast']:.0%}" in title and f"{big.of_copy['torch copy_']:.0%}" in title
    assert big.gb_per_s["cast"] == pytest.approx(78 * 495_616 * 1728 / big.ms["cast"] / 1e6)
    (tmp_path / "x.json").write_text('{"schema": 9}')
    with pytest.raises(BadFile, match="no kernel benchmark"):
        kernels.recorded(tmp_path / "x.json")


def test_recorded_kernels_meet_their_bounds():
    """Ratios of one run, as recorded: our decode over the better FlashInfer, cast over copy."""
    rows, _ = kernels.recorded()
    eight = rows[rows.heads == 8]
    bounds = {
        "1 x 1024": (0.48, 0.43),
        "1 x 8192": (0.45, 0.25),
        "1 x 131072": (0.65, 0.28),
        "32 x 8192": (0.90, 0.30),
        "64 x 2048": (0.90, 0.29),
    }
    for shape, (against_bf16, against_native) in bounds.items():
        ms = eight[eight["shape"] == shape].set_index("kernel").ms
        bf16, native = ms.filter(like="bf16").min(), ms.filter(like="native").min()
        assert ms["fused_fp8"] / bf16 <= against_bf16, shape
        assert ms["fused_fp8"] / native <= against_native, shape
    moved = rows.set_index(["kernel", "shape"])
    assert moved.of_copy["cast", "495616 slots"] >= 0.9
    assert moved.of_copy["gather_cast", "65536 live rows"] >= 0.7
    assert rows[rows.kernel == "append"].ms.max() <= 0.15


def test_ratios_by_head_count_are_those_of_the_rows():
    rows, _ = kernels.recorded(kernel="fused_fp8")
    for reads in ("bf16", "native_fp8"):
        table = kernels.against(rows, reads)
        assert list(table.columns) == [8, 16, 64, 128] and table.index[0] == "1 x 1024"
        for shape, heads in (("1 x 1024", 8), ("32 x 8192", 64)):
            ms = rows[(rows["shape"] == shape) & (rows.heads == heads)].set_index("kernel").ms
            expected = ms["fused_fp8"] / ms.filter(like=reads).min()
            assert table.loc[shape, heads] == pytest.approx(expected, rel=1e-3)


def test_the_decode_at_page_size_64_meets_its_bounds():
    """Issue 17's targets over the better FlashMLA of the same run, and README's misses."""
    rows, _ = kernels.recorded(kernel="fused_fp8")
    assert set(rows.page_size) == {64} and rows[rows.kernel == "fused_fp8"].error.max() < 4e-3
    both = pd.concat([kernels.against(rows, r) for r in ("bf16", "native_fp8")])
    worst = both.groupby(level=0).max()
    bounds = {"1 x 1024": 0.70, "1 x 8192": 0.55, "1 x 131072": 0.75}
    bounds |= {"32 x 8192": 0.85, "64 x 2048": 0.85}
    for shape, bound in bounds.items():
        assert worst.loc[shape, 8] <= bound
    wide = {"1 x 1024": 0.75, "1 x 8192": 0.75, "1 x 131072": 0.85}
    for shape, bound in (wide | {"32 x 8192": 0.95, "64 x 2048": 0.95}).items():
        assert worst.loc[shape, 16] <= bound
    text = " ".join((Path(__file__).resolve().parents[2] / "README.md").read_text().split())
    assert f"takes {worst[8].min():.2f} to {worst[8].max():.2f} of the better FlashMLA" in text
    slow = kernels.against(rows, "bf16").max()
    assert f"at 64 heads per GPU up to {slow[64]:.2f} times as long" in text
    assert f"at 128 up to {slow[128]:.1f}" in text
    at = rows.query("kernel == 'fused_fp8' and heads == 128").set_index("shape").ms["32 x 8192"]
    flops = 2 * 78 * 32 * 8192 * 128 * (576 + 512)  # scores over 576 values, output over 512
    assert f"{flops / at / 1e9:.0f} TFLOP/s" in text


def test_a_floor_stands_on_the_bar_whose_floor_it_is():
    fig = kernels.decode_time(*kernels.recorded(kernel="fused_fp8"))
    bars = {t.offsetgroup: t for t in fig.data if t.type == "bar"}
    (floor,) = [t for t in fig.data if t.type == "scatter"]
    assert fig.layout.scattermode == "group" and floor.offsetgroup == "fused_fp8" in bars
    assert all(f < b for f, b in zip(floor.y, bars["fused_fp8"].y, strict=True))


def test_what_is_no_strategy_has_no_strategys_colour():
    taken = {charts.tag(name).colour.lower() for name in STRATEGIES}
    assert len(charts.OTHERS) >= 5 and not taken & set(charts.OTHERS)
    fig = kernels.bandwidth(*kernels.recorded())
    colours = [t.marker.color for t in fig.data if t.type == "bar"]
    assert len(set(colours)) == len(colours)


def test_the_readmes_steps_are_the_recorded_ones():
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    lines = text.split("## What came out")[1].split("\n## ")[0].splitlines()
    table = [[cell.strip(" `") for cell in x.strip("|").split("|")] for x in lines if x[:1] == "|"]
    runs = decode.recorded("glm-5", 8).query("pool_tokens == 495_616")
    steps = runs.set_index(["strategy", "concurrency", "context"]).step_ms
    worth = kernels.worth_of_a_shadow(decode.recorded("glm-5", 8)).set_index("load")
    slower = worth["shadow / fused"][worth["shadow / fused"] < 1]
    assert "every recorded load but 32 x 1,024 (up to 3 % slower)" in text
    assert set(slower.index) == {"32 x 1024"} and round(100 * (1 / slower.min() - 1)) == 3
    for load, *cells in table[2:]:
        requests, context = load.replace(",", "").split(" x ")
        for strategy, cell in zip(table[0][1:], cells, strict=True):
            step = steps[strategy, int(requests), int(context)]
            assert cell == (f"{step:.1f}" if step >= 10 else f"{step:.2f}"), (load, strategy)


def test_views_are_saved_beside_earlier_ones_and_a_refusal_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(display, "png", lambda fig: b"picture")
    app = decode.step_view.open()
    app.save()
    first = (tmp_path / "out/explorer-1.csv").read_text()
    app.controls["context"].value = 8192
    app.save()
    assert "explorer-2.csv beside the notebook, and 4 PNG" in app.status.value
    assert (tmp_path / "out/explorer-1.csv").read_text() == first
    assert (tmp_path / "out/explorer-2.csv").read_text() != first
    assert {p.name for p in (tmp_path / "out").glob("explorer-2*.png")} == {
        f"explorer-2{letter}.png" for letter in "abcd"
    }
    assert (tmp_path / "out/explorer-2.py").read_text() == f"{app.line}\n"
    (tmp_path / "out/.gitignore").write_text("mine")
    app.controls["strategies"].value = ()
    app.save()
    assert "not saved" in app.status.value, "below an error the figures are an older setting's"
    app.reset()
    app.save()
    assert (tmp_path / "out/explorer-3.csv").exists()
    assert (tmp_path / "out/.gitignore").read_text() == "mine"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "out").write_text("a file where the folder should be")
    app.save()
    assert "CannotWrite" in app.error.value and "out" in app.error.value


@pytest.mark.parametrize("slow", [False, True])
def test_an_unexpected_error_is_shown_and_ends_the_work(slow, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    @application("f.f", slow=lambda settings: slow and settings["n"] == 2)
    def f(n: Annotated[int, Number("n", whole=True)] = 1) -> View:
        """A number."""
        if n == 2:
            raise ZeroDivisionError("no such luck")
        return View([])

    app = f.open()
    if slow:
        app.controls["n"].value = 2
        app.worker.join(10)
    else:
        with pytest.raises(ZeroDivisionError):
            app.controls["n"].value = 2
    assert "ZeroDivisionError" in app.error.value and "no such luck" in app.error.value
    assert app.busy.layout.visibility == "hidden"
    app.controls["n"].value = 1
    assert app.error.value == ""


def test_the_line_to_paste_is_a_call_that_gives_the_same_view():
    app = decode.step_view.open()
    app.controls["concurrency"].value = 8
    line = html.unescape(re.search(r"<code[^>]*>(.*)</code>", app.code.value)[1])
    start, _, arguments = line.partition("; explorer")
    assert start == "from shadowkv_lab import explorer"
    again = decode.step_view.open(**eval(f"dict{arguments}"))
    assert again.settings == app.settings
    assert bars(again.view.figures[0]) == bars(app.view.figures[0])


def test_rows_of_a_pool_file_feed_the_lab():
    """The shipped pool, tiled to the size asked for, and said to be so."""
    app = decode.step_view.open(pool_tokens=2048, context=256, strategies=("shadow",))
    app.controls["rows"].value = "tiny-glm-5-random.safetensors"
    app.controls["live"].value = True
    app.worker.join(120)
    assert app.error.value == ""
    assert set(app.view.table.rows) == {"file:tiny-glm-5-random.safetensors (tiled)"}

"""Applications are annotated functions: widget, command and call give the same; own models too."""

import json
import threading
from typing import Annotated

import ipywidgets as w
import plotly.graph_objects as go
import pytest
from typer.testing import CliRunner

from shadowkv_lab import machine
from shadowkv_lab.cli import app as shadowkv
from shadowkv_lab.cli.applications import APPLICATIONS
from shadowkv_lab.serving import contenders
from shadowkv_lab.steps import measure
from shadowkv_lab.strategies import STRATEGIES
from shadowkv_lab.ui import (
    budget,
    charts,
    decode,
    glm5,
    kernels,
    plots,
    screen,
    serving,
    simulated,
    tables,
)
from shadowkv_lab.ui.app import View, Work
from shadowkv_lab.ui.application import application
from shadowkv_lab.ui.controls import Number, Slider
from tests.own_strategy import hot_set
from tests.tiny import CONFIG

VIEWS = [
    screen.screen_view,
    decode.step_view,
    kernels.kernels_view,
    budget.budget_view,
    glm5.reproduction_view,
    serving.load_view,
    simulated.traffic_view,
]


@pytest.fixture
def config(tmp_path):
    """A user's own config.json, of a model that is in no catalogue."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder / "config.json")


@pytest.fixture(params=VIEWS, ids=lambda view: view.__name__)
def view(request, monkeypatch):
    monkeypatch.setattr(simulated, "REQUESTS", 40)
    monkeypatch.setattr(simulated, "CAPACITY_SHARES", (1.0,))
    return request.param


def test_figures_pass_the_checks_that_the_lab_leaves_out_for_speed(view):
    """plotly names each property that it does not have."""
    for figure in view().figures:
        spec = figure.to_plotly_json()
        assert go.Figure(spec).to_plotly_json()["data"] == spec["data"]
        go.Figure(plots.fitted(figure, 540))


def test_a_call_and_the_widget_show_the_same(view):
    app = view.open()
    if app.worker:
        app.worker.join(60)
    assert app.error.value == "" and app.settings == view.start()
    called = view(**app.settings)
    assert called.note == app.view.note
    assert charts.words(called.note) == app.note.value or view is screen.screen_view
    assert called.table.equals(app.view.table)


def test_shown_columns_have_titles_and_keep_every_row(view):
    found = view()
    shown = found.shown
    assert len(shown) == len(found.table)
    assert set(found.columns) <= set(found.table.columns)
    assert {name for name in found.columns if name not in tables.COLUMNS} <= {
        *("kernel", "shape", "reason")
    }
    assert all(isinstance(cell, str) for cell in shown.to_numpy().ravel())


@pytest.mark.parametrize("name", APPLICATIONS)
def test_a_command_takes_the_options_that_the_controls_are(name):
    place, said = APPLICATIONS[name]
    module, _, view = place.partition(".")
    of = next(v for v in VIEWS if v.__name__ == view)
    assert of.__module__ == f"shadowkv_lab.ui.{module}" and said.endswith(".")
    help_ = CliRunner().invoke(shadowkv, [name, "--help"], env={"COLUMNS": "200"}).output
    for option in of.controls:
        assert f"--{option.replace('_', '-')}" in help_


def test_a_command_gives_the_views_numbers():
    typed = ["load", "--context", "4096", "--strategies", "full_cast,shadow", "--json"]
    rows = json.loads(CliRunner().invoke(shadowkv, typed).stdout)
    wanted = serving.load_view(context=4096, strategies=("full_cast", "shadow")).table
    assert [row["strategy"] for row in rows] == ["full_cast", "shadow"]
    assert [row["tokens_per_s"] for row in rows] == pytest.approx(wanted.tokens_per_s.tolist())
    refused = CliRunner().invoke(shadowkv, ["load", "--contxt", "1"])
    assert refused.exit_code == 2 and "contxt" in refused.output


def test_a_users_own_config_goes_through_measuring_tables_and_figures(config):
    app = decode.step_view.open(model=config, pool_tokens=512, context=64, live=True)
    app.worker.join(120)
    assert app.error.value == "" and "measured" in app.note.value
    assert app.settings["heads"] == 1, "one of its eight heads on each of eight GPUs"
    assert set(app.view.table.model) == {"mine"} and set(app.view.table.layers) == {2}
    assert list(app.view.figures[0].data[0].y) == list(app.view.table.title)
    plan = budget.budget_view(model=config, weights_gib=10.0, kv_gib=4.0)
    row = plan.table.set_index("strategy").loc["full_cast"]
    assert row.token_bytes == 2 * 576 and row.tokens == 4 * 2**30 // 1152
    unknown = budget.budget_view.open(model=config)
    assert "NoAnswer" in unknown.error.value and "weights_gib" in unknown.error.value


def test_a_users_own_strategy_goes_through_measuring_tables_and_figures(tiny):
    with hot_set() as HotSet:
        bench = measure.Bench(tiny, 8, machine.as_device("cpu"), modes=("eager",))
        found = decode.measured_view(bench, 512, 2, 64, ("hot_set", "full_cast"))
        mine = found.table.set_index("strategy").loc["hot_set"]
        assert (mine.title, mine.colour) == ("hot set", HotSet().tag.colour)
        assert mine.kept_bytes == 2 * 576 * (512 + 1) + HotSet().fixed_bytes(tiny)
        assert "hot_set" in found.shown.iloc[:, 0].tolist()
        for figure in found.figures:
            titles = {t.name for t in figure.data} | {y for t in figure.data for y in t.y or ()}
            assert "hot set" in titles
        assert "hot_set" in dict(decode.step_view.open().controls["strategies"].options)
        plan = budget.budget_view()
        assert "hot_set" in set(plan.table.strategy)
        fits = plan.figures[1].data[0]
        assert fits.marker.color[list(fits.y).index("hot set")] == HotSet().tag.colour
        asked = (*contenders.WANTED[:2], "hot_set(rows=131072)")
        loads = serving.load_view(concurrency=4, context=1024, strategies=asked)
        assert "hot set (rows=131072)" in {y for t in loads.figures[0].data for y in t.y}
    assert "hot_set" not in STRATEGIES


def test_what_depends_on_a_control_follows_it():
    app = decode.step_view.open()
    app.controls["model"].value = "deepseek-r1"
    assert app.settings["heads"] == 16 and app.error.value == ""
    memory = budget.budget_view.open()
    assert memory.settings["kv_gib"] == 25.49
    assert memory.beside["weights_gib"].value == "published"
    memory.controls["weights_gib"].value = 60.0
    assert memory.beside["weights_gib"].value == "typed"
    memory.controls["tensor_parallel"].value = 16
    assert memory.settings["kv_gib"] == 0.0, "the report's KV size is of eight GPUs"
    assert memory.settings["weights_gib"] < 50
    assert memory.beside["weights_gib"].value == "assumed"
    memory.reset()
    assert memory.settings["weights_gib"] == 61.0


def test_a_control_that_does_nothing_sleeps_with_the_reason_beside(monkeypatch):
    monkeypatch.setattr(simulated, "REQUESTS", 40)
    monkeypatch.setattr(simulated, "RATES", [1.0])
    app = simulated.traffic_view.open(concurrency=2, strategies=("full_cast",))
    asleep = {name for name, control in app.controls.items() if control.disabled}
    assert asleep == {"rate", "prompt_tokens", "output_tokens"}
    assert app.beside["rate"].value == "only for open arrivals"
    app.controls["arrivals"].value = "Poisson"
    assert not app.controls["rate"].disabled and app.beside["rate"].value == ""
    assert app.beside["concurrency"].value == "only for closed loop"
    app.worker.join(60)


def waiting(release):
    """An application that is slow above 1, and whose worker then waits for `release`."""

    @application("demo.waiting", columns=1, slow=lambda settings: settings["n"] > 1)
    def view(
        n: Annotated[int, Slider("n", (1, 2, 3), "things")] = 1,
        other: Annotated[float, Number("other")] = 0.5,
        *,
        work: Work,
    ) -> View:
        """Things."""
        if n > 1:
            work.stage("waiting", 0.25)
            release.wait(10)
            work.stage("over", 0.5)
        return View([charts.figure(f"{n}", [charts.bar(["a"], [n], "", "#123456", "assumed")])])

    return view.open()


def test_slow_work_can_be_cancelled_and_what_is_shown_stays_grey():
    release = threading.Event()
    app = waiting(release)
    assert app.cancel.layout.display == "none"
    app.controls["n"].value = 2
    assert app.cancel.layout.display == "" and app._stale
    app.cancel.click()
    assert "cancelled" in app.status.value and app.cancel.layout.display == "none"
    release.set()
    app.worker.join(10)
    assert app.view.figures[0].layout.title.text == "1" and app._stale
    app.save()
    assert "not saved" in app.status.value
    app.controls["n"].value = 3
    app.worker.join(10)
    assert app.view.figures[0].layout.title.text == "3" and not app._stale


def test_sliders_answer_while_they_are_dragged_unless_the_answer_is_slow():
    release = threading.Event()
    release.set()
    app = waiting(release)
    assert app.controls["n"].continuous_update
    app.controls["n"].value = 2
    assert not app.controls["n"].continuous_update
    app.worker.join(10)
    app.controls["n"].value = 1
    assert app.controls["n"].continuous_update


def test_a_plot_follows_in_place_and_holds_plain_json():
    """The same widgets show other values, other labels and fewer lines; extra ones are closed."""
    app = decode.step_view.open()
    kept = list(map(id, app.plots.children))
    for settings in ({"concurrency": 64}, {"strategies": ("full_cast", "shadow")}):
        for name, value in settings.items():
            app.controls[name].value = value
        assert list(map(id, app.plots.children)) == kept
        for plot, figure in zip(app.plots.children, app.view.figures, strict=True):
            assert plot.spec == json.loads(json.dumps(plot.spec))
            assert [t.name for t in plot.figure.data] == [t.name for t in figure.data]
    last = app.plots.children[-1]
    app._show(app.plots.children[:-1])
    assert last.comm is None and len(app.plots.children) == len(kept) - 1


def test_a_plot_itself_never_changes_once_it_is_open():
    """anywidget drops what is sent to a widget of its own that a busy page opened too slowly."""
    figure = go.Figure(go.Bar(x=[1, 2], y=["a", "b"]), {"title": {"text": "said"}})
    plot, sent = plots.Plot(plots.plain(figure)), []
    plot.send_state = plot._send = sent.append
    opened = plot.get_state()
    assert len(opened["_esm"]) < 10_000, "plotly.js goes to a page once, not with each figure"
    holder = w.Widget.widgets[opened["held"]]
    assert json.loads(holder.value)["layout"]["title"]["text"] == "said"
    plot.spec = plots.plain(go.Figure(layout={"title": {"text": "other"}}))
    assert json.loads(holder.value) == plot.spec
    assert plot.figure.layout.title.text == "other"
    assert not sent and plot.get_state() == opened


def test_a_line_under_another_is_a_ring():
    step = decode.step_view()
    lines = {t.name: t for t in step.figures[1].data}
    assert lines["BF16 pool"].marker.symbol == "circle-open"
    assert lines["shadow buffer"].marker.symbol is None
    assert lines["full cast"].line.dash == "dash", "recorded"


@pytest.mark.parametrize(
    "name, value, cell",
    [
        ("step_ms", 65.8371, "65.837"),
        ("kept_bytes", 3 * 2**30, "3.00"),
        ("pool_tokens", 495_616, "495,616"),
        ("error", 0.00413, "4.1e-03"),
        ("tokens", None, ""),
        ("tokens", float("nan"), ""),
        ("fits", True, "yes"),
        ("a_new_thing", 12_345.6, "12,346"),
        ("strategy", "shadow(layers=26)", "shadow(layers=26)"),
    ],
)
def test_a_cell_is_written_by_its_column(name, value, cell):
    assert tables.column(name).cell(value) == cell


def test_headings_have_units():
    assert tables.column("step_ms").head == "step, ms"
    assert tables.column("a_new_thing").head == "a new thing"

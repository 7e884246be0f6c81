"""The notebooks in JupyterLab and Chromium: run, moved by keyboard, broken on purpose, saved."""

import csv
import json
import re

import pytest
from playwright.sync_api import expect

from shadowkv_lab.ui import budget, glm5
from shadowkv_lab.ui import decode as steps
from shadowkv_lab.ui import serving as requests
from shadowkv_lab.ui.display import PLOTLY
from shadowkv_lab.ui.notebooks import WIDGET_VIEW

ERRORS = '[data-mime-type="application/vnd.jupyter.error"]'


def plain(title: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", "", title.replace("<br>", " ")).split())


def titles_of(view) -> list[str]:
    return [plain(figure.layout.title.text) for figure in view.figures]


def opened_and_run(name):
    """A fixture: a notebook opened, run whole and looked at; its errors are told at once."""

    @pytest.fixture(scope="module")
    def opened(lab, browser, pictures):
        notebook = lab.open(browser, f"{name}.ipynb")
        notebook.run_all()
        page = notebook.page
        assert page.locator(ERRORS).count() == 0, page.locator(ERRORS).first.inner_text()
        expect(notebook.app().root).to_be_visible()
        expect(notebook.app().root.locator(".main-svg").first).to_be_visible()
        for number in range(page.locator(".jp-OutputArea .shadowkv").count()):
            notebook.screenshot(pictures / f"{name}_app{number}.png", notebook.app(number))
        return notebook

    return opened


decode = opened_and_run("a5_recorded_runs")
memory = opened_and_run("03_memory_and_card")
reproduction = opened_and_run("02_glm5_report")
serving = opened_and_run("04_under_traffic")


def press(app, label, key, **until):
    """Press a key on a slider until the line to paste says so."""
    handle = app.slider(label)
    handle.focus()
    ((name, value),) = until.items()
    for _ in range(40):
        if f"{name}={value}," in app.code():
            return
        before = app.code()
        app.page.keyboard.press(key)
        expect(app.root.locator(".shadowkv-code")).not_to_have_text(before)
    raise AssertionError(f"{name} never became {value}: {app.code()}")


def shows(app, view):
    """The drawn figures' titles are those the library computes for the setting."""
    wanted = titles_of(view)
    app.page.wait_for_timeout(50)
    for _ in range(100):
        if app.titles() == wanted:
            return
        app.page.wait_for_timeout(50)
    assert app.titles() == wanted


def labels(app, number=0):
    """Texts beside the bars of a figure."""
    return (
        app.root.locator(".js-plotly-plot")
        .nth(number)
        .locator(".annotation-text")
        .all_text_contents()
    )


def test_pool_and_concurrency_by_keyboard(decode):
    app = decode.app()
    shows(app, steps.step_view())
    start = app.bars()
    assert len(start) > 6
    press(app, "pool size", "ArrowLeft", pool_tokens=65_536)
    view = steps.step_view(pool_tokens=65_536)
    shows(app, view)
    assert app.readout("pool size") == "65,536 slots"
    assert app.bars() != start, "the bars moved"
    assert labels(app) == [a.text for a in view.figures[0].layout.annotations]
    full_cast = view.table.set_index("strategy").step_ms["full_cast"]
    assert f"{full_cast:,.2f} ms, recorded" in labels(app)
    smaller = app.bars()
    press(app, "concurrency", "ArrowRight", concurrency=32)
    view = steps.step_view(pool_tokens=65_536, concurrency=32)
    shows(app, view)
    assert app.readout("concurrency") == "32 requests"
    assert labels(app) == [a.text for a in view.figures[0].layout.annotations]
    assert app.bars() != smaller


def test_an_error_is_shown_in_place_and_reset_takes_it_away(decode):
    app, page = decode.app(), decode.page
    app.root.locator("select[multiple]").select_option([])
    error = app.root.get_by_role("alert")
    expect(error).to_contain_text("NoAnswer: No recorded run of no strategy")
    expect(error).to_contain_text("Choose at least one strategy")
    assert app.root.locator(".main-svg").first.is_visible(), "the last good view stays"
    app.root.get_by_role("button", name="Reset", exact=True).focus()
    page.keyboard.press("Enter")
    expect(error).to_have_count(0)
    shows(app, steps.step_view())


def test_save_this_view(decode, folder):
    app = decode.app()
    app.root.get_by_role("button", name="Reset", exact=True).click()
    shows(app, steps.step_view())
    app.root.get_by_role("button", name="Save this view").focus()
    decode.page.keyboard.press("Enter")
    said = "saved out/explorer-1.csv beside the notebook, and 4 PNG files"
    expect(app.root).to_contain_text(said, timeout=60_000)
    rows = list(csv.DictReader((folder / "out" / "explorer-1.csv").open()))
    full_cast = next(row for row in rows if row["strategy"] == "full_cast")
    table = steps.step_view().table.set_index("strategy")
    assert float(full_cast["step_ms"]) == table.step_ms["full_cast"]
    for letter in "abcd":
        assert (folder / "out" / f"explorer-1{letter}.png").read_bytes().startswith(b"\x89PNG")


def test_all_fits_1280_pixels(decode):
    overflow = decode.app().root.evaluate("e => [e.scrollWidth, e.clientWidth, innerWidth]")
    assert overflow[0] <= overflow[1] and overflow[2] == 1280


def test_budget_by_keyboard(memory):
    app = memory.app()
    before = app.bars()
    press(app, "concurrency", "ArrowRight", concurrency=8)
    press(app, "context", "ArrowRight", context=8192)
    shows(app, budget.budget_view(kv_gib=25.49, concurrency=8, context=8192))
    app.root.locator(".widget-text", has_text="KV, GiB").locator("input").fill("12")
    memory.page.keyboard.press("Enter")
    shows(app, budget.budget_view(kv_gib=12.0, concurrency=8, context=8192))
    assert app.bars() != before
    app.root.locator(".widget-text", has_text="weights").locator("input").fill("120")
    memory.page.keyboard.press("Enter")
    expect(app.root.get_by_role("alert")).to_contain_text("DoesNotFit")


def test_reproduction_by_keyboard(reproduction):
    app = reproduction.app()
    before = app.bars()
    press(app, "concurrency", "ArrowRight", concurrency=8)
    shows(app, glm5.reproduction_view(concurrency=8))
    assert app.bars() != before


def test_serving_by_keyboard(serving):
    app = serving.app(0)
    before = app.titles()
    press(app, "concurrency", "ArrowLeft", concurrency=8)
    shows(app, requests.load_view(concurrency=8))
    assert app.titles() != before


@pytest.mark.parametrize("which", ["decode", "memory", "reproduction", "serving"])
def test_quiet_console_and_no_request_elsewhere(which, request):
    notebook = request.getfixturevalue(which)
    assert notebook.errors == []
    assert notebook.outside == []


def test_what_jupyterlab_saves_can_be_read_without_a_kernel(
    decode, folder, lab_without_kernels, browser
):
    """JupyterLab keeps a widget's view without its state: that must not reach the file."""
    path = folder / "a5_recorded_runs.ipynb"
    before = path.stat().st_mtime_ns
    decode.page.keyboard.press("Control+s")
    for _ in range(100):
        if path.stat().st_mtime_ns != before:
            break
        decode.page.wait_for_timeout(100)
    decode.page.wait_for_timeout(300)
    saved = json.loads(path.read_text())
    mimes = [set(o.get("data", ())) for c in saved["cells"] for o in c.get("outputs", ())]
    assert not [found for found in mimes if WIDGET_VIEW in found]
    (lab_without_kernels.root / "saved.ipynb").write_text(json.dumps(saved))
    without_kernel(lab_without_kernels, browser, "saved", sum(PLOTLY in m for m in mimes))


def without_kernel(lab, browser, name, figures):
    notebook = lab.open(browser, f"{name}.ipynb")
    page = notebook.page
    page.locator(".jp-Dialog").get_by_role("button", name="No Kernel").click()
    for _ in range(100):
        if notebook.figures() >= figures:
            break
        page.wait_for_timeout(100)
    assert notebook.figures() >= figures
    text = page.locator(".jp-Notebook").inner_text()
    assert "model not found" not in text and "Loading widget" not in text
    assert notebook.errors == [] and notebook.outside == []
    return notebook


def test_each_notebook_without_a_kernel(lab_without_kernels, browser, pictures, name):
    """Opened as received: every figure is there, as a plot or as its picture."""
    content = json.loads((lab_without_kernels.root / f"{name}.ipynb").read_text())
    figures = sum(
        PLOTLY in o.get("data", {}) for c in content["cells"] for o in c.get("outputs", ())
    )
    notebook = without_kernel(lab_without_kernels, browser, name, figures)
    notebook.screenshot(pictures / f"{name}.png")
    notebook.page.context.close()

"""The screen in an exported page: the same answers as the lab's, from the address to the slider."""

import nbformat
import pytest

from shadowkv_lab.deployment import published_deployment
from shadowkv_lab.load import Load
from shadowkv_lab.steps.answer import anchored, answers
from shadowkv_lab.ui import export, live, rows


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    output = nbformat.v4.new_output("display_data", {live.SCREEN: live.payload()})
    cell = nbformat.v4.new_code_cell("", outputs=[output], execution_count=1)
    path = tmp_path_factory.mktemp("live") / "live.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    return export.export(path, path.with_suffix(".html"))


def shown(page):
    """tok/s by row, as the page shows it."""
    cells = page.locator(".sk-rows tr").evaluate_all(
        "rows => rows.slice(1).map(row => [...row.cells].map(cell => cell.innerText))"
    )
    return {cell[0].split("\n")[0]: float(cell[2].replace(",", "")) for cell in cells if cell[3:]}


def test_it_answers_as_the_lab_does(page_file, browser):
    assert page_file.stat().st_size < 200_000
    page = browser.new_context(viewport={"width": 390, "height": 800}).new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    at = published_deployment()
    for limit, R, n in ((495_616, 1, 1024), (32_768, 1, 1024), (495_616, 48, 8192)):
        page.goto(f"file://{page_file}#pool={limit}&concurrency={R}&context={n}")
        page.reload()
        found = answers(at, Load(R, n), anchored("case", at), pool_tokens=limit)
        expected = {rows.named(a).replace(",", ""): a.tokens_per_s for a in found if a.runs}
        assert shown(page) == pytest.approx(expected, rel=0.015, abs=0.06)
    page.goto(f"file://{page_file}")
    page.reload()
    assert "cast 64.6, attention 1.92" in page.locator(".sk-rows").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert not errors


def test_a_slider_moves_the_answer_and_the_address(page_file, browser):
    page = browser.new_context().new_page()
    page.goto(f"file://{page_file}")
    before = page.locator(".sk-answer").inner_text()
    page.locator("input[data-name=concurrency]").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".sk-answer").inner_text() != before
    said = dict(part.split("=") for part in page.url.partition("#")[2].split("&"))
    assert said == {"pool": "495616", "concurrency": "2", "context": "1024"}


def test_an_address_cannot_say_what_no_slider_has(page_file, browser):
    page = browser.new_context().new_page()
    page.goto(
        f"file://{page_file}#concurrency=<img onerror=alert(1)>&context=77&__proto__=1&pool=1e9"
    )
    assert "1,024 tokens" in page.locator("label", has_text="context").inner_text()
    assert page.locator("img").count() == 0


def test_a_notebook_of_somebody_else_cannot_put_marks_into_the_page(browser, tmp_path):
    data, mark = live.payload(), "<img src=x>"
    data["server"] = mark
    data["shades"] = [[f"{name}{mark}", f'1">{mark}'] for name, _ in data["shades"]]
    for strategy in data["strategies"]:
        strategy |= dict.fromkeys(("title", "untried", "line"), mark) | {"colour": f'red">{mark}'}
    output = nbformat.v4.new_output("display_data", {live.SCREEN: data})
    cell = nbformat.v4.new_code_cell("", outputs=[output], execution_count=1)
    path = tmp_path / "theirs.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    page = browser.new_context().new_page()
    page.goto(f"file://{export.export(path, tmp_path / 'theirs.html')}")
    assert mark in page.locator(".sk-answer").inner_text(), "said as text"
    assert page.locator("img").count() == 0

"""The exported HTML file in Chromium, with the network refused."""

import base64
import json
from pathlib import Path

import nbformat
import pytest

from shadowkv_lab.errors import BadFile
from shadowkv_lab.ui import export
from shadowkv_lab.ui.display import PLOTLY

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 8_000_000


def opened(browser, path: Path):
    """The page without any network, what it asked for, and its errors."""
    context = browser.new_context(offline=True, viewport={"width": 1100, "height": 1000})
    page, asked, errors = context.new_page(), [], []
    refused = []
    page.on("requestfailed", lambda request: refused.append((request.url, request.failure)))
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.goto(path.as_uri())
    page.wait_for_load_state("load")
    # What the page's own policy refuses has not left the browser.
    by_policy = {url for url, why in refused if why == "csp"}
    elsewhere = [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
    elsewhere = [url for url in elsewhere if url not in by_policy]
    return page, elsewhere, errors


def test_every_plot_is_drawn_offline(browser, tmp_path, pictures, name):
    source = ROOT / "notebooks" / f"{name}.ipynb"
    content = json.loads(source.read_text())
    figures = sum(
        PLOTLY in o.get("data", {}) for c in content["cells"] for o in c.get("outputs", ())
    )
    path = export.export(source, tmp_path / f"{name}.html")
    assert path.stat().st_size < MOST_BYTES
    page, elsewhere, errors = opened(browser, path)
    drawn = page.locator(".plot").evaluate_all(
        "es => es.map(e => e.querySelectorAll('.main-svg').length > 0 && !!e.querySelector("
        "'.trace, .hm, .bars, .scatterlayer, .heatmaplayer'))"
    )
    assert len(drawn) == figures and all(drawn)
    page.screenshot(path=pictures / f"{name}_export.png", full_page=True)
    assert elsewhere == [] and errors == []
    page.context.close()


def test_plots_are_live(browser, tmp_path):
    """Hovering a bar says its bytes: the plot is no picture."""
    path = export.export(ROOT / "notebooks" / "a5_recorded_runs.ipynb", tmp_path / "x.html")
    page, _, errors = opened(browser, path)
    bar = page.locator("#plot-0 .bars path").first
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    page.mouse.move(box["x"] + min(3, box["width"] / 2), box["y"] + box["height"] / 2)
    page.wait_for_selector("#plot-0 .hoverlayer text", timeout=5000)
    assert errors == []
    page.context.close()


DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
HOSTILE = """<script src="https://example.com/x.js"></script>
<meta http-equiv="refresh" content="0; url=https://example.com/">
<img src="https://example.com/x.png"><iframe src="https://example.com/"></iframe>"""


def test_formulas_are_read_and_foreign_requests_refused(browser, tmp_path):
    """Formulas become MathML; what an output would ask the network for is not asked for."""
    cell = nbformat.v4.new_code_cell("1", execution_count=1)
    cell.outputs = [nbformat.v4.new_output("display_data", data={"text/html": HOSTILE})]
    text = r"# Rest" "\n" r"$\frac{66.8}{43.1} \approx 1.55$, and $\nosuchcommand{x}$."
    text += "\n\n![far](https://example.com/far.png)"
    text += "\n\n![pasted](attachment:p.png) ![near](near.png) ![lost](attachment:lost.png)"
    (tmp_path / "near.png").write_bytes(base64.b64decode(DOT))
    pasted = {"p.png": {"image/png": DOT}}
    words = nbformat.v4.new_markdown_cell(text, attachments=pasted)
    notebook = nbformat.v4.new_notebook(cells=[words, cell])
    nbformat.write(notebook, tmp_path / "n.ipynb")
    page, elsewhere, _ = opened(browser, export.export(tmp_path / "n.ipynb", tmp_path / "n.html"))
    assert page.locator("math mfrac").bounding_box()["height"] > 20, "drawn as a fraction"
    assert "≈" in page.locator("math").text_content()
    assert page.locator("code.tex").inner_text() == r"\nosuchcommand{x}"
    assert page.locator("a", has_text="far").get_attribute("href").endswith("far.png")
    widths = page.locator("p img").evaluate_all("es => es.map(e => e.naturalWidth)")
    assert widths == [1, 1], "pasted, and beside the notebook"
    assert page.get_by_text("lost (not found)").count() == 1
    assert page.title() == "Rest"
    assert elsewhere == []
    page.context.close()


ATTACKS = """<img src=x onerror="document.title='img'"><svg onload="document.title='svg'"></svg>
<script>document.title = 'script'</script><style>p { position: fixed }</style>
<a href="javascript:document.title='href'">press</a>
<form action="https://example.com/" id="f"><input name="x" autofocus
onfocus="document.title='focus'"><button>send</button></form>
<base href="https://example.com/"><meta http-equiv="refresh" content="0; url=https://example.com/">
<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=
document.title='mutation'&gt;">
<div onclick="document.title='click'" style="position:fixed;color:#ff0000">words</div>
<iframe srcdoc="<script>top.document.title='frame'</script>"></iframe>
<object data="data:text/html,<script>top.document.title='object'</script>"></object>"""


def test_nothing_of_a_notebook_runs_and_its_figures_do(browser, tmp_path):
    """Every place that a file's words can stand in, under the page's own policy; then the slider
    and the buttons of a figure, moved by a hand."""
    mark = "<img src=x onerror=document.title='plot'><a href='https://example.com/'>away</a>"
    steps = [dict(method="restyle", args=["y", [[n, n]]], label=str(n)) for n in (1, 5, 9)]
    figure = dict(
        data=[dict(type="bar", x=[mark, "b"], y=[1, 2], name=mark, text=[mark, mark])],
        layout=dict(title=dict(text=mark), sliders=[dict(steps=steps)], showlegend=True),
        config=dict(plotlyServerURL="https://example.com/", showLink=True, showEditInChartStudio=1),
    )
    kinds = {
        "text/html": ATTACKS,
        "text/markdown": ATTACKS + "\n\n[press](javascript:alert(1))",
        "text/latex": "$$" + ATTACKS + "$$",
        "image/svg+xml": "<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>",
        "application/javascript": "document.title = 'javascript'",
        PLOTLY: figure,
    }
    code = nbformat.v4.new_code_cell(ATTACKS, execution_count=1)
    code.outputs = [nbformat.v4.new_output("display_data", data={k: v}) for k, v in kinds.items()]
    code.outputs.append(nbformat.v4.new_output("stream", text=ATTACKS))
    cells = [nbformat.v4.new_markdown_cell("# Title\n\n" + ATTACKS), code]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["title"] = ATTACKS
    nbformat.write(notebook, tmp_path / "n.ipynb")
    path = export.export(tmp_path / "n.ipynb", tmp_path / "<img src=x>.html")
    page, elsewhere, errors = opened(browser, path)
    page.wait_for_timeout(300)
    assert page.title() == "Title" and page.url == path.as_uri()
    marks = (
        "form, input, iframe, object, base, embed, meta[http-equiv=refresh], [onerror], [onclick]"
    )
    assert page.locator(marks).count() == 0
    hrefs = page.locator("a").evaluate_all("es => es.map(e => e.getAttribute('href') || '')")
    assert not any("javascript" in href for href in hrefs)
    assert page.locator("#plot-0 a[href*=example]").count() == 0
    for words in page.get_by_text("words").all():
        words.click()
    assert page.title() == "Title" and elsewhere == [] and errors == []
    # Alive: a step of the slider changes the bars.
    height = "() => document.querySelector('#plot-0').data[0].y[0]"
    assert page.evaluate(height) == 1
    page.locator(
        "#plot-0 .slider-tick-group, #plot-0 .slider-label"
    ).last.scroll_into_view_if_needed()
    box = page.locator("#plot-0 .slider-rail-touch-rect").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    page.wait_for_function("() => document.querySelector('#plot-0').data[0].y[0] == 9")
    # And where the sanitiser had let something through, the policy would not.
    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', `<img src=x onerror=\"document"
        ".title='late'\"><form action='https://example.com/'></form>`)"
    )
    page.wait_for_timeout(300)
    assert page.title() == "Title"
    page.evaluate("document.querySelector('form').submit()")
    page.wait_for_timeout(300)
    assert page.url == path.as_uri() and "form-action 'none'" in errors[-1]
    page.context.close()


def test_a_notebook_that_was_not_executed_is_refused(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
    nbformat.write(notebook, tmp_path / "n.ipynb")
    with pytest.raises(BadFile, match="run-notebook"):
        export.export(tmp_path / "n.ipynb", tmp_path / "n.html")
    (tmp_path / "broken.ipynb").write_text("{")
    with pytest.raises(BadFile, match=r"broken\.ipynb is not JSON"):
        export.export(tmp_path / "broken.ipynb")

"""An executed notebook as one HTML file that works offline: live plots, formulas, no request.

Whatever a notebook's outputs and texts hold, no code of theirs runs: the body is cleaned to the
elements and attributes below, figures are drawn anew from their JSON, and the page's own policy
names its two scripts by hash and forbids every request, form and base address.
"""

import base64
import hashlib
import html
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import nbformat
from bleach.css_sanitizer import CSSSanitizer
from bleach.sanitizer import Cleaner
from jinja2 import pass_context
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import InvalidNotebook, IPythonRenderer, MarkdownWithMath
from plotly import graph_objects as go
from plotly.offline import get_plotlyjs
from pygments.formatters import HtmlFormatter

from shadowkv_lab.errors import BadFile
from shadowkv_lab.files import ready, write
from shadowkv_lab.ui import live, notebooks, plots
from shadowkv_lab.ui.display import PLOTLY

OUT = Path("out")

# The browser itself refuses whatever a notebook's outputs might ask for.
POLICY = (
    "default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
    "font-src data:; connect-src 'none'; form-action 'none'; base-uri 'none'"
)
TAGS = """
a abbr b blockquote br caption code col colgroup dd del details div dl dt em figcaption figure h1 h2
h3 h4 h5 h6 hr i img ins kbd li ol p pre q s small span strong sub summary sup table tbody td tfoot
th thead tr tt u ul var
math mfrac mi mmultiscripts mn mo mover mpadded mphantom mroot mrow mspace msqrt mstyle msub msubsup
msup mtable mtd mtext mtr munder munderover
"""
ATTRIBUTES = """
align alt class colspan display fence height id lang linethickness lspace mathvariant maxsize
minsize open rowspan rspace scope start stretchy style title width
"""
LINK = re.compile(r"(https?://|mailto:)|(?!//)[^:]*$")  # or to a file beside the page

CSS = """
body { font: 16px/1.55 Inter, Helvetica, Arial, sans-serif; color: #222; max-width: 960px;
  margin: 2em auto; padding: 0 1.2em; }
h1, h2, h3 { line-height: 1.25; margin: 1.6em 0 0.5em; }
pre, code { font: 13px/1.5 "JetBrains Mono", Menlo, Consolas, monospace; }
p code, li code, td code { background: #f2f2f2; padding: 1px 4px; border-radius: 3px; }
.input_area, .text_cell_render pre { background: #f7f7f7; border-left: 3px solid #56B4E9;
  padding: 2px 12px; overflow-x: auto; }
.prompt { display: none; }
.output_area { overflow-x: auto; margin: 0.6em 0; }
.output_area pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.output_stderr pre { background: #fff4ec; }
table { border-collapse: collapse; border: 0; font-size: 13px; }
th, td { padding: 4px 10px; border: 0; border-bottom: 1px solid #ddd; text-align: left; }
td { font-variant-numeric: tabular-nums; }
blockquote { border-left: 3px solid #bbb; margin-left: 0; padding-left: 1em; color: #555; }
math { font-size: 1.08em; } math[display=block] { margin: 0.8em 0; }
img { max-width: 100%; }
footer { color: #777; font-size: 13px; margin: 3em 0 1em; border-top: 1px solid #ddd; }
"""

NARROW = 350  # pixels of a figure on a phone 390 wide

DRAW = """
const phone = matchMedia('(max-width: 700px)');
const draw = () => {
  for (const spec of document.querySelectorAll('script.plot-spec')) {
    const figure = JSON.parse(spec.textContent)[phone.matches ? 'narrow' : 'wide'];
    Plotly.react(spec.dataset.plot, figure.data, figure.layout,
                 {responsive: !phone.matches, displaylogo: false});
  }
};
phone.addEventListener('change', draw);
draw();
"""


MATHML = re.compile(
    r"\{http://www\.w3\.org/1998/Math/MathML\}m(ath|frac|i|multiscripts|n|o|over|padded|phantom|root|row"
    r"|space|sqrt|style|sub|subsup|sup|table|td|text|tr|under|underover)"
)


def formula(tex: str, block: bool = False) -> str:
    """TeX as MathML, or as its source where the converter would draw something else of it: a
    command that it does not know, an alignment, marks of HTML."""
    try:
        drawn = convert(tex, display="block" if block else "inline")
        parts = list(ET.fromstring(drawn).iter())
        known = all(MATHML.fullmatch(p.tag) and "href" not in p.attrib for p in parts)
        if known and not any("\\" in (p.text or "") for p in parts):
            return drawn
    except (
        Exception
    ):  # the converter has a dozen kinds of its own, and its recursion may be too deep
        pass
    return f'<code class="tex">{html.escape(tex)}</code>'


class _Renderer(IPythonRenderer):
    """Markdown whose formulas become MathML."""

    def block_math(self, body: str) -> str:
        return formula(body, block=True)

    def inline_math(self, body: str) -> str:
        return formula(body)

    def latex_environment(self, name: str, body: str) -> str:
        return formula(f"\\begin{{{name}}}{body}\\end{{{name}}}", block=True)

    def image(self, text: str, url: str, title: str | None = None) -> str:
        if url.startswith(("http:", "https:")):  # it would be asked for: a link instead
            return f'<a href="{html.escape(url)}">{html.escape(text or url)}</a>'
        try:
            found = super().image(text, url, title)
        except InvalidNotebook:  # no such attachment
            found = ""
        return found if "data:" in found else f"<em>{html.escape(text or url)} (not found)</em>"


class _Exporter(HTMLExporter):
    """nbconvert's cells alone: its whole pages load MathJax, Mermaid and require.js."""

    def __init__(self):
        super().__init__(template_name="basic", embed_images=True)

    @pass_context
    def markdown2html(self, context, source: str) -> str:
        """Markdown with pasted images, and those beside the notebook, inside."""
        renderer = _Renderer(
            escape=False,
            embed_images=True,
            exclude_anchor_links=True,
            attachments=context.get("cell", {}).get("attachments", {}),
            path=context.get("resources", {}).get("metadata", {}).get("path", ""),
        )
        return MarkdownWithMath(renderer=renderer).render(source)


def export(source: str | Path, target: str | Path | None = None) -> Path:
    """Write an executed notebook as one HTML file, out/NAME.html unless `target` says where.

    Raises `BadFile` for a file that is none, and for one without outputs; `CannotWrite`.
    """
    source = Path(source)
    notebook = notebooks.stripped(notebooks.read(source))
    if not any(cell.get("execution_count") for cell in notebook.cells):
        raise BadFile(
            f"{source.name} was not executed",
            "a notebook with outputs",
            f"Run it first: shadowkv run-notebook {source}",
        )
    target = ready(target or OUT / f"{source.stem}.html")
    return write(target, page(notebook, source))


def page(notebook: nbformat.NotebookNode, source: Path) -> str:
    """The HTML of a notebook; its plotly outputs drawn by one inlined plotly.js."""
    (specs, screens), name = _take_plots(notebook), source.name
    folder = {"metadata": {"path": str(source.resolve().parent)}}
    body, _ = _Exporter().from_notebook_node(notebook, folder)
    body, styles = clean(body)
    for number, data in enumerate(screens):  # ours, so it is put in after the cleaning
        place = f'<div id="screen-{number}"></div>'
        body = body.replace(place, live.page_part(data, number), 1)
    plots = "".join(
        f'<script type="application/json" class="plot-spec" data-plot="plot-{i}">'
        f"{_inside_script(json.dumps({'wide': spec, 'narrow': _narrow(spec)}))}</script>\n"
        for i, spec in enumerate(specs)
    )
    scripts = [_inside_script(get_plotlyjs()), DRAW] if specs else []
    allowed = [*scripts, *([live.SCRIPT] if screens else [])]
    hashes = [hashlib.sha256(text.encode()).digest() for text in allowed]
    hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes]
    policy = POLICY.format(hashes=" ".join(hashes) or "'none'")
    library, draw = (f"<script>{text}</script>" for text in scripts) if specs else ("", "")
    code = HtmlFormatter(style="default").get_style_defs(".highlight")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{html.escape(_title(notebook) or name)}</title>\n"
        f"<style>{CSS}{code}{styles}</style>\n"
        f"</head><body>\n{body}\n<footer>{html.escape(name)}, exported by shadowkv_lab. Plots are "
        f"live; this file asks the network for nothing.</footer>\n{library}\n{plots}"
        f"{draw}\n</body></html>\n"
    )


def _narrow(spec: dict) -> dict:
    """A figure for a phone; as it is where nothing of its own says how it looks."""
    if not isinstance(spec["layout"], dict) or "title" not in spec["layout"]:
        return spec
    try:
        return plots.fitted(go.Figure(spec, _validate=False), NARROW)
    except (TypeError, ValueError, KeyError, AttributeError):  # somebody else's figure
        return spec


def clean(body: str) -> tuple[str, str]:
    """A body without anything that could run or ask, and the style sheets that stood in it."""
    sheets = [sheet for _, sheet in STYLE.findall(body)]
    body = SCRIPT.sub("", STYLE.sub("", body))
    styles = [s for s in sheets if not re.search(r"[<@\\]|url|position|expression|content", s)]
    return _cleaner().clean(body), "\n".join(styles)


STYLE = re.compile(r"<style\b([^>]*)>(.*?)</style\s*>", re.I | re.S)
SCRIPT = re.compile(r"<script\b.*?</script\s*>", re.I | re.S)  # else its text would be shown


def _cleaner() -> Cleaner:
    return Cleaner(
        tags=TAGS.split(),
        attributes=_allowed,
        protocols=("http", "https", "mailto", "data"),
        strip=True,
        css_sanitizer=CSSSanitizer(),
    )


def _allowed(tag: str, name: str, value: str) -> bool:
    if name == "href":
        return tag == "a" and bool(LINK.match(value))
    if name == "src":
        return tag == "img" and value.startswith("data:image/")
    return name in ATTRIBUTES.split()


def _text(value: object) -> object:
    """A figure's JSON without links in its texts: the only mark of plotly's that leads away."""
    if isinstance(value, dict):
        return {key: _text(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_text(part) for part in value]
    return re.sub(r"</?a\b[^>]*>?", "", value, flags=re.I) if isinstance(value, str) else value


def _take_plots(notebook: nbformat.NotebookNode) -> tuple[list[dict], list[dict]]:
    """Put a place in each output of plotly or the screen, and formulas in LaTeX ones.

    Returns the figures and the screens' payloads.
    """
    specs, screens = [], []
    for output in (o for cell in notebook.cells for o in cell.get("outputs", [])):
        found = output.get("data", {})
        if live.SCREEN in found:
            place = f'<div id="screen-{len(screens)}"></div>'
            screens.append(found[live.SCREEN])
            output.data = nbformat.NotebookNode({"text/html": place})
        elif PLOTLY in found:
            spec = found[PLOTLY]
            place = f'<div class="plot" id="plot-{len(specs)}"></div>'
            output.data = nbformat.NotebookNode({"text/html": place})
            specs.append(_text({part: spec.get(part, {}) for part in ("data", "layout")}))
        elif "image/svg+xml" in found:  # as a picture, whose scripts do not run
            svg = base64.b64encode("".join(found["image/svg+xml"]).encode()).decode()
            html_of = f'<img src="data:image/svg+xml;base64,{svg}">'
            output.data = nbformat.NotebookNode({"text/html": html_of})
        elif "text/latex" in found and "text/html" not in found:
            tex = "".join(found["text/latex"]).strip().strip("$")
            found["text/html"] = formula(tex, block=True)
    return specs, screens


def _title(notebook: nbformat.NotebookNode) -> str:
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    heading = re.search(r"^# (.+)$", text, re.M)
    return heading.group(1).strip() if heading else ""


def _inside_script(text: str) -> str:
    """Text that cannot end the script element it stands in."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # as a browser reads and hashes it
    return re.sub(r"<(?=/?script|!--)", r"\\u003c", text, flags=re.I)

"""TeX to MathML: drawn right, or shown as its source; never something else."""

import html
import xml.etree.ElementTree as ET

import pytest

from shadowkv_lab.ui.export import formula

M = "{http://www.w3.org/1998/Math/MathML}"


def drawn(tex: str) -> str:
    """The marks of a formula in order, scripts as in TeX."""
    root = ET.fromstring(formula(tex))
    assert root.tag == f"{M}math", tex

    def text(element):
        tag, parts = element.tag.removeprefix(M), [text(child) for child in element]
        if tag in ("msub", "msup"):
            return f"{parts[0]}{'_' if tag == 'msub' else '^'}({parts[1]})"
        if tag == "msubsup":
            return f"{parts[0]}_({parts[1]})^({parts[2]})"
        if tag == "mfrac":
            return f"({parts[0]})/({parts[1]})"
        if tag == "msqrt":
            return f"root({''.join(parts)})"
        return (element.text or "") + "".join(parts)

    return text(root)


@pytest.mark.parametrize(
    "tex, marks",
    [
        (r"\frac{66.8}{43.1} \approx 1.55", "(66.8)/(43.1)≈1.55"),
        (r"\left\lceil x \right\rceil", "⌈x⌉"),
        (r"\left\langle q, k \right\rangle", "⟨q,k⟩"),
        (r"x_12", "x_(1)2"),
        (r"x_{12}^34", "x_(12)^(3)4"),
        (r"\sqrt{d_k}", "root(d_(k))"),
        (r"\left. a \right|", "a|"),
        (r"\operatorname{softmax}(q k^T)", "softmax(qk^(T))"),
    ],
)
def test_formulas_are_drawn_as_tex_reads_them(tex, marks):
    assert drawn(tex) == marks


@pytest.mark.parametrize(
    "tex",
    [
        r"\nosuch{x}",
        r"\left\nosuch x",
        "{" * 3000,
        "x_",
        r"\begin{aligned} a &= b \\ c &= d \end{aligned}",
        r"\text{<img src=x onerror=alert(1) />}",
        r"\text{<script>alert(1)</script>}",
        r"\href{javascript:alert(1)}{x}",
    ],
)
def test_what_is_not_known_is_shown_as_its_source(tex):
    assert formula(tex) == f'<code class="tex">{html.escape(tex)}</code>'

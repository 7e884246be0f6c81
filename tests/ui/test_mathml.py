"""TeX to MathML: drawn right, or shown as its source; never something else."""

import xml.etree.ElementTree as ET

import pytest

from shadowkv_lab.ui import mathml


def drawn(tex: str) -> str:
    """The marks of a formula in order, scripts as in TeX."""
    root = ET.fromstring(mathml.convert(tex))
    assert root.tag == "math", tex

    def text(element):
        parts = [text(child) for child in element]
        if element.tag in ("msub", "msup"):
            return f"{parts[0]}{'_' if element.tag == 'msub' else '^'}({parts[1]})"
        if element.tag == "msubsup":
            return f"{parts[0]}_({parts[1]})^({parts[2]})"
        if element.tag == "mfrac":
            return f"({parts[0]})/({parts[1]})"
        if element.tag == "msqrt":
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
    ],
)
def test_formulas_are_drawn_as_tex_reads_them(tex, marks):
    assert drawn(tex) == marks


@pytest.mark.parametrize(
    "tex", [r"\sqrt[3]{x}", r"\nosuch{x}", r"\left\nosuch x", "{" * 3000, "x_"]
)
def test_what_is_not_known_is_shown_as_its_source(tex):
    assert mathml.convert(tex) == f'<code class="tex">{tex}</code>'

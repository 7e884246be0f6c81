"""TeX to MathML, the part that notebooks use; browsers draw MathML without a script."""

import html
import re

NAMED = """
alpha:α beta:β gamma:γ delta:δ epsilon:ε eta:η theta:θ kappa:κ lambda:λ mu:μ nu:ν pi:π rho:ρ
sigma:σ tau:τ phi:φ chi:χ psi:ψ omega:ω Delta:Δ Sigma:Σ Omega:Ω cdot:· times:× div:÷ pm:± le:≤
leq:≤ ge:≥ geq:≥ ne:≠ neq:≠ approx:≈ sim:∼ equiv:≡ ll:≪ gg:≫ to:→ rightarrow:→ Rightarrow:⇒
leftarrow:← in:∈ infty:∞ sum:∑ prod:∏ int:∫ partial:∂ nabla:∇ ldots:… cdots:⋯ dots:… max:max
min:min log:log exp:exp lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ langle:⟨ rangle:⟩ mid:| top:⊤ odot:⊙
oplus:⊕ propto:∝ ell:ℓ
"""
SYMBOLS = dict(pair.split(":") for pair in NAMED.split())
SPACES = {",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.25em", "quad": "1em", "qquad": "2em"}
TEXT = {
    "text": None,
    "mathrm": None,
    "operatorname": None,
    "textrm": None,
    "mathsf": "sans-serif",
    "mathbf": "bold",
    "textbf": "bold",
    "texttt": "monospace",
    "mathtt": "monospace",
    "mathit": "italic",
}
TOKEN = re.compile(r"\\([A-Za-z]+|.)|(\d[\d,]*(?:\.\d+)?)|(\s+)|(.)", re.S)


class NotSupported(Exception):
    """TeX that this module does not know; its source is then shown as it is."""


def convert(tex: str, block: bool = False) -> str:
    """MathML of a formula; its source in a <code> where a command is unknown."""
    source = html.escape(tex.strip(), quote=False)
    try:
        body = _row(_Tokens(tex.strip()), None)
    except (NotSupported, IndexError, RecursionError):
        return f'<code class="tex">{source}</code>'
    display = ' display="block"' if block else ""
    return f'<math{display} title="{html.escape(tex.strip())}">{body}</math>'


class _Tokens:
    """The tokens that are left; blanks count in text only."""

    def __init__(self, tex: str):
        self.rest = [match.group(0) for match in TOKEN.finditer(tex)]

    def pop(self, blanks: bool = False) -> str:
        self.peek(blanks)
        return self.rest.pop(0)

    def peek(self, blanks: bool = False) -> str | None:
        while not blanks and self.rest and self.rest[0].isspace():
            self.rest.pop(0)
        return self.rest[0] if self.rest else None


def _row(tokens: _Tokens, end: str | None) -> str:
    """Elements up to `end`, scripts attached to what they follow."""
    parts: list[str] = []
    while tokens.peek() not in (end, None):
        if tokens.peek() in ("_", "^"):
            base = parts.pop() if parts else "<mrow></mrow>"
            parts.append(_scripts(base, tokens))
        else:
            parts.append(_atom(tokens))
    if end is not None:
        tokens.pop()
    return parts[0] if len(parts) == 1 else f"<mrow>{''.join(parts)}</mrow>"


def _scripts(base: str, tokens: _Tokens) -> str:
    found = {}
    while tokens.peek() in ("_", "^"):
        mark = tokens.pop()
        if len(first := tokens.peek() or "") > 1 and first[0].isdigit():
            tokens.rest[:1] = [first[0], first[1:]]  # a script is one digit, as in TeX
        found[mark] = _atom(tokens)
    if len(found) == 2:
        return f"<msubsup>{base}{found['_']}{found['^']}</msubsup>"
    kind = "msub" if "_" in found else "msup"
    return f"<{kind}>{base}{next(iter(found.values()))}</{kind}>"


def _atom(tokens: _Tokens) -> str:
    token = tokens.pop()
    if token == "{":
        return _row(tokens, "}")
    if not token.startswith("\\"):
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if token in "}_^":
            raise NotSupported(token)
        kind = "mi" if token.isalpha() else "mo"
        return f"<{kind}>{html.escape(token)}</{kind}>"
    name = token[1:]
    if name in TEXT:
        return _text(tokens, TEXT[name])
    if name in ("frac", "dfrac", "tfrac"):
        return f"<mfrac>{_atom(tokens)}{_atom(tokens)}</mfrac>"
    if name == "sqrt":
        if tokens.peek() == "[":
            raise NotSupported("a root of another degree")
        return f"<msqrt>{_atom(tokens)}</msqrt>"
    if name in ("left", "right", "big", "Big"):
        mark = tokens.pop().lstrip("\\")
        mark = SYMBOLS.get(mark, mark)
        if len(mark) > 1:
            raise NotSupported(mark)
        return "" if mark == "." else f"<mo>{html.escape(mark)}</mo>"
    if name in SPACES:
        return f'<mspace width="{SPACES[name]}"></mspace>'
    if name in "{}%_$&#|":
        return f"<mo>{html.escape(name)}</mo>"
    if name in SYMBOLS:
        kind = "mi" if SYMBOLS[name].isalpha() else "mo"
        return f"<{kind}>{SYMBOLS[name]}</{kind}>"
    raise NotSupported(token)


def _text(tokens: _Tokens, look: str | None) -> str:
    if tokens.pop() != "{":
        raise NotSupported("text without braces")
    words, depth = [], 1
    while True:
        token = tokens.pop(blanks=True)
        depth += (token == "{") - (token == "}")
        if not depth:
            break
        words.append(token.removeprefix("\\"))
    style = f' style="font:{look} 1em serif"' if look in ("bold", "italic") else ""
    style = style or (f' style="font-family:{look}"' if look else "")
    return f"<mtext{style}>{html.escape(''.join(words))}</mtext>"

"""The lab's eight kinds of error. Each says what was wrong, what is allowed, and what to do."""

import difflib
import re
from collections.abc import Iterable
from numbers import Integral

LONGEST = 600  # characters of what was wrong


class LabError(Exception):
    """Base of all errors that a user can cause.

    `what` was wrong, `allowed` values or ranges, and the `remedy` are kept apart, so that a
    notebook can lay them out; `str(error)` joins them into one line.
    """

    def __init__(self, what: str, allowed: str = "", remedy: str = ""):
        what = what if len(what) <= LONGEST else f"{what[:LONGEST]}…"  # it may quote a file
        self.what, self.allowed, self.remedy = what, allowed, remedy
        parts = [what.rstrip(".") + "."]
        if allowed:
            parts.append(f"Allowed: {allowed.rstrip('.')}.")
        if remedy:
            parts.append(remedy if remedy.endswith(("?", ".")) else remedy + ".")
        super().__init__(" ".join(parts))


class UnknownName(LabError):
    """A model, GPU, strategy or backend that the lab does not have."""

    def __init__(self, kind: str, name: object, known: Iterable[str], remedy: str = ""):
        known = sorted(known)
        meant = nearest(str(name), known)
        hint = f"Did you mean {meant!r}? " if meant else ""
        super().__init__(f"Unknown {kind} {name!r}", ", ".join(known), (hint + remedy).strip())


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was most likely meant, or None; never another product of a family.

    Words with digits name a product, so they must agree: an H20 is no H200, a V3.1 no V3.2.

    >>> nearest("glm5", ["glm-5", "glm-5.2"]), nearest("h20", ["h200", "h100"])
    ('glm-5', None)
    """

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9.]", "", text.lower())

    def numbered(text: str) -> set[str]:
        return {word for word in re.split(r"[^a-z0-9.]+", text.lower()) if re.search(r"\d", word)}

    near = {}
    for other in known:
        alike = difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio()
        least = 0.75 if numbered(other) else 0.5
        if plain(name) == plain(other) or (alike >= least and numbered(name) == numbered(other)):
            near[other] = alike
    return max(near, key=near.get, default=None)


class OutOfRange(LabError):
    """A number, slot, row, option or setting outside its range."""


def whole(value: object, what: str, least: int = 1, most: int | None = None) -> int:
    """A whole number of at least `least`; raises `OutOfRange` for others, flags and fractions."""
    integral = isinstance(value, Integral) and not isinstance(value, bool)
    if not integral or value < least or (most is not None and value > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise OutOfRange(f"{what} {value!r}", f"a whole number, {allowed}")
    return int(value)


class DoesNotFit(LabError):
    """Memory, tokens or traffic beyond what there is; says the largest that fits and who holds
    the rest. Raised before anything is allocated."""


class CannotRun(LabError):
    """A rule, library, device or server release forbids it; says which, and the remedy."""


class BadFile(LabError):
    """A file or text that cannot be read as what it should be; says path, line and field."""


class CannotWrite(LabError):
    """A file that could not be written whole; what was there before is still there."""


class WrongResult(LabError):
    """A check failed: an output off from float64, a stale shadow, NaN or Inf."""


class NoAnswer(LabError):
    """Nothing recorded bears on the question, or two runs cannot be compared."""

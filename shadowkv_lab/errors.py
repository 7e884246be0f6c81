"""The lab's eight kinds of error. Each says what was wrong, what is allowed, and what to do."""

import difflib
from collections.abc import Iterable


class LabError(Exception):
    """Base of all errors that a user can cause.

    `what` was wrong, `allowed` values or ranges, and the `remedy` are kept apart, so that a
    notebook can lay them out; `str(error)` joins them into one line.
    """

    def __init__(self, what: str, allowed: str = "", remedy: str = ""):
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
        near = difflib.get_close_matches(str(name).lower(), [k.lower() for k in known], 1, 0.4)
        nearest = next((k for k in known if near and k.lower() == near[0]), None)
        hint = f"Did you mean {nearest!r}? " if nearest else ""
        super().__init__(f"Unknown {kind} {name!r}", ", ".join(known), (hint + remedy).strip())


class OutOfRange(LabError):
    """A number, slot, row, option or setting outside its range."""


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

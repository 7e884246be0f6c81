"""The lab's named errors. Each says what was wrong, what is allowed, and what to do."""

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


class NotMLA(LabError):
    """A config.json without the fields of multi-head latent attention, or with broken ones."""


class BadSize(LabError):
    """A count, context, fraction or time outside its range."""


class PoolDoesNotFit(LabError):
    """A pool that needs more memory than there is; raised before anything is allocated."""


class GpuBusy(PoolDoesNotFit):
    """A pool that would fit this card, if another process did not hold its memory."""


class LoadDoesNotFit(LabError):
    """Requests whose live tokens exceed the pool or the model's positions."""


class BadRows(LabError):
    """Rows of the wrong shape or dtype, or with NaN or Inf in them."""


class BadSlots(LabError):
    """Slots that are out of range, the dummy, freed, or freed twice."""


class ShadowStale(LabError):
    """A shadow row that is not what its FP8 row says."""


class BackendCannotRun(LabError):
    """A kernel backend whose rules refuse this model, dtype, page size, head count or GPU."""


class KernelUnavailable(LabError):
    """A kernel whose library, compiler or device is missing on this machine."""


class WrongResult(LabError):
    """A strategy whose output left the float64 reference by more than its tolerance."""


class BadRecord(LabError):
    """A line or file of recorded runs that cannot be read."""


class BudgetDoesNotFit(LabError):
    """A memory budget that leaves nothing for the KV cache, whatever the strategy."""


class BadLog(LabError):
    """A text that is no start-up log of an engine the lab can read."""


class NoPrediction(LabError):
    """A step time that no recorded run bears on, not even by analogy."""


class RestIsNegative(LabError):
    """TPOTs whose rest would be negative: the cast alone is longer than the step."""


class BadTrace(LabError):
    """Request traffic with broken times or lengths, or a trace file that cannot be read."""


class CannotBeServed(LabError):
    """Traffic that asks for more prompt tokens/s than prefill makes, whatever the strategy."""


class BadTensorFile(LabError):
    """A safetensors, pool or snapshot file that is truncated, foreign, or of another schema."""


class BadCheckpoint(LabError):
    """A checkpoint folder without a shard, a tensor or a tokenizer that its own files promise."""


class UnsupportedQuantisation(LabError):
    """Weights in a quantisation that the lab does not read; the message names it."""


class GeometryMismatch(LabError):
    """Rows of one geometry where another is expected."""


class CannotWrite(LabError):
    """A file that could not be written whole; what was there before is still there."""


class UnsupportedServer(LabError):
    """A SGLang release, or an argument of its server, under which the plug-in will not run."""


class HookMissing(LabError):
    """A function of SGLang that the plug-in must hook and that is not there, or stayed unhooked."""


class BadResult(LabError):
    """A benchmark result, server log or profiler trace that is cut short or is another thing."""


class NotComparable(LabError):
    """A before and an after that differ in more than the patch: another model, pool or load."""

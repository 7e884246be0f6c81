"""shadowkv_lab: FP8 MLA KV caches, attention kernels that want 16 bits, and what to do about it.

The front door: what a notebook or a script needs, imported when it is first asked for.
"""

import importlib

__version__ = "0.1.0"

_PLACES = {
    "model": ["Model", "load_model"],
    "machine": ["Card", "card"],
    "load": ["Load"],
    "deployment": ["Deployment", "Setting", "deploy=deployment", "published_deployment"],
    "rules": ["can_run"],
    "budget": ["memory_budget=budget"],
    "strategies": ["STRATEGIES", "Moves", "Strategy", "parse"],
    "strategies.check": ["check"],
    "kernels": ["gather_cast"],
    "kernels.reference": ["to_fp8"],
    "steps.step": ["Step", "frame", "recorded"],
    "steps.measure": ["measure_step"],
    "steps.predict": ["predict"],
    "steps.answer": ["anchored", "answers"],
    "provenance": ["Provenance"],
    "errors": ["LabError", "OutOfRange"],
    "ui.decode": ["explorer"],
    "ui.screen": ["screen"],
    "ui.budget": ["budget_app"],
    "ui.glm5": ["reproduction_app"],
}
# "deploy=deployment": a function that is named as its module has another name at the door.
_NAMES = {
    name: (place, inside or name)
    for place, names in _PLACES.items()
    for name, _, inside in (entry.partition("=") for entry in names)
}

__all__ = [*_NAMES]


def __getattr__(name: str):
    if name in _NAMES:
        place, inside = _NAMES[name]
        return getattr(importlib.import_module(f"{__name__}.{place}"), inside)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])

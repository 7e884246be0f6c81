"""shadowkv_lab: FP8 MLA KV caches, attention kernels that want 16 bits, and what to do about it.

The front door: what a notebook or a script needs, imported when it is first asked for.
"""

import importlib

__version__ = "0.1.0"

_PLACES = {
    "model": ["Model", "load_model"],
    "machine": ["Card", "card"],
    "load": ["Load"],
    "deployment": ["Deployment", "Setting", "deployment"],
    "rules": ["can_run"],
    "budget": ["budget"],
    "strategies": ["STRATEGIES", "Moves", "Strategy", "parse"],
    "strategies.check": ["check"],
    "kernels": ["gather_cast"],
    "kernels.reference": ["to_fp8"],
    "steps.step": ["Step", "frame", "recorded"],
    "steps.measure": ["measure_step"],
    "steps.predict": ["predict"],
    "provenance": ["Provenance", "Source"],
    "errors": ["LabError", "OutOfRange"],
    "ui.decode": ["explorer"],
    "ui.budget": ["budget_app"],
    "ui.glm5": ["reproduction_app"],
}
_NAMES = {name: place for place, names in _PLACES.items() for name in names}

__all__ = [*_NAMES]


def __getattr__(name: str):
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])

"""shadowkv_lab: FP8 MLA KV caches, attention kernels that want 16 bits, and what to do about it."""

__version__ = "0.1.0"

_APPS = {
    "explorer": "shadowkv_lab.ui.decode_lab",
    "budget_app": "shadowkv_lab.ui.budget",
    "reproduction_app": "shadowkv_lab.ui.reproduce_lab",
}


def __getattr__(name: str):
    """The notebook applications, imported when they are first asked for."""
    if name in _APPS:
        import importlib

        return getattr(importlib.import_module(_APPS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

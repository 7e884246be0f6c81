"""The real classes of SGLang on a CPU. Without sglang these tests are skipped with a reason."""

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types

import pytest


class Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An empty torchvision: SGLang imports names from it and needs none of them here.

    PyPI's torchvision is built for a CUDA torch and does not import beside the CPU file.
    """

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _placeholder(name)
        return module

    def exec_module(self, module):
        pass


def _placeholder(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def provide_torchvision() -> None:
    """Put the empty torchvision in place, after transformers has noted that there is none."""
    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():
        sys.meta_path.append(Torchvision())


@pytest.fixture(scope="session")
def sglang():
    """SGLang with a published parallel config and every hook of the plug-in applied, once."""
    if not _installed():
        pytest.skip("sglang is not installed: make test-sglang")
    provide_torchvision()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_parallel

    from shadowkv_lab.server.plugin import Settings, hooks

    get_parallel().override_permanently(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0)
    wanted = hooks.targets(Settings("shadow", None, 1)) | hooks.targets(Settings("gather_cast"))
    for path, (kind, hook) in wanted.items():
        HookRegistry.register(path, hook, HookType[kind])
    HookRegistry.apply_hooks()
    import sglang

    return sglang


def _installed() -> bool:
    # tests/ is on the path and has a folder of this name: only the distribution counts.
    try:
        importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture
def chosen(sglang, monkeypatch):
    """Choose a strategy for this test: `chosen("shadow", layers=...)`."""
    import torch

    from shadowkv_lab.server.plugin import Settings, hooks

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)  # DSA's copies call it

    def choose(strategy, layers=None, every=0, room=1 << 40):
        settings = Settings(strategy, None if layers is None else frozenset(layers), every)
        monkeypatch.setattr(hooks, "chosen", settings)
        monkeypatch.setattr(hooks, "room_bytes", room)
        monkeypatch.setattr(hooks, "passes", 0)
        return settings

    return choose

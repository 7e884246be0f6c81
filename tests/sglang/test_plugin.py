"""The entry point as SGLang itself loads it, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import conftest, json
conftest.provide_torchvision()
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
ours = {path: [kind.value for kind, _, source in hooks if source.plugin_name == "shadowkv"]
        for path, hooks in HookRegistry._hooks.items() if path in HookRegistry._patched}
print(json.dumps(ours))
"""


def load(**environment):
    """Run SGLang's `load_plugins` with these variables; the finished process."""
    path = str(Path(__file__).parent)
    command = [sys.executable, "-c", CODE]
    here = os.pathsep.join([path, str(Path(__file__).parents[2])])  # this checkout's plug-in
    environment = {**os.environ, "PYTHONPATH": here, **environment}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=path, env=environment, check=False
    )


def test_sglangs_registry_reports_every_hook_as_applied(sglang):
    from shadowkv_lab.server.plugin import Settings, hooks

    done = load(SHADOWKV_STRATEGY="shadow", SHADOWKV_CHECK="1")
    applied = json.loads(done.stdout.strip().splitlines()[-1])
    assert applied.keys() == hooks.targets(Settings("shadow", None, 1)).keys()
    assert len(applied) == 10 and all(applied.values())


@pytest.mark.parametrize(
    "strategy, count", [("full_cast", 1), ("vector_cast", 5), ("gather_cast", 6), ("fused_fp8", 6)]
)
def test_every_strategys_targets_are_in_sglang(sglang, strategy, count):
    from shadowkv_lab.server.plugin import Settings, hooks

    wanted = hooks.targets(Settings(strategy))
    assert len(wanted) == count and all(callable(hooks.resolve(path)) for path in wanted)


def test_without_a_strategy_nothing_is_hooked(sglang):
    done = load(SHADOWKV_STRATEGY="")
    assert json.loads(done.stdout.strip().splitlines()[-1]) == {}


def test_a_plug_in_that_cannot_run_ends_the_server(sglang):
    """SGLang logs an exception of a plug-in and starts without it; this must not happen."""
    done = load(SHADOWKV_STRATEGY="shadows")
    assert done.returncode == 1 and "Did you mean 'shadow'?" in done.stderr
    assert not done.stdout.strip()

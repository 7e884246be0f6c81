"""The set-up files agree with each other, and importing the lab stays light."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> set[str]:
    extras = PROJECT["optional-dependencies"].values()
    return {*PROJECT["dependencies"], *(r for extra in extras for r in extra)}


def test_environment_yml_has_the_packages_of_pyproject():
    lines = [x.strip() for x in (ROOT / "environment.yml").read_text().splitlines()]
    listed = {x[3:-1] for x in lines if x.startswith('- "')}
    assert listed == requirements() | {"-e ."}
    assert f"- python{PROJECT['requires-python']}" in lines


def test_constraints_pin_what_is_required_and_no_address():
    pins = (ROOT / "constraints.txt").read_text().split()
    assert "torch==2.13.0" in pins
    assert all("==" in pin and "@" not in pin and "/" not in pin for pin in pins)
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    own = {"triton", "flashinfer-python", "ninja", "nvidia-ml-py", "nvidia-cutlass-dsl"}
    for requirement in requirements():
        name = requirement.split(">")[0].split("[")[0].lower().replace("_", "-")
        assert name in pinned | own, f"{name} is required and not pinned"


@pytest.mark.parametrize(
    "module", ["triton", "flashinfer", "plotly", "IPython", "transformers", "pandas"]
)
def test_importing_the_package_brings_no(module):
    code = (
        f"import sys, shadowkv_lab, shadowkv_lab.strategies; assert {module!r} not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


FLOORS = (
    ["errors", "files", "facts", "load", "provenance"],
    ["model", "machine", "rules", "deployment", "kernels"],
    ["pool"],
    ["sources", "strategies"],
    ["steps", "budget"],
    ["glm5", "serving", "doctor"],
    ["server", "accuracy", "sglang"],
    ["ui"],
    ["cli"],
    ["__main__"],
)


def imports(path):
    """(room of `path`, room it imports) for each import of the package, also inside functions."""
    place = path.relative_to(ROOT / "shadowkv_lab").parts[0].removesuffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "shadowkv_lab" and len(parts) > 1:
                yield place, parts[1]


def test_nothing_imports_upward():
    floor = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
    upward = {
        f"{path.name}: {place} imports {room}"
        for path in (ROOT / "shadowkv_lab").rglob("*.py")
        for place, room in imports(path)
        if place != "__init__" and room in floor and floor[room] > floor[place]
    }
    assert not upward
    rooms = {path.stem for path in (ROOT / "shadowkv_lab").iterdir() if path.suffix != ".json"}
    assert rooms - {"__init__", "__pycache__", "data"} <= set(floor)


def test_make_sets_jupyter_up_to_save_without_views_and_to_ask_nothing(tmp_path, monkeypatch):
    manager = pytest.importorskip("jupyter_server.services.contents.filemanager")
    pytest.importorskip("playwright")
    monkeypatch.syspath_prepend(ROOT / "tests" / "browser")
    import lab_server
    from traitlets.config import Config

    from shadowkv_lab.ui import notebooks

    (file,) = Path(lab_server.configuration(tmp_path)).rglob("*.json")
    assert file.name == "jupyter_server_config.json"  # of files in .d, only extensions are read
    contents = manager.FileContentsManager(config=Config(json.loads(file.read_text())))
    assert contents.pre_save_hook is notebooks.pre_save
    overrides = json.loads((tmp_path / "share/jupyter/lab/settings/overrides.json").read_text())
    news = overrides["@jupyterlab/apputils-extension:notification"]
    assert news == {"fetchNews": "false", "checkForUpdates": False}

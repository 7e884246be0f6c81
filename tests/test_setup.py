"""The set-up files agree with each other, and importing the lab stays light."""

import ast
import graphlib
import json
import re
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
    own = {
        "triton",
        "flashinfer-python",
        "sgl-flash-mla",
        "ninja",
        "nvidia-ml-py",
        "nvidia-cutlass-dsl",
    }
    sglang = (ROOT / "tests" / "sglang" / "requirements.txt").read_text().splitlines()
    for requirement in requirements() | {line for line in sglang if not line.startswith("#")}:
        name = requirement.split(">")[0].split("[")[0].lower().replace("_", "-")
        assert name in pinned | own, f"{name} is required and not pinned"


# Distributions by the name that is imported, where the two differ. SGLang is the server that loads
# the plug-in, and never a requirement of the lab.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "IPython": "ipython",
    "dask_jobqueue": "dask-jobqueue",
    "flashinfer": "flashinfer-python",
    "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py",
    "sglang": None,
    "traitlets": "ipywidgets",  # whose own base it is
}


def imported(*folders) -> set[str]:
    """Distributions that the modules below these folders import, also inside functions."""
    found = set()
    for path in (p for folder in folders for p in (ROOT / folder).rglob("*.py")):
        here = {p.stem for p in path.parent.glob("*.py")} | {"shadowkv_lab", "tests", "lab_server"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                absolute = isinstance(node, ast.ImportFrom) and not node.level
                names = [node.module] if absolute else []
            tops = {name.split(".")[0] for name in names} - here
            found |= {DISTRIBUTIONS.get(top, top) for top in tops - sys.stdlib_module_names}
    return found - {None}


def declared(*groups) -> dict[str, bool]:
    """Distributions of pyproject.toml, and whether a comment gives the reason for each."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    wanted = [r for group in groups for r in PROJECT["optional-dependencies"][group]]
    named = {}
    for requirement in [*PROJECT["dependencies"], *wanted]:
        (line,) = {x.strip() for x in lines if x.strip().startswith(f'"{requirement}",')}
        named[re.split("[<>=]", requirement)[0]] = "#" in line
    return named


def test_what_the_library_imports_is_declared_and_the_other_way_round():
    ours, told = imported("shadowkv_lab"), declared("lab", "gpu", "cluster")
    assert ours - set(told) == set(), "imported, and not declared"
    assert {name for name in set(told) - ours if not told[name]} == set(), "no import, no reason"


def test_what_the_tests_import_is_declared():
    assert imported("tests", "scripts") - set(declared("lab", "gpu", "cluster", "test")) == set()
    beside = {r.split(">")[0] for r in PROJECT["optional-dependencies"]["test"]}
    unused = beside - imported("tests", "scripts", "shadowkv_lab")
    assert not [name for name in unused if not declared("test")[name]]


@pytest.mark.parametrize(
    "module", ["triton", "flashinfer", "plotly", "IPython", "transformers", "pandas"]
)
def test_importing_the_package_brings_no(module):
    code = (
        f"import sys, shadowkv_lab, shadowkv_lab.strategies; assert {module!r} not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_of_the_front_door_is_there():
    import shadowkv_lab

    assert len(shadowkv_lab.__all__) <= 32
    for name in shadowkv_lab.__all__:
        found = getattr(shadowkv_lab, name)
        assert not isinstance(found, type(shadowkv_lab)), f"{name} is a module as well"


FLOORS = (
    ["errors", "files", "facts", "load", "provenance"],
    ["model", "machine", "rules", "deployment", "kernels"],
    ["pool"],
    ["sources", "strategies"],
    ["steps", "budget"],
    ["glm5", "serving", "doctor"],
    ["server", "accuracy", "sglang", "sweep"],
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


def modules_imported(path):
    """Modules of the package that `path` imports when it is loaded; not those inside functions."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("shadowkv_lab"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                file = ROOT / name.replace(".", "/")
                yield name if file.with_suffix(".py").exists() or file.is_dir() else node.module


def test_no_modules_import_each_other_in_a_circle():
    graph = {}
    for path in (ROOT / "shadowkv_lab").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = {m for m in modules_imported(path) if m != name}
    for name, found in graph.items():  # a package's __init__ gathers what lies in it
        found -= {m for m in found if m.startswith(f"{name}.")}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, naming the circle


def test_few_lines_are_kept_from_the_formatter():
    lines = [
        line
        for path in ROOT.rglob("*.py")
        if ".venv" not in str(path)
        for line in path.read_text().splitlines()
    ]
    mark = "# fmt: " + "skip"
    assert sum(mark in line for line in lines) <= 30


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

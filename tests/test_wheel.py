"""The wheel works where there is no checkout, and writes nothing where it is installed."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command, cwd, **environment):
    """The output of a command; fails with all that it said."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SHADOWKV_DATA", "LIVE")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of the working tree, built in a copy of it."""
    pytest.importorskip("setuptools")
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout, whose files are copied")
    folder = tmp_path_factory.mktemp("wheel")
    listed = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            copy = folder / "source" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    build = "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder
    run(sys.executable, *build, folder / "source", cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """`installed(word, ...)` runs `shadowkv` of the wheel, outside the checkout.

    The dependencies are those of the environment that runs the tests.
    """
    folder = tmp_path_factory.mktemp("installed")
    site, home = folder / "site", folder / "home"
    home.mkdir()
    install = "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel
    run(sys.executable, *install, cwd=home)

    def shadowkv(*words, **environment):
        environment = {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"} | environment
        return run(sys.executable, site / "bin/shadowkv", *words, cwd=home, **environment)

    shadowkv.site, shadowkv.home = site, home
    before = sorted(site.rglob("*"))
    yield shadowkv
    assert sorted(site.rglob("*")) == before, "the lab wrote into its own folder"


def test_the_wheel_holds_every_data_file_and_notebook(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    listed = run("git", "ls-files", "data", "notebooks/*.ipynb", cwd=ROOT).splitlines()
    missing = [n for n in listed if (ROOT / n).exists() and f"shadowkv_lab/{n}" not in held]
    assert len(listed) > 30 and not missing
    assert not [name for name in held if name.startswith(("tests/", "data/", "notebooks/"))]


def test_what_is_imported_is_the_wheels(installed):
    code = "import shadowkv_lab.facts as f; print(f.__file__, f.DATA)"
    said = run(sys.executable, "-c", code, cwd=installed.home, PYTHONPATH=str(installed.site))
    assert said.split() == [
        str(installed.site / "shadowkv_lab" / name) for name in ("facts.py", "data")
    ]


def test_budget_and_rules(installed):
    rows = json.loads(installed("budget", "--kv-gib", "25.49", "--json"))
    tokens = {row["strategy"]: row["tokens"] for row in rows}
    assert tokens["full_cast"] == 495_616 and tokens["shadow"] == 188_608  # pages of 64
    names = {row["backend"] for row in json.loads(installed("rules", "--json"))}
    assert {"flashinfer_fa2", "lab_fused_fp8"} <= names


def test_a_card_of_ones_own(installed):
    card = json.loads((ROOT / "data/gpus/h200.json").read_text())
    path = installed.home / "own/gpus/mine.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(card | {"name": "mine", "title": "Mine"}))
    (path.parent / "bad.json").write_text("{")
    said = installed("budget", "--gpu", "mine", "--kv-gib", "25.49", SHADOWKV_DATA="own")
    assert "on Mine" in said


def test_reproduce_with_its_notebook(installed):
    small = "--pool-tokens", "2048", "--context", "128", "--no-profile", "--notebook"
    said = installed("reproduce", "--out", "out", *small)
    assert "The verdict" in said
    cells = json.loads((installed.home / "out/a5_recorded_runs.ipynb").read_text())["cells"]
    assert [c for c in cells if c.get("outputs")]


def test_a_notebook_by_its_name(installed):
    pytest.importorskip("transformers")
    assert "wrote a2_accuracy.ipynb" in installed("run-notebook", "a2_accuracy")


def test_the_plug_ins_entry_point_resolves(installed):
    code = (
        "from importlib.metadata import distributions as d; "
        "(e,) = [e for x in d(path=[__import__('sys').argv[1]]) for e in x.entry_points "
        "if e.group == 'sglang.srt.plugins']; print(e.value, e.load().__name__); "
        "import shadowkv_lab.sglang as old; assert old.register is e.load()"
    )
    said = run(
        sys.executable,
        *("-c", code, installed.site),
        cwd=installed.home,
        PYTHONPATH=str(installed.site),
    )
    assert said.split() == ["shadowkv_lab.server.plugin:register", "register"]

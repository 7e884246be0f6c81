"""Each notebook executed once a session, in a temporary copy, by whoever asks for it first."""

import shutil
from pathlib import Path

import nbformat
import pytest

from shadowkv_lab.ui import notebooks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def executed(tmp_path_factory):
    """`executed("02_glm5_report")`: that notebook after a run from a clean kernel."""
    folder, done = tmp_path_factory.mktemp("notebooks"), {}
    patch = pytest.MonkeyPatch()
    # Two threads on busy cores wait for each other; what is asserted here does not need them.
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.delenv("LIVE", raising=False)

    def run(name: str) -> nbformat.NotebookNode:
        if name not in done:
            copy = shutil.copy(ROOT / "notebooks" / f"{name}.ipynb", folder)
            done[name] = nbformat.read(notebooks.execute(copy), 4)
        return done[name]

    yield run
    patch.undo()

"""One Chromium and one JupyterLab for all browser tests; skipped without a Chromium, not in CI."""

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_CHROMIUM = "no chromium on the PATH (apt-get install chromium)"


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        names = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
        metafunc.parametrize("name", names)


@pytest.fixture(scope="session")
def browser():
    if shutil.which("chromium") is None:
        # In CI a skip would hide that nothing was looked at.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(NO_CHROMIUM)
    from lab_server import chromium

    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def pictures():
    """Where screenshots go; not committed."""
    folder = ROOT / "out" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A copy of the notebooks for JupyterLab to serve."""
    copy = tmp_path_factory.mktemp("served")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="session")
def lab(browser, folder):
    from lab_server import served

    with pytest.MonkeyPatch.context() as patch, served(folder) as running:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield running


@pytest.fixture(scope="session")
def lab_without_kernels(browser, tmp_path_factory):
    """JupyterLab as a colleague has it who cannot run the notebook."""
    from lab_server import served

    copy = tmp_path_factory.mktemp("received")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(path, copy)
    with served(
        copy,
        "--KernelSpecManager.ensure_native_kernel=False",
        "--KernelSpecManager.allowed_kernelspecs=none",
    ) as running:
        running.root = copy
        yield running

"""A tiny random checkpoint, made once a session by the repository's own script."""

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def maker():
    """scripts/make_tiny_checkpoint.py as a module."""
    pytest.importorskip("transformers")
    path = ROOT / "scripts" / "make_tiny_checkpoint.py"
    spec = importlib.util.spec_from_file_location("make_tiny_checkpoint", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def checkpoint_dir(maker, tmp_path_factory):
    """A folder with five shards, an index and a tokenizer; tests copy it before they break it."""
    return maker.main(tmp_path_factory.mktemp("checkpoint") / "tiny-glm-5")


@pytest.fixture
def broken(checkpoint_dir, tmp_path):
    """A copy of the checkpoint to break."""
    import shutil

    return Path(shutil.copytree(checkpoint_dir, tmp_path / "tiny-glm-5"))

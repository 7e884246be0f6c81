"""A tiny random checkpoint, made once a session."""

import os
import shutil
from pathlib import Path

import pytest

from shadowkv_lab.sources import tiny

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory):
    """A folder with five shards, an index and a tokenizer; tests copy it before they break it."""
    pytest.importorskip("transformers")
    return tiny.write(tmp_path_factory.mktemp("checkpoint") / "tiny-glm-5")


@pytest.fixture
def broken(checkpoint_dir, tmp_path):
    """A copy of the checkpoint to break."""
    return Path(shutil.copytree(checkpoint_dir, tmp_path / "tiny-glm-5"))

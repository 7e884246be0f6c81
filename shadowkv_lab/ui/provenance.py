"""The footer that every notebook ends with: machine, versions, revision, date."""

from datetime import UTC, datetime

import pandas as pd
import torch

from shadowkv_lab import __version__, hardware


def footer() -> pd.DataFrame:
    """What this notebook was executed on; recorded runs carry their own origin."""
    device = hardware.default_device()
    facts = {
        "executed on": hardware.device_title(device),
        "driver": hardware.clocks(device).driver or "-",
        "shadowkv_lab": f"{__version__}, revision {hardware.git_revision()}",
        "torch": torch.__version__,
        "triton": hardware.version_of("triton") or "-",
        "flashinfer": hardware.version_of("flashinfer-python") or "-",
        "date": datetime.now(UTC).date().isoformat(),
    }
    return pd.DataFrame({"": facts})

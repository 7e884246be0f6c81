"""The footer that every notebook ends with: machine, versions, revision, date."""

from datetime import UTC, datetime

import pandas as pd
import torch

from shadowkv_lab import __version__, machine


def footer() -> pd.DataFrame:
    """What this notebook was executed on; recorded runs carry their own origin."""
    device = machine.default_device()
    facts = {
        "executed on": machine.device_title(device),
        "driver": machine.clocks(device).driver or "-",
        "shadowkv_lab": f"{__version__}, revision {machine.git_revision()}",
        "torch": torch.__version__,
        "triton": machine.version_of("triton") or "-",
        "flashinfer": machine.version_of("flashinfer-python") or "-",
        "date": datetime.now(UTC).date().isoformat(),
    }
    return pd.DataFrame({"": facts})

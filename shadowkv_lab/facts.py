"""Where the lab's facts lie: the `data/` folder, and how one named JSON file is found in it."""

import json
import os
from functools import cache
from pathlib import Path

from shadowkv_lab.errors import UnknownName

DATA = Path(os.environ.get("SHADOWKV_DATA", Path(__file__).resolve().parents[1] / "data"))
RUNS = DATA / "runs"


@cache
def catalogue(folder: str) -> dict[str, dict]:
    """All JSON files of `data/<folder>` by their `name` and `aliases`, lower case."""
    facts = {}
    for path in sorted((DATA / folder).glob("*.json")):
        entry = json.loads(path.read_text())
        for name in (entry["name"], *entry.get("aliases", ())):
            facts[name.lower()] = entry
    return facts


def find(folder: str, kind: str, name: str, remedy: str = "") -> dict:
    """The entry `name` of `data/<folder>`; raises `UnknownName` with the nearest one."""
    known = catalogue(folder)
    entry = known.get(str(name).lower())
    if entry is None:
        raise UnknownName(kind, name, known, remedy)
    return entry


def stamps(folder: str, pattern: str) -> tuple[tuple[Path, int], ...]:
    """The files of a folder and when they last changed: a key for what was read from them."""
    return tuple((p, p.stat().st_mtime_ns) for p in sorted((DATA / folder).glob(pattern)))

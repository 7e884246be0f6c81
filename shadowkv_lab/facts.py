"""The facts that the lab ships, and a folder of the user's own laid over them.

Shipped facts are the files of `data/`: beside the package in a clone, inside it once installed.
SHADOWKV_DATA names a folder of the same layout (`gpus/mine.json`, `runs/mine.jsonl`, ...): its
files are added, and win where names are the same. A file of the user's that cannot be read is
left out with a warning; one of the lab's is an error.

Every fact file is a JSON object with a `name`, perhaps a `title` and `aliases`, and its `source`,
the fields of `provenance.Source`: `title`, `url`, `date` (the publication's own; null where it has
none) and `read` (the day on which it was read).
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TypeVar

from shadowkv_lab.errors import CannotWrite, LabError, UnknownName
from shadowkv_lab.files import read_json
from shadowkv_lab.provenance import Source

T = TypeVar("T")


def shipped(folder: str) -> Path:
    """`data` or `notebooks`: inside the package if it is installed, else beside it in a clone."""
    package = Path(str(resources.files("shadowkv_lab")))
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


DATA = shipped("data")
RUNS = DATA / "runs"


def own() -> Path | None:
    """The user's folder, SHADOWKV_DATA, or None."""
    told = os.environ.get("SHADOWKV_DATA")
    return Path(told).expanduser() if told else None


def layers() -> tuple[Path, ...]:
    """The lab's folder, then the user's, which wins."""
    mine = own()
    return (DATA,) if mine is None else (DATA, mine)


def files(folder: str, pattern: str) -> list[Path]:
    """Files of `folder` that match, of both layers and sorted by name; the user's of equal names.

    >>> [path.name for path in files("launch", "sm_9*.json")]
    ['sm_90.json']
    """
    found = {path.name: path for layer in layers() for path in (layer / folder).glob(pattern)}
    return [found[name] for name in sorted(found)]


def path(*parts: str) -> Path:
    """One file by its folder and name: the user's if there is one, else the lab's."""
    mine = layers()[-1].joinpath(*parts)
    return mine if mine.exists() else DATA.joinpath(*parts)


def stamps(folder: str, pattern: str) -> tuple[tuple[Path, int], ...]:
    """`files` with the time of their last change: a key for what is kept of them."""
    found = files(folder, pattern)
    return tuple((path, path.stat().st_mtime_ns if path.exists() else 0) for path in found)


def each(paths: Iterable[Path], reader: Callable[[Path], T]) -> Iterator[tuple[Path, T]]:
    """Each path with what `reader` makes of it; a bad file of the user's is left out, with a
    warning that names it. Raises what `reader` does for a bad file of the lab's."""
    for path in paths:
        try:
            yield path, reader(path)
        except LabError as error:
            if path.is_relative_to(DATA):
                raise
            warnings.warn(f"{path} is left out: {error}", stacklevel=2)


def target(*parts: str) -> Path:
    """Where the lab writes a fact: in the user's folder, or in the clone that it runs from.

    Raises `CannotWrite` if the lab is installed and there is no such folder.
    """
    if own() is None and (DATA.parent / "__init__.py").exists():
        raise CannotWrite(
            f"{'/'.join(parts)} has no place, as the lab is installed",
            "a folder of your own",
            "Set SHADOWKV_DATA to one",
        )
    return layers()[-1].joinpath(*parts)


@dataclass(frozen=True)
class _Head:
    name: str
    source: Source
    aliases: tuple[str, ...] = ()


def catalogue(folder: str, kind: type[T] = dict) -> dict[str, T]:
    """The facts of a folder by `name` and `aliases`, in lower case; read again when files come,
    go or are replaced.

    `kind` is a dataclass for a whole file (a `Card`), or `dict`. Raises `BadFile`.
    """
    found = []
    for layer in layers():  # a prediction asks a thousand times: one call to the system for each
        path = os.path.join(layer, folder)
        try:
            found.append((path, os.stat(path).st_mtime_ns))
        except OSError:
            continue
    return _catalogue(tuple(found), kind)


@cache
def _catalogue(folders: tuple[tuple[str, int], ...], kind: type[T]) -> dict[str, T]:
    def read(path: Path) -> tuple[_Head, T]:
        return read_json(path, _Head), read_json(path, kind)

    paths = (path for folder, _ in folders for path in sorted(Path(folder).glob("*.json")))
    facts = {}
    for _, (head, entry) in each(paths, read):
        facts |= {name.lower(): entry for name in (head.name, *head.aliases)}
    return facts


def find(folder: str, what: str, name: str, remedy: str = "", kind: type[T] = dict) -> T:
    """The fact `name` of a folder; raises `UnknownName` for a `what`, with the nearest one."""
    known = catalogue(folder, kind)
    entry = known.get(str(name).lower())
    if entry is None:
        raise UnknownName(what, name, known, remedy)
    return entry


def source(entry: dict) -> Source:
    """The source of a fact that was read as a `dict`."""
    told = entry["source"]
    return Source(**{name: told.get(name) for name in Source.__dataclass_fields__})

"""The one reader and the one writer of the lab's files.

Reading: `read_text`, `read_json`, `read_lines` (JSONL), and `parse` for JSON that lies inside
something else. Each gives a value of the `kind` asked for, a frozen dataclass as a rule, or raises
`BadFile` with path, line and field. Writing: `write`, `write_json` and `replacing` put a file down
whole or not at all; `append_line` adds one line and pushes it to the disk.

>>> parse('{"requests": 2}', dict[str, int])
{'requests': 2}
"""

import gzip
import json
import math
import os
import secrets
import stat
import tempfile
import warnings
import zlib
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from shadowkv_lab.errors import BadFile, CannotWrite, LabError

T = TypeVar("T")


# Reading


def read_bytes(path: str | Path) -> bytes:
    """A file's bytes, unpacked if they are gzip's. Raises `BadFile` with the path."""
    try:
        if stat.S_ISCHR(os.stat(path).st_mode):
            raise BadFile(f"Cannot read {path}: it is a device", "a file")
        raw = Path(path).read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except FileNotFoundError:
        raise BadFile(f"Cannot read {path}: there is no such file") from None
    except IsADirectoryError:
        raise BadFile(f"Cannot read {path}: it is a folder", "a file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadFile(
            f"Cannot read {path}: it is not a whole gzip file ({error})", "", "Copy it again"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise BadFile(f"Cannot read {path}: {getattr(error, 'strerror', error)}") from None


def read_text(path: str | Path) -> str:
    """A UTF-8 text, with or without a byte-order mark, gzip or not. Raises `BadFile`."""
    return _text(read_bytes(path), f"Cannot read {path}: it")


def read_json(path: str | Path, kind: type[T] = dict, *, unique: bool = True) -> T:
    """The one JSON value of a file, as `kind`: a dataclass, `dict`, `list[int]`, ...

    Types are strict ("8" is no number), fields that `kind` lacks are dropped; NaN, Infinity and
    numbers beyond a double are refused, and so are keys that stand twice in an object. `unique=
    False` leaves the last two checks out, for traces of many MB. Raises `BadFile` with path and
    field.
    """
    raw = read_bytes(path)
    if not raw.strip():
        raise BadFile(f"{path} is empty", "a JSON file", "Was it written to its end?")
    return parse(raw, kind, str(path), unique=unique)


def read_lines(path: str | Path, kind: type[T] = dict) -> list[T]:
    """Every line of a JSONL file as `kind`, see `read_json`; blank lines are passed over.

    A line that a crash cut short is skipped with a warning that names it: the last one, or one
    that a later writer left behind. Raises `BadFile` with path, line and field for any other.
    """
    found = []
    lines = read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            _require_plain(line, where)
        except BadFile:
            if not _torn(line):
                raise
            warnings.warn(f"{where} was cut short and is skipped", stacklevel=2)
            continue
        found.append(_as(kind, line, where))
    return found


def _torn(line: bytes) -> bool:
    """Whether an object begins on this line and JSON ends before the object does; after a crash
    some file systems leave NULs in the place of what was not yet written."""
    text = line.decode("utf-8", "ignore").rstrip("\0 \t\r\n")
    if not text:
        return True
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        ended = error.msg.startswith("Unterminated") or error.pos >= len(text)
        return ended and text.lstrip().startswith("{")
    except (RecursionError, ValueError):
        pass
    return False


def parse(
    text: str | bytes, kind: type[T] = dict, where: str = "this text", *, unique: bool = True
) -> T:
    """A JSON text as `kind`; `where` names it in the `BadFile` that is raised, see `read_json`."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    if unique:
        _require_plain(raw, where)
    return _as(kind, raw, where)


@cache
def reader(kind):
    """What reads JSON as `kind`; built once per process, in some milliseconds."""
    from pydantic import TypeAdapter  # 50 ms, which an import of the lab need not take

    return TypeAdapter(kind)


def _as(kind: type[T], raw: bytes, where: str) -> T:
    from pydantic import ValidationError

    try:
        return reader(kind).validate_json(raw, strict=True)
    except LabError as error:  # of the dataclass's own __post_init__
        raise BadFile(f"{where}: {error.what}", error.allowed, error.remedy) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        if "recursion" in first["ctx"]["error"]:
            raise BadFile(f"{where} is nested too deep")
        raise BadFile(f"{where} is not JSON ({first['ctx']['error']})", "", NOT_JSON)
    field = ".".join(map(str, first["loc"]))
    if first["type"].startswith("missing"):
        raise BadFile(f"{where} lacks {field}")
    wanted = first["msg"].removeprefix("Input should be ")
    value = repr(first["input"])
    value = value if len(value) <= 60 else f"{value[:59]}…"
    raise BadFile(f"{where}: {field or 'it'} is {value}", wanted)


NOT_JSON = "Was it cut short? Copy or write it again"


class _Refused(Exception):
    """JSON as Python reads it, and not as the lab does."""


def _object(pairs: list) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Refused(f"{twice} stands twice in one object")
    return found


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise _Refused(f"{text[:20]} is not a finite number")
    return value


def _whole(text: str) -> int:
    if len(text) > 300:  # a field that is a float would take it as infinite
        _number(text)
    return int(text)


_PLAIN = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_number, parse_int=_whole, parse_constant=_number
)


def _require_plain(raw: bytes, where: str) -> None:
    """Raise `BadFile` for what is not JSON, or holds NaN, Infinity or a key twice."""
    text = _text(raw, where)
    try:
        _PLAIN.decode(text)
    except _Refused as error:
        raise BadFile(f"{where}: {error}") from None
    except RecursionError:
        raise BadFile(f"{where} is nested too deep") from None
    except ValueError as error:
        raise BadFile(f"{where} is not JSON ({error})", "", NOT_JSON) from None


def _text(raw: bytes, where: str) -> str:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFile(f"{where} is not UTF-8 text (byte {error.start})", "UTF-8 text") from None
    if (at := text.find("\0")) >= 0:
        raise BadFile(f"{where} has a NUL in it (character {at})", "text", "Is it a binary file?")
    return text


# Writing


@contextmanager
def replacing(path: str | Path):
    """A binary file beside `path` under another name, which becomes `path` if all went well.

    Whatever goes wrong, also an interrupt, the old file stays and no half file remains. A link is
    followed, and a file that is replaced keeps its mode. Raises `CannotWrite`.
    """
    target = _writable(path)
    temporary = target.with_name(f".{secrets.token_hex(6)}.partial")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            if target.exists():
                os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError):
            raise
        raise CannotWrite(
            f"{path} could not be written whole ({error.strerror})",
            remedy="Free some disk space; what was there before is untouched",
        ) from error


def write(path: str | Path, content: str | bytes) -> Path:
    """Write a file whole or not at all, its folder made if need be. Raises `CannotWrite`."""
    with replacing(ready(path)) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return Path(path)


def write_json(path: str | Path, value: object, indent: int | None = 1) -> Path:
    """Write a value as JSON: dataclasses become objects, enums their values, paths text.

    Raises `CannotWrite`, for NaN too.
    """
    return write(path, _dumps(value, path, indent) + "\n")


def append_line(path: str | Path, value: object) -> None:
    """Add a value to a JSONL file and push it to the disk, so that a later crash keeps it.

    Where the last line was cut short, the new one starts on a line of its own; if it cannot be
    written whole, the file stays as it was. Raises `CannotWrite`.
    """
    target = _writable(ready(path))
    line = _dumps(value, path, None).encode() + b"\n"
    try:
        with open(target, "a+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            torn = file.read(1) not in (b"", b"\n")
            try:
                file.write(b"\n" + line if torn else line)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(target, size)
                raise
    except OSError as error:
        raise CannotWrite(
            f"{path} could not be written ({error.strerror})",
            remedy="Free some disk space; what was there before is untouched",
        ) from error


def ready(path: str | Path) -> Path:
    """A path to write to, its folder made if need be; for a look before long work.

    Raises `CannotWrite` for a folder, a device or a pipe, and where no file can be written.
    """
    target = _writable(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise CannotWrite(
            f"{path} cannot be written ({error.strerror})",
            "",
            "Name a file in a folder that you may write to",
        ) from None
    return Path(path)


def _writable(path: str | Path) -> Path:
    """Where a path leads, links followed; raises `CannotWrite` if that is there and no file."""
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode if target.exists() else stat.S_IFREG
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CannotWrite(f"{path} cannot be written ({why})") from None
    if stat.S_ISDIR(mode):
        raise CannotWrite(f"{path} is a folder", "the name of a file")
    if not stat.S_ISREG(mode):
        raise CannotWrite(f"{path} is a device or a pipe", "the name of a file")
    if target.exists() and not os.access(target, os.W_OK):
        raise CannotWrite(f"{path} is write-protected")
    return target


def _dumps(value: object, path: str | Path, indent: int | None) -> str:
    from pydantic_core import to_jsonable_python

    try:
        return json.dumps(value, indent=indent, allow_nan=False, default=to_jsonable_python)
    except ValueError as error:
        raise CannotWrite(f"{path}: a value cannot be written as JSON ({error})") from None

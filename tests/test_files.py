"""One reader and one writer: whatever a file holds, it is read, or named with line and field."""

import dataclasses
import gzip
import json
import os
import resource
import stat
import time
from enum import Enum
from pathlib import Path

import pytest

from shadowkv_lab import files
from shadowkv_lab.errors import BadFile, CannotWrite, OutOfRange


class Colour(Enum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Inner:
    ms: float
    colour: Colour = Colour.RED


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    layers: int
    phases: tuple[Inner, ...] = ()
    note: str | None = None

    def __post_init__(self):
        if self.layers < 1:
            raise OutOfRange(f"{self.layers} layers", "1 or more", "Count them again")


ROW = Row("shadow", 78, (Inner(1.5), Inner(2.0)), None)
TEXT = json.dumps(dict(name="shadow", layers=78, phases=[dict(ms=1.5), dict(ms=2, colour="red")]))


def put(tmp_path, content: str | bytes, name="a.json") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# Reading


@pytest.mark.parametrize(
    "content",
    [TEXT, "\ufeff" + TEXT, "\n " + TEXT + "\r\n", gzip.compress(TEXT.encode())],
    ids=["plain", "byte-order mark", "white space", "gzip"],
)
def test_what_is_right_is_read(tmp_path, content):
    path = put(tmp_path, content)
    assert files.read_json(path, Row) == ROW
    assert files.read_json(path, Row, unique=False) == ROW
    assert files.read_lines(path, Row) == [ROW]
    assert files.read_json(path)["layers"] == 78


def test_a_field_that_the_kind_lacks_is_dropped():
    assert files.parse(TEXT[:-1] + ', "later": [1]}', Row) == ROW


BAD = {
    "empty": ("", "is empty"),
    "blank": (" \n", "is empty"),
    "cut": (TEXT[:-9], "is not JSON .*Was it cut short"),
    "two values": (TEXT + TEXT, "is not JSON"),
    "not JSON": ("name: shadow", "is not JSON"),
    "binary": (b"\x80\x02}q\x00" * 9, "is not UTF-8"),
    "UTF-16": (TEXT.encode("utf-16"), "is not UTF-8"),
    "latin-1": (TEXT.replace("shadow", "schätzen").encode("latin-1"), "is not UTF-8"),
    "NUL": (TEXT + "\0" * 512, "has a NUL in it .*binary"),
    "brackets": ("[" * 100_000, "nested too deep"),
    "closed brackets": ("[" * 500 + "]" * 500, "nested too deep"),
    "cut gzip": (gzip.compress(TEXT.encode())[:-9], "not a whole gzip"),
    "NaN": (TEXT.replace("1.5", "NaN"), "NaN is not a finite number"),
    "Infinity": (TEXT.replace("1.5", "-Infinity"), "-Infinity is not a finite number"),
    "beyond a double": (TEXT.replace("1.5", "1e999"), "1e999 is not a finite number"),
    "whole, beyond a double": (TEXT.replace("1.5", "1" + "0" * 400), "is not a finite number"),
    "thousands of digits": (TEXT.replace("78", "7" * 5000), "a.json"),
    "a key twice": (TEXT.replace('"ms": 2', '"ms": 2, "ms": 3'), "ms stands twice"),
    "missing": ('{"name": "shadow"}', "lacks layers"),
    "missing inside": ('{"name": "s", "layers": 1, "phases": [{}]}', r"lacks phases\.0\.ms"),
    "wrong": (TEXT.replace("78", '"many"'), "layers is 'many'.*a valid integer"),
    "text for a number": (TEXT.replace("78", '"78"'), "layers is '78'.*a valid integer"),
    "a flag for a number": (TEXT.replace("78", "true"), "layers is True.*a valid integer"),
    "a share for a count": (TEXT.replace("78", "7.5"), "layers is 7.5.*integer"),
    "wrong inside": (TEXT.replace("1.5", "null"), r"phases\.0\.ms is None.*a valid number"),
    "a list": ("[1]", r"it is \[1\]"),
    "its own check": (TEXT.replace("78", "0"), "0 layers.*1 or more.*Count them"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_wrong_is_named(tmp_path, kind):
    content, words = BAD[kind]
    path = put(tmp_path, content)
    with pytest.raises(BadFile, match=f"(?s){words}") as raised:
        files.read_json(path, Row)
    assert str(path) in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "kind", [k for k in BAD if k not in ("empty", "blank", "cut", "cut gzip", "NUL")]
)
def test_a_bad_line_is_named_with_its_number(tmp_path, kind):
    content, words = BAD[kind]
    content = content.encode() if isinstance(content, str) else content
    path = put(tmp_path, TEXT.encode() + b"\n\n" + content.replace(b"\n", b"") + b"\n")
    with pytest.raises(BadFile, match=f"(?s)a.json, line 3.*{words.replace('a.json', '')}"):
        files.read_lines(path, Row)


@pytest.mark.parametrize(
    "torn",
    [b"{", TEXT[:30].encode(), TEXT[:-1].encode(), b'{"name": "\xc3', b"\0" * 40, b'{"n\0\0'],
)
def test_a_torn_line_is_skipped_and_named_and_another_is_not(tmp_path, torn):
    path = put(tmp_path, TEXT.encode() + b"\n" + torn)
    with pytest.warns(UserWarning, match=r"a\.json, line 2 was cut short"):
        assert files.read_lines(path, Row) == [ROW]
    files.append_line(path, ROW)
    with pytest.warns(UserWarning, match=r"a\.json, line 2 was cut short"):
        assert files.read_lines(path, Row) == [ROW, ROW]
    path.write_bytes(TEXT.encode() + b"\n{}")  # whole, and not a row
    with pytest.raises(BadFile, match="line 2 lacks name"):
        files.read_lines(path, Row)


def test_other_line_ends_and_separators(tmp_path):
    """U+2028 ends a line for Python's splitlines, and none of a JSONL file."""
    text = TEXT.replace("shadow", "a\u2028b\x85c")
    path = put(tmp_path, f"{text}\r\n{text}\n")
    assert [row.name for row in files.read_lines(path, Row)] == ["a\u2028b\x85c"] * 2


@pytest.mark.parametrize("read", [files.read_json, files.read_lines, files.read_text])
def test_what_is_no_file(tmp_path, read):
    with pytest.raises(BadFile, match="no such file"):
        read(tmp_path / "absent")
    with pytest.raises(BadFile, match="it is a folder"):
        read(tmp_path)
    with pytest.raises(BadFile, match="it is a device"):
        read("/dev/zero")
    with pytest.raises(BadFile, match="Cannot read"):
        read(tmp_path / ("a" * 300))
    with pytest.raises(BadFile, match="Cannot read"):
        read("a\0b")


def test_the_grid_is_read_about_as_fast_as_json_reads_it():
    """Checks for duplicate keys and NaN included: at most five times json.loads, line by line."""
    path = Path(__file__).resolve().parents[1] / "data/runs/h200_grid.jsonl"

    def fastest(read):
        took = []
        for _ in range(7):
            start = time.process_time()
            rows = read()
            took.append(time.process_time() - start)
        return rows, min(took)

    rows, ours = fastest(lambda: files.read_lines(path))
    plain, theirs = fastest(lambda: [json.loads(x) for x in path.read_text().splitlines()])
    assert len(rows) == len(plain) == 312 and ours < 5 * theirs, (ours, theirs)


# Writing


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "new" / "folder" / "a.json"
    assert files.write_json(path, ROW) == path
    assert files.read_json(path, Row) == ROW
    for row in (ROW, dataclasses.replace(ROW, note="later")):
        files.append_line(tmp_path / "runs" / "a.jsonl", row)
    found = files.read_lines(tmp_path / "runs" / "a.jsonl", Row)
    assert [row.note for row in found] == [None, "later"]


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], Inner(float("nan"))])
def test_nan_is_not_written(tmp_path, value):
    path = put(tmp_path, "old\n")
    for writer in (files.write_json, files.append_line):
        with pytest.raises(CannotWrite, match="cannot be written as JSON"):
            writer(path, value)
    assert path.read_text() == "old\n" and list(tmp_path.iterdir()) == [path]


def test_mode_and_link_are_kept_and_a_new_file_has_the_umask(tmp_path):
    path, link = put(tmp_path, "old"), tmp_path / "link"
    path.chmod(0o640)
    link.symlink_to(path)
    files.write(link, "new")
    assert link.is_symlink() and path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    before = os.umask(0o027)
    try:
        files.write(tmp_path / "fresh", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "fresh").stat().st_mode) == 0o640


def test_what_is_no_file_is_not_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    put(tmp_path, "x", "file")
    wrong = [tmp_path, tmp_path / "pipe", "/dev/null", tmp_path / "file" / "a", "a\0b"]
    for path in wrong:
        for writer in (files.write, files.write_json, files.append_line):
            with pytest.raises(CannotWrite):
                writer(path, "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert {p.name for p in tmp_path.iterdir()} == {"pipe", "file"}


@pytest.mark.parametrize("writer", [files.write, files.append_line])
def test_a_full_disk_leaves_what_was_there(tmp_path, writer):
    path = put(tmp_path, "old\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))  # the kernel refuses to go on
    try:
        with pytest.raises(CannotWrite, match="untouched"):
            writer(path, "x" * (1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "old\n" and list(tmp_path.iterdir()) == [path]


def test_an_interrupt_leaves_the_old_file(tmp_path):
    path = put(tmp_path, "old")
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]

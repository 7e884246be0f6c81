"""Recorded runs survive a crash, and a file that is not one is named."""

import dataclasses
import json

import pytest

from shadowkv_lab import facts
from shadowkv_lab.errors import BadFile
from shadowkv_lab.steps import records

ORIGIN = records.Origin(
    "GPU",
    1980,
    3201,
    84.0,
    "580",
    "2.13.0",
    None,
    None,
    4200.0,
    4100.0,
    "abc",
    "2026-11-29T00:00:00+00:00",
    "shadowkv measure",
)
RUN = records.Run(
    strategy="shadow",
    model="glm-5",
    layers=78,
    heads=8,
    pool_tokens=64,
    concurrency=1,
    context=8,
    live_tokens=8,
    new_tokens=1,
    page_size=1,
    slot_order="random",
    source="synthetic",
    backend="reference",
    mode="eager",
    step_ms=4.0,
    step_spread_ms=0.1,
    cast_ms=0.0,
    attention_ms=3.0,
    write_ms=0.5,
    residual_ms=0.5,
    plan_ms=0.1,
    samples=9,
    kept_bytes=1,
    allocated_bytes=2,
    error=1e-3,
    clipped=0,
    origin=ORIGIN,
)


def test_round_trip(tmp_path):
    file = tmp_path / "runs" / "a.jsonl"
    records.append(file, RUN)
    records.append(file, dataclasses.replace(RUN, strategy="full_cast", step_ms=9.0))
    frame = records.read(file)
    assert frame.strategy.tolist() == ["shadow", "full_cast"]
    assert frame["origin.device"].tolist() == ["GPU", "GPU"]
    assert frame.step_ms.tolist() == [4.0, 9.0]


def test_a_torn_last_line_is_skipped_named_and_not_built_upon(tmp_path):
    file = tmp_path / "a.jsonl"
    records.append(file, RUN)
    whole = file.read_text()
    file.write_text(whole + whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match=r"a.jsonl, line 2 was cut short"):
        assert len(records.read(file)) == 1
    records.append(file, RUN)  # a new run starts on a line of its own
    with pytest.raises(BadFile, match="line 2 is not JSON"):
        records.read(file)


@pytest.mark.parametrize(
    "line, why",
    [
        ('{"schema": 99}', "schema 99"),
        ("{}", "no schema version"),
        ("[1]", "no schema version"),
        ('{"schema": 1, "strategy": "shadow"}', "lacks"),
        (json.dumps(dataclasses.asdict(RUN) | {"step_ms": float("nan")}), "no number"),
    ],
)
def test_lines_that_are_no_runs_are_named(tmp_path, line, why):
    file = tmp_path / "a.jsonl"
    file.write_text(line + "\n" + json.dumps(dataclasses.asdict(RUN)) + "\n")
    with pytest.raises(BadFile, match=rf"a.jsonl, line 1.*{why}"):
        records.read(file)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(BadFile, match="Cannot read"):
        records.read(tmp_path / "absent.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadFile, match="Cannot read"):
        records.read(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text("")
    assert records.read(tmp_path / "c.jsonl").empty


def test_shipped_runs_can_be_read_and_say_where_they_come_from():
    frame = records.read()
    if not list(facts.RUNS.glob("*.jsonl")):
        pytest.skip("no recorded runs yet")
    for column in ("device", "torch", "git_revision", "date", "command"):
        assert frame[f"origin.{column}"].notna().all()
    assert (frame.error < 1e-2).all() and (frame.step_ms > 0).all()

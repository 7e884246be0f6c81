"""A step's record survives a crash, and a file that is not one is named."""

import dataclasses
import json

import pytest

from shadowkv_lab import facts
from shadowkv_lab.errors import BadFile
from shadowkv_lab.steps import step as steps
from shadowkv_lab.strategies import Label
from tests.steps import synthetic_runs as known

STEP = known.runs("shadow", pools=(65_536,), loads=((1, 1024),))[0]


def test_round_trip(tmp_path):
    file = tmp_path / "runs" / "a.jsonl"
    slower = dataclasses.replace(STEP, ms=9.0, strategy=Label("own(a=1)", "own", "#123456", 30))
    steps.append(file, STEP)
    steps.append(file, slower)
    assert steps.read(file) == [STEP, slower]
    frame = steps.frame(steps.read(file))
    assert frame.strategy.tolist() == ["shadow", "own(a=1)"]
    assert frame.colour.tolist() == ["#009E73", "#123456"]
    assert frame["origin.device"].tolist() == ["NVIDIA H200"] * 2
    assert frame.step_ms.tolist() == [STEP.ms, 9.0]
    assert frame.provenance.tolist() == ["recorded", "recorded"]
    assert frame.attention_gb[0] == pytest.approx(78 * 1152 * 1024 / 1e9)


def test_a_torn_last_line_is_skipped_named_and_not_built_upon(tmp_path):
    file = tmp_path / "a.jsonl"
    steps.append(file, STEP)
    whole = file.read_text()
    file.write_text(whole + whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match=r"a.jsonl, line 2 was cut short"):
        assert steps.read(file) == [STEP]
    steps.append(file, STEP)  # a new step starts on a line of its own
    with pytest.warns(UserWarning, match=r"a.jsonl, line 2 was cut short"):
        assert steps.read(file) == [STEP, STEP]


def line(**changes) -> str:
    """A good line with some fields changed, or left out where the change is None."""
    entry = steps.to_dict(STEP) | changes
    return json.dumps({k: v for k, v in entry.items() if v is not None})


@pytest.mark.parametrize(
    "bad, why",
    [
        ('{"schema": 99}', "schema 99"),
        ("{}", "lacks"),
        ("[1]", ""),
        (line(strategy=None), "strategy"),
        (line(ms=float("nan")), "finite"),
        (line(ms="4.0"), "ms"),
        (line(spread_ms="wide"), "spread_ms"),
        (line(kept_bytes=1.5), "kept_bytes"),
        (line(phases=[{"name": "cast"}]), r"phases\.0\.ms"),
        (line(origin={"device": "GPU"}), r"origin\.\w+"),
        (line(setting={"model": "glm-5"}), r"setting\.model"),
    ],
)
def test_lines_that_are_no_steps_are_named(tmp_path, bad, why):
    file = tmp_path / "a.jsonl"
    file.write_text(bad + "\n" + line() + "\n")
    with pytest.raises(BadFile, match=rf"a.jsonl, line 1.*{why}"):
        steps.read(file)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(BadFile, match=r"absent\.jsonl"):
        steps.read(tmp_path / "absent.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"PK\x03\x04\xff\n")
    with pytest.raises(BadFile, match=r"b\.jsonl"):
        steps.read(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text("")
    assert steps.read(tmp_path / "c.jsonl") == []
    assert steps.frame([]).empty


def test_noise_is_a_wide_spread_or_phases_that_do_not_add_up():
    assert not STEP.noisy
    assert dataclasses.replace(STEP, spread_ms=0.3 * STEP.ms).noisy
    assert dataclasses.replace(STEP, ms=2 * STEP.ms).noisy


def test_shipped_runs_say_where_they_come_from_and_what_they_moved():
    recorded = steps.recorded()
    assert len(recorded) >= 400 and len(list(facts.RUNS.glob("*.jsonl"))) >= 3
    for step in recorded:
        assert step.origin.git_revision and step.origin.date and step.origin.command
        assert step.error < 1e-2 and step.ms > 0 and str(step.provenance) == "recorded"
        # DESIGN's table, written out: attention reads L rows of one storage, in every layer.
        row = 576 if step.strategy.name in ("native_fp8", "fused_fp8") else 1152
        # With DSA they are the 2,048 that are chosen, or all of a shorter context.
        layers, load = step.setting.model.layers, step.setting.load
        each = min(2048, load.context) if load.reads == "dsa" else load.context
        live = load.concurrency * each
        assert step["attention"].bytes == layers * row * live

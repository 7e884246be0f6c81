"""The picture and the table of a run of real servers say what its files hold."""

import pytest

from shadowkv_lab.server import runs
from shadowkv_lab.ui import served


@pytest.fixture(scope="module")
def run():
    return runs.find("h200-0924")


def test_the_picture_s_bars_and_diamonds(run):
    fig = served.figure(run)
    bars, predicted = fig.data
    assert (
        "Shadow buffer: the same tokens at 142 tok/s instead of plain SGLang's 13.8"
        in fig.layout.title.text
    )
    assert list(bars.x) == sorted(bars.x, reverse=True) and len(bars.x) == 5
    assert len(predicted.x) == 4 and "BF16 pool" not in predicted.y
    at = dict(zip(bars.y, bars.x, strict=True))
    (plain,) = (name for name in at if name.startswith("plain SGLang"))
    assert at[plain] == pytest.approx(72.21, abs=0.005)
    assert dict(zip(predicted.y, predicted.x, strict=True))[plain] == pytest.approx(71.4, abs=0.1)


def test_a_run_without_plain_or_control_claims_nothing(run, monkeypatch):
    monkeypatch.setattr(runs.ServerRun, "sides", ["shadow"])
    fig = served.figure(runs.read(run.folder))
    assert len(fig.data) == 1 and "instead of" not in fig.layout.title.text
    monkeypatch.setattr(runs.ServerRun, "sides", ["plain", "shadow"])
    pair = served.figure(runs.read(run.folder), 32, 2048)
    assert "instead of" in pair.layout.title.text and len(pair.data) == 1


def test_the_table_stars_what_is_beyond_five_per_cent(run):
    shown = served.table(run)
    assert list(shown) == [
        "1 x 1,024",
        "1 x 8,192",
        "1 x 32,768",
        "8 x 2,048",
        "32 x 2,048",
        "tokens",
    ]
    stars = shown.apply(lambda column: column.str.contains(r"\*")).sum(axis=1)
    wanted = {"plain": 0, "shadow": 0, "gather_cast": 1, "fused_fp8": 4, "bf16": 0}
    assert {side: stars[served.title(side)] for side in run.sides} == wanted
    assert shown.tokens.tolist() == ["", "as plain's", "as plain's", "others", "others"]


def test_every_run_has_its_rows():
    shown = served.every()
    assert [index[2] for index in shown.index] == ["8b6aec6"] * 2 + ["3e8b120"] * 2
    assert shown["1 x 1,024"].tolist() == [72.14, 7.36, 72.21, 7.02]

"""The shipped facts name their sources; a user's folder is laid over them and breaks nothing."""

import json
import warnings
from datetime import date

import pytest

from shadowkv_lab import facts, machine, rules
from shadowkv_lab.errors import BadFile, CannotWrite, UnknownName
from shadowkv_lab.model import known_models, load_model
from shadowkv_lab.provenance import Source

FOLDERS = ("gpus", "models", "published", "traffic", "rules", "launch")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """`own("gpus/mine.json", entry)` puts a file into the user's folder."""
    monkeypatch.setenv("SHADOWKV_DATA", str(tmp_path / "own"))

    def put(name, content):
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return put


def shipped(name):
    return json.loads((facts.DATA / name).read_text())


@pytest.mark.parametrize(
    "path", [p for f in FOLDERS for p in sorted((facts.DATA / f).glob("*.json"))], ids=str
)
def test_every_fact_file_gives_its_source(path):
    source = json.loads(path.read_text())["source"]
    assert set(source) == {"title", "url", "date", "read"}
    assert len(source["title"]) > 10
    assert source["url"] is None or source["url"].startswith("https://")
    for day in filter(None, (source["date"], source["read"])):
        assert date.fromisoformat(day) <= date.today()
    assert source["read"]


def test_a_card_carries_its_source():
    assert machine.card("h200").source.url == "https://www.nvidia.com/en-us/data-center/h200/"
    assert isinstance(facts.source(facts.find("published", "result", "glm5-report")), Source)


def test_a_file_of_ones_own_is_added_and_wins(own):
    card = shipped("gpus/h200.json")
    own("gpus/mine.json", card | {"name": "mine", "driver_names": ["My GPU"]})
    own("gpus/h200.json", card | {"memory_mib": 1})
    config = shipped("models/glm-5.json")
    own("models/small.json", config | {"name": "small", "aliases": [], "title": "Small"})
    assert machine.card("mine").memory_mib == 143_155 and machine.card("H200").memory_mib == 1
    assert machine.card_of("My GPU").name == "mine" and "h100" in machine.known_cards()
    assert "small" in known_models() and load_model("small").layers == 78
    card["memory_mib"] = 2
    own("gpus/mine.json", "").unlink()
    own("gpus/mine.json", card | {"name": "mine"})
    assert machine.card("mine").memory_mib == 2, "replaced files are read again"


def test_files_of_both_layers_by_name(own):
    mine = own("runs/mine.jsonl", ""), own("runs/h200_grid.jsonl", "")
    found = facts.files("runs", "*.jsonl")
    assert {*mine, facts.DATA / "runs/h200_eager.jsonl"} <= {*found}
    assert facts.DATA / "runs/h200_grid.jsonl" not in found
    assert [p for p, _ in facts.stamps("runs", "*.jsonl")] == found
    assert facts.path("runs", "h200_grid.jsonl") == mine[1]
    assert facts.path("runs", "h200_profile.json") == facts.DATA / "runs/h200_profile.json"
    assert facts.target("launch", "sm_90.json") == mine[0].parents[1] / "launch/sm_90.json"


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("gpus/bad.json", "{", "is not JSON"),
        ("gpus/bad.json", {"name": "bad", "source": {"title": "me"}}, "lacks title"),
        ("gpus/bad.json", {"name": "bad"}, "lacks source"),
        ("models/bad.json", {"name": "bad", "source": {"title": "me"}, "config": {}}, "MLA model"),
        ("rules/attention_backends.json", "[]", "it is"),
        ("launch/sm_90.json", {"name": "sm_90", "source": {"title": "me"}, "rows": [1]}, "rows.0"),
    ],
)
def test_a_bad_file_of_ones_own_is_left_out_and_named(own, name, content, words):
    from shadowkv_lab.kernels import launch

    path = own(name, content)
    for cached in (rules.book, launch.rows):
        cached.cache_clear()
    with pytest.warns(UserWarning, match=rf"{path.name} is left out.*{words}"):
        assert machine.card("h200") and load_model("glm-5") and rules.backends()
        assert launch.rows("sm_90")
    with pytest.raises(UnknownName):
        machine.card("bad")


def test_bad_runs_of_ones_own_leave_the_recorded_ones(own):
    from shadowkv_lab.steps import step

    before = len(step.recorded())
    own("runs/bad.jsonl", "[1]\n")
    with pytest.warns(UserWarning, match="bad.jsonl is left out"):
        assert len(step.recorded()) == before > 400


def test_a_bad_file_of_the_labs_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "DATA", tmp_path)
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus/bad.json").write_text("{")
    with pytest.raises(BadFile, match=r"bad\.json is not JSON"):
        machine.card("h200")


def test_a_folder_that_is_not_there_adds_nothing(own):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert machine.card("h200") and facts.files("runs", "*.jsonl")


def test_installed_the_lab_writes_to_no_folder_but_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv("SHADOWKV_DATA", raising=False)
    assert facts.target("runs", "a.jsonl") == facts.DATA / "runs/a.jsonl"  # a clone
    (tmp_path / "data").mkdir()
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(facts, "DATA", tmp_path / "data")
    with pytest.raises(CannotWrite, match="Set SHADOWKV_DATA"):
        facts.target("runs", "a.jsonl")

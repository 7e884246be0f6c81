"""Spoilt files for every reader, odd values for every option: read, or refused by a named error.

Seeded: FUZZ_SEED draws others, FUZZ_COUNT more or fewer of them. What fails says what it was given.
"""

import copy
import gzip
import importlib
import json
import os
import random
import warnings
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from shadowkv_lab import facts, model
from shadowkv_lab.cli import app, applications
from shadowkv_lab.errors import LabError
from shadowkv_lab.kernels import launch
from shadowkv_lab.machine import Card
from shadowkv_lab.server import compare, logs, results, snapshot
from shadowkv_lab.serving import traces
from shadowkv_lab.sources import checkpoint, poolfile
from shadowkv_lab.steps import step, trace
from shadowkv_lab.ui import kernels, notebooks
from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data"
SEED = int(os.environ.get("FUZZ_SEED", "0"))
COUNT = int(os.environ.get("FUZZ_COUNT", "1"))

CONFIG = tiny.CONFIG | dict(
    architectures=["DeepseekV3ForCausalLM"],
    rope_scaling=dict(type="yarn", factor=40, mscale_all_dim=1.0),
    quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]),
    layer_types=["full", "full"],
    index_head_dim=128,
    index_topk_freq=2,
)
TRACE = dict(
    deviceProperties=[dict(name="NVIDIA H200")],
    traceEvents=[
        dict(ph="X", cat="user_annotation", name="step[DECODE bs=1]", ts=0, dur=900, pid=1, tid=1),
        dict(ph="X", cat="user_annotation", name="step[DRAFT bs=1]", ts=1000, dur=9, pid=1, tid=1),
        dict(ph="X", cat="cuda_runtime", name="launch", ts=1, dur=1, args=dict(correlation=7)),
        dict(
            ph="X",
            cat="kernel",
            name="direct_copy_kernel_cuda",
            ts=2,
            dur=828.0,
            pid=0,
            tid=7,
            args=dict(correlation=7),
        ),
    ],
)
NOTEBOOK = dict(
    nbformat=4,
    nbformat_minor=5,
    metadata={},
    cells=[
        dict(
            cell_type="code",
            id="a",
            metadata=dict(tags=["parameters"]),
            source="x = 1",
            execution_count=1,
            outputs=[dict(output_type="stream", name="stdout", text="x")],
        )
    ],
)


def lines(path: Path, most: int = 2) -> bytes:
    return b"\n".join(path.read_bytes().splitlines()[:most]) + b"\n"


def head(path: Path, most: int = 6000) -> bytes:
    return path.read_bytes()[:most]


def in_data(folder: str, name: str, reader):
    """A reader of the user's own folder: the file lies in it under `folder`."""

    def read(path: Path):
        own = path.parent / "own"
        (own / folder).mkdir(parents=True, exist_ok=True)
        (own / folder / name).write_bytes(path.read_bytes())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHADOWKV_DATA", str(own))
            reader()

    return read


def steps_and_frame(path: Path):
    step.frame(step.replays(step.read(path)))


def catalogue(folder: str, kind: type):
    return lambda: facts.catalogue(folder, kind)


def trace_and_casts(path: Path):
    found = trace.read_trace(path)
    found.casts()
    compare.cast_table(found, found, steps=2)


def opened_checkpoint(path: Path):
    folder = path.parent / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(path.read_bytes())
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')
    checkpoint.open_shards(folder)


def indexed(path: Path):
    folder = path.parent / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors.index.json").write_bytes(path.read_bytes())
    shards, _ = checkpoint.open_shards(folder)
    shards.read("model.embed_tokens.weight", None)


def pool(path: Path):
    found = poolfile.load(path)
    for index in range(len(found.layers)):
        found.rows(index, 0, 4)
        found.queries(index)


CASES = ROOT / "tests" / "server" / "cases"
LOGS = sorted(CASES.rglob("*.log"))
JSON = {
    "steps": (lines(DATA / "runs" / "h200_grid.jsonl"), steps_and_frame),
    "profile": ((DATA / "runs" / "h200_profile.json").read_bytes(), trace.recorded),
    "kernels": ((DATA / "runs" / "h200_kernels.json").read_bytes(), kernels.recorded),
    "trace": (json.dumps(TRACE).encode(), trace_and_casts),
    "config": (json.dumps(CONFIG).encode(), model.load_model),
    "checkpoint": (json.dumps(CONFIG).encode(), opened_checkpoint),
    "index": (b'{"weight_map": {"model.embed_tokens.weight": "a.safetensors"}}', indexed),
    "notebook": (
        json.dumps(NOTEBOOK).encode(),
        lambda p: notebooks.prepared(notebooks.read(p), {}),
    ),
    "bench": (lines(DATA / "runs/server/h200-1558/fused_fp8/bench.jsonl"), results.read_results),
    "bench as traffic": (lines(DATA / "traffic/samples/bench-serving.made-up.jsonl"), traces.load),
    "vllm bench": (
        head(CASES / "cmp-03-vllm-json" / "after" / "vllm-100qps-Kimi-K2-Thinking.json"),
        results.read_results,
    ),
    "mooncake": (lines(DATA / "traffic/samples/mooncake.jsonl", 4), traces.load),
    "card": (
        (DATA / "gpus" / "h200.json").read_bytes(),
        in_data("gpus", "mine.json", catalogue("gpus", Card)),
    ),
    "model": (
        (DATA / "models" / "glm-5.json").read_bytes(),
        in_data("models", "mine.json", lambda: model.load_model("glm-5")),
    ),
    "launch": (
        (DATA / "launch" / "sm_90.json").read_bytes(),
        in_data("launch", "sm_91.json", catalogue("launch", launch.Table)),
    ),
    "own steps": (
        lines(DATA / "runs" / "h200_grid.jsonl"),
        in_data("runs", "mine.jsonl", lambda: step.frame(step.recorded())),
    ),
}
TEXT = {
    **{
        f"traffic {path.name}": (lines(path, 40), traces.load)
        for path in sorted((DATA / "traffic" / "samples").glob("*.[cl][so][vg]"))
    },
    **{
        f"log {path.relative_to(CASES)}": (head(path, 20_000), lambda p: logs.read(p, "glm-5"))
        for path in LOGS[:: max(1, len(LOGS) // 6)]
    },
    "pool": ((DATA / "pools" / "tiny-glm-5-random.safetensors").read_bytes(), pool),
    "snapshot": (
        (DATA / "pools" / "tiny-glm-5-random.safetensors").read_bytes(),
        lambda p: snapshot.convert(p, p.with_name("out.safetensors"), "glm-5"),
    ),
}
ODD = [
    None,
    "",
    "x",
    -1,
    0,
    1e308,
    -1e308,
    2**70,
    0.5,
    True,
    [],
    {},
    [[]],
    "9" * 400,
    "\0",
    "é\ud800",
]


def spoilt_value(value: object, rng: random.Random) -> object:
    """A copy of a JSON value with one part of it replaced, taken out or doubled."""
    value = copy.deepcopy(value)
    places = []

    def walk(part):
        for key in part if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], dict | list):
                walk(part[key])

    if isinstance(value, dict | list):
        walk(value)
    if not places:
        return rng.choice(ODD)
    part, key = rng.choice(places)
    kind = rng.randrange(5)
    if kind == 0:
        del part[key]
    elif kind == 1 and isinstance(part, list):
        part.append(part[key])
    else:
        part[key] = rng.choice(ODD)
    return value


def spoilt_json(content: bytes, rng: random.Random) -> bytes:
    try:
        return json.dumps(spoilt_value(json.loads(content), rng)).encode()
    except ValueError:  # one object a line
        rows = content.decode().splitlines()
        at = rng.randrange(len(rows))
        rows[at] = json.dumps(spoilt_value(json.loads(rows[at]), rng))
        return "\n".join(rows).encode()


def spoilt_bytes(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) or 1)
    if content[8:9] == b"{":  # a safetensors file: its header is what is read
        at = rng.randrange(min(len(content), 3000))
    piece = rng.choice(
        [b"\0" * 9, b"\xff\xfe", b"-1", b"9" * 400, b"nan", b"{", b'"', b",,", b"\n"]
    )
    kind = rng.randrange(6)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + piece + content[at:]
    if kind == 2:
        return content[:at] + piece + content[at + len(piece) :]
    if kind == 3:
        return content[:at] + bytes(rng.randrange(256) for _ in range(8)) + content[at + 8 :]
    if kind == 4:
        return rng.choice([b"", b"\n\n", b"[" * 100_000, gzip.compress(content)[:-9], b"\x1f\x8b"])
    found = content.split(b"\n")
    rng.shuffle(found)
    return b"\n".join(found)


def reads(name: str, content: bytes, reader, folder: Path) -> None:
    path = folder / ("x.json" if name in JSON else "x.log")
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reader(path)
        except LabError as error:
            assert str(error).strip() and len(str(error)) < 3000
        except Exception as error:
            raise AssertionError(
                f"{name}: {type(error).__name__}: {error}\n{content[:3000]!r}"
            ) from error


@pytest.mark.parametrize("name", [*JSON, *TEXT])
def test_readers_read_or_name_what_is_wrong(name, tmp_path):
    content, reader = (JSON | TEXT)[name]
    rng = random.Random(f"{SEED} {name}")
    reads(name, content, reader, tmp_path)
    for i in range(25 * COUNT):
        spoil = spoilt_json if name in JSON and i % 4 else spoilt_bytes
        reads(name, spoil(content, rng), reader, tmp_path)


def test_the_seeds_are_read(tmp_path):
    """What is spoilt above is right to begin with, or nothing would be shown."""
    assert len(step.frame(step.read(DATA / "runs" / "h200_grid.jsonl"))) > 100
    assert len(LOGS) > 5
    for name in sorted({*JSON, *TEXT} - {"index", "snapshot"}):  # no shard; a pool file
        content, reader = (JSON | TEXT)[name]
        (tmp_path / "x.json").write_bytes(content)
        # Some logs are of another model than the one asked for, or of a draft.
        (logs.parse if name.startswith("log ") else reader)(tmp_path / "x.json")


# The command line

VALUES = [
    "0",
    "-1",
    "nan",
    "inf",
    "-inf",
    "",
    " ",
    "x",
    "1e400",
    "1,2",
    "2.5",
    "9" * 20,
    "9" * 5000,
]
VALUES += ["\0", "[]", "None", "a" * 300, "/dev/null", "/", "é", "0-99999999999", ",", "shadow("]


def jobs(folder: Path) -> list[list[str]]:
    """Every option of every command with every odd value, beside options that run quickly."""
    config, load = folder / "config.json", DATA / "traffic/samples/azure-2023.csv"
    config.write_text(json.dumps({k: v for k, v in CONFIG.items() if "index" not in k}))
    small = ["--pool-tokens", 256, "--context", 16, "--heads", 4, "--device", "cpu"]
    small += ["--strategies", "shadow"]
    bench = folder / "bench.jsonl"
    bench.write_bytes(lines(DATA / "traffic/samples/bench-serving.made-up.jsonl", 1))
    base = {
        "doctor": ["--device", "cpu"],
        "rules": [],
        "measure": ["--model", config, *small],
        "budget": [],
        "predict": [],
        "compare": [bench, bench],
        "simulate": ["--trace", load, "--strategies", "shadow"],
        "capture": ["--checkpoint", folder, "--text", config, "--out", folder / "o.safetensors"],
        "run-notebook": [folder / "none.ipynb"],
        "export": [folder / "none.ipynb"],
        "bench kernels": ["--device", "cpu"],
        "bench serving": ["--trace", folder / "none.csv"],
        "reproduce": ["--device", "cpu", "--context", 8192, "--pool-tokens", 64],
    }
    made, group = [], typer.main.get_command(app)
    for name, given in base.items():
        command = group
        for part in name.split():
            command = command.commands[part]
        options = [p.opts[0] for p in command.params if p.opts[0].startswith("-")]
        flags = {p.opts[0] for p in command.params if getattr(p, "is_flag", False)}
        for option in sorted(set(options) - flags - {"--help"}):
            made += [[*name.split(), *map(str, given), option, value] for value in VALUES]
    for name, (place, _) in applications.APPLICATIONS.items():
        module, _, view = place.rpartition(".")
        found = getattr(importlib.import_module(f"shadowkv_lab.ui.{module}"), view)
        for option in found.parameters:
            flag = f"--{option.replace('_', '-')}"
            made += [[name, flag, value] for value in VALUES]
    return made


def test_options_take_a_value_or_name_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drawn = random.Random(SEED).sample(all_ := jobs(tmp_path), min(len(all_), 220 * COUNT))
    for arguments in drawn:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ended = CliRunner().invoke(app, arguments)
        error = ended.exception
        named = error is None or isinstance(error, LabError | SystemExit)
        usage = any(c.__name__ == "ClickException" for c in type(error).__mro__)
        assert named or usage, (arguments, repr(error), ended.exc_info)
        assert ended.exit_code in (0, 1, 2), (arguments, ended.exit_code)

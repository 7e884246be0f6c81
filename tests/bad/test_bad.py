"""Sixteen bad inputs of different kinds: each refused in one named line, or used as far as it is
whole; nothing lost, nothing run, nothing written elsewhere.

Records are made here from one that the lab ships, in its own schema.
"""

import ast
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
import torch

from shadowkv_lab.errors import BadFile, LabError
from shadowkv_lab.model import load_model
from shadowkv_lab.pool import Pool
from shadowkv_lab.steps import step, trace
from shadowkv_lab.ui import decode, export

HERE, DATA = Path(__file__).parent, Path(__file__).resolve().parents[2] / "data"
WHOLE = (DATA / "runs" / "h200_grid.jsonl").read_text().splitlines()[0]
MARKUP = "<img src=x onerror=alert(1)>"


def record(**changed) -> str:
    """One recorded step as a line, with other values; a dotted name reaches inside."""
    entry = json.loads(WHOLE)
    for name, value in changed.items():
        *path, last = name.split("__")
        part = entry
        for key in path:
            part = part[key]
        if value is ...:
            del part[last]
        else:
            part[last] = value
    return json.dumps(entry) + "\n"


def shadowkv(*arguments, status=2, folder=None, **environment) -> str:
    command = [sys.executable, "-m", "shadowkv_lab", *map(str, arguments)]
    where = os.environ | environment | {"PYTHONPATH": str(DATA.parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=where)
    assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
    said = done.stderr if status else done.stdout + done.stderr
    return " ".join(said.split())


@pytest.fixture
def data(tmp_path):
    """A copy of the lab's facts as the user's own folder."""
    return Path(shutil.copytree(DATA, tmp_path / "data"))


@pytest.mark.parametrize(
    "changed, words",
    [
        (dict(spread_ms="wide"), "line 1: spread_ms is 'wide'.*number"),
        (dict(origin__date=...), "line 1 lacks origin.date"),
        (dict(origin__torch=...), "line 1 lacks origin.torch"),
        (dict(origin=...), "line 1: origin is not there"),
        (dict(origin__date="soon"), "origin.date is 'soon'"),
        (dict(ms=-1.0), "ms is -1.0"),
        (dict(samples=-5), "samples is -5"),
        (dict(mode="fast"), "mode is 'fast'.*graph, eager"),
        (dict(phases=[]), "phases are"),
        (dict(setting__heads=0), "setting.heads is 0"),
        (dict(setting__pool_tokens=0), "setting.pool_tokens is 0"),
        (dict(setting__model__layers=0), "setting.model.layers is 0"),
        (dict(kept_bytes=1.5), "kept_bytes is 1.5"),
        (dict(strategy__colour="red;background:url(x)"), "strategy.colour"),
        (dict(schema=1), "schema 1.*Allowed: schema 2"),
    ],
)
def test_a_record_is_whole_or_refused(tmp_path, changed, words):
    path = tmp_path / "x.jsonl"
    path.write_text(record(**changed))
    with pytest.raises(BadFile, match=words):
        step.read(path)


def test_markup_in_a_record_is_text(tmp_path, monkeypatch):
    folder = tmp_path / "own"
    (folder / "runs").mkdir(parents=True)
    lines = [
        record(
            card=MARKUP,
            backend=MARKUP,
            origin__device=MARKUP,
            strategy__label=name,
            strategy__title=MARKUP,
            setting__pool_tokens=495_616,
        )
        for name in ("full_cast", "shadow")
    ]
    (folder / "runs" / "mine.jsonl").write_text("".join(lines))
    monkeypatch.setenv("SHADOWKV_DATA", str(folder))
    app = decode.step_view.open(pool_tokens=495_616, concurrency=1, context=1024)
    shown = [app.note.value, app.error.value, app.status.value, app.code.value]
    shown += [box.value for box in app.beside.values()]
    shown += [app.view.shown.to_html(), app.view.shown.style.to_html()]
    figures = json.dumps([figure.to_plotly_json() for figure in app.view.figures], default=str)
    for text in [*shown, figures]:
        assert "<img" not in text


def test_torn_lines_are_passed_over_and_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(WHOLE + "\n" + WHOLE[:300] + "\n" + WHOLE + "\n")
    with pytest.warns(UserWarning, match=r"x\.jsonl, line 2 was cut short"):
        assert len(step.read(path)) == 2
    file = HERE / "bench_torn.jsonl"
    assert "bench_torn.jsonl, line 2 was cut short" in shadowkv("compare", file, file, status=0)


def test_one_bad_fact_breaks_no_command(data):
    shutil.copy(HERE / "model_without_name.json", data / "models" / "bad.json")
    (data / "gpus" / "torn.json").write_text('{"name": "x", ')
    (data / "runs" / "binary.jsonl").write_bytes(bytes(range(256)))
    (data / "runs" / "torn_kernels.json").write_text('{"schema": 1, "rows": [{}]}')
    (data / "runs" / "gone.jsonl").symlink_to("nowhere")
    (data / "runs" / "folder.jsonl").mkdir()
    said = shadowkv("predict", status=0, SHADOWKV_DATA=str(data))
    for name in ("bad.json", "binary.jsonl", "gone.jsonl", "folder.jsonl", "torn_kernels.json"):
        assert f"{name} is left out" in said


def test_a_kernel_lasts_no_negative_time():
    with pytest.raises(BadFile, match=r"lasts -828\.0 us"):
        trace.read_trace(HERE / "trace_negative_duration.json")


def test_no_handler_reaches_an_exported_page(tmp_path):
    """In a browser: tests/browser/test_export.py."""
    path = export.export(HERE / "notebook_with_handler.ipynb", tmp_path / "x.html")
    page = path.read_text()
    assert "onerror" not in page and "document.title" not in page
    policy = page.split('Content-Security-Policy" content="')[1].split('"')[0]
    assert "script-src 'none'" in policy and "form-action 'none'" in policy
    assert "unsafe-eval" not in policy and "script-src 'unsafe-inline'" not in policy


@pytest.mark.parametrize("case", ["twice", "half", "too many"])
def test_a_pool_keeps_its_books(tiny, case):
    pool = Pool(tiny, 64, [("fp8", "bf16")] * tiny.layers)
    slots = pool.allocate(8)
    held = pool.allocate(40)
    work = {
        "twice": lambda: pool.write(
            0, slots[[0, 0, 1, 1, 2, 2, 3, 3]], torch.ones(8, 576).bfloat16()
        ),
        "half": lambda: pool.allocate(2.5),
        "too many": lambda: pool.batch(4, 10),
    }
    before = pool.allocator.free_tokens
    with pytest.raises(LabError):
        work[case]()
    assert pool.allocator.free_tokens == before
    pool.free(held)


def test_usage_that_is_refused_at_once(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "r").mkdir()
    for arguments, said in [
        (("budget", "--model", "deep.json"), "nested too deep"),
        (("measure", "--pool-tokens", "64,128", "--device", "cpu"), "No load fits a pool of 128"),
        (("rules", "--heads", "0"), "Heads 0. Allowed: a whole number, 1"),
        (("measure", "--device", "cpu", "--pool-tokens", "1024", "--record", "r"), "r is a folder"),
        (("capture", "--checkpoint", ".", "--text", "nowhere.txt", "--out", "x"), "nowhere.txt"),
        (("capture", "--checkpoint", ".", "--text", "deep.json", "--out", "r"), "r is a folder"),
    ]:
        start = time.monotonic()
        assert said in shadowkv(*arguments, folder=tmp_path), arguments
        assert time.monotonic() - start < 30
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep.json", "r"]


def test_reproduce_keeps_an_earlier_file(tmp_path):
    earlier = tmp_path / "out/reproduce/measured.jsonl"
    earlier.parent.mkdir(parents=True)
    earlier.write_text(record())
    said = shadowkv("reproduce", "--context", "8192", "--pool-tokens", "4096", folder=tmp_path)
    assert "DoesNotFit" in said and earlier.read_text() == record()
    said = shadowkv("reproduce", "--context", "0", "--pool-tokens", "4096", folder=tmp_path)
    assert "Context 0" in said and earlier.read_text() == record()


def test_links_modes_devices_and_pipes(tmp_path):
    real, link = tmp_path / "real.html", tmp_path / "link.html"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to("real.html")
    source = HERE / "notebook_with_handler.ipynb"
    export.export(source, link)
    assert link.is_symlink() and real.read_text().startswith("<!DOCTYPE")
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    os.mkfifo(tmp_path / "pipe.html")
    for wrong in ("/dev/null", tmp_path / "pipe.html", tmp_path):
        with pytest.raises(LabError):
            export.export(source, wrong)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe.html").st_mode)


# Kills

APPENDER = """
import sys
from shadowkv_lab import files
row = {"n": 0, "text": "x" * 100_000}
while True:
    row["n"] += 1
    files.append_line(sys.argv[1], row)
    print(row["n"], flush=True)
"""
WRITER = """
import sys
from shadowkv_lab import files
n = 0
while True:
    n += 1
    files.write_json(sys.argv[1], [n] * 100_000)
    print(n, flush=True)
"""


def killed(code: str, path: Path, after_s: float) -> int:
    """Run `code` until it is killed; the last number that it said was written."""
    where = os.environ | {"PYTHONPATH": str(DATA.parent)}
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, env=where
    )
    first = run.stdout.readline()
    time.sleep(after_s)
    run.send_signal(signal.SIGKILL)
    said = run.stdout.read().split("\n")[:-1]
    run.wait()
    return int((said or [first])[-1])


@pytest.mark.filterwarnings("ignore:.*cut short")
def test_a_kill_loses_no_finished_row_and_leaves_no_half_file(tmp_path):
    from shadowkv_lab import files

    for turn in range(5):
        rows = tmp_path / f"{turn}.jsonl"
        last = killed(APPENDER, rows, 0.02 + 0.03 * turn)
        found = [row["n"] for row in files.read_lines(rows)]
        assert found[:last] == list(range(1, last + 1)) and len(found) <= last + 1
        files.append_line(rows, {"n": 0})
        assert [row["n"] for row in files.read_lines(rows)] == [*found, 0]
        whole = tmp_path / f"{turn}.json"
        last = killed(WRITER, whole, 0.02 + 0.03 * turn)
        found = files.read_json(whole, list[int])
        assert len(found) == 100_000 and found[0] in (last, last + 1) and len(set(found)) == 1


def test_ctrl_c_in_a_notebook_leaves_it_as_it_was(tmp_path):
    cells = ["open('began', 'w').close()\nimport time\ntime.sleep(60)"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cells[0])])
    nbformat.write(book, tmp_path / "n.ipynb")
    before = (tmp_path / "n.ipynb").read_bytes()
    run = subprocess.Popen(
        [sys.executable, "-m", "shadowkv_lab", "run-notebook", "n.ipynb"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(DATA.parent)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 60
    while not (tmp_path / "began").exists() and time.monotonic() < until:
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130 and "Traceback" not in said, said
    assert (tmp_path / "n.ipynb").read_bytes() == before


def test_no_pickle_and_no_code_of_others():
    """Nothing here unpickles, evaluates a text, or lets a model folder bring its own code."""
    modules, names = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve"}, {"eval", "exec"}
    for path in (DATA.parent / "shadowkv_lab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                found = {getattr(node, "module", None), *(alias.name for alias in node.names)}
                assert not found & modules, path.name
            if not isinstance(node, ast.Call):
                continue
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            called = ast.unparse(node.func)
            assert called not in names and options.get("allow_pickle") != "True", path.name
            if called in ("torch.load", "pd.read_pickle", "np.load"):
                assert options.get("weights_only") == "True", path.name
            if called.endswith(".from_pretrained"):
                assert options["trust_remote_code"] == "False", path.name


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_model_folder_that_needs_its_own_code_is_refused(tmp_path, file):
    from shadowkv_lab.sources import capture, checkpoint, tiny

    ran = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass A: pass\n")
    tiny.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG | {"model_type": "own"}))
    path = folder / file
    found = json.loads(path.read_text())
    found["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModel", "AutoTokenizer"), "code.A")
    path.write_text(json.dumps(found))
    with pytest.raises(BadFile, match=r"auto_map names .*code\.A"):
        capture.tokenise(folder, "text")
    if file == "config.json":
        with pytest.raises(BadFile, match="auto_map"):
            checkpoint.open_shards(folder)
    assert load_model(folder).layers == 4 and not ran.exists()

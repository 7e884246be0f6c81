"""Sweeps over two workers of this machine: killed, lost, interrupted, and of other versions."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from shadowkv_lab import errors, files, machine
from shadowkv_lab.deployment import deployment
from shadowkv_lab.load import Load
from shadowkv_lab.serving import traces
from shadowkv_lab.serving.contenders import contenders, engine
from shadowkv_lab.serving.simulate import simulate
from shadowkv_lab.steps import step as steps
from shadowkv_lab.steps.answer import anchored, answer
from shadowkv_lab.strategies import parse
from shadowkv_lab.sweep import cluster, grid, kinds
from tests.tiny import CONFIG

pytest.importorskip("distributed")
SAMPLES = Path(__file__).resolve().parents[2] / "data" / "traffic" / "samples"
STRATEGIES = ("full_cast", "shadow(layers=1)")
LOADS = [*itertools.product((1, 2), (16, 32, 48))]


@pytest.fixture(scope="module")
def client():
    with cluster.connect(workers=2, gpus=False) as made:
        made.wait_for_workers(2, timeout=60)
        yield made


@pytest.fixture
def tiny_grid(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "grid.json"
    told = dict(
        deployments=[{"model": str(tmp_path), "tensor_parallel": 2}],
        pool_tokens=256,
        concurrency="1,2",
        context="16:48:16",
        strategies=STRATEGIES,
    )
    file.write_text(json.dumps(told))
    return file


def found(record):
    """How often each (strategy, concurrency, context) stands in a record."""
    rows = steps.read(record)
    assert {(s.setting.heads, s.setting.pool_tokens, s.mode) for s in rows} == {(4, 256, "eager")}
    return Counter(
        (s.strategy.label, s.setting.load.concurrency, s.setting.load.context) for s in rows
    )


WANTED = Counter((s, *load) for s, load in itertools.product(STRATEGIES, LOADS))


def test_a_killed_worker_loses_and_doubles_nothing(client, tiny_grid, tmp_path):
    pids, killed = set(client.run(os.getpid).values()), []

    def kill(text, share):
        if not killed and share > 0.2:
            killed.append(min(pids))
            os.kill(killed[0], signal.SIGKILL)

    tally = kinds.measure(client, grid.read(tiny_grid), tmp_path / "record.jsonl", kill)
    assert killed and tally[:4] == (12, 0, 12, 0)
    assert found(tmp_path / "record.jsonl") == WANTED
    for step in steps.read(tmp_path / "record.jsonl"):
        assert step.ms > 0 and step.error < 0.1 and step.origin.device == step.card
    client.wait_for_workers(2, timeout=60)
    assert set(client.run(os.getpid).values()) != pids, "dask has started another one"


def test_a_sweep_goes_on_where_its_record_ends(client, tiny_grid, tmp_path):
    record, swept = tmp_path / "record.jsonl", grid.read(tiny_grid)
    short = grid.Grid(**{**vars(swept), "context": 16})
    assert kinds.measure(client, short, record)[:4] == (4, 0, 4, 0)
    whole = record.read_bytes()
    record.write_bytes(whole + whole.splitlines()[0][:200])  # as a crash leaves it
    with pytest.warns(UserWarning, match="cut short"):
        assert kinds.measure(client, swept, record)[:4] == (12, 4, 8, 0)
    assert record.read_bytes().startswith(whole)
    with pytest.warns(UserWarning, match="cut short"):
        assert found(record) == WANTED
        assert kinds.measure(client, swept, record)[:4] == (12, 12, 0, 0)
    with kinds._alone(record), pytest.raises(errors.CannotWrite, match="Another sweep"):
        kinds.measure(client, swept, record)


def test_failures_are_rows_with_their_reason(client, tiny_grid, tmp_path):
    record, swept = tmp_path / "record.jsonl", grid.read(tiny_grid)
    entry = {**swept.deployments[0], "kv_gib": 1e-9}
    wide = grid.Grid(**{**vars(swept), "concurrency": 8, "context": (16, 48)})
    none = grid.Grid(deployments=(entry,), strategies=("full_cast",), context=(16, 32))
    for _ in range(2):  # tried again, and told once
        tally = kinds.measure(client, wide, record)
        assert (tally.cells, tally.failed) == (4, 2)
        assert kinds.measure(client, none, record).failed == 2
        rows = files.read_lines(tally.failures)
        assert Counter(row["error"] for row in rows) == {"DoesNotFit": 2, "OutOfRange": 2}
        full = [row for row in rows if row["error"] == "DoesNotFit"]
        assert all("8 requests x 48 tokens = 384 slots exceed" in row["reason"] for row in full)
        assert {row["cell"].partition(",")[0] for row in full} == set(STRATEGIES)
    assert found(record) == Counter({(s, 8, 16): 1 for s in STRATEGIES})


def test_a_bug_and_a_cell_that_kills_are_failures_and_the_others_go_on(client):
    def work(cell):
        if cell == "bug":
            return 1 / 0
        if cell == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return cell.upper()

    client.run_on_scheduler(lambda dask_scheduler: setattr(dask_scheduler, "allowed_failures", 0))
    cells = {name: name for name in ("a", "b", "bug", "c", "d", "e", "f", "g")}
    outcomes = dict(cluster.each(client, work, cells))
    bug = outcomes.pop("bug")
    assert bug.error == "ZeroDivisionError" and "a bug at " in bug.reason
    assert {key: o.value for key, o in outcomes.items()} == {k: k.upper() for k in outcomes}
    (outcome,) = dict(cluster.each(client, work, {"kill": "kill"})).values()
    assert outcome.error == "KilledWorker" and "every worker that took it died" in outcome.reason
    client.run_on_scheduler(lambda dask_scheduler: setattr(dask_scheduler, "allowed_failures", 3))


def test_a_worker_whose_gpu_is_broken_is_started_anew(client, tmp_path):
    """And its cell runs once, however long whoever takes the outcomes takes over one."""

    def work(cell):
        if cell == "broken":
            with open(tmp_path / "ran", "a", encoding="utf-8") as file:
                file.write("once\n")
            cluster.works = lambda: False  # as after an illegal access
            raise errors.CannotRun("cuda:0 failed")
        return os.getpid()

    client.wait_for_workers(2, timeout=60)
    before = set(client.run(os.getpid).values())
    cells = {"broken": "broken", **{i: i for i in range(8)}}
    outcomes = {}
    for cell, outcome in cluster.each(client, work, cells):
        outcomes[cell] = outcome
        time.sleep(4 if cell == "broken" else 0)
    assert outcomes.pop("broken").error == "CannotRun"
    assert not any(o.error for o in outcomes.values())
    client.wait_for_workers(2, timeout=60)
    assert len(before & set(client.run(os.getpid).values())) == 1
    assert (tmp_path / "ran").read_text() == "once\n"


def test_other_versions_are_named(client, tiny_grid, tmp_path, monkeypatch):
    here = machine.git_revision()
    monkeypatch.setenv("SHADOWKV_REVISION", "elsewhere")
    machine.git_revision.cache_clear()
    try:
        said = f"revision {here} .here elsewhere.*SHADOWKV_REVISION"
        with pytest.raises(errors.CannotRun, match=said):
            kinds.measure(client, grid.read(tiny_grid), tmp_path / "record.jsonl")
        with pytest.raises(errors.CannotRun, match=said):  # a worker that joins later
            list(cluster.each(client, str, {1: 1}))
    finally:
        machine.git_revision.cache_clear()


def test_two_workers_on_one_gpu_and_two_cards_in_one_host_are_refused(monkeypatch):
    class Client:
        def __init__(self, *workers):
            self.seen = {f"tcp://h:{i}": worker for i, worker in enumerate(workers)}

        def wait_for_workers(self, *_, **__):
            pass

        def run(self, _):
            return self.seen

        def scheduler_info(self):
            return {"workers": {a: {"host": "h", "resources": {}} for a in self.seen}}

    own = cluster.versions()
    seen = [cluster.Seen(own, card, gpu) for card, gpu in (("h200", "A"), ("h200", "B"))]
    assert cluster.survey(Client(*seen)) == {"h200": {"h"}}
    with pytest.raises(errors.CannotRun, match="see the same GPU"):
        cluster.survey(Client(seen[0], seen[0]))
    with pytest.raises(errors.CannotRun, match="workers with h200 and with b200"):
        cluster.survey(Client(seen[0], cluster.Seen(own, "b200", "C")))
    with pytest.raises(errors.CannotRun, match="--resources measure=1"):
        cluster.require_slots(Client(*seen))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert cluster.visible() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    assert cluster.visible() == ["5", "GPU-7"]


def test_each_card_has_the_cells_and_the_pool_of_its_own():
    swept = grid.Grid(
        deployments=({"model": "glm-5"},), strategies=("bf16_pool",), modes=("graph",)
    )
    cells, unfit = kinds._cells(swept, ["h200", "b200"])
    assert not unfit
    pools = {cell.card: cell.setting.pool_tokens for cell in cells}
    assert pools == {name: deployment("glm-5", name).rows(parse("bf16_pool")) for name in pools}
    with pytest.raises(errors.CannotRun, match="No worker has h100"):
        kinds._cells(grid.Grid(deployments=({"card": "h100"},)), ["h200"])


def shadowkv(*arguments, **options):
    command = [sys.executable, "-m", "shadowkv_lab", "sweep", *map(str, arguments)]
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True, **options)


def wait_for(record, lines, process):
    for _ in range(600):
        if record.exists() and record.read_bytes().count(b"\n") >= lines:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError(f"{record} has no {lines} lines")


def test_a_lost_scheduler_is_named_and_the_rerun_goes_on(client, tiny_grid, tmp_path):
    address, record = tmp_path / "scheduler.json", tmp_path / "record.jsonl"
    common = ["--scheduler-file", str(address), "--no-dashboard"]
    dask = [sys.executable, "-m", "dask"]
    quiet = dict(stdout=-3, stderr=-3, cwd=Path(__file__).resolve().parents[2])
    host = ["--host", "127.0.0.1"]
    scheduler = subprocess.Popen([*dask, "scheduler", *common, *host, "--port", "0"], **quiet)
    slots = ["--nthreads", "1", "--resources", "measure=1"]
    worker = subprocess.Popen([*dask, "worker", *common, *slots, *host], **quiet)
    try:
        while not address.exists():
            time.sleep(0.1)
        where = json.loads(address.read_text())["address"]
        swept = shadowkv("--grid", tiny_grid, "--out", record, "--scheduler", where)
        wait_for(record, 3, swept)
        scheduler.kill()
        _, said = swept.communicate(timeout=60)
        assert swept.returncode == 2 and "CannotRun" in said and "was lost" in said, said
    finally:
        scheduler.kill()
        worker.terminate()
        worker.wait(timeout=60)
    had = len(steps.read(record))
    assert 3 <= had < 12
    assert kinds.measure(client, grid.read(tiny_grid), record)[:4] == (12, had, 12 - had, 0)
    assert found(record) == WANTED
    with pytest.raises(errors.CannotRun, match="No scheduler answers"), cluster.connect(where):
        pass


def test_ctrl_c_leaves_a_readable_record(tiny_grid, tmp_path):
    record = tmp_path / "record.jsonl"
    swept = shadowkv("--grid", tiny_grid, "--out", record, "--workers", 1, start_new_session=True)
    wait_for(record, 3, swept)
    os.killpg(swept.pid, signal.SIGINT)  # as a terminal does: the workers hear it too
    _, said = swept.communicate(timeout=60)
    assert swept.returncode == 130 and "Traceback" not in said, said
    counts = found(record)
    assert 3 <= counts.total() < 12 and set(counts.values()) == {1}


def test_a_map_is_the_answers_and_goes_on_by_parts(client, tmp_path):
    cards, folder = ("h200", "rtx-pro-6000-server"), tmp_path / "map"
    told = dict(strategies=("full_cast", "bf16_pool", "native_fp8"), concurrency="1:64:9")
    told |= dict(deployments=({"card": [*cards]},), context=(1024, 8192, 300_000))
    swept, rest = grid.Grid(**told), "rtx6kpro"
    tally = kinds.predict(client, swept, folder, rest, chunk=50)
    assert tally[:4] == (3, 0, 3, 0)
    cells = pd.read_parquet(folder)
    want = []
    for card in cards:
        there = deployment(card=card)
        of = anchored(rest, there)
        for s, R, n in itertools.product(swept.strategies, range(1, 65, 9), swept.context):
            try:
                one = answer(s, there, Load(R, n), of)
                want.append((f"card {card}", s, R, n, one.tokens_per_s or None, one.reason))
            except errors.LabError as error:
                want.append((f"card {card}", s, R, n, None, str(error)))
    names = ["deployment", "strategy", "concurrency", "context", "tokens_per_s", "reason"]
    seen = cells[names].astype(object).where(cells[names].notna(), None)
    seen.reason = seen.reason.fillna("") if seen.reason.notna().any() else ""
    assert len(want) == 144 and [*seen.itertuples(index=False, name=None)] == [
        (*row[:4], None if row[4] is None else pytest.approx(row[4]), row[5]) for row in want
    ]
    assert any(row[5] for row in want) and any(row[4] for row in want)
    best = kinds.winners(folder).set_index(["deployment", "concurrency", "context"]).strategy
    for key, rows in itertools.groupby(
        sorted((row for row in want if row[4]), key=lambda r: (r[0], r[2], r[3])),
        key=lambda r: (r[0], r[2], r[3]),
    ):
        assert best[key] == max(rows, key=lambda row: row[4])[1]
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("part*")}
    (folder / "part-00001.parquet").unlink()
    assert kinds.predict(client, swept, folder, rest, chunk=50)[:4] == (3, 2, 1, 0)
    again = {path.name: path.stat().st_mtime_ns for path in folder.glob("part*")}
    assert [name for name in times if times[name] != again[name]] == ["part-00001.parquet"]
    pd.testing.assert_frame_equal(pd.read_parquet(folder), cells)
    with pytest.raises(errors.CannotWrite, match=r"another map \(other context\)"):
        other = grid.Grid(**told | {"context": 1024})
        kinds.predict(client, other, folder, rest, chunk=50)


def test_simulations_are_those_of_this_process(client, tmp_path):
    load, record = traces.load(SAMPLES / "azure-2023.csv"), tmp_path / "served.jsonl"
    told = dict(deployments=({"published": "glm5-report"},), rates=(0.5, 2), replicas=(1, 2))
    swept = grid.Grid(**told, strategies=("full_cast", "bf16_pool"))
    assert kinds.simulate(client, swept, load, record)[:4] == (8, 0, 8, 0)
    assert kinds.simulate(client, swept, load, record)[:4] == (8, 8, 0, 0)
    rows = pd.DataFrame(files.read_lines(record)).set_index(["strategy", "rate", "replicas"])
    from shadowkv_lab.deployment import published_deployment

    for one in contenders(published_deployment(), ["full_cast", "bf16_pool"]):
        ran = simulate(engine(one), load.scaled(rate=2), overload=True).summary()
        row = rows.loc[one.name, 2.0, 1]
        assert {name: row[name] for name in ran} == pytest.approx(ran)
        assert rows.loc[one.name, 2.0, 2].p99_ttft_ms <= row.p99_ttft_ms


def test_the_dashboard_that_is_named_answers(client):
    pytest.importorskip("bokeh")
    assert "127.0.0.1" in client.dashboard_link
    with urllib.request.urlopen(client.dashboard_link, timeout=20) as page:
        assert page.status == 200 and b"bokeh" in page.read().lower()


def test_a_grid_crosses_lists_and_names_what_is_wrong(tmp_path):
    swept = grid.Grid(deployments=({"card": ["h200", "b200"], "tensor_parallel": [4, 8]},))
    assert [grid.title(entry) for entry in swept.entries] == [
        f"card {card}, tensor_parallel {n}" for card in ("h200", "b200") for n in (4, 8)
    ]
    assert grid.numbers("1,8,16:64:16", "x") == (1, 8, 16, 32, 48, 64)
    assert grid.numbers("3:5", "x") == (3, 4, 5)
    for wrong in ("", "a", "1:2:3:4", "0:3", "1:9:0", "1:1000000000", "1:" + "9" * 40):
        with pytest.raises(errors.OutOfRange):
            grid.numbers(wrong, "context")
    file = tmp_path / "grid.json"
    for text, kind, said in (
        ('{"contexts": [1]}', errors.UnknownName, "Did you mean 'context'"),
        ('{"context": [1.5]}', errors.BadFile, "context"),
        ('{"context": []}', errors.BadFile, "No context"),
        ('{"strategies": ["shadw"]}', errors.LabError, "shadow"),
        ("[1]", errors.BadFile, "grid.json"),
    ):
        file.write_text(text)
        with pytest.raises(kind, match=said):
            grid.read(file)
    with pytest.raises(errors.UnknownName, match="tensor_parallel"):
        grid.made({"tensor_paralel": 8})
    with pytest.raises(errors.OutOfRange, match="weights_gib x"):
        grid.made({"weights_gib": "x"})

"""scripts/server_bench.py against a stand-in for SGLang: every way a run can go."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shadowkv_lab.server import compare, runs

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "server_bench.py"
SMI = """#!/bin/sh
case "$1" in *uuid*) echo "$FAKE_GPU, NVIDIA H200, 580.1";; *) echo "36460, 1980";; esac
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


class Bench:
    """The script in a process of its own, on a machine with one made-up GPU."""

    def __init__(self, folder: Path):
        self.out, self.pids, self.port = folder / "run", folder / "pids", free_port()
        (folder / "bin").mkdir()
        smi = folder / "bin" / "nvidia-smi"
        smi.write_text(SMI)
        smi.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "FAKE_PIDS": str(self.pids),
            "FAKE_GPU": "GPU-one",
            "SHADOWKV_STRATEGY": "shadow",  # of the caller's shell: it must not reach plain
        }

    def command(self, *options: str) -> list[str]:
        launch = f"{sys.executable} {ROOT / 'tests' / 'server' / 'fake_sglang.py'}"
        common = ["--out", str(self.out), "--launch", launch, "--port", str(self.port)]
        common += ["--loads", "1x512,3x256", "--repeats", "2", "--start-limit", "20"]
        return [sys.executable, str(SCRIPT), *common, "--revision", "abc", *options]

    def __call__(self, *options: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*options),
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def started(self) -> list[tuple[str, int, int]]:
        lines = self.pids.read_text().splitlines() if self.pids.exists() else []
        return [(side, int(own), int(child)) for side, own, child in map(str.split, lines)]

    def all_gone(self) -> bool:
        return not any(alive(pid) for _, *pids in self.started() for pid in pids)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_a_whole_run(bench):
    done = bench("--sides", "plain,shadow,bf16", "--page-size", "64", FAKE_noprofile="bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [side for side, *_ in bench.started()] == ["plain", "shadow", "bf16"]
    assert bench.all_gone()
    run = runs.read(bench.out)
    assert run.sides == ["plain", "shadow", "bf16"]
    assert (run.info["card"], run.info["page_size"], run.info["revision"]) == (
        "NVIDIA H200",
        64,
        "abc",
    )
    assert run.info["gpus"] == [{"uuid": "GPU-one", "name": "NVIDIA H200", "driver": "580.1"}]
    table = run.table().set_index(["side", "requests"])
    for side in run.sides:
        lines = [json.loads(x) for x in (bench.out / side / "bench.jsonl").read_text().splitlines()]
        assert [line["repeat"] for line in lines] == [0, 1, 2] * 2
        assert all(line["run"] == run.info["id"] and line["mode"] == side for line in lines)
        assert lines[0]["warm_up"] and "secret" not in lines[0]["server_info"]
        wanted = statistics.median(x["mean_tpot_ms"] for x in lines[1:3])
        assert table.loc[(side, 1)].ms == wanted and 1 <= wanted < 30
    assert table.loc[("plain", 1)].ms > table.loc[("shadow", 1)].ms
    assert table.loc["shadow"].same_tokens.all() and "as plain's" in done.stdout
    assert run.memory().set_index("side").used_gib["plain"] == 36460 / 1024
    # What compare reads of the folders, with a trace where one came.
    sides = {side: compare.read(bench.out / side) for side in run.sides}
    assert [len(side.results) for side in sides.values()] == [6, 6, 6]
    assert sides["plain"].trace.steps == 8 and sides["bf16"].trace is None
    assert compare.compare(sides["plain"], sides["shadow"]).tpot.requests.tolist() == [1, 3]
    assert run.profile("shadow")["kernels"] == [["decode", 1.0, 0.004]]
    side = json.loads((bench.out / "bf16" / "side.json").read_text())
    assert side["profile"].startswith("no trace: ") and side["rows"]["zero"] == 0
    tokens = json.loads((bench.out / "shadow" / "tokens.json").read_text())
    assert len(tokens["3x256"]["ids"]) == 3 and len(tokens["1x512"]["ids"][0]) == 64
    assert tokens["1x512"]["greedy"]["top2_gaps"] == [0.25] * 64
    assert tokens["1x512"]["greedy"]["ids"] == tokens["1x512"]["ids"][0]
    # The flags of each server, and what the plug-in was told.
    logs = {side: (bench.out / side / "server.log").read_text() for side in run.sides}
    assert all("'--load-format', 'dummy'" in log and "] drawn" in log for log in logs.values())
    assert all(
        "'--max-total-tokens', '495616', '--page-size', '64'" in log for log in logs.values()
    )
    assert "'--kv-cache-dtype', 'bfloat16'" in logs["bf16"]
    assert "reads a pool" in logs["shadow"] and "reads a pool" not in logs["plain"] + logs["bf16"]
    config = json.loads((bench.out / "glm-5-dense-tp8" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["kv_lora_rank"]) == (78, 512)


def test_a_run_goes_on_where_it_stopped_and_only_on_its_own_card(bench):
    first = bench("--sides", "plain,shadow", "--limit", "30", "--side-limit", "29")
    assert first.returncode == 3 and "left: shadow" in first.stdout
    kept = (bench.out / "plain" / "bench.jsonl").read_bytes()
    other = bench("--sides", "plain,shadow", FAKE_GPU="GPU-two")
    assert other.returncode == 2 and "GPU-one" in other.stderr and "GPU-two" in other.stderr
    flags = bench("--sides", "plain,shadow", "--page-size", "64")
    assert flags.returncode == 2 and "page_size: 1 and 64" in flags.stderr
    assert len(bench.started()) == 1  # neither of the two started anything
    bench.port = free_port()  # another port is the same run
    second = bench("--sides", "plain,shadow")
    assert second.returncode == 0, second.stdout + second.stderr
    assert [side for side, *_ in bench.started()] == ["plain", "shadow"]
    assert (bench.out / "plain" / "bench.jsonl").read_bytes() == kept
    ids = {json.loads(x)["run"] for p in bench.out.glob("*/bench.jsonl") for x in p.open()}
    assert ids == {runs.read(bench.out).info["id"]} and bench.all_gone()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("zero", "rows of the pool are zero"),
        ("constant", "every request repeats one token"),
        ("silent", "the log has no line"),
        ("absent", "shadow reads the pool: it was not active"),
    ],
)
def test_a_run_that_would_mean_nothing_is_refused_and_keeps_nothing(bench, how, said):
    done = bench("--sides", "shadow,plain", **{f"FAKE_{how}": "shadow"})
    assert done.returncode == 2 and said in done.stderr
    assert not (bench.out / "shadow" / "side.json").exists() and bench.all_gone()
    assert [side for side, *_ in bench.started()] == ["shadow"]


@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        ("never", ["--start-limit", "3"], "not healthy after 3 s"),
        ("dies", [], "out of memory"),
        ("slow", ["--request-limit", "2"], "timed out"),
    ],
)
def test_a_side_that_fails_is_stopped_named_and_tried_again(bench, how, options, said):
    done = bench("--sides", "shadow,plain", *options, **{f"FAKE_{how}": "shadow"})
    assert done.returncode == 1 and said in done.stdout and "shadow FAILED" in done.stdout
    assert (bench.out / "plain" / "side.json").exists()
    assert not (bench.out / "shadow" / "side.json").exists() and bench.all_gone()
    if how != "dies":
        return
    again = bench("--sides", "shadow,plain")
    assert again.returncode == 0 and [s for s, *_ in bench.started()][2:] == ["shadow"]


def test_where_tokens_leave_plain_s_is_said_with_the_gap_there(bench):
    done = bench("--sides", "plain,fused_fp8", FAKE_differs="fused_fp8")
    assert done.returncode == 0
    assert "differ from step 3 (request 0), where plain's top two are 0.25 apart" in done.stdout
    assert not runs.read(bench.out).table().set_index("side").loc["fused_fp8"].same_tokens.any()


def test_another_s_server_is_neither_measured_nor_stopped(bench, tmp_path):
    """On the same port it is a refusal; elsewhere it stays as it was."""
    here = [sys.executable, str(ROOT / "tests" / "server" / "fake_sglang.py")]
    environment = bench.environment | {"FAKE_PIDS": str(tmp_path / "theirs")}
    flags = ["--kv-cache-dtype", "auto", "--port", str(bench.port)]
    theirs = subprocess.Popen([*here, *flags], env=environment, stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket.socket() as s:
                if not s.connect_ex(("127.0.0.1", bench.port)):
                    break
            time.sleep(0.1)
        refused = bench("--sides", "plain")
        assert refused.returncode == 2 and f"port {bench.port}" in refused.stderr
        assert not bench.started()
        bench.port = free_port()
        assert bench("--sides", "plain").returncode == 0
        assert theirs.poll() is None and bench.all_gone()
        child = int((tmp_path / "theirs").read_text().split()[2])
        assert alive(child)
    finally:
        theirs.kill()
        theirs.wait()
        os.kill(int((tmp_path / "theirs").read_text().split()[2]), signal.SIGKILL)


def test_an_ended_script_takes_its_server_with_it(bench):
    process = subprocess.Popen(
        bench.command("--sides", "plain"),
        env=bench.environment | {"FAKE_slow": "plain"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(200):
        if bench.started():
            break
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(40) == 128 + signal.SIGTERM
    assert len(bench.started()) == 1 and bench.all_gone()


def test_what_is_asked_for_is_checked(bench):
    for options, said in (
        (["--sides", "plain,shadows"], "no side shadows"),
        (["--model-path", "/models/x"], "--model"),
        (["--repeats", "0"], "--repeats"),
        (["--page-size", "16"], "page-size"),
    ):
        done = bench(*options)
        assert done.returncode == 2 and said in done.stderr
    no_gpu = bench("--sides", "plain", PATH="/nowhere")
    assert no_gpu.returncode == 2 and "names no GPU" in no_gpu.stderr
    assert not bench.started()


def test_a_checkpoint_on_eight_gpus_is_served_as_it_is(bench):
    """The flags of item 7: no dummy weights, nothing drawn, the rows still looked at."""
    options = ["--model-path", "/models/GLM-5", "--model", "glm-5", "--tp", "8", "--sides", "plain"]
    done = bench(*options, "--", "--ep-size", "8")
    # The stand-in's rows are zero unless weights are drawn: the look at them goes on.
    assert done.returncode == 2 and "rows of the pool are zero" in done.stderr
    log = (bench.out / "plain" / "server.log").read_text()
    assert "'--model-path', '/models/GLM-5'" in log and "'--tp-size', '8'" in log
    assert "'--ep-size', '8'" in log and "dummy" not in log and "] None" in log
    info = json.loads((bench.out / "run.json").read_text())
    assert (info["model"], info["tensor_parallel"]) == ("glm-5", 8)

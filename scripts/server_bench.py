"""One SGLang server after another, with and without the lab's strategies, measured: a run.

    make server-bench                                  # a run of its own under out/server-bench
    python scripts/server_bench.py --out RUN --page-size 64 --limit 560     # until it exits with 0
    python scripts/server_bench.py --out RUN --model-path CHECKPOINT --tp 8 -- --ep-size 8

Run it with a Python 3.11 or later and nothing else; `--python` is the server's own, in whose
environment SGLang 0.5.23 and this package (`pip install -e . --no-deps`) are installed.

Each side is one server with the same flags: plain SGLang, BF16 pool, and a strategy of the plug-in.
Without --model-path it serves GLM-5's KV geometry for one GPU of eight (data/models/
glm-5-dense-tp8.json) with dummy weights that the plug-in draws: SGLang's own are so small that
every FP8 row is zero. The run stops where the rows are zero or the tokens constant, since equal
tokens would mean nothing then.

RUN/run.json holds the run's id, GPUs, versions and flags; RUN/SIDE/ holds bench.jsonl (one line per
load and repeat, in bench_serving's words), server.log, tokens.json, trace.json.gz (8 decode steps)
and, last of all, side.json. Called again it goes on with the sides that lack one, on the same GPUs,
with the same flags, versions and revision, else it refuses: ratios hold inside one run only.

    shadowkv compare RUN/plain RUN/shadow
    python -c "from shadowkv_lab.server import runs; print(runs.read('RUN').table())"

Exit codes: 0 all sides are done; 3 sides are left, call again; 1 a side failed; 2 refused.
"""

import argparse
import contextlib
import datetime
import hashlib
import http.client
import itertools
import json
import os
import random
import re
import secrets
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "glm-5-dense-tp8"
POOL_TOKENS = 495_616
LOADS = ((1, 1024), (1, 8192), (1, 32768), (8, 2048), (32, 2048))
WARM_UP_TOKENS = 8  # of the first run of each load, which nobody times
PROFILED = (1, 1024, 8)  # requests, input tokens, decode steps
# Each side: the plug-in's variables and the pool's dtype. The two without the plug-in come first,
# so that a run that is cut short has what the others are compared with.
SIDES = {
    "plain": ({}, "fp8_e4m3"),
    "bf16": ({}, "bfloat16"),
    "shadow": ({"SHADOWKV_STRATEGY": "shadow"}, "fp8_e4m3"),
    "gather_cast": ({"SHADOWKV_STRATEGY": "gather_cast"}, "fp8_e4m3"),
    "fused_fp8": ({"SHADOWKV_STRATEGY": "fused_fp8"}, "fp8_e4m3"),
    "vector_cast": ({"SHADOWKV_STRATEGY": "vector_cast"}, "fp8_e4m3"),
    "shadow-26": ({"SHADOWKV_STRATEGY": "shadow", "SHADOWKV_LAYERS": "26"}, "fp8_e4m3"),
}
FLAGS = shlex.split("""--skip-tokenizer-init --dtype bfloat16 --attention-backend flashinfer
--flashinfer-mla-disable-ragged --sampling-backend pytorch --grammar-backend none
--context-length 36864 --max-running-requests 32 --chunked-prefill-size 8192
--mem-fraction-static 0.85 --disable-radix-cache --disable-prefill-cuda-graph
--cuda-graph-bs-decode 1 2 4 8 16 32 --disable-flashinfer-autotune --skip-server-warmup
--watchdog-timeout 600 --decode-log-interval 20 --random-seed 1""")
PACKAGES = shlex.split(
    "sglang sglang-kernel flashinfer-python torch triton transformers shadowkv-lab"
)
KEPT = shlex.split(
    "model_path tp_size kv_cache_dtype attention_backend page_size disable_cuda_graph version "
    "max_total_num_tokens max_total_tokens mem_fraction_static chunked_prefill_size"
)
# What a shell may have set: no side gets it but its own.
PLUGIN = [f"SHADOWKV_{name}" for name in ("STRATEGY", "LAYERS", "CHECK", "WEIGHTS", "ROWS")]
ROWS = re.compile(r"shadowkv: rows of layer (\d+): (\d+) written, (\d+) all zero")


class Refused(Exception):
    """The run must not go on: its numbers would mean nothing, or something else."""


class SideFailed(Exception):
    """This side gave no result; the others may."""


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


# --- the server -------------------------------------------------------------------------------


class Server:
    """One server process, its group and its log: started, waited for and stopped here."""

    def __init__(self, command: list[str], variables: dict[str, str], log: Path, port: int):
        if _answers(port):
            raise Refused(f"something listens on port {port} already: choose another --port")
        clean = {k: v for k, v in os.environ.items() if k not in PLUGIN}
        clean |= {"PYTHONUNBUFFERED": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        self.port, self.log = port, log
        with open(log, "wb") as out:  # a group of its own: what it starts is stopped with it
            self.process = subprocess.Popen(
                command,
                env=clean | variables,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait(self, limit_s: float) -> float:
        """Seconds until it was healthy. Raises `SideFailed` after the limit, or where it ended."""
        start = time.monotonic()
        while time.monotonic() - start < limit_s:
            if self.process.poll() is not None:
                raise SideFailed(f"it ended with {self.process.returncode}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.get("/health", 5)[0] == 200:
                    return time.monotonic() - start
            time.sleep(0.5)
        raise SideFailed(f"not healthy after {limit_s:.0f} s")

    def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def post(self, path: str, body: dict, timeout_s: float) -> http.client.HTTPResponse:
        """The open reply; raises `SideFailed` for another status than 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        text = json.dumps(body)
        connection.request("POST", path, text, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise SideFailed(f"{path}: HTTP {reply.status}: {reply.read(300)!r}")
        return reply

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 25) -> str:
        return "\n".join(line[:300] for line in self.text().splitlines()[-lines:])

    def stop(self) -> None:
        """End this server's own process group, and wait until it is gone."""
        for sign, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                break
            end = time.monotonic() + patience_s
            while time.monotonic() < end:
                self.process.poll()  # reap it: a zombie would keep its group alive
                try:
                    os.killpg(self.process.pid, 0)
                except ProcessLookupError:
                    return
                time.sleep(0.1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        return True
    return False


# --- the load ---------------------------------------------------------------------------------


def generate(server: Server, ids: list[int], tokens: int, limit_s: float) -> tuple[list, list[int]]:
    """One greedy request, streamed: [(seconds since it was sent, tokens so far)] and its tokens."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    start, marks, out = time.perf_counter(), [], []
    reply = server.post(
        "/generate", {"input_ids": ids, "stream": True, "sampling_params": sampling}, limit_s
    )
    for line in reply:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        now, event = time.perf_counter() - start, json.loads(line[6:])
        if "error" in event:
            raise SideFailed(f"/generate: {str(event)[:300]}")
        seen = event["meta_info"]["completion_tokens"]
        if seen > (marks[-1][1] if marks else 0):
            marks.append((now, seen))
        out = event.get("output_ids") or out
    if not marks or marks[-1][1] != tokens or len(out) != tokens:
        raise SideFailed(f"/generate gave {len(out)} tokens of {tokens}")
    return marks, out


def prompts(requests: int, length: int) -> list[list[int]]:
    """The same prompts in every side and run."""
    drawn = random.Random(1000 * requests + length)
    return [[drawn.randrange(10, 32_000) for _ in range(length)] for _ in range(requests)]


def one_load(
    server: Server, requests: int, length: int, out: int, limit_s: float
) -> tuple[dict, list]:
    """A line of bench.jsonl, and all tokens: all requests are sent at once."""
    asked = prompts(requests, length)
    results: list = [None] * requests

    def ask(number: int) -> None:
        try:
            results[number] = generate(server, asked[number], out, limit_s)
        except Exception as error:  # told below, in the thread that waits
            results[number] = error

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(requests)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - start
    for result in results:
        if isinstance(result, Exception):
            raise SideFailed(f"{requests} x {length}: {type(result).__name__}: {result}")
    marks, tokens = zip(*results, strict=True)
    return {**times(marks, wall), **load_words(requests, length, tokens)}, list(tokens)


def times(marks: list, wall_s: float) -> dict:
    """Times in ms under bench_serving's names, from each request's [(seconds, tokens so far)].

    `steady_itl_ms` is the median time between tokens once every request has its first: then all
    are decoding together, and no other request's prefill lies in between.
    """
    first = [m[0][0] for m in marks]
    tpot = [1e3 * (m[-1][0] - m[0][0]) / (m[-1][1] - m[0][1]) for m in marks]
    pairs = [(a, b) for m in marks for a, b in itertools.pairwise(m)]
    between = [1e3 * (b[0] - a[0]) / (b[1] - a[1]) for a, b in pairs]
    steady = [t for t, (a, _) in zip(between, pairs, strict=True) if a[0] >= max(first)] or between
    done = sum(m[-1][1] for m in marks)
    return {
        "duration": wall_s,
        "completed": len(marks),
        "total_output_tokens": done,
        "request_throughput": len(marks) / wall_s,
        "output_throughput": done / wall_s,
        "mean_tpot_ms": statistics.mean(tpot),
        "median_tpot_ms": statistics.median(tpot),
        "median_itl_ms": statistics.median(between),
        "steady_itl_ms": statistics.median(steady),
        "mean_ttft_ms": 1e3 * statistics.mean(first),
        "median_ttft_ms": 1e3 * statistics.median(first),
    }


def load_words(requests: int, length: int, tokens: tuple) -> dict:
    return {
        "backend": "sglang",
        "dataset_name": "random-ids",
        "max_concurrency": requests,
        "random_input_len": length,
        "random_output_len": len(tokens[0]),
        "total_input_tokens": requests * length,
        "ids_sha1": hashlib.sha1(json.dumps(list(tokens)).encode()).hexdigest()[:12],
        "distinct_ids": len({token for each in tokens for token in each}),
    }


def check_tokens(tokens: list[list[int]], what: str) -> None:
    """Raise `Refused` where no request has more than one distinct token."""
    if all(len(set(each)) == 1 for each in tokens):
        raise Refused(
            f"{what}: every request repeats one token, so that equal tokens would mean nothing. "
            "Dummy weights need SHADOWKV_WEIGHTS=drawn: is the plug-in installed with the server?"
        )


def check_rows(server: Server, strategy: str | None) -> dict:
    """What the plug-in's log says of the first prefills' rows.

    Raises `Refused` where they are all zero, where it says nothing, or where the strategy that was
    asked for reads no pool: the plain server would be measured in its name.
    """
    end = time.monotonic() + 5
    while not (found := ROWS.findall(server.text())):
        if time.monotonic() > end:
            raise Refused(
                "the log has no line 'shadowkv: rows of layer ...': install the plug-in in the "
                f"server's environment (pip install -e {ROOT.name} --no-deps)"
            )
        time.sleep(0.2)
    written, zero = (sum(int(row[i]) for row in found) for i in (1, 2))
    if zero == written:
        raise Refused(f"all {written} rows of the pool are zero: any two strategies would agree")
    if strategy and f"shadowkv: {strategy} reads a pool" not in server.text():
        raise Refused(f"the log does not say that {strategy} reads the pool: it was not active")
    return {"written": written, "zero": zero}


def gaps(server: Server, length: int, out: int, limit_s: float) -> dict:
    """One more greedy request of one load, untimed: its tokens, and at each step how far the most
    likely token is before the second, in log probability. Where two sides first differ, a small
    gap says that rounding decided."""
    body = {
        "input_ids": prompts(1, length)[0],
        "sampling_params": {"temperature": 0, "max_new_tokens": out, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    reply = json.loads(server.post("/generate", body, limit_s).read())
    top = reply["meta_info"].get("output_top_logprobs") or []
    return {
        "ids": reply.get("output_ids"),
        "top2_gaps": [step[0][0] - step[1][0] if step and len(step) > 1 else None for step in top],
    }


def profile(server: Server, folder: Path, limit_s: float) -> str:
    """A trace of decode steps while one request decodes, as trace.json.gz; what came of it."""
    requests, length, steps = PROFILED
    raw = folder / "profile"
    raw.mkdir(exist_ok=True)
    body = {"output_dir": str(raw.resolve()), "num_steps": steps, "activities": ["CPU", "GPU"]}
    asked = prompts(requests, length)[0]
    failed: list[Exception] = []

    def decode() -> None:  # long enough that the profile falls into its decode steps
        try:
            sampling = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
            sent = {"input_ids": asked, "stream": True, "sampling_params": sampling}
            for line in server.post("/generate", sent, limit_s):
                if line.startswith(b"data: {"):
                    begun.set()
        except Exception as error:
            failed.append(error)
        finally:
            begun.set()

    begun = threading.Event()
    thread = threading.Thread(target=decode, daemon=True)
    thread.start()
    begun.wait(limit_s)
    try:
        server.post("/start_profile", body, limit_s).read()
    except (OSError, http.client.HTTPException, SideFailed) as error:
        failed.append(error)
    thread.join(limit_s)
    if failed:  # the times are there: a side is not lost for its profile
        return f"no trace: {type(failed[0]).__name__}: {failed[0]}"
    end, size = time.monotonic() + limit_s, -1
    while time.monotonic() < end:
        found = sorted(raw.rglob("*.json.gz"))
        if found and size == (size := found[0].stat().st_size) and size:
            found[0].replace(folder / "trace.json.gz")
            return f"trace of {steps} decode steps"
        time.sleep(0.5)
    return f"no trace after {limit_s:.0f} s"


# --- a run ------------------------------------------------------------------------------------


def identity(a: argparse.Namespace) -> dict:
    """What must stay the same from call to call of one run."""
    query = ["nvidia-smi", "--query-gpu=uuid,name,driver_version", "--format=csv,noheader"]
    gpus = [
        dict(zip(("uuid", "name", "driver"), map(str.strip, line.split(",")), strict=True))
        for line in _output(query).splitlines()
    ]
    code = (
        "import importlib.metadata as m, json\n"
        f"found = {{}}\nfor p in {PACKAGES!r}:\n"
        "    try: found[p] = m.version(p)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    git = ["git", "-C", str(ROOT)]
    revision = a.revision or _output([*git, "rev-parse", "HEAD"]).strip()
    if not a.revision and _output([*git, "status", "--porcelain", "-uno"]).strip():
        revision += "-dirty"
    return {
        "schema": 1,
        "card": gpus[0]["name"] if gpus else None,
        "gpus": gpus,
        "tensor_parallel": a.tp,
        "model": MODEL if a.model_path is None else a.model,
        "page_size": a.page_size,
        "pool_tokens": a.pool_tokens,
        "loads": [list(load) for load in a.loads],
        "repeats": a.repeats,
        "output_tokens": a.output_tokens,
        "revision": revision or None,
        "versions": json.loads(_output([a.python, "-c", code]) or "{}"),
        "command": server_command(a, a.model_path or MODEL, "KV_CACHE_DTYPE", "PORT"),
    }


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def open_run(out: Path, now: dict) -> dict:
    """run.json, new or of the calls before. Raises `Refused` naming everything that differs."""
    path = out / "run.json"
    if path.exists():
        kept = json.loads(path.read_text())
        differ = [f"{k}: {kept.get(k)!r} and {v!r}" for k, v in now.items() if kept.get(k) != v]
        if differ:
            raise Refused(
                f"{path} is another run's; ratios hold inside one only. Take another --out, or the "
                "same machine and flags:\n  " + "\n  ".join(differ)
            )
        return kept
    if not now["gpus"]:
        raise Refused("nvidia-smi names no GPU here")
    date = datetime.datetime.now(datetime.UTC)
    kept = {
        "id": f"{date:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        "date": f"{date:%Y-%m-%dT%H:%MZ}",
        **now,
    }
    _write(path, kept)
    return kept


def _write(path: Path, value: object) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)


def server_command(a: argparse.Namespace, model_path: str, kv: str, port: str) -> list[str]:
    """The command that starts a server; `kv` is its --kv-cache-dtype."""
    launch = shlex.split(a.launch) if a.launch else [a.python, "-m", "sglang.launch_server"]
    dummy = ["--load-format", "dummy"] if a.model_path is None else []
    return [
        *launch,
        *("--model-path", model_path, *dummy, *FLAGS),
        *("--max-total-tokens", str(a.pool_tokens), "--page-size", str(a.page_size)),
        *("--tp-size", str(a.tp), "--kv-cache-dtype", kv),
        *("--host", "127.0.0.1", "--port", port, *a.server_flags),
    ]


def one_side(name: str, run: dict, a: argparse.Namespace, running: list[Server]) -> None:
    """Measure a side into a folder of its own; side.json is written last, when all of it is there.

    Raises `SideFailed`, `Refused`.
    """
    variables, kv = SIDES[name]
    folder = a.out / name
    folder.mkdir(parents=True, exist_ok=True)
    model_path = a.model_path
    variables = variables | {"SHADOWKV_ROWS": "1"}
    if model_path is None:
        variables |= {"SHADOWKV_WEIGHTS": "drawn"}
        config = json.loads((ROOT / "data" / "models" / f"{MODEL}.json").read_text())["config"]
        model_path = str(a.out / MODEL)
        Path(model_path).mkdir(exist_ok=True)
        (Path(model_path) / "config.json").write_text(json.dumps(config, indent=1))
    say(f"{name}: start {variables}")
    server = Server(
        server_command(a, model_path, kv, str(a.port)), variables, folder / "server.log", a.port
    )
    running.append(server)
    try:
        up_s = server.wait(a.start_limit)
        say(f"{name}: healthy after {up_s:.0f} s")
        info = json.loads(server.get("/server_info", 30)[1])
        states = info.get("internal_states") or [{}]
        told = {key: info[key] for key in KEPT if key in info}
        told["memory_usage"] = states[0].get("memory_usage")
        warm_up = generate(server, list(range(10, 266)), 4, a.request_limit)
        rows = check_rows(server, variables.get("SHADOWKV_STRATEGY"))
        lines, kept = [], {}
        for requests, length in a.loads:
            for repeat in range(a.repeats + 1):  # the first is the warm-up of its shape
                out = a.output_tokens if repeat else min(WARM_UP_TOKENS, a.output_tokens)
                line, tokens = one_load(server, requests, length, out, a.request_limit)
                check_tokens(tokens, f"{name}, {requests} x {length}")
                head = {"run": run["id"], "mode": name, "page_size": a.page_size, "repeat": repeat}
                head |= {"warm_up": repeat == 0, "written_by": "scripts/server_bench.py"}
                lines.append({**head, **line, "server_info": told})
            kept[f"{requests}x{length}"] = {"ids": tokens}
            timed = [x for x in lines if x["max_concurrency"] == requests]
            timed = [one_time(x) for x in timed if x["random_input_len"] == length and x["repeat"]]
            say(f"{name}: {requests} x {length}: {statistics.median(timed):.2f} ms a token")
            if requests == 1:
                kept[f"{requests}x{length}"]["greedy"] = gaps(
                    server, length, a.output_tokens, a.request_limit
                )
        used = _output(
            ["nvidia-smi", "--query-gpu=memory.used,clocks.sm", "--format=csv,noheader,nounits"]
        )
        used = [int(x) for x in re.findall(r"\d+", used.splitlines()[0])] if used else [None, None]
        profiled = profile(server, folder, a.profile_limit)
    except (OSError, http.client.HTTPException, KeyError, ValueError, SideFailed) as error:
        raise SideFailed(f"{type(error).__name__}: {error}\n{server.tail()}") from error
    finally:
        server.stop()
        running.remove(server)
    say(f"{name}: {profiled}")
    (folder / "bench.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _write(folder / "tokens.json", kept)
    side = {"mode": name, "run": run["id"], "variables": variables, "up_s": round(up_s, 1)}
    side |= {"rows": rows, "warm_up_tokens": warm_up[1], "profile": profiled}
    _write(folder / "side.json", side | {"memory_used_mib": used[0], "sm_clock_mhz": used[1]})


def one_time(line: dict) -> float:
    """ms a token of one request: TPOT of one, else between tokens once all have started."""
    return line["mean_tpot_ms" if line["max_concurrency"] == 1 else "steady_itl_ms"]


def summary(out: Path) -> str:
    """Medians of the sides that are done, their ratio to plain, and whether the tokens agree."""
    done = [name for name in SIDES if (out / name / "side.json").exists()]
    found: dict[tuple, dict[str, tuple]] = {}
    for name in done:
        for line in map(json.loads, (out / name / "bench.jsonl").read_text().splitlines()):
            if not line["warm_up"]:
                load = line["max_concurrency"], line["random_input_len"]
                times_ms, tokens = found.setdefault(load, {}).setdefault(name, ([], set()))
                times_ms.append(one_time(line))
                tokens.add(line["ids_sha1"])
    text = []
    for load, sides in found.items():
        text.append(f"{load[0]} x {load[1]:,}: ms a token, spread, times plain's speed, tokens")
        plain = sides.get("plain")
        for name, (times_ms, tokens) in sides.items():
            middle = statistics.median(times_ms)
            row = f"  {name:<12}{middle:8.2f}{max(times_ms) - min(times_ms):7.2f}"
            if plain:
                row += f"{statistics.median(plain[0]) / middle:8.2f}  "
                row += "as plain's" if tokens == plain[1] else differ(out, name, load)
            text.append(row)
    return "\n".join(text)


def differ(out: Path, name: str, load: tuple[int, int]) -> str:
    """Where a side's tokens first leave plain's, and how close plain's choice was there."""
    key = f"{load[0]}x{load[1]}"
    plain, side = (json.loads((out / n / "tokens.json").read_text())[key] for n in ("plain", name))
    pairs = enumerate(zip(plain["ids"], side["ids"], strict=True))
    firsts = [
        (step, request)
        for request, (one, two) in pairs
        for step in [next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), None)]  # noqa: B905
        if step is not None
    ]
    if not firsts:
        return "as plain's in the last repeat"
    step, request = min(firsts)
    said = f"differ from step {step} (request {request})"
    greedy = plain.get("greedy") or {}
    if greedy.get("ids") == plain["ids"][0] and len(greedy["top2_gaps"]) > step:
        gap = greedy["top2_gaps"][step]
        said += "" if gap is None else f", where plain's top two are {gap:.3g} apart"
    return said


def parse(arguments: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    now = f"{datetime.datetime.now():%Y-%m-%d}"
    p.add_argument("--out", type=Path, default=Path("out", "server-bench", now))
    p.add_argument("--sides", default=",".join(SIDES), help="of " + ", ".join(SIDES))
    p.add_argument("--page-size", type=int, default=1, choices=(1, 64))
    p.add_argument("--loads", default=",".join(f"{r}x{n}" for r, n in LOADS))
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--output-tokens", type=int, default=64, help="per request, 2 or more")
    p.add_argument("--pool-tokens", type=int, default=POOL_TOKENS)
    p.add_argument("--limit", type=float, help="seconds of this call: no side begins that may not")
    p.add_argument(
        "--side-limit", type=float, default=270, help="what a side may take, for --limit"
    )
    p.add_argument("--start-limit", type=float, default=300, help="until a server is healthy, s")
    p.add_argument("--request-limit", type=float, default=120, help="of one read of a request, s")
    p.add_argument("--profile-limit", type=float, default=60, help="for the trace's file, s")
    p.add_argument("--port", type=int, default=30_021)
    p.add_argument("--python", default=sys.executable, help="the server's own")
    p.add_argument("--launch", help="what starts a server: default PYTHON -m sglang.launch_server")
    p.add_argument("--model-path", help="a real checkpoint, in place of dummy weights")
    p.add_argument("--model", default=None, help="the lab's name of that checkpoint's model")
    p.add_argument("--tp", type=int, default=1, help="GPUs of one server")
    p.add_argument("--revision", help="of this checkout, where git cannot say")
    if "--" in arguments:
        at = arguments.index("--")
        arguments, rest = arguments[:at], arguments[at + 1 :]
    else:
        rest = []
    a = p.parse_args(arguments)
    a.server_flags = rest
    a.sides = a.sides.split(",")
    if unknown := set(a.sides) - set(SIDES):
        p.error(f"no side {', '.join(sorted(unknown))}; there are {', '.join(SIDES)}")
    if a.model_path and not a.model:
        p.error("--model-path needs --model, the lab's name of it (data/models), for predictions")
    if a.repeats < 1 or a.output_tokens < 2:
        p.error("--repeats must be 1 or more, --output-tokens 2 or more")
    a.loads = [tuple(map(int, load.split("x"))) for load in a.loads.split(",")]
    return a


def main(arguments: list[str] | None = None) -> int:
    a = parse(sys.argv[1:] if arguments is None else arguments)
    start, running = time.monotonic(), []

    def stop(number, _frame):
        for server in running:
            server.stop()
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    a.out.mkdir(parents=True, exist_ok=True)
    failed, took = [], a.side_limit
    try:
        run = open_run(a.out, identity(a))
        say(f"run {run['id']} on {run['card']}, page size {run['page_size']}, in {a.out}")
        left = [name for name in a.sides if not (a.out / name / "side.json").exists()]
        for name in list(left):
            spent = time.monotonic() - start
            if a.limit is not None and spent + took > a.limit:
                say(f"{a.limit - spent:.0f} s are left, a side may take {took:.0f}: call again")
                break
            began = time.monotonic()
            try:
                one_side(name, run, a, running)
                left.remove(name)
            except SideFailed as error:
                say(f"{name} FAILED: {error}")
                failed.append(name)
            took = max(a.side_limit, 1.2 * (time.monotonic() - began))
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        return 2
    print(summary(a.out), flush=True)
    if failed:
        return 1
    if left:
        say(f"left: {', '.join(left)}")
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())

"""A stand-in for an SGLang server: the few endpoints that scripts/server_bench.py uses.

Its tokens follow from the prompt alone, and come at the pace of its mode: FAKE_MS, by default
2 ms for plain and 1 ms for others. FAKE_<what>=SIDE breaks one side: never (unhealthy), dies (in
the first load), slow (a token takes 30 s), constant (one token), zero (all rows), silent (no row
line), absent (no strategy), differs (another token from step 3 on), noprofile. It writes its own
process id, and that of a child, to FAKE_PIDS.
"""

import gzip
import json
import os
import random
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FLAGS = sys.argv[1:]
STRATEGY = os.environ.get("SHADOWKV_STRATEGY", "")
SIDE = STRATEGY or ("bf16" if "bfloat16" in FLAGS[FLAGS.index("--kv-cache-dtype") :] else "plain")
STEP_S = (2 if SIDE == "plain" else 1) / 1e3


def broken(how: str) -> bool:
    return os.environ.get(f"FAKE_{how}") == SIDE


def tokens(prompt: list[int], count: int) -> list[int]:
    if broken("constant"):
        return [7] * count
    drawn = random.Random(sum(prompt))
    found = [drawn.randrange(32_000) for _ in range(count)]
    return found if not broken("differs") else found[:3] + [t + 1 for t in found[3:]]


def events(steps: int) -> list[dict]:
    """A trace of decode steps of 10 us, each with a kernel of 4."""
    found = []
    for i in range(steps):
        mark = dict(ph="X", name="step[DECODE bs=1]", ts=20 * i, dur=10, pid=0, tid=7)
        found += [mark | dict(cat=cat) for cat in ("user_annotation", "gpu_user_annotation")]
        found.append(mark | dict(cat="kernel", name="decode", ts=20 * i + 1, dur=4))
    return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, body: bytes = b"{}", status: int = 200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/server_info":
            state = {"memory_usage": {"weight": 11.7, "kvcache": 20.7, "graph": {"decode": 0.2}}}
            info = {"version": "0.5.23", "internal_states": [state], "secret": "not kept"}
            return self.reply(json.dumps(info).encode())
        self.reply(status=503 if broken("never") else 200)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/start_profile":
            if broken("noprofile"):
                return self.reply(status=500)
            folder = Path(body["output_dir"])
            content = json.dumps({"traceEvents": events(body["num_steps"])}).encode()
            (folder / "1-TP-0.trace.json.gz").write_bytes(gzip.compress(content))
            return self.reply(b"Start profiling.\n")
        count = body["sampling_params"]["max_new_tokens"]
        assert body["sampling_params"]["temperature"] == 0 and self.path == "/generate"
        out = tokens(body["input_ids"], count)
        rows = 0 if broken("silent") else len(body["input_ids"])
        if rows and os.environ.get("SHADOWKV_ROWS") == "1":
            zero = rows if broken("zero") or not os.environ.get("SHADOWKV_WEIGHTS") else 0
            print(f"shadowkv: rows of layer 77: {rows} written, {zero} all zero", flush=True)
        if not body.get("stream"):
            assert body["top_logprobs_num"] == 2
            top = [[[-0.5, t, None], [-0.75, t + 1, None]] for t in out]
            told = {"output_ids": out, "meta_info": {"output_top_logprobs": top}}
            return self.reply(json.dumps(told).encode())
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for seen in range(1, count + 1):
            if broken("dies") and len(body["input_ids"]) > 300:
                print("Traceback: out of memory", flush=True)
                os._exit(9)
            time.sleep(30 if broken("slow") and seen > 2 else STEP_S)
            event = {"output_ids": out[:seen], "meta_info": {"completion_tokens": seen}}
            self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def chunk(self, data: bytes):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


if __name__ == "__main__":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["FAKE_PIDS"], "a") as file:
        file.write(f"{SIDE} {os.getpid()} {child.pid}\n")
    print("server_args", FLAGS, os.environ.get("SHADOWKV_WEIGHTS"), flush=True)
    print(
        "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 495616, KV size: 20.74 GB",
        flush=True,
    )
    if STRATEGY and not broken("absent"):
        print(f"shadowkv: {STRATEGY} reads a pool of 495616 tokens", flush=True)
    Server(("127.0.0.1", int(FLAGS[FLAGS.index("--port") + 1])), Handler).serve_forever()

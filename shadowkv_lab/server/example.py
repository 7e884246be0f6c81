"""Made-up files of a server before and after, in the formats that SGLang writes.

For demonstrations only: nothing was measured. The times are round numbers that no server gave.
"""

import gzip
import json
from pathlib import Path

COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>"
LOG = """Load weight end. type=GlmMoeDsaForCausalLM, mem usage={weights_gib:.2f} GB.
KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: {pool_tokens}, KV size: {kv_gib:.2f} GB
"""


def write(
    folder: str | Path,
    *,
    before_ms: float = 100.0,
    after_ms: float = 60.0,
    cast_ms: float = 70.0,
    cast_left_ms: float = 28.0,
    pool_tokens: int = 188_608,
    layers: int = 78,
    steps: int = 3,
) -> tuple[Path, Path]:
    """Folders `before` and `after`, each with bench.jsonl, server.log and trace.json.gz.

    `cast_left_ms` of the cast are left as whole layers that are still cast. Returns the folders.
    """
    left = round(layers * cast_left_ms / cast_ms)
    sides = {"before": (before_ms, layers), "after": (after_ms, left)}
    for name, (tpot_ms, cast_layers) in sides.items():
        side = Path(folder) / name
        side.mkdir(parents=True, exist_ok=True)
        line = dict(
            backend="made-up",
            max_concurrency=1,
            random_input_len=1024,
            random_output_len=512,
            request_throughput=0.01,
            mean_tpot_ms=tpot_ms,
            output_throughput=1000 / tpot_ms,
        )
        (side / "bench.jsonl").write_text(json.dumps(line) + "\n")
        log = LOG.format(weights_gib=57.06, pool_tokens=pool_tokens, kv_gib=9.7)
        (side / "server.log").write_text(log)
        events = [dict(ph="X", cat="user_annotation", name="step[DECODE bs=1", ts=0, dur=1)] * steps
        cast = dict(ph="X", cat="kernel", name=COPY, ts=0, dur=1000 * cast_ms / layers)
        other = dict(ph="X", cat="kernel", name="made_up_gemm", ts=0, dur=50.0)
        events += ([cast] * cast_layers + [other] * layers) * steps
        trace = json.dumps(dict(traceEvents=events)).encode()
        (side / "trace.json.gz").write_bytes(gzip.compress(trace))
    return Path(folder) / "before", Path(folder) / "after"

"""Result files, logs and traces as SGLang writes them, whole and broken; the case as an oracle."""

import gzip
import json

import pytest

from shadowkv_lab.errors import BadFile, NoAnswer
from shadowkv_lab.server import compare, results

COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(X)>"
SERVER = {"model_path": "/models/GLM-5-NVFP4", "tp_size": 8, "kv_cache_dtype": "fp8_e4m3"}
LOG = """[2026-01-01 TP0] Load weight end. type=GlmMoeDsaForCausalLM, mem usage=57.06 GB.
[2026-01-01 TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: {pool}, KV size: 25.49 GB
"""  # noqa: E501


def serving(tpot, **changes):
    return {
        "backend": "sglang",
        "max_concurrency": 1,
        "random_input_len": 1024,
        "random_output_len": 512,
        "request_throughput": 0.02,
        "mean_tpot_ms": tpot,
        "median_tpot_ms": tpot,
        "p99_tpot_ms": tpot,
        "output_throughput": 1000 / tpot,
        "server_info": SERVER,
        **changes,
    }


def trace(us, layers=78, steps=2, kernel=COPY, marks=None, **more):
    events = [
        {"ph": "X", "cat": "user_annotation", "name": m, "ts": 0, "dur": 9}
        for m in marks or ["step[DECODE bs=1"] * steps
    ]
    for _ in range(steps * layers):
        events.append({"ph": "X", "cat": "kernel", "name": kernel, "ts": 0, "dur": us})
        events.append({"ph": "X", "cat": "kernel", "name": COPY, "ts": 0, "dur": 3})  # a small copy
        events.append({"ph": "X", "cat": "kernel", "name": "BatchMLAPaged", "ts": 0, "dur": 20})
    device = {"name": "NVIDIA RTX PRO 6000 Blackwell Server Edition"}
    return {"traceEvents": events, "deviceProperties": [device], **more}


@pytest.fixture
def case(tmp_path):
    """The case's own numbers as a user's files: folders before and after."""

    def make(after_us=433.0, after_ms=74.1, pool=495616, **changes):
        for name, tpot, us in (("before", 95.6, 828.2), ("after", after_ms, after_us)):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            line = serving(tpot, **(changes if name == "after" else {}))
            (folder / "bench.jsonl").write_text(json.dumps(line) + "\n")
            (folder / "server.log").write_text(LOG.format(pool=pool if name == "after" else 495616))
            whole = gzip.compress(json.dumps(trace(us)).encode())
            (folder / "1-TP-0-DECODE.trace.json.gz").write_bytes(whole)
        return compare.read(tmp_path / "before"), compare.read(tmp_path / "after")

    return make


def test_the_case_reads_back_as_the_case(case):
    found = compare.compare(*case())
    row = found.tpot.iloc[0]
    assert (row.before_ms, row.after_ms) == (95.6, 74.1)
    assert row.gain_percent == pytest.approx(29.0, abs=0.05)
    assert found.cast.before_ms.sum() == pytest.approx(64.6, abs=0.01)  # the 3 us copies left out
    assert found.left == pytest.approx(433.0 / 828.2) and "traces" in found.left_how
    assert found.hypotheses.tpot_ms[0] == pytest.approx(31.0, abs=0.01)
    assert found.hypotheses.hypothesis.str.startswith("26 of 78 layers").any()
    assert "under_server" in found.hypotheses and not found.hypotheses.established.any()
    assert found.budget.kv_gib == pytest.approx(25.49)
    assert "43.1 ms" in found.sentence
    (note,) = found.notes  # 64.6 x 433 / 828.2 by the traces
    assert "leave 33.8 ms" in note and "step times 43.1" in note and "9.3 ms longer" in note


def test_a_cast_that_is_gone_leaves_nothing(case):
    found = compare.compare(*case(after_us=0.5, after_ms=31.0))
    assert found.left == 0 and found.cast.after_ms.sum() == 0


def test_without_logs_and_traces_what_is_assumed_is_said(tmp_path):
    sides = []
    for name, tpot in (("a", 95.6), ("b", 74.1)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps(serving(tpot, server_info=None)))
        sides.append(compare.read(file))
    found = compare.compare(*sides)
    assert found.cast is None and found.budget is None
    assert found.left == pytest.approx(43.1 / 64.6, abs=0.001) and "TPOTs" in found.left_how
    assert len(found.notes) == 3 and all("assumed" in note for note in found.notes)


def test_each_benchmark_s_line():
    """TPOT by hand: ms a token of one request."""
    server = results.parse_line(
        json.dumps(
            dict(
                run_name="x",
                batch_size=4,
                input_len=1024,
                output_len=64,
                latency=9.0,
                output_throughput=40.0,
                last_gen_throughput=41.0,
            )
        )
    )
    assert (server.tpot_ms, server.tokens_per_s, server.load) == (100.0, 40.0, (4, 1024, 64))
    batch = results.parse_line(
        json.dumps(
            dict(
                run_name="x",
                batch_size=2,
                input_len=8,
                output_len=4,
                prefill_latency=0.1,
                median_decode_latency=0.02,
            )
        )
    )
    assert (batch.tpot_ms, batch.tokens_per_s) == (20.0, 100.0)
    older = serving(50.0)
    for name in ("mean_tpot_ms", "max_concurrency", "server_info", "p99_tpot_ms"):
        del older[name]
    read = results.parse_line(json.dumps(older | {"mean_itl_ms": 51.0, "concurrency": 0.98765}))
    assert (read.tpot_ms, read.how, read.load[0]) == (51.0, "mean_itl_ms", 1.0)
    assert read.server == {} and read.p99_ms is None


@pytest.mark.parametrize(
    "line, match",
    [
        (json.dumps(serving(95.6))[:-20], "cut short"),
        ("[1]", "list"),
        ('{"hello": 1}', "no benchmark"),
        (json.dumps(serving(95.6, mean_tpot_ms=0)), "mean_tpot_ms"),
        (json.dumps(serving(95.6, output_throughput=float("nan"))), "output_throughput"),
        ('{"batch_size": 1, "latency": 1, "output_throughput": -1}', "output_throughput"),
        ('{"prefill_latency": 1}', "median_decode_latency"),
    ],
)
def test_bad_lines_have_one_named_error(line, match, tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps(serving(95.6)) + "\n" + line)
    with pytest.raises(BadFile, match=f"(?s)r.jsonl, line 2.*{match}|{match}.*r.jsonl"):
        compare.read(file)


def test_bad_files(tmp_path):
    empty, missing = tmp_path / "e.jsonl", tmp_path / "none.jsonl"
    empty.write_text("\n")
    for file, match in ((empty, "empty"), (missing, "no .*none")):
        with pytest.raises(BadFile, match=match):
            compare.read(file)
    (tmp_path / "other.jsonl").write_text("{}")
    with pytest.raises(BadFile, match="2 result files"):
        compare.read(tmp_path)
    empty.write_text(json.dumps(serving(1.0)))
    (tmp_path / "no.log").write_text("hello\nworld")
    with pytest.raises(BadFile):
        compare.read(empty, log=tmp_path / "no.log")


def test_bad_traces(tmp_path):
    whole = gzip.compress(json.dumps(trace(800.0)).encode())
    file = tmp_path / "t.json.gz"
    for content, match in (
        (whole[: len(whole) // 2], "whole"),
        (b"\x1f\x8bnonsense", "whole"),
        (json.dumps(trace(800.0)).encode()[:-9], "cut short"),
        (b'{"hello": 1}', "no trace"),
        (json.dumps({"traceEvents": []}).encode(), "no GPU kernels"),
        (json.dumps(trace(800.0, marks=["step[EXTEND bs=1 toks=9"])).encode(), "EXTEND"),
    ):
        file.write_bytes(content)
        with pytest.raises(BadFile, match=match):
            results.read_trace(file)


def test_a_trace_that_marks_no_steps_asks_for_them(case, tmp_path):
    before, after = case()
    bare = trace(828.2)
    bare["traceEvents"] = [e for e in bare["traceEvents"] if e["cat"] == "kernel"]
    file = tmp_path / "bare.json"
    file.write_text(json.dumps(bare))
    own = tmp_path / "before"
    side = compare.read(own / "bench.jsonl", log=own / "server.log", trace=file)
    with pytest.raises(BadFile, match="--steps"):
        compare.compare(side, after)
    found = compare.compare(side, before, steps=2)
    assert found.cast.before_ms.sum() == pytest.approx(64.6, abs=0.1)


def test_gather_s_short_casts_count_and_small_copies_do_not():
    events = trace(5.0, layers=1, steps=1, kernel="widen_kernel")["traceEvents"]
    launches = {"widen_kernel": [5.0], COPY: [3.0, 900.0]}
    assert len(events) == 4
    of = results.Trace("t", None, {}, launches, 1)
    assert of.casts(100.0) == {"widen_kernel": 0.005, COPY: 0.9}


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(pool=188608), "pool tokens: 495616 and 188608"),
        (
            dict(server_info=SERVER | {"model_path": "/m/DeepSeek-R1"}),
            "model: GLM-5-NVFP4 and Deep",
        ),
        (dict(server_info=SERVER | {"tp_size": 4}), "tensor parallel size: 8 and 4"),
        (dict(max_concurrency=8), "loads"),
    ],
)
def test_what_differs_is_said(case, changes, match):
    with pytest.raises(NoAnswer, match=match):
        compare.compare(*case(**changes))


def test_another_model_than_the_server_s_is_refused(case):
    with pytest.raises(NoAnswer, match="--model glm-5"):
        compare.compare(*case(), model="deepseek-r1")


def test_the_command_prints_the_same(case, tmp_path, capsys):
    from shadowkv_lab.cli import predicting

    case()
    predicting.compare(tmp_path / "before", tmp_path / "after", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["left"] == pytest.approx(433.0 / 828.2) and len(found["hypotheses"]) == 4


def test_the_made_up_example_reads_back_as_it_was_made(tmp_path):
    from shadowkv_lab.server import example

    sides = [compare.read(folder) for folder in example.write(tmp_path)]
    found = compare.compare(*sides, gpu="rtx-pro-6000-server")
    assert found.cast.before_ms.sum() == pytest.approx(70.0)
    assert found.left == pytest.approx(31 / 78) and found.tpot.saved_ms[0] == 40.0

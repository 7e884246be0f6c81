"""Result files, logs and traces as servers write them, whole and broken."""

import gzip
import json
from pathlib import Path

import pytest

from shadowkv_lab.errors import BadFile, CannotRun, NoAnswer, OutOfRange
from shadowkv_lab.server import compare, report, results
from shadowkv_lab.steps import trace as traces

CASES = Path(__file__).parent / "cases"
SERVER_RUN = Path(__file__).parents[2] / "data" / "runs" / "server" / "h200-1558"

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
    """The GLM-5 report's numbers as a user's files: folders before and after."""

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
    assert (found.outcome, found.cast_how, found.model) == ("part", "from the trace", "glm-5")
    row = found.tpot.iloc[0]
    assert (row.before_ms, row.after_ms) == (95.6, 74.1)
    assert row.gain_percent == pytest.approx(29.0, abs=0.05)
    assert found.cast.before_ms.sum() == pytest.approx(64.6, abs=0.01)  # the 3 us copies left out
    assert found.left == pytest.approx(433.0 / 828.2) and "traces" in found.left_how
    assert found.hypotheses.tpot_ms[0] == pytest.approx(31.0, abs=0.01)
    assert found.hypotheses.hypothesis.str.startswith("26 of 78 layers").any()
    assert "under_server" in found.hypotheses and not found.hypotheses.established.any()
    assert found.budget.kv_gib == pytest.approx(25.49, abs=0.005)
    assert "43.1 ms" in found.sentence
    note = next(n for n in found.notes if n.startswith("the traces"))  # 64.6 x 433 / 828.2
    assert "leave 33.8 ms" in note and "step times 43.1" in note and "9.3 ms longer" in note


def test_a_cast_that_is_gone_leaves_nothing(case):
    found = compare.compare(*case(after_us=0.5, after_ms=31.0))
    assert found.left == 0 and found.cast.after_ms.sum() == 0
    assert found.outcome == "all" and found.sentence.startswith("All of the cast is gone")
    assert found.hypotheses.empty  # nothing is left to explain


def test_without_a_known_cast_the_tpots_are_compared(tmp_path):
    sides = []
    for name, tpot in (("a", 95.6), ("b", 74.1)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps(serving(tpot, server_info=None)))
        sides.append(compare.read(file))
    found = compare.compare(*sides)
    assert (found.outcome, found.cast_ms, found.left, found.budget) == ("unknown", None, None, None)
    assert "21.5 ms shorter (95.6 to 74.1 ms, -22%)" in found.sentence
    assert all(word in found.sentence for word in ("--before-trace", "--gpu", "log"))


def test_each_benchmark_s_line():
    """TPOT by hand: ms per token of one request."""
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
        (json.dumps(serving(95.6))[:-20] + "\n", "cut short"),
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
        (whole[: len(whole) // 2], "whole gzip"),
        (b"\x1f\x8bnonsense", "whole gzip"),
        (json.dumps(trace(800.0)).encode()[:-9], "not JSON"),
        (b'{"hello": 1}', "no trace"),
        (json.dumps({"traceEvents": []}).encode(), "no GPU kernels"),
        (json.dumps(trace(800.0, marks=["step[EXTEND bs=1 toks=9"])).encode(), "EXTEND"),
    ):
        file.write_bytes(content)
        with pytest.raises(BadFile, match=match):
            traces.read_trace(file)


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
    of = traces.Trace("t", None, {}, launches, 1)
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
    assert found["left"] == pytest.approx(433.0 / 828.2) and found["outcome"] == "part"
    # The pool is the same on both sides, so that it was not cut: three explanations are left.
    assert len(found["hypotheses"]) == 3


def compared(name, *, trace=None, **options):
    """Two sides of tests/server/cases: a folder of before and after, or one file twice."""
    where = CASES / name
    found = [where, where] if where.is_file() else [where / "before", where / "after"]
    paths = [p if p.exists() else p.with_suffix(".jsonl") for p in found]
    sides = [compare.read(p, trace=trace and CASES / trace) for p in paths]
    return compare.compare(*sides, **options)


def test_mtp_on_one_side_is_refused_and_the_steps_are_said():
    # 33.99 ms x 1.82 tokens = 61.86 ms: the step became longer, and only the TPOT shorter.
    with pytest.raises(NoAnswer, match=r"speculative decoding: None and NEXTN.*55.5 and 61.9 ms"):
        compared("cmp-01-mtp-on-off", model="deepseek-r1")


def test_with_mtp_the_step_is_the_tpot_times_the_tokens_it_gives():
    found = compared("cmp-02-mtp-both")
    row = found.tpot.iloc[0]
    assert (row.before_step_ms, row.after_step_ms) == pytest.approx((95.6, 74.1))
    assert found.model == "glm-5" and "step became 21.5 ms shorter" in found.sentence
    # On the report's own card, whose cast was published, it is the report's case again.
    there = compared("cmp-02-mtp-both", gpu="rtx-pro-6000-server")
    assert there.outcome == "part" and there.left == pytest.approx(43.1 / 64.6, abs=1e-3)


def test_vllm_s_own_result_is_read_and_an_open_load_refused():
    before = compare.read(CASES / "cmp-03-vllm-json" / "before")
    (run,) = before.results
    assert (run.tpot_ms, run.tokens_per_s, run.failed) == (381.29, 485.78, 2)
    assert before.fact("model") == "Kimi-K2-Thinking" and run.load == (988, 8000, 390)
    match = r"100 requests/s and no max_concurrency \(988 ran at once\).*2 and 6 requests failed"
    with pytest.raises(NoAnswer, match=match):
        compared("cmp-03-vllm-json")
    files = [
        CASES / f"cmp-03-vllm-json/{s}/vllm-100qps-Kimi-K2-Thinking.json"
        for s in ("before", "after")
    ]
    with pytest.raises(NoAnswer, match="no max_concurrency"):
        compare.compare(*map(compare.read, files))


def test_a_rate_limited_load_is_said_and_its_median_itl_preferred():
    found = compared("cmp-04-rate-limited.jsonl", model="deepseek-r1")
    assert found.tpot.before_ms[0] == 44.12 and found.tpot.tpot_from[0] == "median_itl_ms"
    assert any(n.startswith("rate-limited (10 requests/s") for n in found.notes)


def test_expert_parallelism_differs_and_a_rate_beside_a_full_batch_is_no_limit():
    with pytest.raises(NoAnswer, match=r"expert parallel size: 1 and 8.*auto is BF16") as error:
        compared("cmp-05-ep-size", model="deepseek-r1")
    assert "requests/s" not in str(error.value)  # 64/s asked, 1.4/s served: 64 always run


def test_another_card_s_cast_is_never_borrowed():
    found = compared("cmp-06-fast-card.jsonl", model="deepseek-r1")
    assert found.cast_ms is None and found.tpot.before_ms[0] == 12.8
    assert any("holds 10 tokens: stream_interval 10" in n for n in found.notes)
    for gpu in ("b200", "h20"):  # no cast was measured there
        assert compared("cmp-02-mtp-both", gpu=gpu).cast_ms is None


@pytest.mark.parametrize(
    "name, draft", [("trace-01-target-verify.json", 0.8282), ("trace-02-vllm-marks.json", 0.0)]
)
def test_steps_of_a_target_its_draft_and_vllm(name, draft):
    found = compared("cmp-02-mtp-both", trace=name)
    sums = found.cast.groupby("model").before_ms.sum()
    assert sums["target"] == pytest.approx(4 * 0.8282)  # four casts of 828.2 us per step
    assert sums.get("draft", 0.0) == pytest.approx(draft)
    assert found.left == 1.0 and found.outcome == "none"


@pytest.mark.parametrize("patch", ["shadow", "fused_fp8"])
@pytest.mark.parametrize("options", [dict(gpu="h200"), dict(gpu="h200", model="glm-5"), {}])
def test_a_real_patch_that_takes_the_whole_cast_is_called_so(patch, options):
    sides = [compare.read(SERVER_RUN / name) for name in ("plain", patch)]
    found = compare.compare(*sides, **options)
    assert found.outcome == "all" and found.sentence.startswith("All of the cast is gone")
    assert found.hypotheses.empty and found.left == 0.0
    assert found.tpot.repeats.tolist() == [2, 2, 2, 2]  # the warm-up is none of them
    assert "not accounted for" not in str(found.budget and found.budget.formula)
    # Nobody named the card: that it is this one is assumed, and said.
    assert ("assumed" in found.cast_how) == (not options)


@pytest.mark.parametrize("run", ["h200-1558", "h200-0924"])
def test_a_patch_is_perfect_in_every_run_and_the_logs_say_which(run):
    sides = [compare.read(SERVER_RUN.parent / run / name) for name in ("plain", "shadow")]
    assert [s.log.strategy for s in sides] == [None, "shadow"]
    found = compare.compare(*sides)
    assert found.outcome == "all" and found.hypotheses.empty
    assert "by the logs, no plug-in before and shadow after" in found.notes
    loads = found.tpot[["requests", "input"]].itertuples(index=False)
    wanted = [f"{r} x {n:,}, {when}" for r, n in loads for when in ("before", "after")]
    assert list(report.figure(found).data[0].y) == wanted
    text = " ".join([found.sentence, *found.notes, found.budget.formula])
    assert "cut to 0" not in text and "not accounted for" not in text
    assert "max_total_tokens 495,616" in text and "(1 - 0.85)" in text


def test_a_server_that_is_patched_already_has_no_cast_to_lose():
    """The shadow twice: nothing changed, and no cast is made up for it."""
    side = compare.read(SERVER_RUN.parent / "h200-0924" / "shadow")
    found = compare.compare(side, side, gpu="h200")
    assert (found.outcome, found.cast_ms, found.left) == ("unknown", None, None)
    assert "the server before runs shadow already, by its log" in found.sentence
    assert found.hypotheses.empty


def test_a_faster_cast_is_said_to_be_one_and_not_a_smaller_pool(tmp_path):
    """The vector cast's saving of 48.4 ms, put into plain's lines: its own were not kept."""
    lines = (SERVER_RUN / "plain" / "bench.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    for entry in entries:
        entry["mean_tpot_ms"] -= 48.4
    (tmp_path / "bench.jsonl").write_text("\n".join(map(json.dumps, entries)))
    found = compare.compare(compare.read(SERVER_RUN / "plain"), compare.read(tmp_path), gpu="h200")
    assert found.outcome == "part" and "1 explanation gives the step after" in found.sentence
    assert "'a full cast by a faster kernel'" in found.sentence
    assert (found.hypotheses.pool_tokens == 495_616).all()


def test_sides_of_two_runs_are_said_to_be(tmp_path):
    sides = []
    for name, run in (("a", "20261202-1"), ("b", "20261202-2")):
        entry = serving(50.0, server_info=None, run=run)
        sides.append(compare.Side(name, (results.parse_entry(entry),)))
    (note,) = (n for n in compare.compare(*sides).notes if n.startswith("two runs"))
    assert "20261202-1 and 20261202-2" in note
    assert not any(n.startswith("two runs") for n in compare.compare(sides[0], sides[0]).notes)


def test_the_noise_of_repeats_decides():
    """Repeats 0.3 ms apart: a change of 0.2 ms is none."""
    runs = [serving(t, server_info=None) for t in (50.0, 50.3)]
    other = [serving(t, server_info=None) for t in (49.9, 50.0)]
    sides = []
    for name, entries in (("a", runs), ("b", other)):
        lines = tuple(results.parse_entry(e) for e in entries)
        sides.append(compare.Side(name, lines))
    found = compare.compare(*sides)
    assert found.tpot.noise_ms[0] == pytest.approx(0.4) and "did not change" in found.sentence


@pytest.mark.parametrize(
    "field, old, new, words",
    [
        ("dp_size", 1, 8, "data parallel size: 1 and 8"),
        ("dcp_size", 1, 4, "decode context parallel size"),
        ("chunked_prefill_size", 8192, 4096, "chunked prefill size"),
        ("page_size", 1, 64, "page size: 1 and 64"),
        ("dtype", "bfloat16", "float16", "dtype"),
        ("speculative_num_steps", 1, 3, "speculative steps"),
        ("speculative_algorithm", None, "EAGLE", "speculative decoding: None and EAGLE"),
        ("version", "0.5.17", "0.5.23", "engine version"),
        ("kv_cache_dtype", "fp8_e4m3", "bf16", "KV dtype: fp8_e4m3 and bf16"),
    ],
)
def test_settings_that_must_be_the_same(field, old, new, words):
    sides = [
        compare.Side(n, (results.parse_entry(serving(50.0, server_info={field: value})),))
        for n, value in (("a", old), ("b", new))
    ]
    with pytest.raises(NoAnswer, match=words):
        compare.compare(*sides)


def test_a_bf16_pool_has_no_cast():
    entries = [serving(t, server_info=SERVER | {"kv_cache_dtype": "bf16"}) for t in (31.0, 30.0)]
    sides = [compare.Side("x", (results.parse_entry(e),)) for e in entries]
    found = compare.compare(*sides, gpu="rtx-pro-6000-server")
    assert (found.outcome, found.cast_ms) == ("no cast", None)
    assert "the pool's rows are BF16 rows" in found.sentence


def test_an_unlimited_rate_is_read_as_sglang_writes_it():
    line = json.dumps(serving(50.0)).replace('"max_concurrency": 1', '"request_rate": Infinity')
    assert results.parse_line(line).arrivals == ""


def test_repeats_pretty_json_and_a_torn_last_line(tmp_path):
    file = tmp_path / "r.json"
    entry = serving(50.0) | {"model_id": "zai-org/GLM-5", "server_info": None}
    file.write_text(json.dumps(entry, indent=2))
    (run,) = results.read_results(file)
    assert (run.benchmark, run.server["model_path"]) == ("vllm bench serve", "zai-org/GLM-5")
    file.write_text(json.dumps([entry, entry]))
    assert len(results.read_results(file)) == 2
    file.write_text(json.dumps(entry) + "\n" + json.dumps(entry)[:50])
    with pytest.warns(UserWarning, match=r"r.json, line 2 was cut short"):
        assert len(results.read_results(file)) == 1


def test_a_comparison_as_one_picture_and_one_sentence(tmp_path):
    found = compared("cmp-02-mtp-both", gpu="rtx-pro-6000-server")
    fig = report.figure(found)
    cast, rest = fig.data
    assert list(cast.x) == pytest.approx([64.6, 43.1]) and cast.marker.pattern.shape == "x"
    assert [a + b for a, b in zip(cast.x, rest.x, strict=True)] == pytest.approx([95.6, 74.1])
    (page,) = report.write(found, tmp_path / "a.html", lambda fig: None)
    text = page.read_text()
    assert "21.5 of the cast" in text and "<script src" not in text and "Plotly" in text
    wrote = report.write(found, tmp_path / "a.md", lambda fig: b"picture")
    assert [p.name for p in wrote] == ["a.md", "a.png"]
    text = wrote[0].read_text()
    assert text.startswith(f"**{found.sentence}**") and "![before and after](a.png)" in text
    assert "| 1 | 1,024 | 47.80 | 37.05 |" in text
    (picture,) = report.write(found, tmp_path / "b.png", lambda fig: b"picture")
    assert picture.read_bytes() == b"picture"
    with pytest.raises(CannotRun, match="Chromium"):
        report.write(found, tmp_path / "c.png", lambda fig: None)
    with pytest.raises(OutOfRange, match=r"\.md, \.html, \.png"):
        report.write(found, tmp_path / "c.pdf", lambda fig: None)


def test_a_file_s_text_is_no_markup(tmp_path):
    entry = serving(50.0, server_info={"model_path": "<img src=x onerror=1>", "tp_size": 8})
    sides = [compare.Side("<b>", (results.parse_entry(entry),)) for _ in range(2)]
    (page,) = report.write(compare.compare(*sides), tmp_path / "a.html", lambda fig: None)
    assert "<img" not in page.read_text()

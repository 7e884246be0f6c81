"""Arrivals and lengths, trace files good and bad."""

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from shadowkv_lab import errors
from shadowkv_lab.serving import traces, traffic

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-17 00:00:00.0000001,879,55
"""
MOONCAKE = """{"timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [0, 1]}
{"timestamp": 3052, "input_length": 7319, "output_length": 1}
"""


def write(folder, text, name="trace"):
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.txt"])
def test_azure(tmp_path, name):
    read = traces.load(write(tmp_path, AZURE, name))
    np.testing.assert_allclose(read.arrival_s, [0, 4.314579, 20653.3194101], atol=1e-6)
    assert read.prompt_tokens.tolist() == [374, 396, 879]
    assert read.output_tokens.tolist() == [44, 109, 55]
    assert read.source == f"Azure CSV {name}"


def test_azure_of_2024_has_another_clock_and_windows_line_ends(tmp_path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2024-05-10 00:00:00.009930+00:00,5,6\r\n"
    text += "2024-05-10 00:00:01+00:00,7,8\r\n\r\n"
    read = traces.load(write(tmp_path, "\ufeff" + text))
    np.testing.assert_allclose(read.arrival_s, [0, 0.99007], atol=1e-6)


SAMPLES = Path(__file__).resolve().parents[2] / "data" / "traffic" / "samples"


def by_another_tool(path):
    """(arrivals from the first, prompts, outputs) by pandas, json and str.split."""
    name, text = path.name, path.read_text()
    if path.suffix == ".csv":
        frame = pd.read_csv(path)
        if "TIMESTAMP" in frame:
            at = pd.to_datetime(frame.TIMESTAMP, format="ISO8601")
            at = (at - at[0]) / pd.Timedelta("1s")
            return at, frame.ContextTokens, frame.GeneratedTokens
        if "Timestamp" in frame:
            frame = frame[frame["Response tokens"] > 0]
            at = frame.Timestamp - frame.Timestamp.iloc[0]
            return at, frame["Request tokens"], frame["Response tokens"]
        return frame.arrived_at, frame.num_prefill_tokens, frame.num_decode_tokens
    if name == "mooncake.jsonl":
        frame = pd.read_json(path, lines=True)
        return frame.timestamp / 1000, frame.input_length, frame.output_length
    if "bench" in name:
        run = json.loads(text)
        rows = zip(
            run.get("start_times", [0] * 20), run["input_lens"], run["output_lens"], strict=True
        )
        rows = sorted((row for row in rows if row[2]), key=lambda row: row[0])
        at, prompt, output = map(np.array, zip(*rows, strict=True))
        return at - at[0], prompt, output
    if name.startswith("sglang"):
        rows = []
        for line in text.splitlines():
            if "'meta_info'" in line or '"meta_info"' in line:
                meta = line.replace('"', "'").partition("'meta_info': ")[2]
                words = dict(part.strip("{} ").split(": ", 1) for part in meta.split(", "))
                clock = line.split('"timestamp": "')[1][17:26] if "json" in name else line[18:20]
                at = float(clock) - float(words["'e2e_latency'"].strip("}"))
                rows.append((at, int(words["'prompt_tokens'"]), int(words["'completion_tokens'"])))
        at, prompt, output = map(np.array, zip(*sorted(rows), strict=True))
        return at - at[0], prompt, output
    lines = text.splitlines()
    came = [line for line in lines if "Received" in line]
    done = {line.split("response ")[1].split(" ")[0]: line for line in lines if "Generated" in line}
    at = np.array([float(line.split("18:15:")[1][:2]) for line in came])
    prompt = [
        len(json.loads(line.split("prompt_token_ids: ")[1].split("]")[0] + "]")) for line in came
    ]
    output = []
    for line in came:
        answer = done[line.split("request ")[1].split(":")[0]].split("output_token_ids: ")[1]
        most = int(line.split("max_tokens=")[1].split(",")[0])
        output.append(most if answer.startswith("None") else answer.split("]")[0].count(",") + 1)
    return at - at[0], np.array(prompt), np.array(output)


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.*[!d]")), ids=lambda path: path.name)
def test_each_sample_has_the_counts_of_another_tool(path):
    read, (at, prompt, output) = traces.load(path), by_another_tool(path)
    assert read.prompt_tokens.tolist() == list(prompt) and read.output_tokens.tolist() == list(
        output
    )
    if path.name != "bench-serving.made-up.jsonl":  # which has no times, only a rate
        np.testing.assert_allclose(read.arrival_s, np.array(at, float), atol=2e-6)
    else:
        assert "drawn anew at its 4 requests/s" in read.source
        assert 1 / np.diff(read.arrival_s).mean() == pytest.approx(4, rel=0.5)
    assert ("1 without an answer" in read.source) == any(x in path.name for x in ("bench", "burst"))


def test_block_hashes_are_those_of_whole_blocks():
    read = traces.load(SAMPLES / "mooncake.jsonl")
    raw = [json.loads(line) for line in (SAMPLES / "mooncake.jsonl").read_text().splitlines()]
    for blocks, entry in zip(read.blocks, raw, strict=True):
        assert list(blocks) == entry["hash_ids"][: entry["input_length"] // 512]
    assert read.block_tokens == 512
    halved = read.scaled(length=0.5)
    assert all(len(b) <= p // 512 for b, p in zip(halved.blocks, halved.prompt_tokens, strict=True))


def test_a_benchmark_says_what_it_did_not_keep(tmp_path):
    run = {"output_throughput": 5.0, "max_concurrency": 3, "request_rate": "inf"}
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(run))
    with pytest.raises(errors.BadFile, match=r"--output-details.*--save-detailed"):
        traces.load(path)
    lists = {"input_lens": [5, 6], "output_lens": [7, 8]}
    path.write_text(json.dumps(run) + "\n" + json.dumps(run | lists) + "\n")
    read = traces.load(path)
    assert read.concurrency == 3 and "the last run of" in read.source
    path.write_text(json.dumps(run | lists | {"max_concurrency": None}, indent=1))
    assert traces.load(path).arrival_s.tolist() == [0, 0]
    path.write_text(json.dumps(run | lists | {"start_times": [1.0]}))
    with pytest.raises(errors.BadFile, match="different lengths"):
        traces.load(path)
    path.write_text(json.dumps(run | lists | {"input_lens": [5, "6.5"]}))
    with pytest.raises(errors.BadFile, match=r"input_lens\[1\] is '6.5'"):
        traces.load(path)


def test_what_a_user_wrote_in_a_prompt_is_not_read_as_the_log(tmp_path):
    path = tmp_path / "server.log"
    lie = "'meta_info': {'prompt_tokens': 999999, 'completion_tokens': 9}"
    path.write_text(
        f"[2026-12-02 18:15:50] Finish: obj=GenerateReqInput(text={lie!r}), out={{'text': {lie!r}, "
        "'meta_info': {'prompt_tokens': 12, 'completion_tokens': 3, 'e2e_latency': 1.5}}\n"
    )
    assert traces.load(path).prompt_tokens.tolist() == [12]
    path.write_text(
        "INFO 12-02 18:15:46 Received request a: params: SamplingParams(max_tokens=4)\n"
    )
    with pytest.raises(errors.BadFile, match="request a without its prompt_token_ids"):
        traces.load(path)


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz", "b.csv"])
def test_mooncake(tmp_path, name):
    read = traces.load(write(tmp_path, MOONCAKE, name))
    assert read.arrival_s.tolist() == [0, 3.052]
    assert read.prompt_tokens.tolist() == [655, 7319]
    assert read.output_tokens.tolist() == [52, 1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        (AZURE.splitlines()[0] + "\n", "no request"),
        (AZURE.replace("18:15:50", "18:15:45"), "line 3: earlier than the line before"),
        (AZURE.replace("2023-11-16 18:15:50.9951690", ""), "line 3: no time"),
        (AZURE.replace("2023-11-16 18:15:50", "yesterday"), "line 3: the time 'yesterday"),
        (AZURE.replace(",396,", ",0,"), "line 3: ContextTokens is '0'"),
        (AZURE.replace(",396,", ",-4,"), "line 3: ContextTokens is '-4'"),
        (AZURE.replace(",109", ",1.5"), "line 3: GeneratedTokens is '1.5'"),
        (AZURE.replace(",396,109", ",396"), "line 3: 2 fields"),
        (AZURE.replace("ContextTokens", "Context"), "nearest is Azure CSV, of which ContextTokens"),
        ("timestamp,input_length,tokens\n", "nearest is Mooncake JSONL, of which output_length"),
        ("a,b,c\n1,2,3\n", "columns a, b, c"),
        (MOONCAKE.replace("input_length", "prompt"), "nearest is Mooncake JSONL"),
        (MOONCAKE.replace('"timestamp": 3052', '"timestamp": null'), "line 2: no time"),
        (MOONCAKE.replace('"timestamp": 3052', '"timestamp": NaN'), "line 2: NaN is not a finite"),
        (MOONCAKE.replace('"output_length": 1}', '"output_length": 0}'), "output_length is 0"),
        (MOONCAKE.replace('"output_length": 1}', '"output_length": true}'), "is True"),
        (MOONCAKE[:-20], "line 2 is not JSON"),
    ],
)
def test_broken_traces_say_which_line(tmp_path, text, says):
    with pytest.raises(errors.BadFile) as caught:
        traces.load(write(tmp_path, text))
    assert says in str(caught.value) and "trace" in str(caught.value)


def test_broken_files_are_named(tmp_path):
    with pytest.raises(errors.BadFile, match="no such file"):
        traces.load(tmp_path / "none.csv")
    with pytest.raises(errors.BadFile, match="is a folder"):
        traces.load(tmp_path)
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(AZURE.encode())[:-12])
    with pytest.raises(errors.BadFile, match="not a whole gzip file"):
        traces.load(cut)
    cut.write_bytes(b"\xff\xfe" + AZURE.encode())
    with pytest.raises(errors.BadFile, match="not UTF-8"):
        traces.load(cut)


@pytest.mark.parametrize("packed", [False, True])
def test_gzip_is_known_by_its_bytes_and_not_by_the_name(tmp_path, packed):
    path = tmp_path / ("plain.csv.gz" if not packed else "packed.csv")
    path.write_bytes(gzip.compress(AZURE.encode()) if packed else AZURE.encode())
    assert len(traces.load(path)) == len(AZURE.splitlines()) - 1


def test_scaling(tmp_path):
    read = traces.load(write(tmp_path, MOONCAKE))
    scaled = read.scaled(rate=2, length=0.001)
    assert scaled.arrival_s.tolist() == [0, 1.526]
    assert scaled.prompt_tokens.tolist() == [1, 7] and scaled.output_tokens.tolist() == [1, 1]
    assert scaled.demand.requests_per_s == pytest.approx(2 * read.demand.requests_per_s)
    for wrong in ({"rate": 0}, {"rate": -1}, {"length": 0}, {"rate": float("nan")}):
        with pytest.raises(errors.OutOfRange, match="above 0"):
            read.scaled(**wrong)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_arrivals_have_the_rate_and_burst_that_were_asked_for(cv):
    load = traffic.bursts(4.0, cv, 40_000, traffic.fixed(100, 10), seed=7)
    gaps = np.diff(load.arrival_s)
    assert 1 / gaps.mean() == pytest.approx(4.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    assert load.demand.prompt_tokens_per_s == pytest.approx(400, rel=0.05)


@pytest.mark.parametrize("name", traffic.known_traffic())
def test_drawn_lengths_have_the_published_means_and_quantiles(name):
    from shadowkv_lab import facts

    entry = facts.find("traffic", "traffic", name)
    drawn = traffic.published(name).draw(50_000, np.random.default_rng(0))
    for lengths, key in zip(drawn, ("prompt_tokens", "output_tokens"), strict=True):
        assert lengths.mean() == pytest.approx(entry[f"mean_{key}"], rel=0.03)
        for share, tokens in entry[key][3:8]:
            below, at_most = np.mean(lengths < tokens), np.mean(lengths <= tokens)
            assert below - 0.02 <= share <= at_most + 0.02


def test_the_same_seed_draws_the_same_traffic():
    a, b, c = (
        traffic.poisson(1, 50, traffic.published("azure-conversation"), s) for s in (1, 1, 2)
    )
    assert list(a.rows()) == list(b.rows()) != list(c.rows())


def test_bad_traffic_is_named():
    lengths = traffic.fixed(10, 10)
    for wrong in (
        lambda: traffic.poisson(0, 5, lengths),
        lambda: traffic.poisson(float("inf"), 5, lengths),
        lambda: traffic.bursts(1, 0, 5, lengths),
        lambda: traffic.poisson(1, 0, lengths),
        lambda: traffic.closed_loop(0, 5, lengths),
        lambda: traffic.fixed(0, 10),
    ):
        with pytest.raises(errors.OutOfRange):
            wrong()
    with pytest.raises(errors.UnknownName, match="azure-conversation"):
        traffic.published("azure-conversatoin")
    times, lengths = np.array([0.0, 1.0]), np.array([5, 5])
    for broken in (
        (times[::-1], lengths, lengths),
        (np.array([0.0, np.nan]), lengths, lengths),
        (times, lengths - 5, lengths),
        (times, lengths[:1], lengths),
        (times[:0], lengths[:0], lengths[:0]),
    ):
        with pytest.raises(errors.BadFile):
            traffic.Traffic("broken", *broken)

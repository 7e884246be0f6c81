"""Arrivals and lengths, trace files good and bad."""

import gzip

import numpy as np
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

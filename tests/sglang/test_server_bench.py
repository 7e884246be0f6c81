"""What scripts/server_bench.py says to a server, against SGLang's own definitions."""

import argparse
import importlib.util
import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "server_bench.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("server_bench", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("more", [[], ["--tp", "8", "--model-path", "/m", "--model", "glm-5"]])
@pytest.mark.parametrize("page", ["1", "64"])
def test_the_servers_command_is_sglang_s(sglang, bench, page, more):
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    for _, kv in bench.SIDES.values():
        a = bench.parse(["--page-size", page, *more])
        command = bench.server_command(a, "/model", kv, "30021")
        found, unknown = parser.parse_known_args(command[3:])
        assert command[1:3] == ["-m", "sglang.launch_server"] and unknown == []
        assert (found.kv_cache_dtype, found.page_size) == (kv, int(page))
        assert (found.max_total_tokens, found.tp_size) == (495_616, 8 if more else 1)
        assert (found.load_format == "dummy") == (not more)
        assert found.cuda_graph_bs_decode == [1, 2, 4, 8, 16, 32]
        longest = max(length for _, length in a.loads) + a.output_tokens
        assert found.context_length > longest and not found.enable_dp_attention


def test_the_strategies_are_the_plug_in_s(bench):
    from shadowkv_lab.server.plugin import settings

    chosen = [settings(variables) for variables, _ in bench.SIDES.values() if variables]
    assert {c.strategy for c in chosen} == {"shadow", "gather_cast", "fused_fp8", "vector_cast"}
    assert [len(c.layers) for c in chosen if c.layers] == [26]


def test_the_endpoints_and_their_fields(sglang, bench):
    """The HTTP server itself does not import here: its routes are read in its source."""
    root = Path(sglang.__file__).parent / "srt"
    server = (root / "entrypoints" / "http_server.py").read_text()
    for path in ("/health", "/server_info", "/generate", "/start_profile"):
        assert re.search(rf'@app\.\w+\(\s*"{path}"', server), path
    io = (root / "managers" / "io_struct.py").read_text()
    profile = io.split("class ProfileReq(")[1].split("\nclass ")[0]
    assert all(re.search(rf"^    {n}:", profile, re.M) for n in ("output_dir", "num_steps"))
    assert "activities: Optional[List[str]]" in profile and '"CPU", "GPU"' in profile
    generate = re.split(r"class GenerateReqInput\b", io)[1].split("\nclass ")[0]
    for name in ("input_ids", "sampling_params", "stream", "return_logprob", "top_logprobs_num"):
        assert re.search(rf"^    {name}:", generate, re.M), name
    manager = (root / "managers" / "tokenizer_manager.py").read_text()
    assert '"completion_tokens"' in manager and 'meta_info["output_top_logprobs"]' in manager
    from sglang.srt.sampling.sampling_params import SamplingParams

    SamplingParams(temperature=0, max_new_tokens=64, ignore_eos=True)


def test_the_line_of_the_rows_is_the_one_that_the_script_reads(bench):
    from shadowkv_lab.server.plugin import trial

    assert bench.ROWS.findall(trial.ROWS % (77, 256, 3)) == [("77", "256", "3")]

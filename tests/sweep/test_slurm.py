"""The SLURM script's jobs; they were never run on a cluster here."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("dask_jobqueue")
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "slurm_sweep.py"


def test_each_job_has_one_gpu_and_a_worker_that_measures_one_cell_at_a_time():
    spec = importlib.util.spec_from_file_location("slurm_sweep", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    typed = "--jobs 8 --partition gpu --walltime 08:00:00 -- --grid g.json --out r.jsonl"
    options = script.parser().parse_args(typed.split())
    assert options.sweep == ["--grid", "g.json", "--out", "r.jsonl"]
    with script.cluster(options) as made:
        job = made.job_script()
    asked = dict(re.findall(r"#SBATCH (-\w|--[\w-]+)[ =](\S+)", job))
    assert asked["--gres"] == "gpu:1" and asked["-p"] == "gpu" and asked["-t"] == "08:00:00"
    worker = shlex.split(job.strip().splitlines()[-1])
    assert worker[worker.index("--nthreads") + 1] == "1" and "--nanny" in worker
    assert worker[worker.index("--resources") + 1] == "measure=1"

"""`shadowkv sweep` on a SLURM cluster: one job per GPU through dask-jobqueue.

    python scripts/slurm_sweep.py --jobs 8 --partition gpu --walltime 08:00:00 -- \
        --grid grid.json --out record.jsonl

What follows `--` goes to `shadowkv sweep`. Run it where `sbatch` is found, from the checkout that
the nodes see too; the scheduler lives in this process, so keep it in tmux, or in a job of its own.
Jobs join as SLURM starts them. A job that ends at its wall time, or a node that fails, gives its
cell to another; run the same command again for what is left. It has not been run on a cluster.
"""

import argparse
import subprocess
import sys

from dask_jobqueue import SLURMCluster

from shadowkv_lab.sweep.cluster import RESOURCE


def cluster(options: argparse.Namespace) -> SLURMCluster:
    """A scheduler here, whose jobs each bring one worker; with --gpus 0 they measure on CPUs."""
    return SLURMCluster(
        queue=options.partition,
        account=options.account,
        walltime=options.walltime,
        cores=1,  # threads of the worker: one cell at a time
        processes=1,
        job_cpu=options.cpus,
        memory=options.memory,
        job_extra_directives=[f"--gres=gpu:{options.gpus}"] if options.gpus else [],
        worker_extra_args=[f"--resources {RESOURCE}=1", "--memory-limit 0"],
        interface=options.interface,
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--jobs", type=int, default=1, help="jobs, each with one worker")
    made.add_argument("--gpus", type=int, default=1, choices=(0, 1), help="GPUs of a job")
    made.add_argument("--partition")
    made.add_argument("--account")
    made.add_argument("--walltime", default="04:00:00")
    made.add_argument("--cpus", type=int, default=8, help="of a job")
    made.add_argument("--memory", default="64GB", help="of a job")
    made.add_argument("--interface", help="network that the nodes share, such as ib0")
    made.add_argument("sweep", nargs="+", metavar="-- OPTIONS", help="of shadowkv sweep")
    return made


def main() -> int:
    options = parser().parse_args()
    with cluster(options) as made:
        made.scale(jobs=options.jobs)
        made.wait_for_workers(1)
        command = [sys.executable, "-m", "shadowkv_lab", "sweep"]
        return subprocess.call([*command, "--scheduler", made.scheduler_address, *options.sweep])


if __name__ == "__main__":
    sys.exit(main())

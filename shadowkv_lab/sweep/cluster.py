"""Workers of dask.distributed: connected, compared with this process, given cells one by one."""

import asyncio
import itertools
import logging
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec

import torch

import shadowkv_lab
from shadowkv_lab import machine
from shadowkv_lab.errors import CannotRun, LabError, whole

# What a worker has one of per GPU, so that one cell is measured there at a time.
RESOURCE = "measure"
AHEAD = 2  # cells that a worker has: the one it is at, and the next
STRANGER = "another version"


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: its value, or the kind of error and the reason.

    `broken` says that the worker's GPU takes no more work.
    """

    value: object = None
    error: str = ""
    reason: str = ""
    worker: str = ""
    broken: bool = False


@contextmanager
def connect(scheduler: str | None = None, workers: int | None = None, gpus: bool = True):
    """A client of the scheduler at an address, or of workers of this machine.

    Those are one per GPU, each of which sees its own alone, and without GPUs (or where `gpus` is
    False) one per core. Raises `CannotRun` where dask is missing or the scheduler does not answer.
    """
    require("distributed")
    from distributed import Client

    with ExitStack() as stack:
        if scheduler is None:
            scheduler = stack.enter_context(_local(workers, visible() if gpus else []))
        try:
            client = Client(scheduler, timeout=10, set_as_default=False)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            raise CannotRun(
                f"No scheduler answers at {scheduler} ({str(error)[:200]})",
                "an address such as tcp://10.0.0.1:8786",
                "Start one with: dask scheduler",
            ) from None
        stack.callback(_close, client)
        yield client


def require(package: str) -> None:
    """Raise `CannotRun` where a package of the extra `cluster` is missing."""
    if find_spec(package) is None:
        remedy = "pip install 'shadowkv-lab[cluster]'"
        raise CannotRun(f"{package} is not installed", remedy=remedy)


def _close(client) -> None:
    with suppress(OSError, RuntimeError):  # a scheduler that is gone
        client.close(timeout=2)


def visible() -> list[str]:
    """This process' GPUs as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    told = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (told.split(",") if told else [str(i) for i in range(count)])[:count]


def _local(workers: int | None, gpus: Sequence[str]):
    """A scheduler with workers, for this machine alone."""
    from distributed import LocalCluster

    most = len(gpus) or len(os.sched_getaffinity(0))
    count = most if workers is None else whole(workers, "Workers:", 1, len(gpus) or 1024)
    cluster = LocalCluster(
        n_workers=0,
        threads_per_worker=1,
        memory_limit=None,  # the lab checks what fits; dask would end a worker on its guess
        dashboard_address="127.0.0.1:0",
        resources={RESOURCE: 1},
        preload=[__name__],
        silence_logs=logging.ERROR,
    )
    spec = cluster.new_spec
    for i in range(count):
        env = {"CUDA_VISIBLE_DEVICES": gpus[i]} if gpus else {}
        cluster.worker_spec[i] = spec | {"options": spec["options"] | {"env": env}}
    cluster.scale(count)
    return cluster


def dask_setup(worker) -> None:
    """Called by dask in each worker: Ctrl-C ends the sweep, which ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def versions() -> dict[str, str | None]:
    """What must be the same wherever cells of one sweep are run."""
    return {
        "python": platform.python_version(),
        "shadowkv_lab": shadowkv_lab.__version__,
        "revision": machine.git_revision(),
        "torch": torch.__version__,
        "triton": machine.version_of("triton"),
    }


def own_device() -> torch.device:
    """The GPU of a worker: the first that it sees, or the CPU."""
    return torch.device(machine.devices()[0])


@dataclass(frozen=True)
class Seen:
    """A worker: its versions, and its GPU or CPU as records name it."""

    versions: dict
    card: str
    gpu: str = ""  # the driver's id

    @classmethod
    def here(cls) -> "Seen":
        device = own_device()
        known, title = machine.detect_card(device), machine.device_title(device)
        gpu = device.type == "cuda" and str(torch.cuda.get_device_properties(device).uuid)
        return cls(versions(), known.name if known else title, gpu or "")


def survey(client, wait_s: float = 60) -> dict[str, set[str]]:
    """The hosts of each card that the workers have.

    Raises `CannotRun` for no worker, for one that is not of this process' versions, and where a
    cell could not be sent to a GPU of its own.
    """
    from distributed import TimeoutError as TooLate

    try:
        client.wait_for_workers(1, timeout=wait_s)
        found = client.run(Seen.here)
    except TooLate:
        remedy = f"Start some: dask worker ADDRESS --nthreads 1 --resources {RESOURCE}=1"
        raise CannotRun("The scheduler has no workers", remedy=remedy) from None
    except (ImportError, AttributeError) as error:
        raise CannotRun(
            f"A worker cannot import this lab ({error})", remedy="Install the same checkout there"
        ) from None
    workers = client.scheduler_info()["workers"]
    hosts, users = {}, {}
    for address, seen in found.items():
        _require_same(address, seen.versions)
        if seen.gpu and (other := users.setdefault(seen.gpu, address)) != address:
            raise CannotRun(
                f"The workers {other} and {address} see the same GPU first",
                remedy="Start each with a CUDA_VISIBLE_DEVICES of its own",
            )
        if address in workers:
            hosts.setdefault(seen.card, set()).add(workers[address]["host"])
    for a, b in itertools.combinations(hosts, 2):  # a worker that dies comes back elsewhere
        if both := hosts[a] & hosts[b]:
            raise CannotRun(
                f"{min(both)} has workers with {a} and with {b}",
                "one kind of card per host",
                "Sweep one kind after the other",
            )
    return hosts


def require_slots(client) -> None:
    """Raise `CannotRun` where a worker would take more than one cell to measure, or none."""
    for address, worker in client.scheduler_info()["workers"].items():
        if worker["resources"].get(RESOURCE) != 1:
            raise CannotRun(
                f"The worker {address} does not say that it measures one cell at a time",
                remedy=f"Start it with --nthreads 1 --resources {RESOURCE}=1",
            )


def _require_same(worker: str, theirs: dict) -> None:
    own = versions()
    if theirs != own:
        names = [name for name in own if theirs.get(name) != own[name]]
        differ = ", ".join(f"{name} {theirs.get(name)} (here {own[name]})" for name in names)
        raise CannotRun(
            f"The worker {worker} has {differ}",
            "the same versions on every worker",
            "Install the same checkout there; where it has no .git, SHADOWKV_REVISION names it",
        )


def each(
    client,
    work: Callable[[object], object],
    cells: Mapping[Hashable, object],
    *,
    hosts: Callable[[object], Iterable[str] | None] = lambda cell: None,
    resources: dict | None = None,
) -> Iterator[tuple[Hashable, Outcome]]:
    """The key of each cell with its outcome, as they come; a worker has `AHEAD` of them at most.

    A cell whose worker dies is given to another, and has failed when it was there at four deaths.
    Raises `CannotRun` where the scheduler is lost, or a worker joins with other versions.
    """
    from distributed import as_completed

    waiting, told, under_way = iter(cells.items()), versions(), {}
    done = as_completed(loop=client.loop)

    def send(count: int) -> None:
        for key, cell in itertools.islice(waiting, count):
            place = {"workers": sorted(there)} if (there := hosts(cell)) else {}
            future = client.submit(_run, work, cell, told, pure=False, resources=resources, **place)
            under_way[future] = key
            done.add(future)

    def more() -> None:
        send(max(0, AHEAD * max(1, len(client.nthreads())) - len(under_way)))

    try:
        more()
        for future in done:
            outcome, key = _outcome(future), under_way.pop(future)
            if outcome.error == STRANGER:
                _require_same(outcome.worker, outcome.value)
            # Given back first: dask runs a cell again whose worker dies while its outcome is held.
            future.release()
            del future
            if outcome.broken:
                client.run(_end, workers=[outcome.worker], wait=False, on_error="ignore")
            yield key, outcome
            more()
    except (OSError, RuntimeError) as error:  # dask's own: the client is closed
        raise _lost(client, error) from None


def _outcome(future) -> Outcome:
    """A future's outcome; raises `CannotRun` where it can have none."""
    from distributed import CancelledError, KilledWorker

    try:
        return future.result()
    except KilledWorker as error:
        why = f"every worker that took it died ({error.allowed_failures + 1} times): out of memory?"
        return Outcome(error="KilledWorker", reason=why, worker=error.last_worker.address)
    except CancelledError as error:
        raise _lost(future.client, error) from None


def _lost(client, error: BaseException) -> CannotRun:
    return CannotRun(
        f"The scheduler at {client.scheduler.address} was lost ({type(error).__name__})",
        remedy="What came before is kept: start it again, and run the same command",
    )


def _run(work: Callable, cell: object, told: dict) -> Outcome:
    """One cell, on a worker."""
    from distributed import get_worker

    if not works():  # the client ends this worker, and dask gives the cell to another
        time.sleep(60)
        os._exit(1)
    here = get_worker().address
    if (own := versions()) != told:
        return Outcome(own, STRANGER, worker=here)
    try:
        return Outcome(work(cell), worker=here)
    except LabError as error:
        name, reason = type(error).__name__, str(error)
    except Exception as error:  # a bug: the sweep goes on, and its row says where
        at = traceback.extract_tb(error.__traceback__)[-1]
        name = type(error).__name__
        reason = f"a bug at {os.path.basename(at.filename)}:{at.lineno}: {error}"
    return Outcome(error=name, reason=reason, worker=here, broken=not works())


async def _end() -> None:
    """End this worker, a little later: the release of its outcome takes another way."""
    await asyncio.sleep(1)
    os._exit(1)


def works() -> bool:
    """Whether the GPU still takes work: after some failures CUDA refuses all."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True

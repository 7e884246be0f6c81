"""Several servers after a router that sends each request to the one with the fewest."""

from array import array
from dataclasses import dataclass, replace

import numpy as np

from shadowkv_lab.errors import whole
from shadowkv_lab.serving.lines import PS_PER_S
from shadowkv_lab.serving.results import Log, Results
from shadowkv_lab.serving.simulate import Engine, Run, _too_long
from shadowkv_lab.serving.traffic import Traffic, require_servable


@dataclass(frozen=True, eq=False)
class Fleet(Results):
    """The results of all replicas as of one server; `replicas` holds those of each."""

    replicas: tuple[Results, ...] = ()

    def kv_use(self) -> tuple[np.ndarray, np.ndarray]:
        """(seconds, share of all pools' pages taken), the mean of the replicas'."""
        each = [r.kv_use() for r in self.replicas if len(r.log.at)]
        if not each:
            return np.array([]), np.array([])
        times = np.concatenate([at for at, _ in each])
        taken, own = np.zeros(len(times)), 0
        for at, share in each:
            there = np.interp(times, at, share)
            there[own : own + len(at)] = share  # before and after an event, at one time
            taken, own = taken + there, own + len(at)
        order = np.argsort(times, kind="stable")
        return times[order], taken[order] / len(self.replicas)

    def queue(self) -> tuple[np.ndarray, np.ndarray]:
        """(seconds, requests that wait at all replicas)."""
        each = [q for r in self.replicas if len((q := r.queue())[0])]
        times = np.unique(np.concatenate([at for at, _ in each])) if each else np.array([])
        waiting = np.zeros(len(times), np.int64)
        for at, count in each:
            last = np.searchsorted(at, times, side="right") - 1
            waiting += np.where(last >= 0, count[np.maximum(last, 0)], 0)
        return times, waiting


MOST = 4096  # replicas, each of which is simulated


def simulate_replicas(
    engine: Engine, traffic: Traffic, replicas: int, *, overload: bool = False
) -> Fleet:
    """`traffic` on `replicas` servers like `engine`: data-parallel copies, each with its own pool.

    A simple composition: the router knows how many requests each replica has, those that wait
    included, as at the end of the step under way, and sends the next one to the replica with the
    fewest, the first of equals. It costs no time, knows no prefixes, and moves nothing afterwards;
    no replica waits for another. A closed loop is dealt out in turn, each replica a loop of its
    own. One replica is `simulate`, bit for bit. Raises as `simulate` does.
    """
    whole(replicas, "Replicas:", 1, MOST)
    if not overload:
        require_servable(traffic, replicas * engine.prefill_tokens_per_s)
    closed = traffic.concurrency is not None
    return (_loops if closed else _routed)(engine, traffic, replicas)


def _routed(engine: Engine, traffic: Traffic, replicas: int) -> Fleet:
    runs = [Run(engine, traffic) for _ in range(replicas)]
    arrivals = runs[0].arrivals
    try:
        for id, at in enumerate(arrivals):
            for run in runs:
                _advance(run, at)
            min(runs, key=lambda run: run.in_flight).send(id)
        for run in runs:
            run.arrived = len(arrivals)
            _advance(run, None)
    except OverflowError:
        raise _too_long(traffic) from None
    everyone = np.arange(len(traffic))
    return _together(engine, traffic, [(everyone, run.results()) for run in runs])


def _advance(run: Run, until: int | None) -> None:
    """Let a replica serve what it has, up to the end of the step that is under way at `until`."""
    run.horizon = until
    while run.in_flight and (until is None or run.now < until):
        run.one_step(True, None)
    if not run.in_flight and until is not None and run.now < until:
        run.now = until
        run.scheduler.idle()


def _loops(engine: Engine, traffic: Traffic, replicas: int) -> Fleet:
    used, parts = min(replicas, traffic.concurrency, len(traffic)), []
    for first in range(used):
        ids = np.arange(first, len(traffic), used)
        own = replace(
            traffic,
            arrival_s=traffic.arrival_s[ids],
            prompt_tokens=traffic.prompt_tokens[ids],
            output_tokens=traffic.output_tokens[ids],
            concurrency=len(range(first, traffic.concurrency, used)),
            blocks=traffic.blocks and [traffic.blocks[i] for i in ids.tolist()],
        )
        parts.append((ids, Run(engine, own).serve(True, None)))
    return _together(engine, traffic, parts)


def _together(engine: Engine, traffic: Traffic, parts: list[tuple[np.ndarray, Results]]) -> Fleet:
    """One result of many: `parts` are the ids of each replica's requests, and its results."""
    log, total, runs = Log(len(traffic)), engine.scheduler(), [run for _, run in parts]
    arrivals = np.rint(traffic.arrival_s * PS_PER_S).astype(np.int64)
    refused = []
    for ids, run in parts:
        own = ids[run.served]
        for name in ("admitted", "first", "end", "preempted"):
            np.asarray(getattr(log, name))[own] = np.asarray(getattr(run.log, name))[run.served]
        if traffic.concurrency is not None:
            arrivals[ids] = run.arrivals
        refused += [replace(r, id=int(ids[r.id])) for r in run.refused]
        for column, more in zip(log.gap_runs, run.log.gap_runs, strict=True):
            column.extend(more)
        for name in ("decode_steps", "live_rows", "shared_rows"):
            setattr(log, name, getattr(log, name) + getattr(run.log, name))
        for name in ("admissions", "preemptions", "recomputed_tokens", "cached_tokens"):
            setattr(total, name, getattr(total, name) + getattr(run.scheduler, name))
    columns = array("q", arrivals.tobytes())
    return Fleet(engine, traffic, columns, refused, total, log, tuple(runs))

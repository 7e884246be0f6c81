"""Answers over pool x concurrency x context at once, from the predictions that they have in common.

A step is a part that depends on the load alone and, for strategies that cast the pool, a part that
depends on the pool alone. So a few hundred predictions give every point of a curve or a map; they
are made once for a model, a card and a spread, whatever the memory and the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shadowkv_lab.deployment import Deployment
from shadowkv_lab.load import Load
from shadowkv_lab.rules import can_run
from shadowkv_lab.steps.predict import predict
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.strategies import STRATEGIES, Label, Strategy

REQUESTS = tuple(1 << k for k in range(9))  # 1 to 256
CONTEXTS = tuple(512 << k for k in range(9))  # 512 to 131,072 tokens
POOLS = tuple(512 << k for k in range(16))  # 512 to 16.8 million slots


@dataclass(frozen=True)
class Times:
    """ms of one strategy: `load` [concurrency, context, phase] and `pool` [pool], its cast's part.

    Phases are cast, attention and write; the cast of `load` is the part that the load decides.
    """

    strategy: Label
    load: np.ndarray
    pool: np.ndarray
    untried: str = ""


@dataclass(frozen=True)
class Grid:
    """The times of every strategy that runs in a deployment, by its label."""

    page_size: int
    groups: int  # data-parallel ranks
    times: Mapping[str, Times]
    tokens_per_step: int = 1  # of each request

    def tokens_per_s(
        self, label: str, rows: int, rest: Rest, concurrency, context, cut: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """tok/s, one a step of each request, and the requests that run, over arrays of loads.

        `rows` are the slots of one GPU's pool (a number or an array); `cut` takes no more of them
        than the load needs.
        """
        own = self.times[label]
        rows, R, n = np.broadcast_arrays(rows, concurrency, context)
        each = -(-n // self.page_size) * self.page_size
        running = np.minimum(R, rows // each * self.groups)
        if cut:
            rows = np.minimum(rows, each * -(-R // self.groups))
        ms = _between(own.load.sum(2), running, n) + np.interp(rows, POOLS, own.pool)
        counts, which = np.unique(running, return_inverse=True)
        rest_ms = np.array(
            [rest(max(1, count) * self.tokens_per_step) for count in counts.tolist()]
        )[which]
        return 1000 * running / (ms + rest_ms.reshape(ms.shape)), running


def _between(ms: np.ndarray, R: np.ndarray, n: np.ndarray) -> np.ndarray:
    """A table [concurrency, context] at any load: straight between its points."""
    (i, x), (j, y) = (
        _place(np.clip(at, knots[0], knots[-1]), np.array(knots))
        for at, knots in ((R, REQUESTS), (n, CONTEXTS))
    )
    low = (1 - y) * ms[i, j] + y * ms[i, j + 1]
    return (1 - x) * low + x * ((1 - y) * ms[i + 1, j] + y * ms[i + 1, j + 1])


def _place(at: np.ndarray, knots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    i = np.clip(np.searchsorted(knots, at, "right") - 1, 0, len(knots) - 2)
    return i, (at - knots[i]) / (knots[i + 1] - knots[i])


def ready(deployment: Deployment, tokens_per_step: int = 1) -> bool:
    """Whether `grid` has it already."""
    return _key(deployment, tokens_per_step) in _made


_made: dict[tuple, Grid] = {}


def grid(deployment: Deployment, stage=lambda text, done: None, tokens_per_step: int = 1) -> Grid:
    """The grid of a deployment's model, card, spread and layout; made once, in under a second.

    `stage` is told how far it is, and may raise to stop.
    """
    key = _key(deployment, tokens_per_step)
    if key not in _made:
        runs = {kind: can_run(kind(), deployment) for kind in STRATEGIES.values()}
        chosen = [kind() for kind, verdict in runs.items() if verdict]
        times = {}
        for i, strategy in enumerate(chosen):
            stage(f"curves and map: {strategy.title}", i / len(chosen))
            untried = runs[type(strategy)].untried
            times[strategy.label] = _times(strategy, deployment, untried, tokens_per_step)
        if len(_made) > 30:
            _made.clear()
        groups = deployment.data_parallel
        _made[key] = Grid(deployment.page_size, groups, times, tokens_per_step)
    return _made[key]


def _key(at: Deployment, tokens_per_step: int) -> tuple:
    spread = at.tensor_parallel, at.data_parallel, at.pipeline_parallel, at.decode_context_parallel
    model = at.model, at.card, at.layout, at.page_size, at.engine, tokens_per_step
    return *model, spread, tuple(STRATEGIES.values())


def _times(strategy: Strategy, deployment: Deployment, untried: str, tokens_per_step: int) -> Times:
    """A strategy's predictions at each load, and its cast at each pool where that decides it."""
    page, phases = deployment.page_size, ("cast", "attention", "write")
    by_pool = casts_by_pool(strategy, deployment)
    load = np.zeros((len(REQUESTS), len(CONTEXTS), len(phases)))
    for i, R in enumerate(REQUESTS):
        for j, n in enumerate(CONTEXTS):
            load_of = Load(R, n, tokens_per_step)
            share = deployment.share(load_of)
            needed = -(-int(share.context) // page) * page * share.concurrency
            step = predict(strategy, deployment, load_of, pool_tokens=needed)
            load[i, j] = [0.0 if by_pool and p == "cast" else step[p].ms for p in phases]
    pool = np.zeros(len(POOLS))
    if by_pool:
        one = Load(1, min(POOLS))
        pool[:] = [predict(strategy, deployment, one, pool_tokens=P)["cast"].ms for P in POOLS]
    return Times(strategy.tag, load, pool, untried)


@lru_cache(maxsize=256)
def casts_by_pool(strategy: Strategy, deployment: Deployment) -> bool:
    """Whether the pool decides how long its cast is."""
    few, many = (strategy.step_moves(deployment.model, P, 1, 1).cast_bytes for P in (64, 128))
    return many > few

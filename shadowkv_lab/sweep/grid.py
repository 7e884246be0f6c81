"""What is swept: deployments x pools x loads x strategies, from a file or from options."""

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from shadowkv_lab import files
from shadowkv_lab.deployment import Deployment, deployment, published_deployment
from shadowkv_lab.errors import OutOfRange, UnknownName, whole
from shadowkv_lab.strategies import STRATEGIES, parse

MOST = 1 << 20  # numbers of one axis
Numbers = int | str | tuple[int, ...]

# What an entry of `deployments` may hold.
OPTIONS = {"published", *inspect.signature(deployment).parameters}
OPTIONS |= {field.name for field in fields(Deployment)}
OPTIONS -= {"options", "given", "derived", "checkpoint"}


@dataclass(frozen=True)
class Grid:
    """The axes of a sweep; each cell is one value of each.

    An entry of `deployments` holds arguments of `deployment.deployment`, or `published` and
    changes; a list in it stands for each of its values. `concurrency` and `context` are loads of
    the whole deployment. Numbers are a list, or a text such as "1,8" or "1024:8192:1024", the end
    included. Without `pool_tokens` each strategy has the pool that fits. `modes` are of measured
    cells, `rates` (factors on the trace's) and `replicas` of simulated ones. Raises `OutOfRange`,
    `UnknownName`.
    """

    deployments: tuple[dict, ...] = ({},)
    concurrency: Numbers = 1
    context: Numbers = 1024
    strategies: tuple[str, ...] = ()
    pool_tokens: Numbers = ()
    modes: tuple[str, ...] = ("graph",)
    rates: tuple[float, ...] = (1.0,)
    replicas: Numbers = 1

    def __post_init__(self):
        for name in ("concurrency", "context", "pool_tokens", "replicas"):
            object.__setattr__(self, name, numbers(getattr(self, name), name))
        labels = tuple(parse(name).label for name in self.strategies or STRATEGIES)
        object.__setattr__(self, "strategies", labels)
        for name in (f.name for f in fields(self) if f.name != "pool_tokens"):
            if not getattr(self, name):
                raise OutOfRange(f"No {name} in the grid", "one or more")

    @property
    def entries(self) -> Iterator[dict]:
        """Each deployment's options, one value each."""
        for entry in self.deployments:
            each = (v if isinstance(v, list | tuple) else [v] for v in entry.values())
            for values in itertools.product(*each):
                yield dict(zip(entry, values, strict=True))


def read(path: str | Path) -> Grid:
    """A grid file: a JSON object with the fields of `Grid`. Raises `BadFile`, and what it does."""
    names = [field.name for field in fields(Grid)]
    for name in files.read_json(path):
        if name not in names:
            raise UnknownName("field of a grid", name, names)
    return files.read_json(path, Grid)


def numbers(told: Numbers, what: str) -> tuple[int, ...]:
    """Whole numbers of 1 or more, each once.

    >>> numbers("1,8,16:64:16", "concurrency")
    (1, 8, 16, 32, 48, 64)
    """
    if isinstance(told, int):
        told = (told,)
    if isinstance(told, str):
        spans = [_span(part, what) for part in told.split(",")]
        if sum(map(len, spans)) > MOST:
            raise OutOfRange(f"{what} {told[:60]!r}", f"up to {MOST:,} numbers")
        told = itertools.chain(*spans)
    return tuple(dict.fromkeys(whole(number, what) for number in told))


def _span(part: str, what: str) -> range:
    """The numbers of "8", "1:8" or "1024:8192:1024"."""
    try:
        first, *more = (int(number) for number in part.split(":"))
        last, step = {0: (first, 1), 1: (*more, 1), 2: more}[len(more)]
        return range(first, whole(last, what, 1, 1 << 48) + 1, step)
    except (KeyError, ValueError):
        raise OutOfRange(f"{what} {part[:60]!r}", "such as 8, or 1024:8192:1024") from None


def made(entry: dict, card: str | None = None) -> Deployment:
    """The deployment of an entry; `card` where it names none."""
    for name in entry:
        if name not in OPTIONS:
            raise UnknownName("option of a deployment", name, OPTIONS)
    options = ({"card": card} if card else {}) | entry
    name = options.pop("published", None)
    try:
        return deployment(**options) if name is None else published_deployment(name, **options)
    except (TypeError, ValueError) as error:
        raise OutOfRange(f"Deployment {title(entry)} ({error})", "values of its options") from None


def title(entry: dict) -> str:
    """An entry in one line, which names a deployment in results."""
    return ", ".join(f"{name} {value}" for name, value in entry.items()) or "as derived"

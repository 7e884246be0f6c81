"""How far predictions are off on steps that the fit has not seen: whole pools, contexts, models."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from shadowkv_lab.errors import NoAnswer
from shadowkv_lab.steps.fit import fit, replays
from shadowkv_lab.steps.predict import predict_again
from shadowkv_lab.steps.step import Step


class Group(NamedTuple):
    """What is held out together: single cells would leak, as a cast depends on the pool only."""

    kind: str
    name: str
    holds: Callable[[Step], bool]


def groups(measured: Sequence[Step]) -> Iterator[Group]:
    """Every pool size and every context of the model with most steps; each other model whole."""
    names = [s.setting.model.name for s in measured]
    main = max(sorted(set(names)), key=names.count)
    ours = [s.setting for s in measured if s.setting.model.name == main]

    def at_pool(P: int) -> Callable[[Step], bool]:
        return lambda s: s.setting.model.name == main and s.setting.pool_tokens == P

    def at_context(context: int) -> Callable[[Step], bool]:
        return lambda s: s.setting.load.context == context

    def of_model(name: str) -> Callable[[Step], bool]:
        return lambda s: s.setting.model.name == name

    for P in sorted({at.pool_tokens for at in ours}):
        yield Group("pool", f"{P:,} slots", at_pool(P))
    for context in sorted({at.load.context for at in ours}):
        yield Group("context", f"{context:,} tokens", at_context(context))
    for name in sorted(set(names) - {main}):
        yield Group("model", name, of_model(name))


def held_out(measured: Sequence[Step]) -> pd.DataFrame:
    """One row per held-out step: the step predicted without its group, beside the recorded one.

    Left out are steps of mixed layers, and a group whose absence leaves nothing to predict from.
    """
    seen = replays(measured)
    rows = []
    for group in groups(seen) if seen else ():
        fitted = fit([s for s in seen if not group.holds(s)])
        for step in filter(group.holds, seen):
            try:
                again = predict_again(step, fitted)
            except NoAnswer:
                continue
            at = step.setting
            rows.append(
                dict(
                    kind=group.kind,
                    held_out=group.name,
                    strategy=step.strategy.label,
                    title=step.strategy.title,
                    colour=step.strategy.colour,
                    gpu=step.card,
                    pool_tokens=at.pool_tokens,
                    concurrency=at.load.concurrency,
                    context=at.load.context,
                    recorded_ms=step.ms,
                    predicted_ms=again.ms,
                    provenance=str(again.provenance),
                    error=abs(again.ms / step.ms - 1),
                    how=again.how,
                )
            )
    return pd.DataFrame(rows)


def summary(rows: pd.DataFrame, by: str = "kind") -> pd.DataFrame:
    """Steps, median and 90th-percentile relative error of each group, and of all."""
    if rows.empty:
        return pd.DataFrame(columns=[by, "runs", "median", "p90", "assumed"])
    parts = [*rows.groupby(by, sort=False), ("all", rows)]
    return pd.DataFrame(
        [
            {
                by: name,
                "runs": len(part),
                "median": part.error.median(),
                "p90": part.error.quantile(0.9),
                "assumed": (part.provenance == "assumed").mean(),
            }
            for name, part in parts
        ]
    )

"""How far predictions are off on runs that the fit has not seen: whole pools, contexts, models."""

from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd

from shadowkv_lab.errors import LabError
from shadowkv_lab.steps.fit import fit, latest
from shadowkv_lab.steps.predict import predict
from shadowkv_lab.strategies import parse


class Group(NamedTuple):
    """What is held out together: single cells would leak, as a cast depends on the pool only."""

    kind: str
    name: str
    mask: pd.Series


def groups(runs: pd.DataFrame) -> Iterator[Group]:
    """Every pool size and every context of the model with most runs, and each other model whole."""
    main = runs.model.value_counts().index[0]
    for P in sorted(runs[runs.model == main].pool_tokens.unique()):
        yield Group("pool", f"{P:,} slots", (runs.pool_tokens == P) & (runs.model == main))
    for context in sorted(runs[runs.model == main].context.unique()):
        yield Group("context", f"{context:,} tokens", runs.context == context)
    for model in sorted(set(runs.model) - {main}):
        yield Group("model", model, runs.model == model)


def held_out(runs: pd.DataFrame) -> pd.DataFrame:
    """One row a held-out run: the step predicted without its group, beside the recorded one.

    A group whose absence leaves nothing to predict from is left out; so are devices without a
    card file, where a cell cannot be told from its machine.
    """
    runs = latest(runs).reset_index(drop=True)
    rows = []
    for group in groups(runs) if len(runs) else ():
        fitted = fit(runs[~group.mask])
        for run in runs[group.mask].itertuples():
            try:
                strategy = parse(run.strategy)
                if strategy.at(0) != strategy.at(run.layers - 1):
                    continue
                step = predict(
                    strategy,
                    run.model,
                    run.gpu,
                    run.pool_tokens,
                    run.concurrency,
                    run.context,
                    heads=run.heads,
                    fitted=fitted,
                    backend=run.backend,
                )
            except LabError:
                continue
            rows.append(
                dict(
                    kind=group.kind,
                    held_out=group.name,
                    strategy=run.strategy,
                    gpu=run.gpu,
                    pool_tokens=run.pool_tokens,
                    concurrency=run.concurrency,
                    context=run.context,
                    recorded_ms=run.step_ms,
                    predicted_ms=step.step_ms,
                    provenance=step.provenance,
                    error=abs(step.step_ms / run.step_ms - 1),
                    how=step.how,
                )
            )
    return pd.DataFrame(rows)


def summary(rows: pd.DataFrame, by: str = "kind") -> pd.DataFrame:
    """Runs, median and 90th-percentile relative error of each group, and of all."""
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

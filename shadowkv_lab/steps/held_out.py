"""How far predictions are off on times that they have not seen, by kind of prediction.

Left out in turn, whole: every card, head count and request count, the longest contexts, and one
cell in four of every table. Each left-out time is predicted from the others, and its error counts
for the kind of prediction that was made (`Answer.basis`), which gives such a prediction its range.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from shadowkv_lab import facts, files
from shadowkv_lab.errors import NoAnswer
from shadowkv_lab.steps import evidence
from shadowkv_lab.steps import step as steps
from shadowkv_lab.steps.evidence import Point
from shadowkv_lab.steps.fit import Answer, Fit, fit_points, generation
from shadowkv_lab.steps.predict import predict_at
from shadowkv_lab.steps.step import Step

LONG = 32_768  # contexts from here on are left out together
COVERED = 0.8  # share of times that a range is to hold


BY_LOAD = (
    "attention",
    "index growth",
    *evidence.CHOICE,
)  # phases whose size is a request's tokens, not bytes


class Group(NamedTuple):
    """What is left out together, so that no neighbour of it leaks."""

    kind: str
    name: str
    holds: Callable[[Point], bool]


def groups(points: Sequence[Point]) -> Iterator[Group]:
    """Every card, head count per card, request count, the longest contexts, a quarter of cells.

    Of an index also every generation: off Hopper and Blackwell it is always lent by another.
    """
    attention = [p for p in points if p.key.phase == "attention"]

    def where(**wanted) -> Callable[[Point], bool]:
        return lambda p: all(
            getattr(p if hasattr(p, name) else p.key, name) == value
            for name, value in wanted.items()
        )

    for card in sorted({p.key.card for p in points}):
        yield Group("card", card, where(card=card))
    for card, heads in sorted({(p.key.card, p.key.heads) for p in attention}):
        yield Group("heads", f"{heads} on {card}", where(card=card, heads=heads))
    for phase in BY_LOAD:
        for R in sorted({p.requests for p in points if p.key.phase == phase}):
            yield Group("requests", f"{R}", where(requests=R, phase=phase))
    index = [p.key.card for p in points if p.key.phase == "index growth"]
    for major in sorted({generation(card) for card in index}):
        yield Group("generation", f"SM{major}0", lambda p, m=major: generation(p.key.card) == m)
    yield Group("context", f"{LONG:,} and more", _long)
    for turn in range(4):
        yield Group("cells", f"quarter {turn + 1}", _quarter(turn))


def _long(p: Point) -> bool:
    return p.size >= (LONG if p.key.phase in BY_LOAD else 1728 * LONG)


def _quarter(turn: int) -> Callable[[Point], bool]:
    """One in four cells: no two of them are neighbours in a table of powers of two."""

    def holds(p: Point) -> bool:
        size = round((1 if p.key.phase in BY_LOAD else 2) * np.log2(p.size))
        return (round(np.log2(p.requests)) % 2 + 2 * (size // 2 % 2)) == turn

    return holds


def held_out(points: Iterable[Point] | None = None, kinds: Sequence[str] = ()) -> pd.DataFrame:
    """One row per left-out time: what was predicted without its group, beside what it was.

    `points` are by default all that is shipped of a dense step; those of a step with an index are
    `indexed()`. `kinds` names the groups, by default all.
    """
    points = list(evidence.shipped(_recorded("dense")) if points is None else points)
    rows = []
    for group in groups(points):
        if kinds and group.kind not in kinds:
            continue
        fitted = fit_points(p for p in points if not group.holds(p))
        for p in once(filter(group.holds, points)):
            try:
                answer = predicted(p, fitted)
            except NoAnswer:
                continue
            rows.append(
                dict(
                    kind=group.kind,
                    held_out=group.name,
                    phase=p.key.phase,
                    kernel=p.key.kernel,
                    reads=p.key.reads,
                    card=p.key.card,
                    heads=p.key.heads,
                    requests=p.requests,
                    size=p.size,
                    seen_us=1000 * p.ms,
                    predicted_us=1000 * answer.ms,
                    error=abs(answer.ms / p.ms - 1),
                    basis=answer.basis if lent_alike(p, answer) else "another kernel",
                    provenance=str(answer.provenance),
                    evidence=p.kind.value,
                )
            )
    return pd.DataFrame(rows)


def _recorded(reads: str) -> list[Step]:
    return [s for s in steps.recorded() if s.setting.load.reads == reads]


def indexed() -> list[Point]:
    """What is shipped of steps with an index: recorded ones, and the published growth."""
    return [*evidence.of_steps(_recorded("dsa")), *evidence.index_growth()]


def steps_left_out(measured: Iterable[Step] | None = None) -> pd.DataFrame:
    """Recorded DSA steps, each predicted without any row of its load: requests and context.

    `edge` says that no loads of as many requests, and none of its context, lie on both sides of
    it: its prediction goes beyond what is left. Everything else that is shipped stays.
    """
    known = _recorded("dsa") if measured is None else list(measured)
    known = [s for s in steps.latest(known) if s.mode == "graph"]
    loads = sorted({(s.setting.load.concurrency, s.setting.load.context) for s in known})
    rows, dense = [], _recorded("dense")
    for load in loads:
        lines = [[of[1 - i] for of in loads if of[i] == load[i]] for i in (0, 1)]
        inside = any(min(on) < load[1 - i] < max(on) for i, on in enumerate(lines))
        own = [s for s in known if (s.setting.load.concurrency, s.setting.load.context) == load]
        left = [*dense, *(s for s in known if s not in own)]
        fitted = fit_points([*evidence.shipped(left), *evidence.index_growth()])
        for s in own:
            found = predict_at(s.strategy.label, s.setting, s.card, fitted=fitted)
            rows.append(
                dict(
                    strategy=s.strategy.label,
                    requests=load[0],
                    context=load[1],
                    edge=not inside,
                    seen_ms=s.ms,
                    predicted_ms=found.ms,
                    error=abs(found.ms / s.ms - 1),
                )
            )
    return pd.DataFrame(rows)


def lent_alike(p: Point, answer: Answer) -> bool:
    """Whether the prediction is of this kernel, or of one that the fit takes in its place.

    FlashInfer's FP8 kernel is not TensorRT-LLM's, and the latter's on SM120 does not split a
    request over the card: such errors say nothing of a prediction that the lab would make.
    """
    same = answer.kernel == p.key.kernel or p.key.reads == "bf16"
    return same and not (p.key.kernel == "trtllm_default" and p.key.card.startswith("rtx-pro"))


def once(points: Iterable[Point]) -> Iterable[Point]:
    """Each cell of a key once: a pool size does not make another attention time of it."""
    cells: dict[tuple, Point] = {}
    for p in sorted(points, key=lambda p: (p.exact, p.date)):
        cells[(p.key, p.requests, p.size)] = p
    return cells.values()


def predicted(p: Point, fitted: Fit) -> Answer:
    """The answer to a point's own question, by its own kernel where there is a table of it."""
    key = p.key
    if key.phase == "index growth":
        return fitted.index(key.card, p.requests, p.size, p.bytes)
    if key.phase in evidence.CHOICE:
        found = fitted.choice(key.phase, key.kernel, key.card, p.requests, p.size)
        if found is None:
            raise NoAnswer(f"No recorded {key.phase} on {key.card}")
        return found
    if key.phase != "attention":
        return fitted.moved(key.phase, key.kernel, key.card, p.bytes)
    here = {k.kernel for k in fitted.of("attention", key.reads, key.card)}
    known = {k.kernel for k in fitted.of("attention", key.reads)}
    lendable = key.kernel in known and not here
    return fitted.attention(
        key.reads,
        key.card,
        key.heads,
        p.requests,
        p.size,
        backend=key.kernel if key.kernel in here or lendable else None,
        page_size=key.page_size or 1,
        gathered=key.gathered,
        chosen=key.chosen,
        row_bytes=round(p.bytes / p.requests / p.size),
    )


def summary(rows: pd.DataFrame, by: "str | list[str]" = "kind") -> pd.DataFrame:
    """Times, median and 90th-percentile relative error of each group, and of all."""
    names = [by] if isinstance(by, str) else by
    if rows.empty:
        return pd.DataFrame(columns=[*names, "times", "median", "p90"])
    parts = [(key, part) for key, part in rows.groupby(names, sort=False)]
    parts.append((("all",) + ("",) * (len(names) - 1), rows))
    return pd.DataFrame(
        [
            {
                **dict(zip(names, key, strict=True)),
                "times": len(part),
                "median": part.error.median(),
                "p90": part.error.quantile(0.9),
            }
            for key, part in parts
        ]
    )


def record(path: "str | Path | None" = None) -> Path:
    """Leave everything out in turn, and keep each kind of prediction's range with the data."""
    rows = pd.concat([held_out(), held_out(indexed())])
    found = dict(
        name="errors",
        title="Errors of predictions on times that they had not seen",
        how=f"shadowkv_lab.steps.held_out: factors between which {COVERED:.0%} of the times lay",
        ranges=ranges(rows),
    )
    return files.write_json(path or facts.target("published", "tables", "errors.json"), found)


def ranges(rows: pd.DataFrame) -> dict[str, dict[str, float]]:
    """For each kind of prediction the factors between which `COVERED` of its times lay."""
    edge = (1 - COVERED) / 2
    found = {}
    for basis, part in rows.groupby("basis"):
        ratio = part.seen_us / part.predicted_us
        found[basis] = dict(
            low=round(float(ratio.quantile(edge)), 3),
            high=round(float(ratio.quantile(1 - edge)), 3),
            times=len(part),
        )
    return found

"""Step time of a strategy on a GPU: bytes over fitted bandwidth, phase by phase."""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from shadowkv_lab import machine
from shadowkv_lab.errors import NoAnswer, OutOfRange, UnknownName
from shadowkv_lab.machine import Card
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.pool import check_load
from shadowkv_lab.steps.fit import PHASES, Fit, fit
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.strategies import STRATEGIES, Strategy, parse, runnable

PROVENANCES = ("measured", "recorded", "calibrated", "assumed")  # from the best to the weakest


def weakest(provenances) -> str:
    """The provenance of a sum: that of its weakest part."""
    return max(provenances, key=PROVENANCES.index, default="calibrated")


@dataclass(frozen=True)
class Phase:
    """One phase of a step, all layers. `how` names the fit, or the analogy when assumed."""

    name: str
    ms: float
    moved_bytes: int
    provenance: str
    how: str

    @property
    def gb_per_s(self) -> float:
        return self.moved_bytes / self.ms / 1e6 if self.ms else 0.0


@dataclass(frozen=True)
class StepPrediction:
    """A predicted step: `phases` in the order cast, attention, write; L live tokens."""

    strategy: str
    model: str
    gpu: str
    heads: int
    pool_tokens: int
    concurrency: int
    live_tokens: float
    phases: tuple[Phase, ...]

    @property
    def step_ms(self) -> float:
        return sum(p.ms for p in self.phases)

    @property
    def provenance(self) -> str:
        return weakest(p.provenance for p in self.phases if p.ms)

    @property
    def how(self) -> str:
        """The analogies behind the assumed phases, in words; empty where there are none."""
        return "; ".join(f"{p.name}: {p.how}" for p in self.phases if p.provenance == "assumed")

    def __getitem__(self, phase: str) -> Phase:
        return next(p for p in self.phases if p.name == phase)


def predict(
    strategy: "Strategy | str",
    model: "Model | str",
    card: "Card | str",
    pool_tokens: int,
    concurrency: int = 1,
    context: float | None = None,
    *,
    live_tokens: float | None = None,
    heads: int | None = None,
    backend: str | None = None,
    fitted: Fit | None = None,
) -> StepPrediction:
    """The step of `concurrency` requests of `context` tokens, or of `live_tokens` in all.

    `card` is a card of data/gpus or a device title that runs were recorded on; `heads` on this
    GPU default to eight GPUs' share, `backend` names a recorded
    attention kernel. Raises `OutOfRange`, `DoesNotFit`, `NoAnswer`.
    """
    strategy, model = parse(strategy), load_model(model)
    fitted = fitted or fit()
    if (context is None) == (live_tokens is None):
        raise OutOfRange("Both or neither of context and live tokens", "one of the two")
    each = live_tokens / concurrency if context is None else context
    check_load(model, pool_tokens, concurrency, int(each))
    live = live_tokens if context is None else concurrency * context
    heads = heads or model.heads_per_gpu(8 if model.heads % 8 == 0 else 1)
    layers = Counter(strategy.at(i) for i in range(model.layers))
    phases = tuple(
        _phase(name, layers, model, card, pool_tokens, live, concurrency, heads, fitted, backend)
        for name in PHASES
    )
    return StepPrediction(
        strategy.label, model.name, _name(card), heads, pool_tokens, concurrency, live, phases
    )


def _name(card: "Card | str") -> str:
    return card.name if isinstance(card, Card) else card


def _phase(name, layers, model, card, P, L, R, heads, fitted, backend) -> Phase:
    total, moved, words = 0.0, 0, []
    for strategy, count in layers.items():
        bytes_ = getattr(strategy.moves(model, P, L, R), f"{name}_bytes")
        if not bytes_:
            continue
        size, requests = (L / R, R) if name == "attention" else (bytes_, 1)
        source, gb_per_s, analogy = _source(name, strategy, card, heads, fitted, backend)
        ms, inside = source.time(bytes_, size, requests, gb_per_s)
        if not inside:
            analogy.append("outside the recorded sizes, so the utilisation of the nearest one")
        total, moved = total + count * ms, moved + count * bytes_
        words.append((("assumed" if analogy else "calibrated"), "; ".join(analogy)))
    how = "; ".join(dict.fromkeys(w for _, w in words if w)) or "interpolated between recorded runs"
    return Phase(name, total, moved, weakest(p for p, _ in words), how)


def _source(phase: str, strategy: Strategy, card, heads: int, fitted: Fit, backend=None):
    """The curve that serves a phase on a card, the card's bandwidth, and the analogies made."""
    kernels = _kernels(phase, strategy, fitted)
    if phase == "attention" and backend in kernels:
        kernels = [backend]
    name = _name(card)
    candidates = fitted.keys(phase, kernels)
    analogy = []
    if not candidates:
        candidates = fitted.keys(phase)
        analogy.append(f"no run of {strategy.label}'s {phase} kernel, so another's utilisation")
    here, known = [k for k in candidates if k[2] == name], machine.known_cards()
    if not here:
        here = [k for k in candidates if k[2] in known] if name in known else []
    if name in known:  # what flashinfer's "auto" takes: fa3 exists on SM90 only
        other = "fa2" if machine.card(name).compute_capability[0] == 9 else "fa3"
        here = [k for k in here if other not in k[1]] or here
    if not here:
        devices = {k[2] for k in fitted.curves}
        if name not in {*known, *devices}:
            raise UnknownName("GPU", name, {*known, *devices})
        raise NoAnswer(
            f"No recorded run bears on the {phase} of {strategy.label} on {name}",
            f"devices with runs: {', '.join(sorted(devices))}",
            "Record one with shadowkv measure --record, or choose a card of data/gpus",
        )
    key = min(here, key=lambda k: abs(np.log(max(k[3], 1) / heads)) if phase == "attention" else 0)
    gb_per_s = None
    if key[2] != name:
        gb_per_s = machine.card(name).bandwidth_gb_per_s
        analogy.append(f"{key[1]} at {key[2]}'s launches and share of its bandwidth")
    if phase == "attention" and key[3] != heads:
        analogy.append(f"as with {key[3]} heads")
    return fitted.curves[key], gb_per_s, analogy


def _kernels(phase: str, strategy: Strategy, fitted: Fit) -> list[str]:
    if phase == "cast":
        return [strategy.label]
    if phase == "write":
        return ["+".join(strategy.kinds)]
    return [kernel for kernel, reads in fitted.reads.items() if reads == strategy.reads]


@dataclass(frozen=True)
class StepTime:
    """`(running, live_tokens) -> ms`: one strategy's step, and the rest where one is given.

    For a simulation: for each request count, piecewise linear in the live tokens, between the
    knots that `knots(running)` returns; a call costs a bisection. `pool_tokens` is the capacity.
    """

    strategy: Strategy
    model: Model
    card: "Card | str"
    pool_tokens: int
    heads: int
    fitted: Fit
    rest: Rest | None = None
    _tables: dict = field(default_factory=dict, compare=False, repr=False)

    def knots(self, running: int) -> tuple[list[float], list[float]]:
        """Live tokens (from one a request to the pool), and the whole step's ms at each."""
        if running not in self._tables:
            top = max(running, min(self.pool_tokens, running * self.model.max_positions))
            live = np.unique(np.geomspace(running, top, 49).clip(running, top))
            rest = self.rest(running) if self.rest else 0.0
            times = [rest + self.at(running, L).step_ms for L in live]
            self._tables[running] = (live.tolist(), times)
        return self._tables[running]

    def at(self, running: int, live_tokens: float) -> StepPrediction:
        """The strategy's step alone, phase by phase, with provenances."""
        return predict(
            self.strategy,
            self.model,
            self.card,
            self.pool_tokens,
            running,
            live_tokens=live_tokens,
            heads=self.heads,
            fitted=self.fitted,
        )

    def __call__(self, running: int, live_tokens: float) -> float:
        live, times = self.knots(running)
        if len(live) == 1:
            return times[0]
        i = min(max(bisect_right(live, live_tokens), 1), len(live) - 1)
        slope = (times[i] - times[i - 1]) / (live[i] - live[i - 1])
        return times[i - 1] + slope * (live_tokens - live[i - 1])

    @property
    def provenance(self) -> str:
        """The weakest provenance over one request and a full pool, rest included."""
        ends = [self.at(1, min(1024, self.pool_tokens)).provenance]
        return weakest([*ends, *([self.rest.provenance] if self.rest else [])])


def step_time(
    strategy: "Strategy | str",
    model: "Model | str",
    card: "Card | str",
    pool_tokens: int,
    *,
    heads: int | None = None,
    rest: Rest | None = None,
    fitted: Fit | None = None,
) -> StepTime:
    """A `StepTime` from names; fits data/runs if no fit is given."""
    model = load_model(model)
    heads = heads or model.heads_per_gpu(8 if model.heads % 8 == 0 else 1)
    return StepTime(parse(strategy), model, card, pool_tokens, heads, fitted or fit(), rest)


def predict_all(
    model: "Model | str",
    card: "Card | str",
    pool_tokens: int,
    concurrency: int,
    context: int,
    **options,
) -> list[StepPrediction]:
    """The prediction of every strategy that some kernel serves there; `options` of `predict`."""
    shape, chosen = load_model(model), [kind() for kind in STRATEGIES.values()]
    if (name := _name(card)) in machine.known_cards():
        heads = options.get("heads") or shape.heads_per_gpu(8)
        chosen = runnable(shape, heads, machine.card(name).compute_capability)
    return [predict(s, shape, card, pool_tokens, concurrency, context, **options) for s in chosen]

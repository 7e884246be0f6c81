"""Step time of a strategy on a GPU: bytes over fitted bandwidth, phase by phase."""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from shadowkv_lab import machine
from shadowkv_lab.deployment import Setting, deployment
from shadowkv_lab.errors import NoAnswer, UnknownName
from shadowkv_lab.load import Load
from shadowkv_lab.machine import Card
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.pool import check_load
from shadowkv_lab.provenance import Provenance, assumed, calibrated
from shadowkv_lab.rules import can_run
from shadowkv_lab.steps.fit import Fit, fit, reads_of
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.steps.step import PHASES, Phase, Step
from shadowkv_lab.strategies import STRATEGIES, Strategy, parse


def predict_at(
    strategy: "Strategy | str",
    setting: Setting,
    card: "Card | str",
    *,
    backend: str | None = None,
    fitted: Fit | None = None,
) -> Step:
    """The step of a strategy at a setting of one GPU.

    `card` is a card of data/gpus or a device title that steps were recorded on; `backend` names a
    recorded attention kernel. Raises `OutOfRange`, `DoesNotFit`, `NoAnswer`.
    """
    strategy, fitted = parse(strategy), fitted or fit()
    model, load, P = setting.model, setting.load, setting.pool_tokens
    check_load(model, P, load.concurrency, int(load.context))
    layers = Counter(strategy.at(i) for i in range(model.layers))
    phases = tuple(_phase(name, layers, setting, card, fitted, backend) for name in PHASES)
    return Step(
        strategy.tag,
        setting,
        _name(card),
        phases,
        ms=sum(p.ms for p in phases),
        kept_bytes=strategy.token_bytes(model) * (P + setting.page_size)
        + strategy.fixed_bytes(model),
        scratch_bytes=strategy.scratch_bytes(model, P, int(load.live_tokens)),
        backend=phases[1].curve or "",
    )


def at(
    model: "Model | str",
    pool_tokens: int,
    concurrency: int = 1,
    context: float = 1024,
    heads: int | None = None,
) -> Setting:
    """A setting from names; `heads` are by default those of one of eight GPUs."""
    model = load_model(model)
    heads = heads or model.heads_per_gpu(8 if model.heads % 8 == 0 else 1)
    return Setting(model, heads, pool_tokens, Load(concurrency, context))


def resized(step: Step, pool_tokens: int) -> Step:
    """A measured step as it would be over another pool: each phase by its bytes, calibrated.

    Raises `UnknownName` for a strategy that is not defined here: only its own `moves` knows how
    its bytes grow.
    """
    setting = replace(step.setting, pool_tokens=pool_tokens)
    if setting == step.setting:
        return step
    strategy, load = parse(step.strategy.label), setting.load
    moves = strategy.step_moves(setting.model, pool_tokens, load.live_tokens, load.new_tokens)
    phases = []
    for p in step.phases:
        bytes_ = getattr(moves, f"{p.name}_bytes")
        if bytes_ == p.bytes or not p.bytes:
            phases.append(p)
            continue
        factor = bytes_ / p.bytes
        how = calibrated(f"{p.name} x {factor:.1f}, by bytes")
        phases.append(replace(p, ms=p.ms * factor, bytes=bytes_, provenance=p.provenance + how))
    grown = sum(p.ms for p in phases) - sum(p.ms for p in step.phases)
    kept = strategy.token_bytes(setting.model) * (pool_tokens + setting.page_size)
    return replace(
        step,
        setting=setting,
        phases=tuple(phases),
        ms=step.ms + grown,
        kept_bytes=kept + strategy.fixed_bytes(setting.model),
    )


def _name(card: "Card | str") -> str:
    return card.name if isinstance(card, Card) else card


def predict_again(step: Step, fitted: Fit) -> Step:
    """The prediction of a measured step, from its own bytes and kernels: no strategy is needed.

    Raises `NoAnswer` where a phase's time belongs to no one kernel, as where layers differ.
    """
    layers, phases = step.setting.model.layers, []
    for p in step.phases:
        if not p.bytes:
            continue
        if p.curve is None:
            raise NoAnswer(f"The layers of {step.strategy.label} differ in their {p.name}")
        kernels = _alike(p.curve, fitted) if p.name == "attention" else [p.curve]
        ms, curve, provenance = _layer(
            p.name, kernels, p.bytes / layers, step.setting, step.card, fitted, p.curve
        )
        phases.append(Phase(p.name, layers * ms, p.bytes, curve, provenance))
    return replace(step, phases=tuple(phases), ms=sum(p.ms for p in phases), origin=None)


def _phase(
    name: str,
    layers: Counter,
    setting: Setting,
    card: "Card | str",
    fitted: Fit,
    backend: str | None,
) -> Phase:
    load, total, moved, parts, curves = setting.load, 0.0, 0, [], set()
    for strategy, count in layers.items():
        moves = strategy.moves(
            setting.model, setting.pool_tokens, load.live_tokens, load.new_tokens
        )
        if not (bytes_ := getattr(moves, f"{name}_bytes")):
            continue
        kernels = _kernels(name, strategy, fitted)
        ms, curve, provenance = _layer(name, kernels, bytes_, setting, card, fitted, backend)
        total, moved = total + count * ms, moved + count * bytes_
        curves.add(curve)
        parts.append(provenance)
    curve = curves.pop() if len(curves) == 1 else None
    return Phase(name, total, moved, curve, sum(parts) or RECORDED)


RECORDED = calibrated("interpolated between recorded runs")


def _kernels(phase: str, strategy: Strategy, fitted: Fit) -> list[str]:
    if phase == "cast":
        return [strategy.cast_curve]
    if phase == "write":
        return [strategy.write_curve]
    return [k[1] for k in fitted.curves if k[0] == phase and reads_of(k[1]) == strategy.reads]


def _alike(kernel: str, fitted: Fit) -> list[str]:
    """Attention kernels that read what this one reads."""
    reads = reads_of(kernel)
    return [k[1] for k in fitted.curves if k[0] == "attention" and reads_of(k[1]) == reads]


def _layer(
    phase: str,
    kernels: list[str],
    moved_bytes: float,
    setting: Setting,
    card: "Card | str",
    fitted: Fit,
    backend: str | None,
) -> tuple[float, str, Provenance]:
    """One layer's ms in a phase, the curve that gave it, and where that comes from."""
    attention, R = phase == "attention", setting.load.new_tokens
    if attention and backend in kernels:
        kernels = [backend]
    key, gb_per_s, analogy = _source(phase, kernels, card, setting.heads, fitted)
    size, requests = (setting.load.live_tokens / R, R) if attention else (moved_bytes, 1)
    ms, inside = fitted.curves[key].time(moved_bytes, size, requests, gb_per_s)
    if not inside:
        analogy.append("outside the recorded sizes, so the utilisation of the nearest one")
    return ms, key[1], assumed("; ".join(analogy)) if analogy else RECORDED


def _source(phase: str, kernels: list[str], card: "Card | str", heads: int, fitted: Fit):
    """The key of the curve that serves a phase on a card, the card's bandwidth, the analogies."""
    name = _name(card)
    candidates = fitted.keys(phase, kernels)
    analogy = []
    if not candidates:
        candidates = fitted.keys(phase)
        analogy.append(f"no run of the {phase} kernel, so another's utilisation")
    here, known = [k for k in candidates if k[2] == name], machine.known_cards()
    if not here:
        here = [k for k in candidates if k[2] in known] if name in known else []
    if name in known:  # what flashinfer's "auto" takes: fa3 exists on SM90 only
        other = "fa2" if machine.card(name).compute_capability == (9, 0) else "fa3"
        here = [k for k in here if other not in k[1]] or here
    if not here:
        devices = {k[2] for k in fitted.curves}
        if name not in {*known, *devices}:
            raise UnknownName("GPU", name, {*known, *devices})
        raise NoAnswer(
            f"No recorded run bears on the {phase} of {' or '.join(kernels) or 'this strategy'} "
            f"on {name}",
            f"devices with runs: {', '.join(sorted(devices))}",
            "Record one with shadowkv measure --record, or choose a card of data/gpus",
        )
    attention = phase == "attention"
    key = min(here, key=lambda k: abs(np.log(max(k[3], 1) / heads)) if attention else 0)
    gb_per_s = None
    if key[2] != name:
        gb_per_s = machine.card(name).bandwidth_gb_per_s
        analogy.append(f"{key[1]} at {key[2]}'s launches and share of its bandwidth")
    if attention and key[3] != heads:
        analogy.append(f"as with {key[3]} heads")
    return key, gb_per_s, analogy


def predict_all(setting: Setting, card: "Card | str", **options) -> list[Step]:
    """The prediction of every strategy that some kernel serves there; `options` of `predict_at`."""
    chosen = [kind() for kind in STRATEGIES.values()]
    if (name := _name(card)) in machine.known_cards():
        spread = setting.model.heads // setting.heads
        there = deployment(setting.model, name, tensor_parallel=spread, page_size=setting.page_size)
        chosen = [s for s in chosen if can_run(s, there)]
    return [predict_at(s, setting, card, **options) for s in chosen]


@dataclass(frozen=True)
class StepTime:
    """`(running, live_tokens) -> ms`: one strategy's step, and the rest where one is given.

    For a simulation: for each request count, piecewise linear in the live tokens, between the
    knots that `knots(running)` returns; a call costs a bisection. The setting's pool is the
    capacity; its load is not used.
    """

    strategy: Strategy
    setting: Setting
    card: "Card | str"
    fitted: Fit
    rest: Rest | None = None
    _tables: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def pool_tokens(self) -> int:
        return self.setting.pool_tokens

    def knots(self, running: int) -> tuple[list[float], list[float]]:
        """Live tokens (from one per request to the pool), and the whole step's ms at each."""
        if running not in self._tables:
            longest = running * self.setting.model.max_positions
            top = max(running, min(self.pool_tokens, longest))
            live = np.unique(np.geomspace(running, top, 49).clip(running, top))
            rest = self.rest(running) if self.rest else 0.0
            times = [rest + self.at(running, L).ms for L in live]
            self._tables[running] = (live.tolist(), times)
        return self._tables[running]

    def at(self, running: int, live_tokens: float) -> Step:
        """The strategy's step alone, phase by phase, with provenances."""
        load = Load(running, live_tokens / running)
        here = replace(self.setting, load=load)
        return predict_at(self.strategy, here, self.card, fitted=self.fitted)

    def __call__(self, running: int, live_tokens: float) -> float:
        live, times = self.knots(running)
        if len(live) == 1:
            return times[0]
        i = min(max(bisect_right(live, live_tokens), 1), len(live) - 1)
        slope = (times[i] - times[i - 1]) / (live[i] - live[i - 1])
        return times[i - 1] + slope * (live_tokens - live[i - 1])

    @property
    def provenance(self) -> Provenance:
        """The weakest provenance over one request and a full pool, rest included."""
        step = self.at(1, min(1024, self.pool_tokens)).provenance
        return step + self.rest.provenance if self.rest else step


def step_time(
    strategy: "Strategy | str",
    setting: Setting,
    card: "Card | str",
    *,
    rest: Rest | None = None,
    fitted: Fit | None = None,
) -> StepTime:
    """A `StepTime` from names; fits data/runs if no fit is given."""
    return StepTime(parse(strategy), setting, card, fitted or fit(), rest)

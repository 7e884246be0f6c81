"""Step time of a strategy on a GPU: bytes over fitted bandwidth, phase by phase."""

from collections import Counter
from dataclasses import replace

from shadowkv_lab import machine
from shadowkv_lab.deployment import Deployment, Setting
from shadowkv_lab.deployment import deployment as make_deployment
from shadowkv_lab.errors import CannotRun, OutOfRange
from shadowkv_lab.kernels.index import PAGE
from shadowkv_lab.load import Load
from shadowkv_lab.machine import Card
from shadowkv_lab.model import Model, load_model
from shadowkv_lab.pool import check_load
from shadowkv_lab.provenance import assumed, calibrated
from shadowkv_lab.rules import can_run
from shadowkv_lab.steps.evidence import (
    INDEX_FROM,
    LAUNCH_MS,
    REACH,
    WITH_WRITE,
    bandwidth,
    choosing,
)
from shadowkv_lab.steps.fit import Answer, Fit, fit
from shadowkv_lab.steps.step import PHASES, Phase, Step
from shadowkv_lab.strategies import STRATEGIES, Strategy, parse


def predict_at(
    strategy: "Strategy | str",
    setting: Setting,
    card: "Card | str",
    *,
    backend: str | None = None,
    mode: str = "graph",
    fitted: Fit | None = None,
) -> Step:
    """The step of a strategy at a setting of one GPU.

    `card` is a card of data/gpus or a device title that steps were recorded on; `backend` names a
    recorded or published attention kernel. `mode` "eager" is a step without a CUDA graph: the
    longer of its replay and of the host's launches, whose excess is a phase "host". Raises
    `OutOfRange`, `DoesNotFit`, `NoAnswer`, `UnknownName`.
    """
    strategy, fitted = parse(strategy), fitted or fit()
    model, load, P = setting.model, setting.load, setting.pool_tokens
    read = setting.read_tokens
    check_load(model, P, load.concurrency, int(load.context))
    strategy.require_rows(load.live_tokens)
    layers = Counter(strategy.at(i) for i in range(model.layers))
    found = [_phase(name, layers, setting, card, fitted, backend) for name in PHASES]
    if found[1].curve in WITH_WRITE:
        found[2] = _beyond_a_plain_write(found[2], strategy, setting, card, fitted)
    keys = 0
    if load.reads == "dsa":
        moves = strategy.moves_at(setting)
        found += _index(setting, moves["index"], moves["top_k"], card, fitted)
        slots = -(-(P + setting.page_size) // PAGE) * PAGE
        keys = len(model.choosing) * model.row_bytes("index") * slots
    if mode == "eager":
        host = fitted.host(strategy.label, _name(card), load.concurrency, load.context)
        excess = max(0.0, model.layers * host.ms - sum(p.ms for p in found))
        found.append(Phase("host", excess, 0, None, host.provenance, excess, excess))
    phases = tuple(found)
    return Step(
        strategy.tag_at(load),
        setting,
        _name(card),
        phases,
        ms=sum(p.ms for p in phases),
        kept_bytes=strategy.token_bytes(model) * (P + setting.page_size)
        + strategy.fixed_bytes(model)
        + keys,
        scratch_bytes=strategy.scratch_bytes(model, P, int(read)),
        mode=mode,
        backend=phases[1].curve or "",
    )


def predict(
    strategy: "Strategy | str",
    deployment: Deployment,
    load: Load | None = None,
    *,
    pool_tokens: int | None = None,
    backend: str | None = None,
    mode: str = "graph",
    fitted: Fit | None = None,
) -> Step:
    """One GPU's step of a strategy in a deployment, for a load of the whole server.

    `pool_tokens` are the slots of the pool; without them those that the strategy has in the
    deployment's memory. `backend` names a recorded or published attention kernel, and then
    answers also where no backend of the strategy can run. Raises `CannotRun` with the rules'
    reason, and what `predict_at` does.
    """
    strategy = parse(strategy)
    verdict = can_run(strategy, deployment)
    if not verdict and backend is None:
        raise CannotRun(
            f"{strategy.tag.title} in {deployment}: {verdict.reason}",
            remedy="Choose another strategy, card or layout",
        )
    P = deployment.rows(strategy) if pool_tokens is None else pool_tokens
    setting = deployment.setting(load, P)
    return predict_at(strategy, setting, deployment.card, backend=backend, mode=mode, fitted=fitted)


def at(
    model: "Model | str",
    pool_tokens: int,
    concurrency: int = 1,
    context: float = 1024,
    heads: int | None = None,
    reads: str = "dense",
) -> Setting:
    """A setting from names; `heads` are by default those of one of eight GPUs.

    Raises `OutOfRange` for a model whose heads eight GPUs cannot share.
    """
    model = load_model(model)
    if heads is None and model.heads % 8:
        raise OutOfRange(
            f"8 GPUs cannot share the {model.heads} heads of {model.name}",
            f"heads per GPU from 1 to {model.heads}",
            "Say how many one GPU has: --heads",
        )
    heads = model.heads // 8 if heads is None else heads
    if heads < 1:
        raise OutOfRange(f"{heads} heads per GPU", "1 or more")
    return Setting(model, heads, pool_tokens, Load(concurrency, context, reads=reads))


def resized(step: Step, pool_tokens: int) -> Step:
    """A measured step as it would be over another pool: each phase by its bytes, calibrated.

    Raises `UnknownName` for a strategy that is not defined here: only its own `moves` knows how
    its bytes grow.
    """
    setting = replace(step.setting, pool_tokens=pool_tokens)
    if setting == step.setting:
        return step
    strategy = parse(step.strategy.label)
    moves = strategy.moves_at(setting)
    phases = []
    for p in step.phases:
        bytes_ = moves[p.name]
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


def _phase(
    name: str,
    layers: Counter,
    setting: Setting,
    card: "Card | str",
    fitted: Fit,
    backend: str | None,
) -> Phase:
    found = []
    for strategy, count in layers.items():
        moves = strategy.moves_of(setting)
        if not (bytes_ := getattr(moves, f"{name}_bytes")):
            continue
        curves = {"attention": backend, "cast": strategy.cast_curve, "write": strategy.write_curve}
        answer = _layer(name, curves[name], strategy, bytes_, setting, card, fitted)
        found.append(_phase_of(name, answer, count, count * bytes_, fitted))
    if not found:
        return Phase(name, 0.0, 0, None, NOTHING)
    curves = {p.curve for p in found}
    return Phase(
        name,
        sum(p.ms for p in found),
        sum(p.bytes for p in found),
        curves.pop() if len(curves) == 1 else None,
        sum(p.provenance for p in found),
        sum(p.low_ms for p in found),
        sum(p.high_ms for p in found),
    )


NOTHING = calibrated("moves nothing")
PUBLISHED_INDEX = 32, 2048  # index heads and top-k of GLM-5's DSA modules


def _index(
    setting: Setting, index_bytes: int, top_k_bytes: int, card: "Card | str", fitted: Fit
) -> list[Phase]:
    """Scores and top-k of a step that reads by an index: recorded on the card, or else published.

    Published is how much both together grow beyond `INDEX_FROM` tokens; no table tells them apart,
    or holds their launches. So the scores are taken as a launch and their bytes, and what the bytes
    do not explain of the growth is the top-k's, with a launch of its own.
    """
    load, layers, name = setting.load, len(setting.model.choosing), _name(card)
    topk = setting.model.index_topk
    like = (setting.model.index_heads, topk) == PUBLISHED_INDEX
    sizes = dict(index=index_bytes, top_k=top_k_bytes)
    own = {
        p: fitted.choice(p, choosing(p, load.context, topk), name, load.concurrency, load.context)
        for p in sizes
    }
    if all(own.values()):
        found = [_phase_of(p, own[p], layers, size, fitted) for p, size in sizes.items()]
        how = assumed("recorded of GLM-5's 32 index heads and top-k 2,048")
        return [p if like else replace(p, provenance=p.provenance + how) for p in found]
    more = max(0.0, load.context - INDEX_FROM)
    row = setting.model.row_bytes("index")
    grown = fitted.index(name, load.concurrency, more, load.concurrency * more * row)
    per_byte = 1 / (bandwidth(name) * REACH) / 1e6
    launch, own = layers * LAUNCH_MS / 2, index_bytes * per_byte
    how = f"a launch and its bytes at {REACH:.0%} of bandwidth: no published time holds it alone"
    scores = Phase("index", launch + own, index_bytes, None, assumed(how))
    inside = layers * load.concurrency * more * row * per_byte

    def beside(factor: float) -> float:
        return launch + max(top_k_bytes * per_byte, layers * grown.ms * factor - inside)

    said = "a launch"
    if more:
        said += f", and the growth of scores and top-k from {INDEX_FROM:,} tokens on, published: "
        said += f"{grown.provenance.how}, less the scores' bytes"
    if not like:
        said += "; published of GLM-5's 32 index heads and top-k 2,048"
    low, high = fitted.range_of(grown.basis)
    known = replace(grown.provenance + assumed("its launch"), how=said)
    top_k = Phase("top_k", beside(1.0), top_k_bytes, None, known, beside(low), beside(high))
    return [scores, top_k]


def _beyond_a_plain_write(
    write: Phase, strategy: Strategy, setting: Setting, card: "Card | str", fitted: Fit
) -> Phase:
    """The write without what a published attention time holds of it already: one plain row."""
    kind = "bf16" if strategy.at(0).kinds == ("bf16",) else "fp8"
    moved = setting.model.row_bytes(kind) * setting.load.new_tokens
    inside = setting.model.layers * fitted.moved("write", kind, _name(card), moved).ms
    share = max(0.0, write.ms - inside) / write.ms
    how = calibrated("its plain part is inside the published attention time")
    if not share:
        return replace(write, ms=0.0, low_ms=0.0, high_ms=0.0, provenance=how)
    return replace(
        write, ms=share * write.ms, low_ms=share * write.low_ms, high_ms=share * write.high_ms
    )


def _phase_of(name: str, answer: Answer, layers: int, bytes_: float, fitted: Fit) -> Phase:
    ms, (low, high) = layers * answer.ms, fitted.range_of(answer.basis)
    return Phase(name, ms, bytes_, answer.kernel, answer.provenance, low * ms, high * ms)


def _layer(
    phase: str,
    kernel: str | None,
    strategy: Strategy,
    moved_bytes: float,
    setting: Setting,
    card: "Card | str",
    fitted: Fit,
) -> Answer:
    """One layer's time in a phase."""
    if phase != "attention":
        return fitted.moved(phase, kernel, _name(card), moved_bytes)
    load, model, reads = setting.load, setting.model, strategy.reads
    # Several query tokens of one request read its rows together, as more heads would.
    heads, requests, page = (
        setting.heads * load.tokens_per_step,
        load.concurrency,
        setting.page_size,
    )
    if strategy.by_row:
        page = 1
    if load.reads == "dsa":  # each reads rows of its own, one here and one there
        heads, requests, page = setting.heads, load.new_tokens, 1
    return fitted.attention(
        reads,
        _name(card),
        heads,
        requests,
        setting.read_tokens / requests,
        backend=kernel,
        page_size=page,
        gathered=strategy.compact,
        chosen=load.reads == "dsa",
        row_bytes=model.row_bytes("bf16" if reads == "bf16" else "fp8"),
    )


def predict_all(setting: Setting, card: "Card | str", **options) -> list[Step]:
    """The prediction of every strategy that some kernel serves there; `options` of `predict_at`."""
    chosen = [kind() for kind in STRATEGIES.values()]
    if (name := _name(card)) in machine.known_cards():
        spread = setting.model.heads // setting.heads
        there = make_deployment(
            setting.model, name, tensor_parallel=spread, page_size=setting.page_size
        )
        chosen = [s for s in chosen if can_run(s, there)]
    return [predict_at(s, setting, card, **options) for s in chosen]

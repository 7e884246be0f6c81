"""The serving lab: one load by the closed form, one traffic by simulation, each behind widgets."""

import ipywidgets as w
import pandas as pd

from shadowkv_lab import machine
from shadowkv_lab.deployment import published_deployment
from shadowkv_lab.errors import DoesNotFit, OutOfRange
from shadowkv_lab.model import known_models, load_model
from shadowkv_lab.rules import can_run
from shadowkv_lab.serving import traffic
from shadowkv_lab.serving.contenders import ANCHORS, WANTED, contenders, engine
from shadowkv_lab.serving.simulate import PREFILL_SOURCE, simulate
from shadowkv_lab.strategies import STRATEGIES, parse
from shadowkv_lab.ui import serving as figures
from shadowkv_lab.ui import serving_runs, style
from shadowkv_lab.ui.app import App, View
from shadowkv_lab.ui.controls import gpus, menu, several, slider

CARD = "rtx-pro-6000-server"
CONCURRENCIES = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]
CONTEXTS = [2**k for k in range(9, 18)]
TOKENS = [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
RATES = [0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0]
ARRIVALS = ("closed loop", "Poisson", "bursts")
BURST_CV = 3.0
REQUESTS = 400
CAPACITY_SHARES = (0.06, 0.1, 0.16, 0.25, 0.4, 0.63, 0.8, 1.0, 1.25)


def lengths_of(name: str, prompt_tokens: int, output_tokens: int) -> traffic.Lengths:
    """Lengths by the name a control shows."""
    if name == "fixed":
        return traffic.fixed(prompt_tokens, output_tokens)
    return traffic.long_answers() if name == "long answers" else traffic.published(name)


def load_view(
    model: str = "glm-5",
    gpu: str = CARD,
    rest: str = "case",
    concurrency: int = 64,
    context: int = 8192,
    strategies: tuple[str, ...] = WANTED,
) -> View:
    """The closed form: one load, throughput against interactivity, and who wins where."""
    found = _contenders(model, gpu, rest, strategies)
    shape = load_model(model)
    contexts = [n for n in figures.CONTEXTS if n <= shape.max_positions]
    shown = [
        figures.verdict(found, concurrency, context),
        figures.pareto(found, context),
        figures.winners(found, contexts=contexts),
    ]
    rows = [
        {
            "strategy": c.name,
            "capacity": c.capacity_tokens,
            "running": c.running(concurrency, context),
            "tokens/s": c.tokens_per_s(concurrency, context),
            "provenance": c.step.provenance,
        }
        for c in found
    ]
    return View(shown, _note(rest, gpu, found), pd.DataFrame(rows))


def traffic_of(
    arrivals: str,
    rate: float,
    concurrency: int,
    lengths: traffic.Lengths,
    requests: int = REQUESTS,
    seed: int = 0,
) -> traffic.Traffic:
    """Traffic by the names that the controls show."""
    if arrivals not in ARRIVALS:
        raise OutOfRange(f"Arrivals {arrivals!r}", ", ".join(ARRIVALS))
    if arrivals == "closed loop":
        return traffic.closed_loop(concurrency, max(requests, 4 * concurrency), lengths, seed)
    return traffic.bursts(rate, 1.0 if arrivals == "Poisson" else BURST_CV, requests, lengths, seed)


def traffic_view(
    model: str = "glm-5",
    gpu: str = CARD,
    rest: str = "case",
    arrivals: str = "closed loop",
    rate: float = 0.8,
    concurrency: int = 96,
    lengths: str = "long answers",
    prompt_tokens: int = 1024,
    output_tokens: int = 256,
    strategies: tuple[str, ...] = WANTED,
) -> View:
    """The simulation: KV use and queue over time, and the cliff or the objectives."""
    found = _contenders(model, gpu, rest, strategies)
    drawn = lengths_of(lengths, prompt_tokens, output_tokens)
    load = traffic_of(arrivals, rate, concurrency, drawn)
    runs = [simulate(engine(c), load) for c in found]
    if not any(run.finished for run in runs):
        raise DoesNotFit(
            f"No request fits: {runs[0].refusals()[0]}", "shorter requests, or a larger pool"
        )
    shown = [serving_runs.kv_use(runs)]
    if arrivals == "closed loop":
        plain = next((c for c in found if c.name == "bf16_pool"), found[-1])
        kept = {c.name: c.capacity_tokens for c in found}
        shown.append(serving_runs.cliff(plain, load, kept, CAPACITY_SHARES))
    else:
        shown.append(serving_runs.attainment(found, drawn, RATES))
    refused = [line for run in runs for line in run.refusals()]
    note = f"{_note(rest, gpu, found)}; prefill: {PREFILL_SOURCE}, assumed here"
    note += f"; lengths: {drawn.source}"
    if refused:
        note += f"; refused: {len(refused)}, such as {refused[0]}"
    return View(shown, note, serving_runs.table(runs))


def loads(**start) -> w.Widget:
    """The closed form as a widget; arguments are `load_view`'s, as start values."""
    return loads_app(**start).widget


def traffics(**start) -> w.Widget:
    """The simulation as a widget; arguments are `traffic_view`'s, as start values."""
    return traffics_app(**start).widget


def loads_app(
    model: str = "glm-5",
    gpu: str = CARD,
    rest: str = "case",
    concurrency: int = 64,
    context: int = 8192,
    strategies: tuple[str, ...] = WANTED,
) -> App:
    """The application behind `loads`."""
    controls = _common(model, gpu, rest, strategies) | {
        "concurrency": slider("concurrency", CONCURRENCIES, concurrency, "requests"),
        "context": slider("context", CONTEXTS, context, "tokens"),
    }
    return App(
        "shadowkv_lab.ui.serving_lab.loads", controls, lambda s, report, cancelled: load_view(**s)
    )


def traffics_app(
    model: str = "glm-5",
    gpu: str = CARD,
    rest: str = "case",
    arrivals: str = "closed loop",
    rate: float = 0.8,
    concurrency: int = 96,
    lengths: str = "long answers",
    prompt_tokens: int = 1024,
    output_tokens: int = 256,
    strategies: tuple[str, ...] = WANTED,
) -> App:
    """The application behind `traffics`."""
    controls = _common(model, gpu, rest, strategies) | {
        "arrivals": menu("arrivals", ARRIVALS, arrivals),
        "lengths": menu("lengths", ["long answers", *traffic.known_traffic(), "fixed"], lengths),
        "concurrency": slider("closed loop of", CONCURRENCIES, concurrency, "requests"),
        "rate": slider("open, rate", RATES, rate, "requests/s"),
        "prompt_tokens": slider("fixed prompt", TOKENS, prompt_tokens, "tokens"),
        "output_tokens": slider("fixed output", TOKENS, output_tokens, "tokens"),
    }
    return App(
        "shadowkv_lab.ui.serving_lab.traffics",
        controls,
        lambda s, report, cancelled: traffic_view(**s),
    )


def _common(model: str, gpu: str, rest: str, strategies: tuple[str, ...]) -> dict[str, w.Widget]:
    return {
        "model": menu("model", known_models(), load_model(model).name),
        "gpu": gpus("8 GPUs of", machine.known_cards(), gpu),
        "rest": menu("rest as in", ANCHORS, rest, "rest"),
        "strategies": several("strategies", [*STRATEGIES], strategies),
    }


def _contenders(model, gpu, rest, strategies):
    known = [s for s in strategies if s.split("(")[0] in STRATEGIES]
    if not known:
        raise OutOfRange("No strategy is chosen", "one or more", "Choose some in the list")
    return contenders(model, gpu, known, anchor=rest)


def _note(rest: str, gpu: str, found) -> str:
    """What the verdict rests on, in words."""
    at = published_deployment("case", gpu)
    anew = any(can_run(parse(c.name), at).untried for c in found)
    kept = ", ".join(f"{style.title(c.name)} {c.capacity_tokens:,}" for c in found)
    return (
        f"<b>{figures.source_of(found)}</b>: the rest at many requests was never measured; it "
        f"is anchored on {ANCHORS[rest]}. Tokens kept: {kept}"
        + ("; the fused kernel was never run on this card" if anew else "")
    )

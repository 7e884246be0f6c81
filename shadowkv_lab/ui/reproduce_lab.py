"""The reproduction as an application: the case's verdict, and a user's own two TPOTs."""

import dataclasses
import math

import ipywidgets as w

from shadowkv_lab import machine
from shadowkv_lab.errors import OutOfRange
from shadowkv_lab.glm5 import case, hypotheses, verdict
from shadowkv_lab.ui import reproduce
from shadowkv_lab.ui.app import App, View
from shadowkv_lab.ui.budget import CONCURRENCIES, CONTEXTS
from shadowkv_lab.ui.controls import check, gpus, number, slider

CARD = "rtx-pro-6000-server"


def reproduction_view(
    gpu: str = CARD,
    context: int = 1024,
    concurrency: int = 1,
    rest_ms: float = 0.0,
    rest_grows: bool = True,
    before_ms: float | None = None,
    after_ms: float | None = None,
    pool_tokens: int | None = None,
    layers: int | None = None,
    cast_ms: float = 0.0,
) -> View:
    """TPOT by strategy on the case's card, and the hypotheses for two TPOTs.

    `rest_ms` at one request replaces the derived one where it is above 0; `rest_grows` adds the
    experts that more requests read. A `cast_ms` of 0 scales the case's own by bytes.
    """
    if not (math.isfinite(rest_ms) and rest_ms >= 0):
        raise OutOfRange(f"rest_ms of {rest_ms}", "a finite number, 0 or more")
    rest = verdict.case_rest(gpu, context)
    if rest_ms:
        at_one = rest_ms - rest.expert_ms * rest.per_token
        rest = dataclasses.replace(rest, fixed_ms=at_one, how=f"{rest_ms} ms at one request, typed")
    if not rest_grows:
        rest = dataclasses.replace(rest, fixed_ms=rest(1), expert_ms=0.0)
    of = case.server(before_ms, after_ms, pool_tokens, layers, cast_ms=cast_ms or None)
    table = hypotheses.recorded_hypotheses(of)
    found = verdict.verdict(gpu, context, concurrency, rest=rest)
    where = f"{machine.card(gpu).title}, {concurrency} x {context:,} tokens"
    figures = [
        reproduce.tpot(found, rest, concurrency, where),
        reproduce.hypotheses_bars(table, of),
    ]
    note = f"{hypotheses.in_words(of, table)} Rest: {rest.how}; {rest.provenance}."
    return View(figures, note, found, {"hypotheses": table})


def reproduction_app(**start) -> w.Widget:
    """The reproduction as a widget; arguments are `reproduction_view`'s, as start values."""
    return make_app(**start).widget


def make_app(
    gpu: str = CARD,
    context: int = 1024,
    concurrency: int = 1,
    rest_ms: float = 0.0,
    rest_grows: bool = True,
    before_ms: float | None = None,
    after_ms: float | None = None,
    pool_tokens: int | None = None,
    layers: int | None = None,
    cast_ms: float = 0.0,
) -> App:
    """The application behind `reproduction_app`; it starts at the case."""
    of = case.server(before_ms, after_ms, pool_tokens, layers, cast_ms=cast_ms or None)
    controls = {
        "gpu": gpus("GPU", case.published("case")["gpu"], gpu),
        "context": slider("context", CONTEXTS, context, "tokens"),
        "concurrency": slider("concurrency", CONCURRENCIES, concurrency, "requests"),
        "rest_ms": number("rest, ms (0: derive)", rest_ms, 0.5),
        "rest_grows": check("rest grows with the experts read", rest_grows),
        "before_ms": number("your TPOT before, ms", of.before_ms, 0.1),
        "after_ms": number("your TPOT after, ms", of.after_ms, 0.1),
        "pool_tokens": number("your pool, slots", of.pool_tokens, 64, whole=True),
        "layers": number("your layers", of.layers, whole=True),
        "cast_ms": number("cast, ms (0: scale)", cast_ms, 0.1),
    }

    def build(settings, report, cancelled) -> View:
        return reproduction_view(**settings)

    return App("shadowkv_lab.ui.reproduce_lab.reproduction_app", controls, build, columns=1)

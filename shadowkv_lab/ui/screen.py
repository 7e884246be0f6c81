"""The main screen: which way to read an FP8 pool, on my card, under my load, and how fast."""

import html
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Annotated

import ipywidgets as w
import pandas as pd

from shadowkv_lab import facts, machine
from shadowkv_lab.deployment import Deployment, checked, deployment, published_deployment
from shadowkv_lab.errors import LabError
from shadowkv_lab.glm5 import reproduce
from shadowkv_lab.load import Load
from shadowkv_lab.model import load_model
from shadowkv_lab.provenance import assumed
from shadowkv_lab.rules import can_run
from shadowkv_lab.server import logs
from shadowkv_lab.steps import measure as measuring
from shadowkv_lab.steps.answer import ANCHORS, Answer, anchored, answers, own
from shadowkv_lab.steps.grid import CONTEXTS, casts_by_pool, grid, ready
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.steps.step import Step
from shadowkv_lab.strategies import STRATEGIES, parse
from shadowkv_lab.ui import plots, rows
from shadowkv_lab.ui.app import QUIET, App, View, Work
from shadowkv_lab.ui.application import application
from shadowkv_lab.ui.controls import (
    Menu,
    Number,
    Paste,
    Slider,
    Switch,
    cards,
    models,
    spread,
    spreads,
)
from shadowkv_lab.ui.curves import (
    ALONG,
    CONCURRENCIES,
    Field,
    Line,
    Seen,
    curve,
    lead_map,
    seen,
    timed,
)

REPORT = next(iter(ANCHORS))
SERVERS = {
    REPORT: "the GLM-5 report",
    "sglang-35291": "sglang #35291",
    "h200-server": "the H200 server run",
}
STARTS = {**SERVERS, "log": "a log of mine, pasted", "own": "a server of my own"}
RESTS = {name: words.partition(":")[0].partition(",")[0] for name, words in ANCHORS.items()}
RESTS["mine"] = "my own TPOT"
WHAT = ("start", "model", "checkpoint", "card", "tensor_parallel", "log")  # decide the memory
MTP = {1: "off"} | {q: f"{q} tokens per step" for q in (2, 3, 4)}
HERE: list[Step] = []  # steps measured on this machine in this session
MEASURED = ("full_cast", "bf16_pool", "shadow")
ONE = Load(1, 1024)  # the load of a TPOT that is typed


# What is served, from the settings.


def _base(s: dict) -> Deployment:
    """The deployment without what was typed of its memory."""
    return _bases(*(s[name] for name in WHAT))


@lru_cache(maxsize=64)
def _bases(start, model, checkpoint, card, tensor_parallel, log) -> Deployment:
    if start in SERVERS:
        return published_deployment(start, card)
    if start == "log" and log.strip():
        return logs.read(log, None, card).deployment
    return deployment(model, card, quantisation=checkpoint or None, tensor_parallel=tensor_parallel)


def deployed(s: dict) -> Deployment:
    """The deployment with what was typed of its memory, and the MTP layer's cache where it runs."""
    at = _typed(_base(s), s["weights_gib"], s["kv_gib"])
    return replace(at, mtp=True) if s["tokens_per_step"] > 1 else at


@lru_cache(maxsize=64)
def _typed(at: Deployment, weights_gib: float, kv_gib: float) -> Deployment:
    said, given = assumed("as typed"), dict(at.given)
    if weights_gib and weights_gib != _weights(at):
        checkpoint = replace(at.checkpoint, weights_gib=weights_gib, provenance=said)
        given["weights_gib"] = said
        at = replace(at, checkpoint=checkpoint, kv_gib=None, pool_tokens=None, given=given)
    if kv_gib and kv_gib != _kv(at):
        given["kv_gib"] = said
        at = replace(at, kv_gib=kv_gib, pool_tokens=None, given=given)
    return checked(at)


def _weights(at: Deployment) -> float:
    return round(at.checkpoint.weights_gib or 0.0, 2)


def _kv(at: Deployment) -> float:
    """GiB of KV, 0 where nothing is left for it."""
    try:
        return round(at.memory().kv_gib, 2)
    except LabError:
        return 0.0


@lru_cache(maxsize=64)
def capacities(at: Deployment) -> dict[str, int]:
    """Slots of one GPU's pool by strategy, of those that can run there and have any."""
    try:
        memory = at.memory()
    except LabError:
        return {}
    kinds = [kind() for kind in STRATEGIES.values()]
    found = {s.label: at.rows(s, memory) for s in kinds if can_run(s, at)}
    return {label: rows for label, rows in found.items() if rows}


def pools(s: dict) -> list[int]:
    """Positions of the pool slider: powers of two, and what each strategy holds."""
    kept = set(capacities(deployed(s)).values())
    most = max(kept, default=131_072)
    return sorted({p for p in (2048 << k for k in range(14)) if p < most} | kept | {most})


def rest_of(s: dict, at: Deployment) -> Rest:
    """The rest that is asked for: a published server's, or one's own."""
    if s["rest"] == "mine":
        return own(s["tpot_ms"], s["tpot_of"], replace(at, mtp=False), ONE)
    return _anchored(s["rest"], at)


@lru_cache(maxsize=64)
def _anchored(name: str, at: Deployment) -> Rest:
    return anchored(name, at)


def _nearest_rest(at: Deployment) -> str:
    """The published server whose rest is the nearest: of this model and card, or of one."""

    def alike(name):
        entry = facts.find("published", "published result", name)
        own_cards = [entry["gpu"]] if isinstance(entry["gpu"], str) else entry["gpu"]
        return 2 * (entry["model"] == at.model.name) + (at.card.name in own_cards)

    return max(ANCHORS, key=alike)


# What follows from a change.


def follow(s: dict, name: str | None) -> dict:
    """A start fills in its server; another model, card or spread derives all that hangs on it."""
    s = dict(s)
    if name is None:
        chosen = any(s[key] is not None for key in ("model", "checkpoint", "tensor_parallel"))
        s["start"] = s["start"] or ("log" if s["log"].strip() else "own" if chosen else REPORT)
    if name == "log" and s["log"].strip():
        s["start"] = "log"
    if name in ("model", "checkpoint", "tensor_parallel") and s["start"] != "own":
        s["start"] = "own"
    if name == "card" and s["start"] in SERVERS and s["card"] not in _cards(s["start"]):
        s["start"] = "own"
    if name in (None, "start") and s["start"] in SERVERS:
        theirs = _cards(s["start"])
        at = published_deployment(s["start"], s["card"] if s["card"] in theirs else None)
        s |= {"model": at.model.name, "card": at.card.name}
        s |= {"checkpoint": at.checkpoint.quantisation, "tensor_parallel": at.tensor_parallel}
    s["model"] = "glm-5" if s["model"] is None else s["model"]
    s["card"] = s["card"] or "rtx-pro-6000-server"
    s["tensor_parallel"] = s["tensor_parallel"] or 8
    if name == "model":
        s |= {"checkpoint": None, "tensor_parallel": spread(s)}
    if not load_model(s["model"]).mtp_layers:
        s["tokens_per_step"] = 1
    s["accepted"] = min(s["accepted"], float(max(2, s["tokens_per_step"])))
    fresh = name is None or name in WHAT
    if fresh:
        at = _base(s)
        if s["start"] == "log":
            known = at.model.name in models(s)
            s |= {"model": at.model.name} if known else {}
            s |= {"card": at.card.name, "tensor_parallel": at.tensor_parallel}
        s["checkpoint"] = at.checkpoint.quantisation
        if name is not None or s["weights_gib"] is None:
            s["weights_gib"] = _weights(at)
        if name is not None or s["rest"] is None:
            s["rest"] = _nearest_rest(at) if s["rest"] != "mine" else "mine"
    if name == "weights_gib" or (fresh and (name is not None or s["kv_gib"] is None)):
        s["kv_gib"] = 0.0
    if not s["weights_gib"]:
        s["weights_gib"] = _weights(_base(s))
    if not s["kv_gib"]:
        s["kv_gib"] = _kv(deployed(s))
    positions = pools(s)
    if (
        s["pool_tokens"] is None
        or (name is not None and fresh)
        or name in ("weights_gib", "kv_gib")
    ):
        s["pool_tokens"] = positions[-1]
    if s["rest"] == "mine" and (not s["tpot_ms"] or (fresh and name is not None)):
        s["tpot_ms"] = _first_tpot(s)
    return s


def _cards(start: str) -> list[str]:
    found = facts.find("published", "published result", start)["gpu"]
    return [found] if isinstance(found, str) else found


def _first_tpot(s: dict) -> float:
    """Where a TPOT of one's own starts: what is predicted of that strategy."""
    at = deployed(s)
    try:
        found = answers(at, ONE, _anchored(_nearest_rest(at), at), strategies=[s["tpot_of"]])
    except LabError:  # it does not fit: the answer says so
        return 30.0
    return next((round(a.tpot_ms, 1) for a in found if a.runs and not a.cut), 30.0)


def _checkpoints(s: dict) -> list[str]:
    model = load_model(s["model"])
    own_kind = s["checkpoint"] or ""
    return list(dict.fromkeys([*model.quantisations, own_kind])) or [""]


def _asleep(s: dict) -> dict[str, str]:
    """Controls that do nothing now."""
    found = {}
    if s["rest"] != "mine":
        found |= dict.fromkeys(("tpot_ms", "tpot_of"), "only for a TPOT of my own")
    if not load_model(s["model"]).mtp_layers:
        found["tokens_per_step"] = f"{s['model']} has no MTP layer"
    if s["tokens_per_step"] == 1:
        found["accepted"] = "only with MTP"
    return found


def _accepted(s: dict) -> list[float]:
    return [round(1 + k / 20, 2) for k in range(20 * max(1, s["tokens_per_step"] - 1) + 1)]


def _spreads(s: dict) -> list[int]:
    """GPUs that can share the model's heads, and those that a log says."""
    logged = {s["tensor_parallel"]} if s["start"] == "log" else set()
    return sorted({*spreads(s), *logged})


# The view.


@dataclass(frozen=True)
class Answered(View):
    """A view whose note is also there in two parts: the sentence, and what goes below the rows."""

    said: str = ""
    rows: str = ""  # a bar of ms by phase for each strategy


def _marks(text: str) -> str:
    """HTML as a note: no element but b, br and code, and none with an attribute."""
    text = re.sub(r"</div>(?=.)", "<br>", text)
    return re.sub(
        r"<(/?(?:b|br|code)\b)[^>]*>|<[^>]*>", lambda m: f"<{m[1]}>" if m[1] else "", text
    )


def _tpot_strategies(s: dict) -> dict[str, str]:
    return {name: kind.title for name, kind in STRATEGIES.items()}


@application(
    "shadowkv_lab.screen",
    changed=follow,
    asleep=_asleep,
    shell=lambda: Screen,
    slow=lambda s: not ready(deployed(s), s["tokens_per_step"]),
)
def screen_view(
    start: Annotated[str | None, Menu("start from", STARTS)] = None,
    model: Annotated[str | None, Menu("model", models)] = None,
    checkpoint: Annotated[str | None, Menu("checkpoint", _checkpoints)] = None,
    card: Annotated[str | None, Menu("card", cards(machine.known_cards), kind="GPU")] = None,
    tensor_parallel: Annotated[int | None, Menu("GPUs (TP)", _spreads)] = None,
    weights_gib: Annotated[
        float | None, Number("weights, GiB", 0.5, help="per GPU; 0: derived")
    ] = None,
    kv_gib: Annotated[
        float | None, Number("KV, GiB", 0.5, help="per GPU; 0: the engine's rule")
    ] = None,
    pool_tokens: Annotated[
        int | None, Slider("pool", pools, "tokens", help="at most, as --max-total-tokens")
    ] = None,
    concurrency: Annotated[int, Slider("concurrency", CONCURRENCIES, "requests")] = 1,
    context: Annotated[int, Slider("context", CONTEXTS, "tokens")] = 1024,
    tokens_per_step: Annotated[
        int, Menu("MTP", MTP, help="tokens of each request in a step, drafted by the MTP layer")
    ] = 1,
    accepted: Annotated[
        float,
        Slider(
            "accepted",
            _accepted,
            "a step",
            help="DeepSeek-V3's report (arXiv 2412.19437, 5.4.3) accepts 85 to 90 % of second "
            "tokens; a server's log says its own",
        ),
    ] = 1.85,
    rest: Annotated[
        str | None, Menu("the rest", RESTS, "rest", help="GEMMs, MoE, all-reduce, host: whose")
    ] = None,
    tpot_ms: Annotated[
        float, Number("my TPOT, ms", 0.5, help="of one request of 1,024 tokens")
    ] = 0.0,
    tpot_of: Annotated[str, Menu("it runs", _tpot_strategies)] = "full_cast",
    along: Annotated[str, Switch("over", ALONG)] = "pool",
    log: Annotated[str, Paste("log", "paste SGLang's or vLLM's start-up log here")] = "",
    *,
    work: Work = QUIET,
) -> View:
    """Which way to read an FP8 pool on my card under my load: how fast, why, what to launch."""
    s = {k: v for k, v in locals().items() if k != "work"}
    at, load = deployed(s), Load(concurrency, context, tokens_per_step)
    gain = accepted if tokens_per_step > 1 else 1.0
    beside = _beside(s, at)
    kept = capacities(at)
    try:
        at.memory()
        its_rest = rest_of(s, at)
    except LabError as error:
        return _unanswered(s, at, error, beside)
    most = max(kept.values(), default=0)
    limit = pool_tokens if pool_tokens < most else None
    found = answers(at, load, its_rest, pool_tokens=limit, accepted=gain)
    points = seen(at, its_rest, HERE) if tokens_per_step == 1 else []  # all without MTP
    whole_steps = {(p.strategy.label, p.concurrency, p.context) for p in points}
    servers = _servers(points, load, pool_tokens)
    said = rows.sentence(found, at, load, its_rest, limit, servers)
    if work is not QUIET:
        grid(at, work.stage, tokens_per_step)

    @cache
    def drawn() -> Field:
        slots = min(pool_tokens, most or pool_tokens)
        made = grid(at, tokens_per_step=tokens_per_step)
        return Field(made, _lines(at, kept), its_rest, slots, gain)

    marks = ()
    if start == REPORT and load.new_tokens == 1:
        entry = facts.find("published", "published result", REPORT)
        marks = [
            (entry[when]["tokens_per_s"], f"reported {what}: {entry[when]['tokens_per_s']}")
            for when, what in (("before", "with full cast"), ("after", "with a shadow"))
        ]

    def rings() -> list[Seen]:
        """What was seen of whole steps, and of attention where no step was."""
        if tokens_per_step > 1:
            return []
        slots = min(pool_tokens, most or pool_tokens)
        parts = timed(at, its_rest, load, along, slots)
        return points + [
            p for p in parts if (p.strategy.label, p.concurrency, p.context) not in whole_steps
        ]

    figures = plots.Figures(
        lambda: curve(drawn(), along, load, rings(), marks), lambda: lead_map(drawn(), load)
    )
    below = _footnotes(s, at)
    bars = rows.rows(found, load, servers) + below
    answer = {"said": said, "rows": bars}
    return Answered(figures, _marks(said + below), table(found), SHOWN, beside=beside, **answer)


def _servers(points: list[Seen], load: Load, pool_tokens: int) -> dict[str, Seen]:
    """Whole servers at this load and pool, by strategy; of several the fastest."""
    found: dict[str, Seen] = {}
    for point in points:
        same = point.pool_tokens is None or point.pool_tokens <= pool_tokens
        if point.whole and same and point.at("pool", load, pool_tokens):
            label = point.strategy.label
            found[label] = max(point, found.get(label, point), key=lambda p: p.tokens_per_s)
    return found


def _lines(at: Deployment, kept: dict[str, int]) -> tuple[Line, ...]:
    found = []
    for label, slots in kept.items():
        strategy = parse(label)
        found.append(Line(strategy.tag, slots))
        if casts_by_pool(strategy, at):
            found.append(Line(strategy.tag, slots, cut=True))
    return tuple(found)


def _unanswered(s: dict, at: Deployment, error: LabError, beside: dict) -> View:
    """A deployment that does not fit, or a TPOT that cannot be: said in place of the answer."""
    parts = filter(None, (error.what, error.allowed and f"Allowed: {error.allowed}.", error.remedy))
    said = "".join(f"<br>{html.escape(part)}" for part in parts)
    note = f"<div class=sk-say><b class=sk-big>No answer here</b>{said}</div>"
    empty = Field(None, (), Rest(0.0), s["pool_tokens"])
    load = Load(s["concurrency"], s["context"], s["tokens_per_step"])
    figures = [curve(empty, s["along"], load, ()), lead_map(empty, load)]
    more = {"beside": beside, "said": note, "unanswered": error}
    return Answered(figures, _marks(note), table([]), SHOWN, **more)


def _beside(s: dict, at: Deployment) -> dict[str, str]:
    """Whose the memory's figures are."""
    base, said = _base(s), {}
    yours = s["weights_gib"] != _weights(base)
    words = at.checkpoint.provenance
    said["weights_gib"] = "yours" if yours else f"{words}: {words.how}"
    typed = at.given.get("kv_gib")
    if typed is not None and typed.how == "as typed":
        said["kv_gib"] = "yours"
    else:
        try:
            memory = at.memory()
            word = memory.provenance
            how = word.source.title if word.source and word.how == "as published" else word.how
            said["kv_gib"] = f"{word}: {how or 'by the rule of ' + at.engine}"
        except LabError:
            said["kv_gib"] = "none is left"
    return said


def _footnotes(s: dict, at: Deployment) -> str:
    told = []
    if s["start"] == REPORT:
        told.append(
            "The report measured 95.6 ms with full cast and 74.1 with its shadow; a shadow should "
            "leave 31.0 (context and card are not reported; 1,024 tokens are assumed). rtx6kpro, a "
            "server of the same class, shows 51 tok/s with a BF16 pool: the report's rest was "
            "slow itself."
        )
    if s["start"] == "h200-server":
        told.append(html.escape(facts.find("published", "published result", s["start"])["note"]))
    if s["start"] == "log":
        if s["log"].strip():
            told += [html.escape(x) for x in logs.read(s["log"], None, s["card"]).notes]
        else:
            told.append("Paste a start-up log on the left; until then this is the server as set.")
    if HERE:
        first = HERE[0]
        times = ", ".join(f"{step.strategy.title} {step.ms:,.1f} ms" for step in HERE)
        told.append(f"Measured here, a step on {first.card} of {first.setting}: {times}.")
    if not told:
        return ""
    return f'<div class=sk-say style="font-size:10.5px;color:#555">{" ".join(told)}</div>'


TABLE = (
    "strategy",
    "tokens_per_s",
    "low_tokens_per_s",
    "high_tokens_per_s",
    "tpot_ms",
    "cast_ms",
    "attention_ms",
    "write_ms",
    "rest_ms",
    "tokens",
    "running",
    "provenance",
    "reason",
)


SHOWN = tuple(name for name in TABLE if name not in ("attention_ms", "write_ms", "provenance"))


def table(found: list[Answer]) -> pd.DataFrame:
    """One row per answer."""
    records = []
    for a in found:
        row = {"strategy": rows.named(a)}
        if a.runs:
            row |= {"tokens_per_s": a.tokens_per_s, "low_tokens_per_s": a.low_tokens_per_s}
            row |= {
                "high_tokens_per_s": a.high_tokens_per_s,
                "tpot_ms": a.tpot_ms,
                "rest_ms": a.rest_ms,
            }
            row |= {f"{p.name}_ms": p.ms for p in a.step.phases}
            row |= {"running": a.running, "provenance": str(a.provenance)}
        row |= {"tokens": a.kept_tokens or None, "reason": a.reason or a.untried}
        records.append(row)
    return pd.DataFrame(records, columns=[*TABLE])


def measured_here(at: Deployment, load: Load, report, cancelled=lambda: False) -> list[Step]:
    """Steps on this machine, over the largest pool that it has room for, and as much of the load
    as that holds. Raises what `measure` does where not one of the strategies runs."""
    bench = measuring.Bench(
        at.model,
        at.heads,
        machine.default_device(),
        page_size=at.page_size,
        modes=("graph",),
        progress=report,
        cancelled=cancelled,
    )
    pool, page = reproduce.pool_here(bench), at.page_size
    R = min(load.concurrency, pool // page)
    n = min(int(load.context), pool // R // page * page)
    found, failed = [], None
    for strategy in MEASURED:
        try:
            found += measuring.measure(bench, [parse(strategy)], [pool], [(R, n)])
        except LabError as error:
            failed = error
    if failed and not found:
        raise failed
    return found


# The screen itself.

CSS = """<style>
.sk-screen { container-type: inline-size; }
.sk-grid { display: grid !important; gap: 0 14px; align-items: start; width: 100%;
  grid-template-columns: minmax(236px, 262px) minmax(350px, 1.8fr) minmax(244px, 1fr); }
.sk-grid > .widget-vbox { overflow: visible; min-width: 0; }
.sk-grid .widget-html { height: auto; margin: 0; }
.sk-grid .widget-html-content { line-height: inherit !important; }
.sk-left .widget-label { font-size: 12px; }
.sk-left .widget-readout { font-size: 11px; min-width: 0; width: 86px; margin: 0 0 0 6px;
  padding: 0; overflow: visible; text-align: right; white-space: nowrap; }
.sk-left .slider-container { min-width: 0; margin-left: 8px; flex: 1 1 0; }
.sk-left .shadowkv-beside { margin: 0 2px 2px 82px; }
.sk-left .shadowkv-beside .widget-html-content { overflow: hidden; max-height: 26px;
  line-height: 1.2 !important; display: -webkit-box; -webkit-line-clamp: 2;
  -webkit-box-orient: vertical; }
.sk-left .widget-inline-hbox { margin: 1px 0; height: 25px; }
.sk-left .widget-hprogress[style*="visibility: hidden"] { display: none; }
.sk-right .widget-toggle-buttons > .widget-label { display: none; }
/* One line, all of which a click selects; pointed at, it shows itself. */
.sk-screen > .widget-html:last-child .widget-html-content { font-size: 11px; white-space: nowrap;
  overflow: hidden; text-overflow: ellipsis; line-height: 1.4; }
.sk-screen > .widget-html:last-child .widget-html-content:hover { white-space: normal; }
.sk-screen .shadowkv-code { font-size: 11px; }
.sk-right .widget-toggle-button { width: auto; height: 24px; line-height: 22px; font-size: 11px; }
@container (max-width: 860px) { .sk-grid { grid-template-columns: 250px 1fr; }
  .sk-right { grid-column: 1 / -1; } }
@container (max-width: 600px) { .sk-grid { grid-template-columns: 1fr; } }
</style>"""
HEIGHT = 262  # of each of the two figures, pixels
FIXED = {
    "DP": "predictions know no data-parallel attention yet",
    "PP": "predictions know no pipeline stages yet",
    "DCP": "predictions know no decode context parallelism yet",
}


class Screen(App):
    """The application in three columns: what I have, the answer, and when it changes."""

    def __init__(self, of, settings: dict):
        self.answer = w.HTML()
        self.measuring: threading.Event | None = None  # set: stop
        # The first answer at once, in half a second: beside the cells that Run All runs meanwhile,
        # a worker takes six times as long.
        with suppress(LabError):  # the view says it
            grid(deployed(settings), tokens_per_step=settings["tokens_per_step"])
        super().__init__(of, settings)
        for control in self.controls.values():
            control.style.description_width = "78px"
            control.layout.width = "100%"
        self.controls["along"].style.description_width = "0px"
        self.controls["log"].layout.height = "48px"
        own_row = w.HBox(
            [
                w.Dropdown(
                    options=["1"],
                    description=name,
                    disabled=True,
                    tooltip=why,
                    layout=w.Layout(flex="1", min_width="0"),
                    style={"description_width": "28px"},
                )
                for name, why in FIXED.items()
            ]
        )
        why = w.HTML("DP, PP and DCP: not in the predictions yet")
        why.add_class("shadowkv-beside")
        left = []
        for name, control in self.controls.items():
            if name == "along":
                continue
            left.append(control)
            if name in ("weights_gib", "kv_gib"):
                left.append(self.beside[name])
            if name == "tensor_parallel":
                left += [own_row, why]
        buttons = self.widget.children[2]
        for button in buttons.children[:2]:
            button.description = button.description.partition(" ")[0]
            button.layout.width, button.layout.flex = "auto", "0 0 auto"
        self.measure = w.Button(
            description="Measure here",
            tooltip="A step of full cast, BF16 pool and shadow on this machine, over the largest "
            "pool that fits",
            layout=w.Layout(width="auto", flex="0 0 auto"),
        )
        self.measure.on_click(lambda _: self.measure_here())
        working = w.HBox([self.cancel, self.busy])
        buttons.children = [*buttons.children[:2], self.measure]
        columns = [
            w.VBox([*left, buttons, working, self.status, self.error]),
            self.answer,
            w.VBox([self.controls["along"], self.plots]),
        ]
        for column, name in zip(columns, ("sk-left", "sk-middle", "sk-right"), strict=True):
            column.add_class(name)
        box = w.Box(columns)
        box.add_class("sk-grid")
        self.plots.layout = w.Layout(grid_template_columns="minmax(0, 1fr)", width="100%")
        self.widget.add_class("sk-screen")
        self.widget.children = [self.widget.children[0], w.HTML(rows.CSS + CSS), box, self.code]

    def measure_here(self) -> threading.Thread:
        """Measure this model and load on this machine, in a worker, over a pool that fits here.

        The answer stays and follows the sliders meanwhile. Cancel stops it, and keeps nothing.
        """
        s, stop = self.settings, threading.Event()
        self.measure.disabled, self.measuring = True, stop
        self.cancel.layout.display = ""

        def report(text: str, done: float) -> None:
            if not stop.is_set():
                self.status.value, self.busy.value = html.escape(text), done
                self.busy.layout.visibility = "visible"

        def work() -> None:
            load, said = Load(s["concurrency"], s["context"]), ""
            try:
                HERE[:] = measured_here(deployed(s), load, report, stop.is_set)
            except measuring.Cancelled:
                said = "measuring was cancelled"
            except LabError as error:
                said = html.escape(str(error))
            finally:
                self.measuring = None
                self.measure.disabled = False
            self.refresh()
            if self.worker:
                self.worker.join()
            self.status.value = said

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        return worker

    def _cancel(self) -> None:
        if self.measuring is None:
            super()._cancel()
            return
        self.measuring.set()
        self.status.value = "stopping ..."

    def _end(self, error: str = "", stale: bool = False) -> None:
        super()._end(error, stale)
        if self.measuring is not None:
            self.cancel.layout.display = ""

    @property
    def _answers(self) -> tuple[w.Widget, ...]:
        return self.answer, self.plots

    def _answer(self, view: View) -> None:
        self.answer.value = view.said + view.rows  # one message; the note is for a command

    def _settle(self, settings: dict, slow: bool) -> None:
        super()._settle(settings, slow)
        mine = settings["rest"] == "mine"
        for name, shown in (
            ("tpot_ms", mine),
            ("tpot_of", mine),
            ("accepted", settings["tokens_per_step"] > 1),
            ("log", settings["start"] == "log"),
        ):
            self.controls[name].layout.display = "" if shown else "none"
        for control in self.controls.values():
            if control.has_trait("continuous_update") and not isinstance(control, w.Textarea):
                control.continuous_update = True

    def _say(self, name: str, text: str) -> None:
        text = html.escape(text)
        if self.beside[name].value != (said := f'<span title="{text}">{text}</span>'):
            self.beside[name].value = said

    def _draw(self, figures) -> None:
        self._show(plots.draw(self.plots.children, figures, 0, fit=_fluid))


def _fluid(figure, width: int) -> dict:
    """A figure as plain JSON, as wide as its place; the rows beside it are its legend."""
    spec = plots.plain(figure)
    layout = spec["layout"]
    title = layout["title"]["text"]
    layout |= {"height": HEIGHT, "autosize": True, "showlegend": False}
    for axis in ("xaxis", "yaxis"):  # margins that follow the labels draw every figure twice
        layout[axis] = layout[axis] | {"automargin": False}
    layout.pop("width", None)
    layout["margin"] = {"l": 44, "r": 8, "t": 76, "b": 36}
    layout["font"] = {"size": 10.5}
    said = plots.wrapped(title, 40, 50)
    said = said.replace("<sup>", '<span style="font-size:9.5px">').replace("</sup>", "</span>")
    layout["title"] = {
        "text": said,
        "font": {"size": 12},
        "x": 0,
        "xref": "container",
        "y": 1 - 15 / HEIGHT,
        "yref": "container",
        "yanchor": "top",
    }
    return spec


screen = screen_view.app

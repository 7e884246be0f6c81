"""The answer in words and rows: one sentence, and a bar of ms by phase for each strategy.

Plain HTML, so that a slider changes it in one message: colours are the strategies', shades the
phases', as in every figure.
"""

import html
from collections.abc import Mapping, Sequence

from shadowkv_lab.deployment import Deployment
from shadowkv_lab.load import Load
from shadowkv_lab.provenance import Kind
from shadowkv_lab.server.launch import PLAIN, launch_line, no_line
from shadowkv_lab.steps.answer import Answer
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.strategies import parse
from shadowkv_lab.ui import charts
from shadowkv_lab.ui.curves import Seen

REST = "#c9ced6"
CUT = ", pool cut"
CSS = """<style>
.sk-say { font-size: 12.5px; line-height: 1.33; color: #222; }
.sk-say b.sk-big { font-size: 19px; line-height: 1.2; }
.sk-say code { display: block; user-select: all; background: #f2f2f2; color: #222;
  padding: 2px 6px; margin: 3px 0; font-size: 11px; line-height: 1.3; overflow-wrap: anywhere; }
.sk-rows { border-collapse: collapse; width: 100%; font-size: 12px; line-height: 1.15;
  color: #222; table-layout: fixed; }
.sk-rows th { font-weight: 400; font-size: 10.5px; color: #555; text-align: left;
  padding: 1px 3px; }
.sk-rows td { padding: 1px 3px; border-top: 1px solid #e6e6e6; vertical-align: top; }
.sk-rows .sk-n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.sk-rows small { color: #555; font-size: 10px; }
.sk-rows .sk-off td { color: #757575; }
.sk-rows .sk-lead td { background: #eef6fb; }
.sk-rows .sk-off small { display: -webkit-box; -webkit-line-clamp: 2; -webkit-box-orient: vertical;
  overflow: hidden; }
.sk-bar { display: flex; height: 13px; align-items: center; }
.sk-bar span { font-size: 10.5px; padding-left: 4px; white-space: nowrap; }
.sk-bar i { display: block; height: 100%; box-sizing: border-box; }
.sk-key span { white-space: nowrap; }
.sk-say summary { cursor: pointer; }
.sk-say abbr { cursor: help; }
.sk-key i { display: inline-block; width: 7px; height: 8px; margin: 0 2px 0 3px; }
.sk-name { border-left: 4px solid; padding-left: 4px; display: block; }
</style>"""


def leader(found: Sequence[Answer], load: Load) -> Answer | None:
    """The fastest that holds the load and was tried on the card; of the others if there is none."""
    runs = [a for a in found if a.runs]
    return max(runs, key=lambda a: (a.holds(load), not a.untried, a.tokens_per_s), default=None)


def named(answer: Answer) -> str:
    return answer.strategy.title + (CUT if answer.cut else "")


def line(answer: Answer, at: Deployment, limit: int | None = None) -> str:
    """The launch line of an answer; "" where no server can be launched so."""
    strategy = parse(answer.strategy.label)
    load = answer.step.setting.load if answer.step else None
    if no_line(strategy, at, load):
        return ""
    cap = answer.kept_tokens if answer.cut or limit is not None else None
    return launch_line(strategy, at, cap, load)


def sentence(
    found: Sequence[Answer],
    at: Deployment,
    load: Load,
    rest: Rest,
    limit: int | None,
    seen: Mapping[str, Seen] = {},
) -> str:
    """Which, how fast, why, what it keeps, how sure, and the line to paste.

    `seen` are whole servers at this load, by the label of the strategy.
    """
    best = leader(found, load)
    if best is None:
        needed = f"{int(load.context):,}"
        why = next((a.reason for a in found if a.kept_tokens), "")
        said = f"No strategy runs one request of {needed} tokens here."
        return _say(f"<b class=sk-big>{said}</b><br>{_(why or 'See the reasons below.')}")
    full = next((a for a in found if a.strategy.name == "full_cast" and not a.cut), None)
    said = [f"<b class=sk-big>{_(named(best))}: {best.tokens_per_s:,.1f} tok/s</b>"]
    if full is not None and full.runs and full is not best:
        times = best.tokens_per_s / full.tokens_per_s
        said.append(f", {times:.1f} x full cast's {full.tokens_per_s:,.1f}.")
        cast = full.step["cast"].ms
        said.append(
            f"<br><b>Why</b>: the cast of the whole pool takes {cast:.1f} of full cast's "
            f"{full.whole_ms:.1f} ms per {'token' if best.accepted == 1 else 'step'}."
        )
    elif full is best:
        said.append(": casting the whole pool is the fastest here.")
    else:
        said.append(f". Full cast does not run here: {_(full.reason)}" if full else ".")
    own = f"{best.low_tokens_per_s:,.1f} to {best.high_tokens_per_s:,.1f} tok/s"
    kept = f" It keeps {best.kept_tokens:,} tokens"
    if full and full.kept_tokens not in (0, best.kept_tokens):
        kept += f" (full cast {full.kept_tokens:,})"
    run = f"{best.running} of {load.concurrency} requests run"
    if best.holds(load):
        run = "the one request runs" if load.concurrency == 1 else f"all {load.concurrency} run"
    said.append(f"{kept}; {run}.")
    word = best.step.provenance.kind.value
    of_rest = f'<abbr title="{_(rest.provenance.how, True)}">{rest.provenance}</abbr>'
    said.append(
        f"<br><b>How sure</b>: {own}; its step is {word}, the rest (GEMMs, MoE, all-reduce, host) "
        f"of {best.rest_ms:.1f} ms {of_rest}."
    )
    if load.tokens_per_step > 1:
        said.append(
            f" MTP: of {load.tokens_per_step} tokens a step {best.accepted:g} are taken as "
            "accepted; drafting them is left out."
        )
    ties = [a for a in found if a is not best and a.holds(load) and best.ties(a)]
    if ties:
        said.append(f" Tied with it: {_(', '.join(map(named, ties)))}.")
    for a in found:
        if a.untried and not best.untried and a.holds(load) and a.tokens_per_s > best.tokens_per_s:
            more = "" if a in ties else f" would lead with {a.tokens_per_s:,.1f}"
            said.append(f" {_(named(a))}{more}: {_(a.untried)}.")
    ahead = max(seen.values(), key=lambda one: one.tokens_per_s, default=None)
    if len(seen) > 1 and ahead.strategy.label != best.strategy.label:
        said.append(
            f" <b>On a server</b> {_(ahead.strategy.title)} was the fastest: "
            f"{ahead.tokens_per_s:,.1f} tok/s."
        )
    if best.untried:
        said.append(f" Untried: {_(best.untried)}.")
    if command := line(best, at, limit):
        said.append(f"<br><code>{_(command)}</code>")
    else:
        why = no_line(parse(best.strategy.label), at, load)
        said.append(f"<br><b>Launch</b>: none, {_(why)}.")
    stock = next(
        (
            a
            for a in sorted(found, key=lambda a: -a.tokens_per_s)
            if a.holds(load) and a.strategy.name in PLAIN and line(a, at, limit)
        ),
        None,
    )
    if stock and best.strategy.name not in PLAIN:
        said.append(
            f"<details><summary>Without the plug-in: {_(named(stock))}, "
            f"{stock.tokens_per_s:,.1f} tok/s</summary><br>"
            f"<code>{_(line(stock, at, limit))}</code></details>"
        )
    return _say("".join(said))


def rows(found: Sequence[Answer], load: Load, seen: Mapping[str, Seen] = {}) -> str:
    """A row per strategy: ms by phase as a bar and in words, tok/s with its range, tokens kept."""
    best = leader(found, load)
    longest = max((a.whole_ms for a in found if a.runs), default=1.0)
    per = "step" if load.tokens_per_step > 1 else "token"
    shades = "".join(
        f'<span><i style="background:rgba(60,60,60,{shade})"></i>{name}</span> '
        for name, shade in charts.OPACITY.items()
    )
    head = (
        "<tr><th style='width:20%'>strategy</th><th class=sk-key>"
        f"ms/{per}{shades}<span><i style='background:{REST}'></i>rest</span></th>"
        "<th class=sk-n style='width:13%'>tok/s</th><th class=sk-n style='width:15%'>tokens kept"
        "</th></tr>"
    )
    share = 45 if seen else 83  # of its cell, for the longest bar
    body = "".join(
        _row(a, load, share / longest, best, None if a.cut else seen.get(a.strategy.label))
        for a in found
    )
    return f"<table class=sk-rows>{head}{body}</table>"


def _row(a: Answer, load: Load, scale: float, best: Answer | None, seen: Seen | None) -> str:
    name = _(a.strategy.title) + (" <small>pool cut</small>" if a.cut else "")
    colour = a.strategy.colour if a.runs else "#c4c4c4"
    cell = f'<td><span class=sk-name style="border-color:{colour}">'
    if not a.runs:
        reason = _(a.reason)
        kept = f"{a.kept_tokens:,}" if a.kept_tokens else ""
        return (
            f'<tr class=sk-off>{cell}{name}</span></td><td colspan=2 title="{_(a.reason, True)}">'
            f"<small>{reason}</small></td><td class=sk-n>{kept}</td></tr>"
        )
    short = not a.holds(load)
    if short:
        name = f"<s>{name}</s><br><small>{a.running} of {load.concurrency} run</small>"
    elif a is not best and best is not None and best.ties(a):
        name += " <small>(tie)</small>"
    parts = [(p.name, p.ms, charts.OPACITY.get(p.name, 0.5)) for p in a.step.phases if p.ms > 0]
    bar = "".join(
        f'<i style="flex:0 0 {scale * ms:.2f}%;background:{colour};opacity:{shade}"></i>'
        for _name, ms, shade in parts
    )
    bar += f'<i style="flex:0 0 {scale * a.rest_ms:.2f}%;background:{REST}"></i>'
    bar += f"<span>{a.whole_ms:.1f}</span>"
    if seen:
        bar += f"<span><b>seen {seen.tokens_per_s:,.1f} tok/s</b></span>"
    told = ", ".join(f"{name} {_ms(ms)}" for name, ms, _shade in parts if ms >= 0.005)
    told += f"; {_(seen.who.partition(':')[0])}" if seen else ""
    whence = _(f"{a.step.provenance}: {a.step.provenance.how}", True)
    style = f"border-bottom:2px {_border(a.step.provenance.kind)} #888"
    return (
        f"<tr{' class=sk-lead' if a is best else ''}>{cell}{name}</span></td>"
        f"<td><div class=sk-bar>{bar}</div><small>{told}</small></td>"
        f"<td class=sk-n><b>{a.tokens_per_s:,.1f}</b><br><small>"
        f"{a.low_tokens_per_s:,.1f}–{a.high_tokens_per_s:,.1f}</small></td>"
        f'<td class=sk-n>{a.kept_tokens:,}<br><small title="{whence}"><span style="{style}">'
        f"{a.step.provenance}</span></small></td></tr>"
    )


def _border(kind: Kind) -> str:
    return {"measured": "solid", "assumed": "dotted"}.get(kind.value, "dashed")


def _ms(ms: float) -> str:
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _say(text: str) -> str:
    return f"<div class=sk-say>{text}</div>"


def _(text: str, quote: bool = False) -> str:
    return html.escape(text, quote=quote)

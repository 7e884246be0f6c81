"""The screen in an exported page: its sliders at work without a kernel, from one small grid.

A notebook's output holds the grid as JSON of a kind of its own; JupyterLab and GitHub show the
text beside it, `export` draws it. The page's address keeps the setting, so that a link shows what
somebody saw; of an address only numbers within the sliders' positions and known names are taken.
"""

import html
import json

from IPython.display import display

from shadowkv_lab.load import Load
from shadowkv_lab.server.launch import PLAIN, launch_line, no_line
from shadowkv_lab.steps.grid import CONTEXTS, POOLS, REQUESTS, casts_by_pool, grid
from shadowkv_lab.strategies import parse
from shadowkv_lab.ui import charts, rows
from shadowkv_lab.ui.curves import CONCURRENCIES
from shadowkv_lab.ui.screen import capacities, deployed, pools, rest_of, screen_view

SCREEN = "application/vnd.shadowkv-screen+json"


def payload(**settings) -> dict:
    """What the page needs of one deployment: times, capacities, the rest, and launch lines."""
    s = screen_view.start(**settings)
    at = deployed(s)
    q = s["tokens_per_step"]
    made, rest, kept = grid(at, tokens_per_step=q), rest_of(s, at), capacities(at)
    strategies = []
    for label, slots in kept.items():
        strategy, times = parse(label), made.times[label]
        line = (
            "" if no_line(strategy, at) else launch_line(strategy, at, load=Load(tokens_per_step=q))
        )
        strategies.append(
            {
                "name": strategy.name,
                "title": strategy.tag.title,
                "colour": strategy.tag.colour,
                "rows": slots,
                "untried": times.untried,
                "line": line,
                "plain": strategy.name in PLAIN,
                "cuts": casts_by_pool(strategy, at),
                "load": times.load.round(4).tolist(),
                "pool": times.pool.round(3).tolist(),
            }
        )
    return {
        "server": str(at),
        "page": at.page_size,
        "groups": at.data_parallel,
        "knots": {"requests": REQUESTS, "contexts": CONTEXTS, "pools": POOLS},
        "sliders": {"pool": pools(s), "concurrency": CONCURRENCIES, "context": CONTEXTS},
        "start": {"pool": s["pool_tokens"], "concurrency": s["concurrency"]}
        | {"context": s["context"]},
        "accepted": s["accepted"] if q > 1 else 1,
        "rest": [round(rest(R * q), 3) for R in range(1, REQUESTS[-1] + 1)],
        "shades": list(charts.OPACITY.items()),  # a notebook sorts the keys of a dict
        "strategies": strategies,
    }


def show_live(**settings) -> None:
    """Put the screen's grid into a notebook's output, for `export`; the text says what it is."""
    view = screen_view(**settings)
    data = payload(**settings)
    words = f"{data['server']}: {Load(data['start']['concurrency'], data['start']['context'])}, "
    words += f"{len(view.table)} answers; the exported page has sliders here."
    display({SCREEN: data, "text/plain": words}, raw=True)


def page_part(data: dict, number: int) -> str:
    """The HTML of one screen in a page, from a `payload`."""
    spec = json.dumps(data).replace("<", "\\u003c")
    sliders = "".join(
        f"<label><span>{name}</span><output></output>"
        f'<input type="range" min="0" step="1" data-name="{name}" aria-label="{name}"></label>'
        for name in ("pool", "concurrency", "context")
    )
    return (
        f'{rows.CSS}{CSS}<div class="sk-live" id="sk-live-{number}"><p class="sk-server">'
        f"{html.escape(str(data.get('server', '')))}</p><div class=sk-sliders>{sliders}</div>"
        f"<div class=sk-answer></div></div>"
        f'<script type="application/json" class="sk-data" data-place="sk-live-{number}">{spec}'
        f"</script><script>{SCRIPT}</script>"
    )


CSS = """<style>
.sk-live { border: 1px solid #ddd; padding: 8px 12px; }
.sk-live .sk-server { margin: 0 0 6px; font-size: 13px; color: #555; }
.sk-sliders { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr));
  gap: 4px 18px; margin-bottom: 8px; font-size: 13px; }
.sk-sliders label { display: grid; grid-template-columns: 1fr auto; }
.sk-sliders input { grid-column: 1 / -1; width: 100%; }
.sk-sliders output { font-variant-numeric: tabular-nums; }
</style>"""

SCRIPT = r"""
(() => {
  const spec = document.currentScript.previousElementSibling;
  const data = JSON.parse(spec.textContent), root = document.getElementById(spec.dataset.place);
  const text = s => String(s).replace(/[&<>"]/g, c => '&#' + c.charCodeAt(0) + ';');
  const number = (x, digits = 1) =>
    Number(x).toLocaleString('en', {minimumFractionDigits: digits, maximumFractionDigits: digits});
  const accepted = Number(data.accepted ?? 1);
  const units = {pool: 'token', concurrency: 'request', context: 'token'};
  const at = {};  // numbers alone reach the page's own HTML, whoever wrote the notebook
  for (const name in units) at[name] = Number(data.start[name]);
  const per = accepted === 1 ? 'token' : 'step';
  const place = (x, knots) => {
    x = Math.min(Math.max(x, knots[0]), knots.at(-1));
    let i = 0;
    while (i < knots.length - 2 && knots[i + 1] <= x) i++;
    return [i, (x - knots[i]) / (knots[i + 1] - knots[i])];
  };
  const between = (table, R, n, phase) => {
    const [i, x] = place(R, data.knots.requests), [j, y] = place(n, data.knots.contexts);
    const row = k => (1 - y) * table[k][j][phase] + y * table[k][j + 1][phase];
    return (1 - x) * row(i) + x * row(i + 1);
  };
  const answer = (s, cut) => {
    const each = Math.ceil(at.context / data.page) * data.page;
    let rows = Math.floor(Math.min(s.rows, at.pool) / data.page) * data.page;
    if (cut) rows = Math.min(rows, each * Math.ceil(at.concurrency / data.groups));
    const running = Math.min(at.concurrency, Math.floor(rows / each) * data.groups);
    if (!running) return {s, cut, rows, running};
    const [k, x] = place(rows, data.knots.pools);
    const phases = [0, 1, 2].map(p => between(s.load, running, at.context, p));
    phases[0] += (1 - x) * s.pool[k] + x * s.pool[k + 1];
    const rest = data.rest[running - 1], ms = phases[0] + phases[1] + phases[2] + rest;
    return {s, cut, rows, running, phases, rest, ms, rate: accepted * 1000 * running / ms};
  };
  const named = a => a.s.title + (a.cut ? ', pool cut' : '');
  const draw = () => {
    let found = data.strategies.map(s => answer(s, false));
    for (const s of data.strategies.filter(s => s.cuts)) {
      const cut = answer(s, true), whole = found.find(a => a.s === s);
      if (cut.running && cut.rows < whole.rows) found.push(cut);
    }
    found.sort((a, b) => (b.rate || 0) - (a.rate || 0));
    const worth = a => [a.running >= at.concurrency, !a.s.untried, a.rate];
    const runs = found.filter(a => a.running);
    const best = [...runs].sort((a, b) => {
      const x = worth(a), y = worth(b);
      for (let i = 0; i < 3; i++) if (x[i] !== y[i]) return y[i] - x[i];
      return 0;
    })[0];
    const full = runs.find(a => a.s.name === 'full_cast' && !a.cut);
    let said = '<b class=sk-big>No strategy holds one such request in this pool.</b>';
    if (best) {
      said = `<b class=sk-big>${text(named(best))}: ${number(best.rate)} tok/s</b>`;
      if (full && full !== best)
        said += `, ${number(best.rate / full.rate)} x full cast's ${number(full.rate)}: the cast `
          + `is ${number(full.phases[0])} of its ${number(full.ms)} ms per ${per}`;
      said += `. It keeps ${number(best.rows, 0)} tokens; ${best.running} of ${at.concurrency} `
        + `request${at.concurrency === 1 ? ' runs' : 's run'}. Predicted.`;
      for (const a of runs)
        if (a.s.untried && !best.s.untried && a.rate > best.rate)
          said += ` ${text(named(a))} would give ${number(a.rate)}: ${text(a.s.untried)}.`;
      let line = best.s.line;
      if (line && (best.cut || at.pool < Math.max(...data.strategies.map(s => s.rows))))
        line = line.replace(/ --max-total-tokens \d+/, '') + ` --max-total-tokens ${best.rows}`;
      if (line) said += `<code>${text(line)}</code>`;
    }
    const longest = Math.max(...runs.map(a => a.ms), 1e-9), shades = data.shades;
    const row = a => {
      const colour = a.running ? text(a.s.colour) : '#ccc';
      const name = `<td><span class=sk-name style="border-color:${colour}">`
        + text(a.s.title) + (a.cut ? ' <small>pool cut</small>' : '');
      if (!a.running) return `<tr class=sk-off>${name}</span></td><td colspan=2><small>its pool `
        + `does not hold one such request</small></td>`
        + `<td class=sk-n>${number(a.rows, 0)}</td></tr>`;
      const short = a.running < at.concurrency;
      const parts = shades.map(([phase, shade], i) => [phase, a.phases[i], shade]);
      const bar = parts.map(([, ms, shade]) => `<i style="flex:0 0 ${80 * ms / longest}%;`
        + `background:${colour};opacity:${Number(shade)}"></i>`).join('')
        + `<i style="flex:0 0 ${80 * a.rest / longest}%;background:#c9ced6"></i>`
        + `<span>${number(a.ms)}</span>`;
      const told = parts.filter(p => p[1] >= 0.005)
        .map(([phase, ms]) => `${text(phase)} ${number(ms, ms >= 10 ? 1 : 2)}`).join(', ');
      return `<tr${a === best ? ' class=sk-lead' : ''}>${name}</span>`
        + (short ? `<small>${a.running} of ${at.concurrency} run</small>` : '')
        + `</td><td><div class=sk-bar>${bar}</div><small>${told}</small></td>`
        + `<td class=sk-n><b>${number(a.rate)}</b></td>`
        + `<td class=sk-n>${number(a.rows, 0)}</td></tr>`;
    };
    root.querySelector('.sk-answer').innerHTML = `<div class=sk-say>${said}</div>`
      + '<table class=sk-rows><tr><th style="width:25%">strategy</th><th>ms per ' + per + ': cast, '
      + 'attention, write, rest (grey)</th><th class=sk-n style="width:16%">tok/s</th>'
      + `<th class=sk-n style="width:17%">tokens kept</th></tr>${found.map(row).join('')}</table>`;
  };
  const inputs = [...root.querySelectorAll('input')];
  const show = () => {
    for (const input of inputs) {
      const name = input.dataset.name, value = at[name];
      input.max = data.sliders[name].length - 1;
      input.value = data.sliders[name].indexOf(value);
      input.parentNode.querySelector('output').textContent =
        `${number(value, 0)} ${units[name]}${value === 1 ? '' : 's'}`;
    }
    draw();
  };
  const read = () => {
    for (const [name, word] of new URLSearchParams(location.hash.slice(1)))
      if (Object.hasOwn(units, name) && /^\d{1,9}$/.test(word)
          && data.sliders[name].includes(Number(word)))
        at[name] = Number(word);
  };
  for (const input of inputs)
    input.addEventListener('input', () => {
      at[input.dataset.name] = Number(data.sliders[input.dataset.name][Number(input.value)]);
      history.replaceState(null, '', '#' + new URLSearchParams(at));
      show();
    });
  addEventListener('hashchange', () => { read(); show(); });
  read();
  show();
})();
"""

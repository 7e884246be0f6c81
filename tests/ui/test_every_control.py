"""Every control of every application, over its range and after each choice of the menus beside it:
each position changes something that a user sees, none ends in an error, and all are quick."""

import html
import re
import time

import ipywidgets as w
import numpy as np
import pytest

from shadowkv_lab.serving import traffic
from shadowkv_lab.ui import accuracy, latencies, simulated
from tests.ui import test_applications

VIEWS = [*test_applications.VIEWS, accuracy.outliers_view, latencies.waits_view]

LIMIT_MS = 120  # from a press to the drawn figure in a browser; scripts/bench_ui.py shows that
NOT_PRESSED = {"live", "log"}  # to measure and to paste: they have tests of their own
FEW = 2  # of a menu's choices, after which the other controls are pressed


@pytest.fixture(scope="module", params=VIEWS, ids=lambda view: view.__name__)
def app(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "REQUESTS", 40)
        patch.setattr(simulated, "CAPACITY_SHARES", (1.0,))
        patch.setattr(simulated, "RATES", [0.2, 0.8])
        patch.setattr(latencies, "REQUESTS", 40)
        patch.setattr(latencies, "FACTORS", (0.5, 2.0))
        opened = request.param.open()
        settle(opened)
        yield opened


def settle(app):
    while app.worker and app.worker.is_alive():
        app.worker.join(120)


def shown(app):
    """All that a user sees beside the controls themselves."""
    figures = [plot.spec for plot in app.plots.children]
    answer = app.answer if hasattr(app, "answer") else app.note
    return repr((answer.value, [label.value for label in app.beside.values()], figures))


def positions(control):
    """All values of a control that has a range; some of one that has none."""
    if isinstance(control, w.SelectMultiple):
        names = [value for _, value in control._options_full]
        return [tuple(names[:n]) for n in range(1, len(names) + 1)]
    if isinstance(control, w.Checkbox):
        return [True, False]
    if isinstance(control, w.FloatText | w.IntText):
        return [control.value + n * (control.step or 1) for n in (1, 2)]
    if isinstance(control, w.Text):
        return [*traffic.known_traffic()]
    return [value for _, value in control._options_full]


def there(control, value):
    """Whether a control still has a value: another of its own may have taken it away."""
    typed = isinstance(control, w.FloatText | w.IntText)
    return typed or value in positions(control)


def ends(values):
    return values if len(values) < 3 else [values[0], values[-1]]


def awake(app):
    return [
        (name, control)
        for name, control in app.controls.items()
        if name not in NOT_PRESSED and not control.disabled and control.layout.display != "none"
    ]


class Presses:
    """What was wrong about each press, and the times of those that no worker answered."""

    def __init__(self, app):
        self.app, self.wrong, self.times, self.seen = app, [], [], shown(app)

    def __call__(self, name, value, where=""):
        app, control = self.app, self.app.controls[name]
        if value == control.value:
            return
        start, worker = time.process_time(), app.worker
        control.value = value
        if app.worker is worker:
            self.times.append(1000 * (time.process_time() - start))
        settle(app)
        before, self.seen = self.seen, shown(app)
        if app.error.value:
            said = html.unescape(re.sub("<[^>]+>", " ", app.error.value)).strip()
            self.wrong.append(f"{where}{name} = {value!r}: {said}")
        elif self.seen == before:
            self.wrong.append(f"{where}{name} = {value!r}: nothing changed")

    def back(self, settings):
        self.app._put(settings)
        self.app.refresh()
        settle(self.app)
        self.seen = shown(self.app)


def test_every_position_changes_something_and_none_is_an_error(app):
    start, press = app.settings, Presses(app)
    for name, control in awake(app):
        for value in positions(control):
            if there(control, value):
                press(name, value)
        press.back(start)
    assert not press.wrong, "\n".join(press.wrong)
    if press.times:
        assert np.median(press.times) < 3 * LIMIT_MS, press.times


def test_after_each_choice_of_a_menu_the_others_still_work(app):
    start, press = app.settings, Presses(app)
    few = 1 if app.of.slow(start) else FEW  # an application of a worker's takes seconds a press
    menus = [n for n, c in awake(app) if isinstance(c, w.Dropdown | w.ToggleButtons)]
    for menu in menus:
        choices = [v for v in positions(app.controls[menu]) if v != start[menu]]
        for choice in choices[:: -(-len(choices) // few)] if choices else []:
            press.back(start)
            if choice not in positions(app.controls[menu]):
                continue
            press(menu, choice)
            here = app.settings
            for name, control in awake(app):
                for value in ends(positions(control))[-few:]:
                    if name != menu and there(control, value):
                        press(name, value, f"{menu} = {choice!r}, then ")
                press.back(here)
    press.back(start)
    assert not press.wrong, "\n".join(press.wrong)


def test_a_control_that_sleeps_says_why(app):
    for name, control in app.controls.items():
        if control.disabled:
            assert app.beside[name].value, name

"""An application is one annotated function from settings to a `View`.

    @application("shadowkv_lab.budget_app", changed=follow)
    def budget_view(model: ModelName = "glm-5", context: Context = 1024, ...) -> View:

The annotation of an argument is its control in a notebook (`budget_view.app(context=4096)`), its
option on the command line (`shadowkv fits --context 4096`), and a notebook's parameter; its
default stands there and nowhere else. Called as a function it gives the view itself.
"""

import functools
import inspect
import typing
from collections.abc import Callable

import ipywidgets as w

from shadowkv_lab.errors import CannotRun, DoesNotFit
from shadowkv_lab.ui.app import QUIET, App, View, Work, unanswered
from shadowkv_lab.ui.controls import Control

Settings = dict[str, object]


class Application:
    """A view's function with a control for each annotated argument; made by `application`."""

    def __init__(
        self,
        function: Callable[..., View],
        where: str,
        columns: int,
        changed: Callable[[Settings, str | None], Settings],
        asleep: Callable[[Settings], dict[str, str]],
        slow: Callable[[Settings], bool],
        shell: Callable[[], type[App]] = lambda: App,
        refusals: int = 0,
    ):
        self.function, self.where, self.columns = function, where, columns
        self.refusals = refusals
        self.changed, self.asleep, self.slow, self.shell = changed, asleep, slow, shell
        functools.update_wrapper(self, function)
        hints = typing.get_type_hints(function, include_extras=True)
        self.parameters, self.controls = {}, {}
        for name, parameter in inspect.signature(function).parameters.items():
            marks = getattr(hints.get(name), "__metadata__", ())
            for control in (mark for mark in marks if isinstance(mark, Control)):
                self.controls[name] = control
                self.parameters[name] = parameter.replace(annotation=hints[name])
        self.signature = inspect.Signature([*self.parameters.values()])
        self.works = "work" in hints

        def app(*args, **start) -> w.Widget:
            return self.open(*args, **start).widget

        app.__name__, app.__signature__ = where.rpartition(".")[2], self.signature
        app.__doc__ = (
            f"{function.__doc__.splitlines()[0]} A widget; arguments are what its controls start "
            "at.\n\nRaises `UnknownName` or `OutOfRange` for a value that a control does not take."
        )
        self.app = app

    def start(self, *args, **given) -> Settings:
        """All settings: those given, the defaults, and what follows from them.

        Raises `TypeError` for an argument that no control has.
        """
        bound = self.signature.bind(*args, **given)
        bound.apply_defaults()
        return self.changed(dict(bound.arguments), None)

    def __call__(self, *args, work: Work = QUIET, **given) -> View:
        settings = self.start(*args, **given)
        try:
            return self.function(**settings, **({"work": work} if self.works else {}))
        except (CannotRun, DoesNotFit) as error:
            if not self.refusals:
                raise
            return unanswered(error, self.refusals)

    def open(self, *args, **start) -> App:
        """The application at these settings, to be used from Python."""
        return self.shell()(self, self.start(*args, **start))


def application(
    where: str = "",
    columns: int = 2,
    changed: Callable[[Settings, str | None], Settings] = lambda settings, name: settings,
    asleep: Callable[[Settings], dict[str, str]] = lambda settings: {},
    slow: Callable[[Settings], bool] = lambda settings: False,
    shell: Callable[[], type[App]] = lambda: App,
    refusals: int = 0,
) -> Callable[[Callable[..., View]], Application]:
    """Make an annotated function an application with `columns` of figures.

    `where` is the full name under which its widget is imported; the line to paste calls it.
    `changed(settings, name)` gives the settings as they follow from a change of `name`, and with
    None fills what was left open at the start. `asleep` says which controls do nothing now, and
    why. Where `slow` says so, the view is made in a worker, and takes `work` to report and to be
    cancelled. `shell` gives the class that lays it out, where that is not `App`. A setting that
    cannot run or does not fit is an answer, in the place of `refusals` figures.
    """

    def made(function: Callable[..., View]) -> Application:
        own = where or f"{function.__module__}.{function.__name__}.app"
        return Application(function, own, columns, changed, asleep, slow, shell, refusals)

    return made

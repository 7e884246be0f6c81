"""The applications as commands: the options are their controls, the output is the view's table."""

import html
import importlib
import inspect
import re
import typing
from typing import Annotated

import typer

from shadowkv_lab.cli import AsJson, app, console, progress, show, shown

# Imported when they are called: an application brings plotly, which `--help` need not wait for.
APPLICATIONS = {
    "advise": ("screen.screen_view", "Which way to read an FP8 pool here, and the launch line."),
    "steps": ("decode.step_view", "Decode steps of each strategy: recorded, or measured here."),
    "kernels": ("kernels.kernels_view", "Each kernel of the lab beside its peers, as recorded."),
    "verdict": ("glm5.reproduction_view", "TPOT by strategy, and what explains two TPOTs."),
    "load": ("serving.load_view", "Many requests at once, by the closed form."),
    "traffic": ("simulated.traffic_view", "Traffic simulated: TTFT, TPOT, preemptions, queue."),
}

MOST_COLUMNS = 10  # a wider table is turned on its side


def command(application) -> typing.Callable[..., None]:
    """A typer command with an option for each control of an application."""

    def run(as_json: bool = False, **typed) -> None:
        from shadowkv_lab.ui.app import Work
        from shadowkv_lab.ui.charts import words

        settings = {name: application.controls[name].typed(value) for name, value in typed.items()}
        start = application.start(**settings)
        for name, control in application.controls.items():
            control.check(start[name], start)
        with progress(quiet=as_json) as report:
            view = application(**settings, work=Work(report))
        if view.unanswered:
            raise view.unanswered
        if as_json:
            typer.echo(view.table.to_json(orient="records", indent=1))
            return
        console.print(shown(_plain(words(view.note))), soft_wrap=True)
        table = view.shown
        if table.index.dtype.kind in "iu":
            table = table.set_index(table.columns[0])
        table = table.T if len(table.columns) > MOST_COLUMNS else table
        rows = table.rename_axis("").reset_index().to_dict("records")
        show(rows, {name: str(name) for name in rows[0]})

    options = []
    for name, parameter in application.parameters.items():
        kind, control = parameter.annotation.__origin__, application.controls[name]
        said = f"{control.label}{f': {control.help}' if control.help else ''}."
        typed = Annotated[control.told(kind), typer.Option(help=said)]
        default = parameter.default
        default = ",".join(default) if isinstance(default, tuple) else default
        options.append(parameter.replace(annotation=typed, default=default))
    quiet = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False)
    run.__signature__ = inspect.Signature([*options, quiet.replace(annotation=AsJson)])
    run.__doc__ = application.__doc__
    return run


def _plain(note: str) -> str:
    """A note without its marks."""
    return html.unescape(re.sub(r"<[^>]+>", "", re.sub("<br>|</code>", "\n", note)))


def _register(name: str, place: str, said: str) -> None:
    any_options = {"ignore_unknown_options": True, "allow_extra_args": True}

    @app.command(name, help=said, add_help_option=False, context_settings=any_options)
    def call(context: typer.Context) -> None:
        module, _, view = place.rpartition(".")
        found = getattr(importlib.import_module(f"shadowkv_lab.ui.{module}"), view)
        own = typer.Typer(add_completion=False)
        own.command()(command(found))
        found = typer.main.get_command(own)
        if code := found.main(context.args, context.command_path, standalone_mode=False):
            raise typer.Exit(code)


for _name, (_place, _said) in APPLICATIONS.items():
    _register(_name, _place, _said)

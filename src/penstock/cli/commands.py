"""The commands: list, show, check, simulate, compare, explain, plan, trace, verify, demo."""

import sys
from importlib import import_module
from pathlib import Path
from traceback import format_exception
from typing import Any

import click
from rich.console import Console

from penstock.assembly import lower
from penstock.checks.deadlock import Channels
from penstock.checks.report import find_problems
from penstock.cli import inputs, reports
from penstock.cli.explain import explain_flights, names_flights
from penstock.cli.torch_side import require_torch
from penstock.costs import Costs
from penstock.errors import ArgumentError, PenstockError, PipelineError
from penstock.ir.schedule import Schedule
from penstock.schedules.registry import FAMILIES
from penstock.sim.comparison import compare as compare_timelines
from penstock.sim.engine import simulate as simulate_schedule
from penstock.sim.explain import explain as explain_schedule
from penstock.view import figure, terminal
from penstock.view.page.html import page
from penstock.view.trace import write_trace

__all__ = ["main"]

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of pictures.")
_LOWER = click.option(
    "--lower", "lowered", is_flag=True, help="With sends, receives and the rest."
)
_FILE = click.Path(dir_okay=False, path_type=Path, writable=True)
_HTML = click.option(
    "--html", "html_file", type=_FILE, help="Write a page to look at in a browser."
)


# Commands whose modules are loaded when they are asked for, since that takes a while.
_LATE_COMMANDS = {
    "demo": ("penstock.cli.demo.demo", "demo_command"),
    "plan": ("penstock.cli.plan", "plan_command"),
    "revise": ("penstock.cli.revise", "revise_command"),
    "soak": ("penstock.cli.soak", "soak_command"),
    "trace": ("penstock.cli.trace", "trace_command"),
}


class _Group(click.Group):
    """Turns our errors into one line on stderr and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_LATE_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _LATE_COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, name = _LATE_COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(module), name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (PenstockError, OSError) as error:
            if isinstance(error, PipelineError) and error.__cause__ is not None:
                click.echo("".join(format_exception(error.__cause__)), err=True)
            click.echo(f"penstock: {error}", err=True)
            ctx.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penstock")
def main() -> None:
    """Plan, check, price, draw and run pipeline-parallel schedules.

    A SCHEDULE is the name of a family (see `penstock list`) or a .csv file with one row per rank.
    Exit codes: 0 fine, 1 the schedule is refused or a check failed, 2 the input cannot be used.
    """


@main.command("list")
@_JSON
def list_families(as_json: bool) -> None:
    """List the families of schedules.

    \b
    Example:
      penstock list
    """
    if as_json:
        click.echo(reports.to_json(reports.families()))
    else:
        _console().print(reports.family_table(FAMILIES.values()))


@main.command()
@click.argument("schedule")
@inputs.with_size
@inputs.with_costs
@_LOWER
@click.option("--table", "as_table", is_flag=True, help="Actions as text, ranks across.")
@click.option("--csv", "csv_file", type=_FILE, help="Write the schedule, one row per rank.")
@click.option("--trace", "trace_file", type=_FILE, help="Write a trace, for ui.perfetto.dev.")
@_HTML
@inputs.with_figures
@_JSON
def show(
    schedule: str,
    size: inputs.Size,
    costs: Costs,
    lowered: bool,
    as_table: bool,
    csv_file: Path | None,
    trace_file: Path | None,
    html_file: Path | None,
    figures: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Draw a schedule to scale, in the terminal or as a figure.

    \b
    Examples:
      penstock show 1F1B --ranks 4 --microbatches 8
      penstock show ZBV -r 8 -m 16 --transfer 0.2 --pdf zbv.pdf --html zbv.html
      penstock show mine.csv --lower --table
    """
    found = _load(schedule, size, lowered)
    timeline = simulate_schedule(found, costs)
    if csv_file is not None:
        found.to_csv(csv_file)
        _tell_written(csv_file)
    if trace_file is not None:
        write_trace(timeline, trace_file)
        _tell_written(trace_file)
    if html_file is not None:
        html_file.write_text(page(timeline), encoding="utf-8")
        _tell_written(html_file)
    for path in figures:
        figure.save(figure.draw(timeline), path)
        _tell_written(path)
    if as_json:
        click.echo(reports.to_json(reports.schedule(found) | reports.timeline(timeline)))
    elif as_table:
        click.echo(str(found))
    else:
        _console().print(reports.picture(_console(), timeline))


@main.command("check")
@click.argument("schedule")
@inputs.with_size
@_LOWER
@click.option(
    "--channels",
    type=click.Choice(["directed", "shared"]),
    default="directed",
    show_default=True,
    help="One queue per direction of a pair of ranks, or one per pair.",
)
@_JSON
def check_schedule(
    schedule: str, size: inputs.Size, lowered: bool, channels: Channels, as_json: bool
) -> None:
    """Prove that a schedule is complete and will finish, or say what is wrong.

    \b
    Examples:
      penstock check mine.csv
      penstock check mine.csv --lower --channels shared
    """
    found = inputs.load_schedule(schedule, size)
    problems = find_problems(found, channels=channels)
    if lowered and not problems:
        found = lower(found)
        problems = find_problems(found, channels=channels)
    if as_json:
        click.echo(reports.to_json(reports.verdict(found, problems)))
    elif problems:
        for problem in problems:
            click.echo(str(problem))
    else:
        click.echo(f"fine: {reports.describe(found)}; it finishes ({channels} channels)")
    sys.exit(1 if problems else 0)


@main.command()
@click.argument("schedule")
@inputs.with_size
@inputs.with_costs
@_LOWER
@_JSON
def simulate(schedule: str, size: inputs.Size, costs: Costs, lowered: bool, as_json: bool) -> None:
    """Price a schedule: time, idle time and memory of every rank.

    \b
    Examples:
      penstock simulate ZB-H2 -r 8 -m 24 --forward 18.5 --backward-input 18.1 \\
          --backward-weight 9.3 --transfer 0.6
      penstock simulate mine.csv --costs costs.toml --json
    """
    timeline = simulate_schedule(_load(schedule, size, lowered), costs)
    if as_json:
        click.echo(reports.to_json(reports.timeline(timeline)))
        return
    console = _console()
    console.print(terminal.summary_table({timeline.schedule.name: timeline}))
    console.print()
    console.print(terminal.rank_table(timeline))


@main.command()
@click.argument("schedules", nargs=-1, required=True)
@inputs.with_size
@inputs.with_costs
@click.option("--draw", is_flag=True, help="Draw each of them too.")
@_HTML
@inputs.with_figures
@_JSON
def compare(
    schedules: tuple[str, ...],
    size: inputs.Size,
    costs: Costs,
    draw: bool,
    html_file: Path | None,
    figures: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Price schedules side by side for the same model; ratios are to the first.

    Costs are those of one rank's share of the model, so that schedules with one and with several
    stages per rank compare fairly.

    \b
    Examples:
      penstock compare 1F1B ZB-H1 ZBV DualPipeV -r 8 -m 24 --transfer 0.1
      penstock compare 1F1B mine.csv --costs costs.toml --draw --png both.png
      penstock compare 1F1B ZBV --html both.html
    """
    found = [_load(schedule, size, lowered=False) for schedule in schedules]
    timelines = compare_timelines(found, costs)
    if html_file is not None:
        html_file.write_text(page(timelines), encoding="utf-8")
        _tell_written(html_file)
    for path in figures:
        figure.save(figure.draw_comparison(timelines), path)
        _tell_written(path)
    if as_json:
        click.echo(reports.to_json({name: reports.timeline(t) for name, t in timelines.items()}))
        return
    for name, timeline in timelines.items() if draw else ():
        click.echo(f"{name}:")
        _console().print(reports.picture(_console(), timeline))
        click.echo()
    _console().print(terminal.summary_table(timelines))


@main.command()
@click.argument("sources", metavar="SCHEDULE|RECORDS...", nargs=-1, required=True)
@inputs.with_size
@inputs.with_costs
@_LOWER
@_HTML
@_JSON
def explain(
    sources: tuple[str, ...],
    size: inputs.Size,
    costs: Costs,
    lowered: bool,
    html_file: Path | None,
    as_json: bool,
) -> None:
    """Say why a step takes as long as it does, or why it did not end.

    Of a schedule: critical path, idle gaps, what would help. Of the flight records that a run left
    behind, given as their folder or as some of its files: where every rank was, who waited for
    whom, and the last step as far as it got.

    \b
    Examples:
      penstock explain 1F1B -r 4 -m 8 --transfer 0.5
      penstock explain mine.csv --costs costs.toml
      penstock explain /tmp/penstock-flight-x1 --html last-step.html
    """
    if names_flights(sources):
        explain_flights(_console(), sources, html_file, as_json=as_json)
        return
    if len(sources) > 1:
        raise ArgumentError(f"one schedule is explained at a time (got {', '.join(sources)})")
    found = explain_schedule(_load(sources[0], size, lowered), costs)
    if html_file is not None:
        html_file.write_text(page(found.timeline), encoding="utf-8")
        _tell_written(html_file)
    if as_json:
        click.echo(reports.to_json(reports.explanation(found)))
    else:
        _console().print(reports.explanation_view(found))


@main.command("verify")
@click.argument("schedule")
@inputs.with_size
@click.option(
    "--model",
    default="mlp",
    show_default=True,
    metavar="mlp|gpt|MODULE:FUNCTION",
    help="One of ours, or a function of yours, which is imported and run.",
)
@click.option("--rows", type=click.IntRange(1), help="Rows of the batch, for our models.")
@click.option(
    "--processes", is_flag=True, help="One gloo process per rank, instead of one in all."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=1e-10,
    show_default=True,
    help="Largest relative error of loss and gradients.",
)
@_JSON
def verify_schedule(
    schedule: str,
    size: inputs.Size,
    model: str,
    rows: int | None,
    processes: bool,
    tolerance: float,
    as_json: bool,
) -> None:
    """Run one training step and check it: gradients, loss, memory and order.

    Gradients and loss are compared in float64 with those of the unsplit model, the activations
    that are alive with the prediction, and the recorded order with the schedule. A function of
    your own takes the number of stages and returns stages, args, target and loss.

    \b
    Examples:
      penstock verify ZBV --ranks 2 --microbatches 4
      penstock verify mine.csv --model gpt --rows 11 --processes
      penstock verify 1F1B --model mymodel:make_case
    """
    require_torch()
    from penstock.tools.verify.verification import VerifyRequest, verify

    found = _load(schedule, size, lowered=False)
    inputs.find_modules_here()
    checks = verify(VerifyRequest(found, model, tolerance, rows), uses_processes=processes)
    if as_json:
        click.echo(reports.to_json(reports.verification(found, model, checks)))
    else:
        click.echo(f"{found.name} with {model}: {reports.describe(found)}")
        _console().print(reports.verification_table(checks))
    sys.exit(0 if all(check.is_fine for check in checks) else 1)


def _load(source: str, size: inputs.Size, lowered: bool) -> Schedule:
    """A checked schedule; what is wrong with it ends the command with exit code 1."""
    found = inputs.load_schedule(source, size)
    problems = find_problems(found, limit=1)
    if problems:
        click.echo(f"penstock: {source} is refused: {problems[0]}", err=True)
        sys.exit(1)
    return lower(found) if lowered else found


def _console() -> Console:
    return Console(soft_wrap=False, highlight=False)


def _tell_written(path: Path) -> None:
    click.echo(f"wrote {path}", err=True)

"""`penstock demo`: measure, plan, train and compare a small GPT, with a page at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock import view
from penstock.atomic_files import write_atomically
from penstock.cli import options
from penstock.cli.demo.comparison import compare_and_show, describe_times
from penstock.cli.demo.learning import learn_and_show
from penstock.cli.demo.planning import Preparation, prepare
from penstock.cli.demo.tour import tour_planning
from penstock.cli.demo.training import Training, train_and_compare
from penstock.cli.inputs import require_torch
from penstock.cli.reports import make_console, title
from penstock.errors import MissingDependencyError
from penstock.files.timeline import write_timeline
from penstock.units import format_bytes, format_share

if TYPE_CHECKING:
    from penstock.tools.demo.candidates import DemoCandidate
    from penstock.tools.demo.comparison import Result
    from penstock.tools.demo.task import Task

__all__ = ["demo_command", "run_demo"]

# The value of --schedule that selects the plan instead of a family.
_PLAN = "plan"


@options.command("demo")
@options.ranks_option(2, "Number of ranks, one process each.")
@click.option(
    "--schedule",
    metavar="plan|FAMILY",
    default=_PLAN,
    show_default=True,
    help="Schedule of the training: plan, or the name of a family.",
)
@click.option(
    "--steps",
    type=options.COUNT,
    metavar="N",
    default=60,
    show_default=True,
    help="Number of training steps.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Device of the training; ranks share GPUs if there are too few. [default: cuda if there "
    "is a GPU]",
)
@click.option(
    "--output",
    type=options.OUTPUT_FOLDER,
    default=Path("demo-output"),
    show_default=True,
    help="Folder for the page and other files.",
)
def demo_command(ranks: int, schedule: str, steps: int, device: str | None, output: Path) -> None:
    """Measure, plan and train a small GPT in local processes, in a minute or two.

    The plan keeps a memory limit. Every loss is compared with that of the unsplit model, and the
    plan with 1F1B, GPipe and the best family within the limit on this machine. What explains the
    difference to the prediction is printed, and a page shows predicted and recorded steps. Without
    torch, a tour of planning runs instead.

    \b
    Examples:
      penstock demo --output tour
      penstock demo --schedule ZBV --ranks 4 --steps 20
    """
    console = make_console()
    try:
        require_torch()
    except MissingDependencyError as error:
        _tour(console, output, error)
        return
    from penstock.tools.demo.task import make_task

    family = None if schedule == _PLAN else schedule
    task = make_task(ranks=ranks, steps=steps, device=device, family=family)
    output.mkdir(parents=True, exist_ok=True)
    run_demo(console, output, task, family)


def _tour(console: Console, output: Path, missing: MissingDependencyError) -> None:
    output.mkdir(parents=True, exist_ok=True)
    tour_planning(console, output)
    console.print(f"\n(no training: {missing})", markup=False)
    _suggest(
        console,
        {
            "penstock explain 1F1B --ranks 4 --transfer 0.5": "why ranks wait",
            "penstock plan --ranks 4 --activation-bytes 1 --memory 3": "plan within a limit",
            f"penstock check {output / 'zb-h2.csv'} --lower": "prove that it finishes",
        },
    )


def run_demo(console: Console, output: Path, task: Task, family: str | None) -> None:
    """Run all parts of the demo on a task; a family is trained in place of the plan."""
    prepared = prepare(console, task)
    candidates = _choose_candidates(task, prepared, family)
    training = train_and_compare(console, task, candidates[0])
    results = compare_and_show(console, task, candidates, memory=prepared.memory)
    _draw(console, results[0])
    planned, rivals = _split_results(prepared, results)
    outcome = learn_and_show(
        console, prepared.planned.plan, planned, rivals, memory=prepared.planned_limit
    )
    _write(output, prepared, results)
    _summarise(console, output, prepared, training, results, outcome)
    _suggest(
        console,
        {
            f"penstock revise {output / 'plan.json'} {output / 'recorded.json'}": (
                "plan again from the recorded step"
            ),
            f"penstock plan {output / 'costs.toml'} --ranks {task.ranks} "
            f"--microbatches {task.microbatches}": "plan without the limit",
            "penstock demo --ranks 4 --schedule ZBV": "more ranks, another order",
        },
    )


def _choose_candidates(
    task: Task, prepared: Preparation, family: str | None
) -> list[DemoCandidate]:
    """Return the schedule of the training first, then those it is compared with."""
    from penstock.tools.demo.candidates import family_candidate

    candidates = [prepared.planned.candidate, *prepared.baselines]
    if family is None:
        return candidates
    chosen = family_candidate(family, task, prepared.costs)
    return [chosen, *(other for other in candidates if other.name != chosen.name)]


def _split_results(prepared: Preparation, results: list[Result]) -> tuple[Result, list[Result]]:
    """Return the result of the plan, and those of the families."""
    name = prepared.planned.candidate.name
    (planned,) = (result for result in results if result.candidate.name == name)
    return planned, [result for result in results if result is not planned]


def _draw(console: Console, result: Result) -> None:
    title(console, "See: a step as predicted and as recorded")
    timelines = {"predicted": result.candidate.predicted, "recorded": result.recorded}
    for name, timeline in timelines.items():
        console.print(f"{name}, in seconds:")
        console.print(view.draw(timeline))


def _write(output: Path, prepared: Preparation, results: list[Result]) -> None:
    """Write the page, and the files of the suggested commands."""
    first = results[0]
    timelines = {"predicted": first.candidate.predicted, "recorded": first.recorded}
    timelines |= {f"{result.candidate.name}, recorded": result.recorded for result in results[1:]}
    text = view.page(view.compare(timelines), title=f"Penstock demo: {first.candidate.name}")
    write_atomically(output / "report.html", text)
    plan = prepared.planned.plan
    plan.to_file(output / "plan.json")
    plan.problem.costs.to_file(output / "costs.toml")
    planned, _ = _split_results(prepared, results)
    write_timeline(planned.recorded, output / "recorded.json")


def _summarise(
    console: Console,
    output: Path,
    prepared: Preparation,
    training: Training,
    results: list[Result],
    outcome: str,
) -> None:
    title(console, "Summary")
    gap = max(prepared.planned.plan.gap, 0.0)
    first = results[0]
    lines = {
        "loss": f" {training.first_loss:.2f} -> {training.last_loss:.2f}",
        "exact": f"within {training.difference:.1e} of the unsplit model at every step",
        "plan": f"proven to be within {format_share(gap)} of the best order of its cut",
        "time": describe_times(results),
        "outcome": outcome,
        "memory": f"{first.candidate.name} used at most {format_bytes(max(first.held))} "
        f"on a rank; the limit was {format_bytes(prepared.memory)}",
        "page": f"{output / 'report.html'}",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for name, line in lines.items():
        table.add_row(name, Text(line))
    console.print(table)


def _suggest(console: Console, commands: dict[str, str]) -> None:
    title(console, "Three things to try")
    for command, reason in commands.items():
        console.print(f"  {command}   # {reason}", markup=False, soft_wrap=True)

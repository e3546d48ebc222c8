"""`penstock demo`: measure, plan, train and compare a small GPT, and a page to look at it all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.demo.comparison import compare_and_show, describe_race
from penstock.cli.demo.planning import Prospects, look_ahead
from penstock.cli.demo.tour import tour_planning
from penstock.cli.demo.training import Training, train_and_compare
from penstock.cli.reports import picture, title
from penstock.cli.torch_side import require_torch
from penstock.errors import MissingDependencyError
from penstock.files.timeline import write_timeline
from penstock.view.page.html import page
from penstock.view.units import format_bytes, format_share

if TYPE_CHECKING:
    from penstock.tools.demo.candidates import DemoCandidate
    from penstock.tools.demo.comparison import Result
    from penstock.tools.demo.task import Task

__all__ = ["demo_command"]

# What --schedule says when no family is asked for.
_PLAN = "plan"


@click.command("demo")
@click.option("-r", "--ranks", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--schedule",
    default=_PLAN,
    show_default=True,
    help="What to train by: the plan, or the name of a family.",
)
@click.option("--steps", type=click.IntRange(1), default=60, show_default=True)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Default: cuda where there is a GPU, which ranks share where there are too few.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Folder for the page and the files.",
)
def demo_command(ranks: int, schedule: str, steps: int, device: str | None, output: Path) -> None:
    """Measure, plan and train a small GPT over local processes, in about two minutes.

    The plan keeps a memory limit. Every loss is compared with that of the unsplit model, and the
    plan with 1F1B and GPipe on this machine. A page shows what was predicted and what happened.
    Without torch, there is a tour of planning.

    \b
    Examples:
      penstock demo --output tour
      penstock demo --schedule ZBV --ranks 4 --steps 20
    """
    console = Console(soft_wrap=False, highlight=False)
    try:
        require_torch()
    except MissingDependencyError as error:
        _tour(console, output, error)
        return
    from penstock.tools.demo.task import make_task

    family = None if schedule == _PLAN else schedule
    task = make_task(ranks=ranks, steps=steps, device=device, family=family)
    output.mkdir(parents=True, exist_ok=True)
    _teach(console, output, task, family)


def _tour(console: Console, output: Path, missing: MissingDependencyError) -> None:
    output.mkdir(parents=True, exist_ok=True)
    tour_planning(console, output)
    console.print(f"\n(no training: {missing})", markup=False)
    _suggest(
        console,
        {
            "penstock explain 1F1B --ranks 4 --transfer 0.5": "why ranks wait",
            "penstock plan --ranks 4 --activation-bytes 1 --memory 3": "keep a limit",
            f"penstock check {output / 'zb-h2.csv'} --lower": "prove that it ends",
        },
    )


def _teach(console: Console, output: Path, task: Task, family: str | None) -> None:
    prospects = look_ahead(console, task)
    candidates = _line_up(task, prospects, family)
    training = train_and_compare(console, task, candidates[0])
    results = compare_and_show(console, task, candidates, memory=prospects.memory)
    _draw(console, results[0])
    _write(output, prospects, results)
    _sum_up(console, output, prospects, training, results)
    _suggest(
        console,
        {
            f"penstock revise {output / 'plan.json'} {output / 'recorded.json'}": (
                "plan anew from what happened"
            ),
            f"penstock plan {output / 'costs.toml'} --ranks {task.ranks} "
            f"--microbatches {task.microbatches}": "without the limit",
            "penstock demo --ranks 4 --schedule ZBV": "more ranks than this, another order",
        },
    )


def _line_up(task: Task, prospects: Prospects, family: str | None) -> list[DemoCandidate]:
    """What is trained by, first, and what it is compared with."""
    from penstock.tools.demo.candidates import family_candidate

    candidates = [prospects.planned.candidate, *prospects.rivals]
    if family is None:
        return candidates
    chosen = family_candidate(family, task, prospects.costs)
    return [chosen, *(candidate for candidate in candidates if candidate.name != chosen.name)]


def _draw(console: Console, result: Result) -> None:
    title(console, "See: a step as it was predicted, and as it was recorded")
    timelines = {"predicted": result.candidate.predicted, "recorded": result.recorded}
    for name, timeline in timelines.items():
        console.print(f"{name}, in seconds:")
        console.print(picture(console, timeline))


def _write(output: Path, prospects: Prospects, results: list[Result]) -> None:
    """The page, and what the commands that are suggested read."""
    first = results[0]
    timelines = {"predicted": first.candidate.predicted, "recorded": first.recorded}
    timelines |= {f"{result.candidate.name}, recorded": result.recorded for result in results[1:]}
    text = page(timelines, title=f"Penstock demo: {first.candidate.name}")
    (output / "report.html").write_text(text, encoding="utf-8")
    plan = prospects.planned.plan
    plan.to_file(output / "plan.json")
    plan.problem.costs.to_file(output / "costs.toml")
    name = prospects.planned.candidate.name
    (recorded,) = (result.recorded for result in results if result.candidate.name == name)
    write_timeline(recorded, output / "recorded.json")


def _sum_up(
    console: Console,
    output: Path,
    prospects: Prospects,
    training: Training,
    results: list[Result],
) -> None:
    title(console, "Summary")
    gap = max(prospects.planned.plan.gap, 0.0)
    first = results[0]
    lines = {
        "learned": f"loss {training.first_loss:.2f} -> {training.last_loss:.2f}",
        "exact": f"within {training.difference:.1e} of the unsplit model, at every step",
        "planned": f"within {format_share(gap)} of the best order that its cut can have, proven",
        "fast": describe_race(results),
        "small": f"{first.candidate.name} held {format_bytes(max(first.held))} on a rank, "
        f"the limit was {format_bytes(prospects.memory)}",
        "look": f"{output / 'report.html'}",
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

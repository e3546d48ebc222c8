"""`penstock plan`: from a file of costs to a schedule, a plan and a report."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from penstock.cli import inputs
from penstock.cli.reports import picture
from penstock.cli.solver_progress import show_solving
from penstock.errors import ArgumentError
from penstock.planner.planning import plan
from penstock.planner.plans import Plan
from penstock.planner.search.findings import Findings
from penstock.planner.search.layer_files import read_layers
from penstock.planner.search.layouts import Layout
from penstock.planner.search.search import search
from penstock.view.plan_report import findings_report, plan_report
from penstock.view.plan_table import findings_view

__all__ = ["plan_command"]


@dataclass(frozen=True, slots=True)
class _Wish:
    """What both ways of planning are asked for."""

    ranks: int
    memory: float | None
    seconds: float


@click.command("plan")
@click.argument("costs_file", metavar="[COSTS]", type=inputs.FILE, required=False)
@click.option("-r", "--ranks", type=click.IntRange(1), default=4, show_default=True)
@click.option("-m", "--microbatches", type=click.IntRange(1), default=8, show_default=True)
@click.option("--memory", type=inputs.Bytes(), help="Limit per rank, such as 40GiB.")
@click.option(
    "--placement",
    type=click.Choice(["loop", "interleaved", "v"]),
    help="Default: the fastest of those that the costs allow.",
)
@click.option(
    "--seconds", type=click.FloatRange(0), default=5.0, show_default=True, help="Time to solve."
)
@click.option(
    "--search", "is_search", is_flag=True, help="COSTS are those of layers; choose everything."
)
@click.option("--batch", type=click.IntRange(1), help="Rows of a batch, for --search.")
@click.option(
    "--check-after",
    is_flag=True,
    help="For --search: ranks take their optimizer step without waiting for the others.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for schedule.csv, plan.json and report.md.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@inputs.with_given_costs
def plan_command(
    costs_file: Path | None,
    ranks: int,
    microbatches: int,
    memory: float | None,
    placement: Layout | None,
    seconds: float,
    is_search: bool,
    batch: int | None,
    check_after: bool,
    output: Path | None,
    as_json: bool,
    given_costs: Mapping[str, object],
) -> None:
    """Find the fastest schedule that keeps a memory limit, and say how good it can be.

    COSTS is a TOML or JSON file with the costs of one rank's share of the model, or of every
    stage; options override it. With --search it holds the costs of every layer, and placement,
    stages per rank, cuts, microbatch size and checkpointed stages are chosen too.

    \b
    Examples:
      penstock plan costs.toml --ranks 8 --microbatches 32 --memory 40GiB -o plan
      penstock plan --ranks 4 --microbatches 12 --transfer 0.2 --placement v
      penstock plan layers.toml --search --ranks 8 --batch 64 --memory 80GB
    """
    wish = _Wish(ranks, memory, seconds)
    if is_search:
        if placement is not None or given_costs:
            raise ArgumentError("--search chooses the placement and reads all costs from the file")
        found = _search(wish, costs_file, batch, check_after)
        _tell(found.best, found, output, as_json)
        return
    if batch is not None or check_after:
        raise ArgumentError("--batch and --check-after are for --search; say --microbatches")
    costs = inputs.merge_costs(costs_file, given_costs)
    with show_solving(Console(stderr=True), seconds) as progress:
        solved = plan(
            costs,
            ranks=ranks,
            microbatches=microbatches,
            memory=memory,
            placement=placement,
            seconds=seconds,
            progress=progress,
        )
    _tell(solved, None, output, as_json)


def _search(wish: _Wish, file: Path | None, batch: int | None, check_after: bool) -> Findings:
    if file is None or batch is None:
        raise ArgumentError("--search takes a file of layers, and the rows of a batch: --batch 64")
    model = read_layers(file)
    with show_solving(Console(stderr=True), wish.seconds) as progress:
        return search(
            model.layers,
            ranks=wish.ranks,
            batch=batch,
            memory=wish.memory,
            transfer=model.transfer,
            is_checked_after=check_after,
            seconds=wish.seconds,
            progress=progress,
        )


def _tell(best: Plan, findings: Findings | None, output: Path | None, as_json: bool) -> None:
    """Print what was found, and write it where that is wished."""
    if as_json:
        click.echo(best.to_text(), nl=False)
    else:
        console = Console(soft_wrap=False, highlight=False)
        if findings is not None:
            console.print(findings_view(findings))
            console.print()
        console.print(str(best), markup=False)
        console.print()
        console.print(picture(console, best.timeline))
    if output is not None:
        report = plan_report(best) if findings is None else findings_report(findings)
        _write(best, report, output)


def _write(plan: Plan, report: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plan.schedule.to_csv(folder / "schedule.csv")
    plan.to_file(folder / "plan.json")
    (folder / "report.md").write_text(report, encoding="utf-8")
    for name in ("schedule.csv", "plan.json", "report.md"):
        click.echo(f"wrote {folder / name}", err=True)

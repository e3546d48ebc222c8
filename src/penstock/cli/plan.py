"""`penstock plan`: find a schedule for given costs, and write the plan and a report."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from penstock import view
from penstock.atomic_files import write_atomically
from penstock.cli import options, reports
from penstock.cli.projection.workload import with_workload
from penstock.cli.waiting.progress import show_solving
from penstock.errors import ArgumentError
from penstock.planner.planning import plan
from penstock.planner.plans import Plan
from penstock.planner.search.findings import Findings
from penstock.planner.search.layer_files import read_layers
from penstock.planner.search.layouts import Layout
from penstock.planner.search.search import search
from penstock.sim.period import Boundary
from penstock.sim.throughput import Workload

__all__ = ["plan_command"]


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of both ways of planning."""

    ranks: int
    memory: float | None
    boundary: Boundary
    seconds: float
    effort: float | None
    devices: int | None
    rank_factors: tuple[float, ...] | None
    bandwidth: float | None
    shard_optimizer: bool


@options.command("plan")
@click.argument("costs_file", metavar="[COSTS]", type=options.INPUT_FILE, required=False)
@options.ranks_option(4)
@options.MICROBATCHES
@click.option("--memory", type=options.Bytes(), help="Memory limit per rank, such as 40GiB.")
@click.option(
    "--placement",
    type=click.Choice(["loop", "interleaved", "v"]),
    help="Placement of stages on ranks. [default: the fastest that the costs allow]",
)
@options.SOLVER_SECONDS
@click.option(
    "--search",
    "is_search",
    is_flag=True,
    help="Choose placement, cuts, microbatch size and checkpointing; COSTS are those of layers.",
)
@click.option(
    "--batch",
    type=options.COUNT,
    metavar="ROWS",
    help="Rows of a batch, such as 64; with --search only.",
)
@click.option(
    "--effort",
    type=click.FloatRange(0),
    metavar="ROWS",
    help="Rows of orders to build, in place of --seconds, such as 1e6.",
)
@click.option(
    "--devices",
    type=options.COUNT,
    metavar="N",
    help="Divide devices between ranks and replicas, in place of --ranks; with --search only.",
)
@click.option(
    "--rank-factors",
    metavar="FACTOR[,...]",
    help="Seconds per rank as multiples, such as 1,1,1.5; with --search only.",
)
@click.option(
    "--reduction-bandwidth",
    "bandwidth",
    type=options.Bytes(),
    metavar="BYTES/S",
    help="Bytes per second between replicas, such as 50GB; with --devices only.",
)
@click.option(
    "--shard-optimizer",
    is_flag=True,
    help="Divide the optimizer's state among replicas; with --devices only.",
)
@options.BOUNDARY
@click.option(
    "-o",
    "--output",
    type=options.OUTPUT_FOLDER,
    help="Folder for schedule.csv, plan.json and report.md.",
)
@options.JSON
@with_workload
@options.with_given_costs
def plan_command(
    costs_file: Path | None,
    ranks: int,
    microbatches: int,
    memory: float | None,
    placement: Layout | None,
    seconds: float,
    is_search: bool,
    batch: int | None,
    effort: float | None,
    devices: int | None,
    rank_factors: str | None,
    bandwidth: float | None,
    shard_optimizer: bool,
    boundary: Boundary,
    output: Path | None,
    as_json: bool,
    given_costs: Mapping[str, object],
    workload: Workload | None,
) -> None:
    """Find the fastest schedule within a memory limit, and a bound that none can beat.

    COSTS is a TOML or JSON file with the costs of one rank's share of the model, or of every
    stage; options override it. With --search it has the costs of every layer, and placement,
    stages per rank, cuts, microbatch size and checkpointed stages are chosen too.

    A step lasts until the last rank ends, unless --boundary says that ranks do not wait for each
    other between steps.

    \b
    Examples:
      penstock plan costs.toml --ranks 8 --microbatches 32 --memory 40GiB -o plan
      penstock plan --ranks 4 --microbatches 12 --transfer 0.2 --placement v
      penstock plan layers.toml --search --ranks 8 --batch 64 --memory 80GB
      penstock plan layers.toml --search --devices 16 --batch 64 --reduction-bandwidth 50GB
    """
    factors = None if rank_factors is None else _read_factors(rank_factors)
    request = _Request(
        ranks, memory, boundary, seconds, effort, devices, factors, bandwidth, shard_optimizer
    )
    if is_search:
        if placement is not None or given_costs:
            raise ArgumentError(
                "--search chooses the placement and reads all costs from COSTS; leave out "
                "--placement and the options for costs"
            )
        found = _search(request, costs_file, batch)
        _show(found.best, found, output, workload, as_json)
        return
    if batch is not None:
        raise ArgumentError("--batch works with --search only; use --microbatches instead")
    if devices is not None or factors is not None:
        raise ArgumentError("--devices and --rank-factors work with --search only; add --search")
    costs = options.merge_costs(costs_file, given_costs)
    with show_solving(Console(stderr=True), seconds) as progress:
        solved = plan(
            costs,
            ranks=ranks,
            microbatches=microbatches,
            memory=memory,
            placement=placement,
            boundary=boundary,
            seconds=seconds,
            effort=effort,
            progress=progress,
        )
    _show(solved, None, output, workload, as_json)


def _search(request: _Request, file: Path | None, batch: int | None) -> Findings:
    if file is None or batch is None:
        raise ArgumentError(
            "--search needs a file of layers and the rows of a batch; write penstock plan "
            "layers.toml --search --batch 64"
        )
    model = read_layers(file)
    with show_solving(Console(stderr=True), request.seconds) as progress:
        return search(
            model.layers,
            ranks=None if request.devices is not None else request.ranks,
            devices=request.devices,
            batch=batch,
            memory=request.memory,
            transfer=model.transfer,
            host_message=model.host_message,
            rank_factors=request.rank_factors,
            reduction_bandwidth=request.bandwidth,
            shard_optimizer=request.shard_optimizer,
            boundary=request.boundary,
            seconds=request.seconds,
            effort=request.effort,
            progress=progress,
        )


def _read_factors(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ArgumentError(
            f"--rank-factors must be numbers separated by commas (got {text!r})"
        ) from error


def _show(
    best: Plan,
    findings: Findings | None,
    output: Path | None,
    workload: Workload | None,
    as_json: bool,
) -> None:
    """Print the plan, and write it to the output folder if there is one."""
    if as_json:
        click.echo(best.to_text(), nl=False)
    else:
        console = reports.make_console()
        if findings is not None:
            console.print(view.draw(findings))
            console.print()
        console.print(str(best), markup=False)
        if workload is not None:
            problem = best.problem
            console.print(
                str(
                    workload.at(
                        best.seconds, ranks=problem.ranks, microbatches=problem.microbatches
                    )
                )
            )
        console.print()
        console.print(view.draw(best))
    if output is not None:
        _write(best, view.report(best if findings is None else findings), output)


def _write(plan: Plan, text: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plan.schedule.to_csv(folder / "schedule.csv")
    plan.to_file(folder / "plan.json")
    write_atomically(folder / "report.md", text)
    for name in ("schedule.csv", "plan.json", "report.md"):
        reports.announce(folder / name)

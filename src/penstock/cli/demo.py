"""A tour of the planning half, in a minute and without a GPU."""

from pathlib import Path
from time import perf_counter

from rich.console import Console

from penstock.assembly import build, lower
from penstock.checks.report import check, find_problems
from penstock.cli.reports import picture
from penstock.costs import Costs
from penstock.errors import MissingDependencyError
from penstock.ir.schedule import Schedule
from penstock.sim.comparison import compare
from penstock.sim.engine import simulate
from penstock.sim.explain import explain
from penstock.view import figure
from penstock.view.terminal import summary_table

__all__ = ["run_demo"]

# Seconds of one rank's share of a model of 6.2 billion parameters on 8 ranks, as published in
# https://arxiv.org/abs/2401.10241, table 7 (there in milliseconds).
_PUBLISHED = Costs(
    forward=0.029718, backward_input=0.029444, backward_weight=0.019927, transfer=0.000527
)
_COMPARED = ("1F1B", "GPipe", "Interleaved1F1B", "ZB-H1", "V-Min", "V-Half", "ZBV", "ZB-H2")


def run_demo(console: Console, output: Path) -> None:
    """Build, check, price, compare, explain and draw; figures and a CSV file go to `output`."""
    output.mkdir(parents=True, exist_ok=True)
    _draw_two(console)
    _refuse_one(console)
    _compare_all(console, output)
    _explain_slow_link(console)
    _plan_large(console)
    _suggest(console, output)


def _title(console: Console, number: int, text: str) -> None:
    console.print()
    console.rule(f"[bold]{number}. {text}", align="left")


def _draw_two(console: Console) -> None:
    _title(console, 1, "A schedule is a picture: 1F1B, and zero bubble in a V")
    for name in ("1F1B", "ZBV"):
        timeline = compare([build(name, ranks=4, microbatches=8)])[name]
        console.print(f"{name}: bubble {timeline.bubble_rate:.1%}")
        console.print(picture(console, timeline))


def _refuse_one(console: Console) -> None:
    _title(console, 2, "A wrong schedule is refused before a GPU is touched")
    orders = [
        list(map(str, order)) for order in lower(build("1F1B", ranks=2, microbatches=3)).orders
    ]
    first, second = orders[1].index("1RECV_F1"), orders[1].index("1SEND_B0")
    orders[1].insert(second, orders[1].pop(first))
    console.print("1F1B on two ranks, with one receive moved behind a send:")
    for problem in find_problems(Schedule.from_orders(orders)):
        console.print(str(problem), markup=False)


def _compare_all(console: Console, output: Path) -> None:
    _title(console, 3, "Eight schedules priced with published costs (6.2B model, 8 ranks)")
    schedules = [build(name, ranks=8, microbatches=24) for name in _COMPARED]
    timelines = compare(schedules, _PUBLISHED)
    console.print(summary_table(timelines))
    schedules[-1].to_csv(output / "zb-h2.csv")
    try:
        figure.save(figure.draw_comparison(timelines), output / "comparison.png")
        figure.save(figure.draw(timelines["ZBV"]), output / "zbv.pdf")
    except MissingDependencyError as error:
        console.print(f"(no figures: {error})", markup=False)


def _explain_slow_link(console: Console) -> None:
    _title(console, 4, "Why is it slow? One link between two ranks is ten times slower")
    transfer = [[0.05] * 4 for _ in range(4)]
    transfer[1][2] = transfer[2][1] = 0.5
    found = explain(build("1F1B", ranks=4, microbatches=8), Costs(transfer=transfer))
    worst = max(found.gaps, key=lambda gap: gap.transfer_seconds)
    best = found.savings[0]
    console.print(
        f"The critical path spends {found.critical_seconds['transfer']:.2f} of "
        f"{found.timeline.makespan:.2f} on its way between ranks.\n"
        f"For example, {worst.action} on rank {worst.rank} waits for {worst.waited_for}.\n"
        f"Most would be won by a cheaper {best.cost}: 5 % less saves {best.share:.2%} of the step."
    )


def _plan_large(console: Console) -> None:
    _title(console, 5, "It scales: ZBV on 64 ranks with 512 microbatches")
    with console.status("building, lowering, checking, simulating"):
        begin = perf_counter()
        schedule = build("ZBV", ranks=64, microbatches=512)
        lowered = lower(schedule)
        check(lowered, channels="shared")
        timeline = simulate(lowered)
        seconds = perf_counter() - begin
    console.print(
        f"{len(lowered.rows):,} actions built, lowered, proven free of deadlock and priced in "
        f"{seconds:.1f} s; bubble {timeline.bubble_rate:.2%}"
    )


def _suggest(console: Console, output: Path) -> None:
    console.print()
    console.rule("[bold]Three things to try", align="left")
    console.print(f"  look at {output / 'comparison.png'}")
    console.print("  penstock show DualPipeV --ranks 4 --microbatches 10")
    console.print(f"  penstock check {output / 'zb-h2.csv'} --lower --channels shared")

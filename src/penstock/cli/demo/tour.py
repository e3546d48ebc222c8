"""The tour of the demo without torch: draw, check and price schedules in two seconds."""

from pathlib import Path

from rich.console import Console

from penstock import view
from penstock.assembly import build, lower
from penstock.checks.report import find_problems
from penstock.cli.reports import title, write_figure
from penstock.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.sim.comparison import compare
from penstock.units import format_share
from penstock.view.text.tables import summary_table

__all__ = ["tour_planning"]

# Seconds of one rank's share of a model of 6.2 billion parameters on 8 ranks, as published in
# https://arxiv.org/abs/2401.10241, table 7 (there in milliseconds).
_PUBLISHED = Costs(
    forward=0.029718, backward_input=0.029444, backward_weight=0.019927, transfer=0.000527
)
_COMPARED = ("1F1B", "GPipe", "Interleaved1F1B", "ZB-H1", "V-Half", "ZBV", "ZB-H2")


def tour_planning(console: Console, output: Path) -> None:
    """Draw two schedules, reject one, compare seven; write a figure and a CSV to `output`."""
    _draw_two(console)
    _reject_one(console)
    _compare_all(console, output)


def _draw_two(console: Console) -> None:
    title(console, "Plan: a schedule is a picture, here 1F1B and zero bubble in a V")
    for name in ("1F1B", "ZBV"):
        timeline = compare([build(name, ranks=4, microbatches=8)])[name]
        rate = format_share(timeline.bubble_rate)
        seconds = f"{timeline.end_time:g} s"
        console.print(f"{name}: ends after {seconds}; ranks are idle for {rate} of that")
        console.print(view.draw(timeline))


def _reject_one(console: Console) -> None:
    title(console, "Check: an invalid schedule is rejected before it reaches a GPU")
    orders = [
        list(map(str, order)) for order in lower(build("1F1B", ranks=2, microbatches=3)).orders
    ]
    first, second = orders[1].index("1RECV_F1"), orders[1].index("1SEND_B0")
    orders[1].insert(second, orders[1].pop(first))
    console.print("1F1B on two ranks, with one receive moved after a send:")
    for problem in find_problems(Schedule.from_orders(orders)):
        console.print(str(problem), markup=False)


def _compare_all(console: Console, output: Path) -> None:
    title(console, "Price: seven schedules with published costs (6.2B model, 8 ranks)")
    schedules = [build(name, ranks=8, microbatches=24) for name in _COMPARED]
    timelines = compare(schedules, _PUBLISHED)
    console.print(summary_table(timelines))
    schedules[-1].to_csv(output / "zb-h2.csv")
    write_figure(console, timelines, output / "comparison.png")

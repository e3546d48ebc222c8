"""The demo: plan, then train a small GPT over local processes, and see that it was exact."""

from pathlib import Path

from rich.console import Console

from penstock.cli.demo_training import Wish, plan_training, train_and_show
from penstock.cli.reports import title
from penstock.cli.torch_side import require_torch
from penstock.cli.tour import tour_planning
from penstock.errors import MissingDependencyError

__all__ = ["run_demo"]


def run_demo(console: Console, output: Path, wish: Wish) -> None:
    """Show both halves, or only planning where torch is missing; files go to `output`."""
    try:
        require_torch()
    except MissingDependencyError as error:
        _tour(console, output)
        console.print(f"\n(no training: {error})", markup=False)
    else:
        lesson = plan_training(wish)
        _tour(console, output)
        train_and_show(console, output, lesson)
    _suggest(console, output)


def _tour(console: Console, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    tour_planning(console, output)


def _suggest(console: Console, output: Path) -> None:
    title(console, "Three things to try")
    console.print("  penstock verify DualPipeV --ranks 4 --model gpt   # exact, in one process")
    console.print("  penstock demo --schedule 1F1B                     # see the bubble come back")
    console.print(f"  penstock check {output / 'zb-h2.csv'} --lower --channels shared")

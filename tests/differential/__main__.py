"""The command: `python -m tests.differential --cases 20000 --seed 0`."""

import sys
from collections.abc import Iterator
from time import monotonic

import click
import torch

from tests.differential.campaign import (
    Finding,
    run_here,
    run_in_workers,
    run_over_processes,
    seeds_of,
)
from tests.differential.case import literal
from tests.differential.drawing import draw_case
from tests.processes import Processes

# Seconds between two lines that say how far the run is.
_PAUSE = 20.0


@click.command()
@click.option("--cases", default=1000, show_default=True, help="How many cases to run.")
@click.option("--seed", default=0, show_default=True, help="Another seed has other cases.")
@click.option(
    "--processes", type=click.IntRange(2, 4), help="Run over this number of gloo processes."
)
@click.option("--jobs", default=1, show_default=True, help="Cases at once, in one process each.")
@click.option("--only", type=int, help="Show and run the case with this seed alone.")
@click.option(
    "--keep-going", default=10, show_default=True, help="Stop after this number of failures."
)
def main(
    cases: int, seed: int, processes: int | None, jobs: int, only: int | None, keep_going: int
) -> None:
    """Run random models split and unsplit, and compare every number."""
    torch.set_num_threads(1)
    seeds = seeds_of(seed, cases) if only is None else range(only, only + 1)
    if only is not None:
        click.echo(literal(draw_case(only, ranks=processes)))
    if processes is not None:
        with Processes(processes) as fleet:
            failed = _follow(run_over_processes(seeds, fleet), len(seeds), keep_going)
    elif jobs > 1:
        failed = _follow(run_in_workers(seeds, jobs), len(seeds), keep_going)
    else:
        failed = _follow(run_here(seeds), len(seeds), keep_going)
    sys.exit(1 if failed else 0)


def _follow(found: Iterator[tuple[int, Finding | None]], total: int, most: int) -> int:
    """Say how far a run is and what it finds; how many cases have failed."""
    start = said = monotonic()
    done = failed = 0
    for _, finding in found:
        done += 1
        if finding is not None:
            failed += 1
            click.echo(str(finding))
            if failed >= most:
                click.echo(f"stopped after {failed} failures")
                break
        if monotonic() - said > _PAUSE:
            said = monotonic()
            click.echo(f"{done} of {total} cases in {said - start:.0f} s, {failed} failed")
    seconds = monotonic() - start
    click.echo(
        f"{done} cases in {seconds:.0f} s ({1e3 * seconds / done:.0f} ms each), {failed} failed"
    )
    return failed


if __name__ == "__main__":
    main()

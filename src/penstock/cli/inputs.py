"""Schedules and costs from the arguments of a command."""

import sys
from dataclasses import dataclass
from pathlib import Path

import click

from penstock.assembly import build, lower
from penstock.checks.report import find_problems
from penstock.cli.options import Size
from penstock.costs import Costs
from penstock.errors import MissingDependencyError
from penstock.ir.schedule import Schedule
from penstock.planner.plans import Plan
from penstock.sim.costs_of_timeline import costs_of
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.sources import is_file, read_source

__all__ = ["Loaded", "add_working_folder", "load", "load_checked", "require_torch"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A schedule with the costs and the timeline that came with it, if any."""

    schedule: Schedule
    costs: Costs | None = None
    timeline: Timeline | None = None

    def choose_costs(self, given: Costs | None) -> Costs:
        """Return the given costs, else those of the plan or recorded step, else unit costs."""
        if given is None and self.timeline is not None:
            return costs_of(self.timeline)
        return given or self.costs or Costs()

    def price(self, given: Costs | None) -> Timeline:
        """Return the timeline: as recorded if no costs are given, else simulated."""
        if given is None and self.timeline is not None:
            return self.timeline
        return simulate(self.schedule, self.choose_costs(given))


def load(source: str, size: Size) -> Loaded:
    """Build a family by name, or read a schedule, a plan, a recorded step or a trace."""
    if not is_file(source):
        schedule = build(
            source,
            ranks=size.ranks,
            microbatches=size.microbatches,
            stages_per_rank=size.stages_per_rank,
        )
        return Loaded(schedule)
    found = read_source(source)
    match found:
        case Schedule():
            return Loaded(found)
        case Plan():
            return Loaded(found.schedule, found.problem.costs)
        case Timeline():
            return Loaded(found.schedule, timeline=found)


def load_checked(source: str, size: Size, *, lowered: bool = False) -> Loaded:
    """Load and check a schedule; a problem ends the command with exit code 1."""
    found = load(source, size)
    problems = find_problems(found.schedule, limit=1)
    if problems:
        click.echo(f"penstock: {source} is not a valid schedule: {problems[0]}", err=True)
        sys.exit(1)
    if not lowered:
        return found
    if found.timeline is None:
        return Loaded(lower(found.schedule), found.costs)
    if found.schedule.has_communication:
        return found
    return Loaded(lower(found.schedule), costs_of(found.timeline))


def require_torch() -> None:
    """Raise an error that says how to install torch if it is missing."""
    try:
        import torch  # noqa: F401  # it is enough that it can be imported
    except ImportError as error:
        raise MissingDependencyError(
            "this command needs torch; run pip install 'penstock[torch]'"
        ) from error


def add_working_folder() -> None:
    """Make modules in the working folder importable, as `python` and `python -m` do."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)

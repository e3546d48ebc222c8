"""Schedules and costs from the arguments of a command."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import click

from penstock.assembly import build, lower
from penstock.checks.report import find_problems
from penstock.cli.options import Size
from penstock.cli.waiting.busy import busy
from penstock.costs import Costs
from penstock.errors import MissingDependencyError
from penstock.ir.schedule import Schedule
from penstock.planner.plans import Plan
from penstock.sim.engine import simulate
from penstock.sim.recorded.costs_of_timeline import costs_of
from penstock.sim.timeline import Timeline
from penstock.view import sources

__all__ = [
    "Loaded",
    "add_working_folder",
    "load",
    "load_checked",
    "price_alike",
    "require_torch",
]


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
        with busy(f"simulating {self.schedule.name}"):
            return simulate(self.schedule, self.choose_costs(given))


def price_alike(loaded: Sequence[Loaded], given: Costs | None) -> dict[str, Timeline]:
    """Price schedules for the same model; without given costs, recorded steps keep their times.

    The other schedules then get the costs of the first plan, or else of the first recorded step.
    """
    if given is not None:
        return sources.price_alike([found.schedule for found in loaded], costs=given)
    planned = (found.costs for found in loaded if found.costs is not None)
    recorded = (costs_of(found.timeline) for found in loaded if found.timeline is not None)
    items = [found.schedule if found.timeline is None else found.timeline for found in loaded]
    return sources.price_alike(items, costs=next(chain(planned, recorded), None))


def load(source: str, size: Size) -> Loaded:
    """Build a family by name, or read a schedule, a plan, a recorded step or a trace."""
    text = f"reading {source}" if sources.is_file(source) else f"building {source}"
    with busy(text):
        return _load(source, size)


def _load(source: str, size: Size) -> Loaded:
    if not sources.is_file(source):
        schedule = build(
            source,
            ranks=size.ranks,
            microbatches=size.microbatches,
            stages_per_rank=size.stages_per_rank,
        )
        return Loaded(schedule)
    found = sources.read_source(source)
    match found:
        case Schedule():
            return Loaded(found)
        case Plan():
            return Loaded(found.schedule, found.problem.costs)
        case Timeline():
            return Loaded(found.schedule, timeline=found)


def load_checked(source: str, size: Size, *, lowered: bool = False) -> Loaded:
    """Load and check a schedule; a problem ends the command with exit code 1.

    What was recorded is not checked: a step that did not finish can be drawn and priced too.
    """
    found = load(source, size)
    if found.timeline is not None and not lowered:
        return found
    with busy(f"checking {found.schedule.name}"):
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

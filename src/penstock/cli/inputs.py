"""From options to schedules and costs."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias

import click

from penstock.assembly import build
from penstock.costs import Costs
from penstock.ir.schedule import Schedule

__all__ = [
    "Size",
    "find_modules_here",
    "load_schedule",
    "with_costs",
    "with_figures",
    "with_size",
]

# A command takes what click gives it: one keyword per option.
Command: TypeAlias = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes for which a family is built."""

    ranks: int
    microbatches: int
    stages_per_rank: int | None


def with_size(command: Command) -> Command:
    """Give a command the options for sizes, as its argument `size`."""

    @click.option("-r", "--ranks", type=click.IntRange(1), default=4, show_default=True)
    @click.option("-m", "--microbatches", type=click.IntRange(1), default=8, show_default=True)
    @click.option("--stages-per-rank", type=click.IntRange(1), help="Default: the family's own.")
    @wraps(command)
    def wrapper(
        *args: Any, ranks: int, microbatches: int, stages_per_rank: int | None, **kwargs: Any
    ) -> None:
        command(*args, size=Size(ranks, microbatches, stages_per_rank), **kwargs)

    return wrapper


def with_costs(command: Command) -> Command:
    """Give a command an option per cost and one for a file of them, as its argument `costs`."""
    names = [field.name for field in fields(Costs)]

    @wraps(command)
    def wrapper(*args: Any, costs_file: Path | None, **kwargs: Any) -> None:
        given = {name: value for name in names if (value := kwargs.pop(name)) is not None}
        base = Costs() if costs_file is None else Costs.from_file(costs_file)
        values = {name: getattr(base, name) for name in names} | given
        command(*args, costs=Costs.from_mapping(values), **kwargs)

    wrapper = click.option(
        "--costs",
        "costs_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="TOML or JSON file of costs; options override it.",
    )(wrapper)
    for name in reversed(names):
        wrapper = click.option(f"--{name.replace('_', '-')}", name, type=_Numbers())(wrapper)
    return wrapper


def with_figures(command: Command) -> Command:
    """Give a command --png, --svg and --pdf, as its argument `figures`: the files to write."""
    formats = ("png", "svg", "pdf")

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        files = {name: file for name in formats if (file := kwargs.pop(name)) is not None}
        figures = tuple(
            file if file.suffix.lower() == f".{name}" else file.with_name(f"{file.name}.{name}")
            for name, file in files.items()
        )
        command(*args, figures=figures, **kwargs)

    path = click.Path(dir_okay=False, path_type=Path, writable=True)
    for name in reversed(formats):
        help_text = f"Write the figure as {name.upper()}."
        wrapper = click.option(f"--{name}", type=path, help=help_text)(wrapper)
    return wrapper


class _Numbers(click.ParamType[Any]):
    """A number, or several with commas between them."""

    name = "NUMBER[,NUMBER...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | tuple[float, ...]:
        try:
            numbers = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no number, nor several with commas between them", param, ctx)
        return numbers[0] if len(numbers) == 1 else numbers


def load_schedule(source: str, size: Size) -> Schedule:
    """A schedule by the name of its family, or from a CSV file."""
    if source.lower().endswith(".csv"):
        return Schedule.from_csv(source)
    return build(
        source,
        ranks=size.ranks,
        microbatches=size.microbatches,
        stages_per_rank=size.stages_per_rank,
    )


def find_modules_here() -> None:
    """Let modules of the working folder be imported, as `python` and `python -m` do."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)

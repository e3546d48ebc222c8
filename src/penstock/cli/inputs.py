"""From options to schedules and costs."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from math import inf
from pathlib import Path
from string import ascii_letters
from typing import Any, TypeAlias

import click

from penstock.assembly import build
from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.ir.schedule import Schedule

__all__ = [
    "FILE",
    "Bytes",
    "Size",
    "find_modules_here",
    "load_schedule",
    "merge_costs",
    "with_costs",
    "with_figures",
    "with_given_costs",
    "with_size",
]

# A file that must be there.
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PREFIXES = ("", "k", "m", "g", "t", "p")
_UNITS = {
    f"{prefix}ib" if prefix else "": 1024.0**power for power, prefix in enumerate(_PREFIXES)
} | {f"{prefix}b": 1000.0**power for power, prefix in enumerate(_PREFIXES)}

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

    @wraps(command)
    def wrapper(
        *args: Any, costs_file: Path | None, given_costs: Mapping[str, object], **kwargs: Any
    ) -> None:
        command(*args, costs=merge_costs(costs_file, given_costs), **kwargs)

    option = click.option(
        "--costs", "costs_file", type=FILE, help="TOML or JSON file of costs; options override it."
    )
    return with_given_costs(option(wrapper))


def with_given_costs(command: Command) -> Command:
    """Give a command an option per cost, as its argument `given_costs`: those that were used."""
    names = [field.name for field in fields(Costs)]

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        given = {name: value for name in names if (value := kwargs.pop(name)) is not None}
        command(*args, given_costs=given, **kwargs)

    for name in reversed(names):
        wrapper = click.option(f"--{name.replace('_', '-')}", name, type=_Numbers())(wrapper)
    return wrapper


def merge_costs(file: Path | None, given: Mapping[str, object]) -> Costs:
    """The costs of a file, or unit costs, with some of them given anew."""
    base = Costs() if file is None else Costs.from_file(file)
    return Costs.from_mapping({**base.to_mapping(), **given})


def with_figures(command: Command) -> Command:
    """Give a command --png, --svg and --pdf, as its argument `figures`: the files to write."""
    formats = ("png", "svg", "pdf")

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        files = {name: file for name in formats if (file := kwargs.pop(name)) is not None}
        if nameless := [name for name, file in files.items() if not file.name]:
            raise ArgumentError(f"--{nameless[0]} takes the name of a file (got nothing)")
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


class Bytes(click.ParamType[Any]):
    """A number of bytes, with or without a unit: 1e9, 512MiB, 40GiB, 80 GB."""

    name = "BYTES"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The bytes as a number."""
        text = str(value).strip()
        number = text.rstrip(ascii_letters)
        unit = text.removeprefix(number).lower()
        try:
            found = float(number) * _UNITS[unit]
        except (ValueError, KeyError):
            found = -1.0
        if not 0 <= found < inf:
            self.fail(f"{value!r} is no number of bytes, such as 1e9, 512MiB or 40GiB", param, ctx)
        return found


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

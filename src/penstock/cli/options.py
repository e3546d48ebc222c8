"""Options that several commands share, each with its help."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from math import inf
from pathlib import Path
from string import ascii_letters
from typing import Any, TypeAlias

import click

from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.sim.period import BOUNDARIES, DEFAULT_BOUNDARY

__all__ = [
    "BOUNDARY",
    "HTML",
    "INPUT_FILE",
    "JSON",
    "LOWER",
    "MICROBATCHES",
    "OUTPUT_FILE",
    "SOLVER_SECONDS",
    "Bytes",
    "Size",
    "merge_costs",
    "ranks_option",
    "with_costs",
    "with_figures",
    "with_given_costs",
    "with_size",
]

# A command takes one keyword per option from click.
Command: TypeAlias = Callable[..., None]
Decorator: TypeAlias = Callable[[Command], Command]

INPUT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT_FILE = click.Path(dir_okay=False, path_type=Path, writable=True)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of pictures.")
BOUNDARY = click.option(
    "--boundary",
    type=click.Choice(BOUNDARIES),
    default=DEFAULT_BOUNDARY,
    show_default=True,
    help="What waits between two steps, or how papers count; decides which seconds are shown.",
)
LOWER = click.option("--lower", "lowered", is_flag=True, help="Include communication actions.")
HTML = click.option("--html", "html_file", type=OUTPUT_FILE, help="Write an interactive page.")
MICROBATCHES = click.option(
    "-m",
    "--microbatches",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Number of microbatches in a step.",
)
SOLVER_SECONDS = click.option(
    "--seconds",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="Time limit of the solver.",
)

_PREFIXES = ("", "k", "m", "g", "t", "p")
_UNITS = {
    f"{prefix}ib" if prefix else "": 1024.0**power for power, prefix in enumerate(_PREFIXES)
} | {f"{prefix}b": 1000.0**power for power, prefix in enumerate(_PREFIXES)}

# By field of Costs. A value is one number, or one per stage (for a transfer, one).
_COST_HELP = {
    "forward": "Seconds of a forward.",
    "backward_input": "Seconds of a backward for inputs.",
    "backward_weight": "Seconds of a backward for weights.",
    "full_backward": "Seconds of a full backward; by default the sum of its two halves.",
    "transfer": "Seconds that a value takes from rank to rank.",
    "send": "Seconds that a send keeps its rank busy.",
    "overlap_gain": "Share of the shorter part that an overlapped pair saves, from 0 to 1.",
    "activation_bytes": "Bytes that a microbatch holds from its forward to its backward.",
    "weight_stash_bytes": "Bytes that a microbatch holds from I to W in a split backward.",
    "parameter_bytes": "Bytes of the parameters.",
    "gradient_bytes": "Bytes of the gradients.",
    "optimizer_bytes": "Bytes of the optimizer state.",
    "message_bytes": "Bytes of a message between two stages.",
    "workspace_bytes": "Temporary bytes of an action while it runs.",
    "host_action": "Seconds of the host for each compute action; they occupy the rank.",
    "host_message": "Seconds of the host for each message, on its sender and on its receiver.",
    "unshard": "Seconds to gather the parameters of a stage.",
    "reshard": "Seconds to free the gathered parameters of a stage.",
    "reduce_grad": "Seconds to reduce the gradients of a stage.",
    "collective_overlap": "Share of these collectives that runs beside compute, from 0 to 1.",
    "wires": "The node of each rank; messages from a node to others share one wire.",
    "microbatch_scale": "Size of every microbatch, as multiples of what the costs are for.",
}


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a family."""

    ranks: int
    microbatches: int
    stages_per_rank: int | None


def ranks_option(default: int, help_text: str = "Number of ranks.") -> Decorator:
    """Return the option for the number of ranks."""
    return click.option(
        "-r",
        "--ranks",
        type=click.IntRange(1),
        default=default,
        show_default=True,
        help=help_text,
    )


def with_size(command: Command) -> Command:
    """Add the options for sizes to a command, as its argument `size`."""

    @ranks_option(4, "Number of ranks, for the name of a family.")
    @MICROBATCHES
    @click.option(
        "--stages-per-rank",
        type=click.IntRange(1),
        help="Number of stages per rank. [default: that of the family]",
    )
    @wraps(command)
    def wrapper(
        *args: Any, ranks: int, microbatches: int, stages_per_rank: int | None, **kwargs: Any
    ) -> None:
        command(*args, size=Size(ranks, microbatches, stages_per_rank), **kwargs)

    return wrapper


def with_costs(command: Command) -> Command:
    """Add an option per cost and one for a file, as the argument `costs`; None if unused."""

    @wraps(command)
    def wrapper(
        *args: Any, costs_file: Path | None, given_costs: Mapping[str, object], **kwargs: Any
    ) -> None:
        is_given = costs_file is not None or given_costs
        costs = merge_costs(costs_file, given_costs) if is_given else None
        command(*args, costs=costs, **kwargs)

    option = click.option(
        "--costs",
        "costs_file",
        type=INPUT_FILE,
        help="TOML or JSON file of costs; the options for single costs override it.",
    )
    return with_given_costs(option(wrapper))


def with_given_costs(command: Command) -> Command:
    """Add an option per cost to a command, as its argument `given_costs`: those in use."""
    names = [field.name for field in fields(Costs)]

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        given = {name: value for name in names if (value := kwargs.pop(name)) is not None}
        command(*args, given_costs=given, **kwargs)

    for name in reversed(names):
        flag, help_text = f"--{name.replace('_', '-')}", _COST_HELP[name]
        wrapper = click.option(flag, name, type=_Numbers(), help=help_text)(wrapper)
    return wrapper


def merge_costs(file: Path | None, given: Mapping[str, object]) -> Costs:
    """Return the costs of a file, or unit costs, with the given ones replaced."""
    base = Costs() if file is None else Costs.from_file(file)
    return Costs.from_mapping({**base.to_mapping(), **given})


def with_figures(command: Command) -> Command:
    """Add --png, --svg and --pdf to a command, as its argument `figures`: the files to write."""
    formats = ("png", "svg", "pdf")

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        files = {name: file for name in formats if (file := kwargs.pop(name)) is not None}
        if nameless := [name for name, file in files.items() if not file.name]:
            raise ArgumentError(f"--{nameless[0]} must be the name of a file (got nothing)")
        figures = tuple(
            file if file.suffix.lower() == f".{name}" else file.with_name(f"{file.name}.{name}")
            for name, file in files.items()
        )
        command(*args, figures=figures, **kwargs)

    for name in reversed(formats):
        help_text = f"Write a figure as {name.upper()}."
        wrapper = click.option(f"--{name}", type=OUTPUT_FILE, help=help_text)(wrapper)
    return wrapper


class _Numbers(click.ParamType[Any]):
    """A number, or several separated by commas."""

    name = "NUMBER[,NUMBER...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | tuple[float, ...]:
        try:
            numbers = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} must be a number, or numbers separated by commas", param, ctx)
        return numbers[0] if len(numbers) == 1 else numbers


class Bytes(click.ParamType[Any]):
    """A number of bytes, with or without a unit: 1e9, 512MiB, 40GiB, 80 GB."""

    name = "BYTES"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number of bytes."""
        text = str(value).strip()
        number = text.rstrip(ascii_letters)
        unit = text.removeprefix(number).lower()
        try:
            found = float(number) * _UNITS[unit]
        except (ValueError, KeyError):
            found = -1.0
        if not 0 <= found < inf:
            message = f"{value!r} must be a number of bytes, such as 1e9, 512MiB or 40GiB"
            self.fail(message, param, ctx)
        return found

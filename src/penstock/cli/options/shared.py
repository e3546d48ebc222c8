"""Options that several commands share, each with its help."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias

import click

from penstock.cli.options.completion import complete_schedule
from penstock.cli.options.types import COUNT, INPUT_FILE, OUTPUT_FILE, Numbers
from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.sim.period import BOUNDARIES, DEFAULT_BOUNDARY

__all__ = [
    "BOUNDARY",
    "HTML",
    "JSON",
    "LOWER",
    "MICROBATCHES",
    "SOLVER_SECONDS",
    "Size",
    "merge_costs",
    "ranks_option",
    "schedule_argument",
    "with_costs",
    "with_figures",
    "with_given_costs",
    "with_size",
]

# A command takes one keyword per option from click.
Command: TypeAlias = Callable[..., None]
Decorator: TypeAlias = Callable[[Command], Command]

JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print everything that is known, as JSON."
)
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
    type=COUNT,
    metavar="N",
    default=8,
    show_default=True,
    help="Number of microbatches in a step.",
)
SOLVER_SECONDS = click.option(
    "--seconds",
    type=click.FloatRange(0),
    metavar="SECONDS",
    default=5.0,
    show_default=True,
    help="Time limit of the solver.",
)

# Costs that are neither seconds nor bytes.
_COST_UNITS = {
    "overlap_gain": "SHARE",
    "collective_overlap": "SHARE",
    "wires": "NODE",
    "host_link": "BYTES/S",
    "microbatch_scale": "FACTOR",
}
# One number each; of the others one, or one per stage, rank or microbatch.
_SINGLE_COSTS = (
    "transfer",
    "send",
    "overlap_gain",
    "host_action",
    "host_message",
    "collective_overlap",
)
# By field of Costs.
_COST_HELP = {
    "forward": "Seconds of a forward; 1 if no costs are given.",
    "backward_input": "Seconds of a backward for inputs; 1 if no costs are given.",
    "backward_weight": "Seconds of a backward for weights; 1 if no costs are given.",
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
    "recompute": "Seconds to recompute what a forward saves; by default those of the forward.",
    "input_bytes": "Bytes that a recomputed forward keeps; by default those of a message.",
    "host_link": "Bytes per second from a rank to its host, and as many back at the same time.",
}


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a family."""

    ranks: int
    microbatches: int
    stages_per_rank: int | None


def schedule_argument(name: str = "schedule", *, several: bool = False, metavar: str) -> Decorator:
    """Return the argument that takes the name of a family or a file."""
    return click.argument(
        name,
        metavar=metavar,
        nargs=-1 if several else 1,
        required=True,
        shell_complete=complete_schedule,
    )


def ranks_option(default: int, help_text: str = "Number of ranks.") -> Decorator:
    """Return the option for the number of ranks."""
    return click.option(
        "-r",
        "--ranks",
        type=COUNT,
        metavar="N",
        default=default,
        show_default=True,
        help=help_text,
    )


def with_size(command: Command) -> Command:
    """Add the options for sizes to a command, as its argument `size`."""

    @ranks_option(4, "Number of ranks, if SCHEDULE is a family.")
    @MICROBATCHES
    @click.option(
        "--stages-per-rank",
        type=COUNT,
        metavar="N",
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
        wrapper = click.option(flag, name, type=_type_of(name), help=help_text)(wrapper)
    return wrapper


def _type_of(cost: str) -> Numbers:
    unit = "BYTES" if cost.endswith("_bytes") else _COST_UNITS.get(cost, "SECONDS")
    return Numbers(unit, is_several=cost not in _SINGLE_COSTS)


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

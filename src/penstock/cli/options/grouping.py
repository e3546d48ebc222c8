"""Commands whose help lists options by purpose."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import click

from penstock.costs import Costs

__all__ = ["GroupedCommand", "command", "group_of"]

# By heading, in the order of the help: the arguments that options set. The rest is "Options".
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Sizes": (
        "ranks",
        "microbatches",
        "stages_per_rank",
        "nodes",
        "devices_per_node",
        "devices",
        "tensor",
        "pipeline",
        "batch",
        "rows",
    ),
    "Links and memory": (
        "bandwidth_inside",
        "bandwidth_between",
        "latency_inside",
        "latency_between",
        "bandwidth",
        "memory",
        "limits",
        "points",
    ),
    "Options": (),
    "Solver": ("seconds", "effort"),
    "Throughput": ("tokens", "flops_per_token", "peak_flops"),
    "Output": (
        "as_table",
        "is_drawn",
        "as_json",
        "all_rows",
        "csv_file",
        "trace_file",
        "output",
        "file",
        "html_file",
        "png",
        "svg",
        "pdf",
    ),
    "Costs": ("costs_file", *(field.name for field in fields(Costs))),
}
_REST = "Options"


def group_of(name: str) -> str:
    """Return the heading under which an option is listed, by the argument that it sets."""
    found = (heading for heading, names in _GROUPS.items() if name in names)
    return next(found, _REST)


class GroupedCommand(click.Command):
    """A command whose help lists its options by purpose, the most specific first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each group that has options."""
        records: dict[str, list[tuple[str, str]]] = {heading: [] for heading in _GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            # The usage and the text before name the arguments.
            if record is not None and isinstance(param, click.Option):
                records[group_of(param.name or "")].append(record)
        for heading, lines in records.items():
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(_in_order(heading, lines))


def command(name: str) -> Callable[[Callable[..., Any]], GroupedCommand]:
    """Return the decorator that makes a function a command with grouped options."""
    return click.command(name, cls=GroupedCommand)


def _in_order(heading: str, lines: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Put --help last, where readers look for it."""
    return sorted(lines, key=lambda line: heading == _REST and "--help" in line[0])

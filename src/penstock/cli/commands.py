"""The `penstock` command: its subcommands, and errors as one line on stderr."""

from importlib import import_module
from traceback import format_exception
from typing import Any

import click

from penstock.errors import PenstockError, PipelineError

__all__ = ["main"]

# The module and the name of every command; a module is loaded when its command is used.
_COMMANDS = {
    "check": ("penstock.cli.check", "check_command"),
    "compare": ("penstock.cli.prices", "compare_command"),
    "curve": ("penstock.cli.projection.curve", "curve_command"),
    "demo": ("penstock.cli.demo.demo", "demo_command"),
    "explain": ("penstock.cli.explain", "explain_command"),
    "list": ("penstock.cli.show", "list_command"),
    "plan": ("penstock.cli.plan", "plan_command"),
    "playground": ("penstock.cli.playground", "playground_command"),
    "project": ("penstock.cli.projection.project", "project_command"),
    "revise": ("penstock.cli.revise", "revise_command"),
    "show": ("penstock.cli.show", "show_command"),
    "simulate": ("penstock.cli.prices", "simulate_command"),
    "soak": ("penstock.cli.soak", "soak_command"),
    "trace": ("penstock.cli.trace", "trace_command"),
    "verify": ("penstock.cli.verify", "verify_command"),
}


class _Group(click.Group):
    """A group that loads commands late, and reports our errors with exit code 2."""

    def list_commands(
        self,
        ctx: click.Context,  # noqa: ARG002  # the signature of click
    ) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002  # the signature of click
        cmd_name: str,
    ) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(module), name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (PenstockError, OSError) as error:
            if isinstance(error, PipelineError) and error.__cause__ is not None:
                click.echo("".join(format_exception(error.__cause__)), err=True)
            click.echo(f"penstock: {error}", err=True)
            ctx.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penstock")
def main() -> None:
    """Plan, check, price, draw and run pipeline-parallel schedules.

    A SCHEDULE is the name of a family (see `penstock list`) or a file: a .csv with one row per
    rank, or a .json with a plan, a recorded step or a trace.

    Exit codes: 0 success, 1 the schedule is invalid or a check failed, 2 the input cannot be used.
    """

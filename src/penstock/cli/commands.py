"""The `penstock` command: its subcommands, and errors as one line on stderr."""

import sys
from importlib import import_module
from io import TextIOWrapper
from traceback import format_exception
from typing import Any

import click

from penstock.errors import PenstockError, PipelineError

__all__ = ["main"]

# The module and the name of every command, by what it is for; a module is loaded when its command
# is used.
_SECTIONS = {
    "Look at schedules and recorded steps": {
        "list": ("penstock.cli.show", "list_command"),
        "show": ("penstock.cli.show", "show_command"),
        "simulate": ("penstock.cli.prices", "simulate_command"),
        "compare": ("penstock.cli.prices", "compare_command"),
        "check": ("penstock.cli.check", "check_command"),
        "explain": ("penstock.cli.explain", "explain_command"),
        "trace": ("penstock.cli.trace", "trace_command"),
        "playground": ("penstock.cli.playground", "playground_command"),
    },
    "Plan": {
        "plan": ("penstock.cli.plan", "plan_command"),
        "curve": ("penstock.cli.projection.curve", "curve_command"),
        "revise": ("penstock.cli.revise", "revise_command"),
        "project": ("penstock.cli.projection.project", "project_command"),
    },
    "Run (with torch)": {
        "demo": ("penstock.cli.demo.demo", "demo_command"),
        "verify": ("penstock.cli.verify", "verify_command"),
        "soak": ("penstock.cli.soak", "soak_command"),
    },
}
_COMMANDS = {name: place for section in _SECTIONS.values() for name, place in section.items()}
# Enough for the first sentence of any command.
_SUMMARY_LENGTH = 200


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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by what they are for, each with its first sentence."""
        for heading, names in _SECTIONS.items():
            commands = ((name, self.get_command(ctx, name)) for name in names)
            lines = [
                (name, command.get_short_help_str(_SUMMARY_LENGTH))
                for name, command in commands
                if command is not None
            ]
            with formatter.section(heading):
                formatter.write_dl(lines)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (PenstockError, OSError) as error:
            if isinstance(error, PipelineError) and error.__cause__ is not None:
                click.echo("".join(format_exception(error.__cause__)), err=True)
            click.echo(f"penstock: {_describe(error)}", err=True)
            ctx.exit(2)


def _describe(error: Exception) -> str:
    """Return an error as one sentence; the system's begin with a number and a capital."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    return str(error)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penstock")
def main() -> None:
    """Plan, check, price, draw and run pipeline-parallel schedules.

    A SCHEDULE is the name of a family (see `penstock list`) or a file: a .csv with one row per
    rank, a .json with a plan, a recorded step or a trace, or flight records (.flight, or their
    folder). With --json a command prints all it knows; its tables are short.

    Exit codes: 0 success, 1 the schedule is invalid or a check failed, 2 the input cannot be used.

    \b
    Completion by TAB, in ~/.bashrc (or with zsh_source in ~/.zshrc):
      eval "$(_PENSTOCK_COMPLETE=bash_source penstock)"
    """
    # A terminal or a pipe that lacks a letter gets a question mark, not a traceback.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")

"""What a shell offers in place of a SCHEDULE: the names of families, and files."""

import click
from click.shell_completion import CompletionItem

from penstock.schedules.registry import FAMILIES

__all__ = ["complete_schedule"]


def complete_schedule(
    ctx: click.Context,  # noqa: ARG001  # the signature of click
    param: click.Parameter,  # noqa: ARG001  # the signature of click
    incomplete: str,
) -> list[CompletionItem]:
    """Return the families that begin like this, in any case, and let the shell add files."""
    begin = incomplete.lower()
    names = [
        CompletionItem(name, help=family.summary)
        for name, family in FAMILIES.items()
        if name.lower().startswith(begin)
    ]
    return [*names, CompletionItem(incomplete, type="file")]

"""Help: every option of every command says what it does."""

from collections.abc import Iterator

import click
import pytest

from penstock.cli import main


def all_commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands of a group by their whole name, and those of groups inside it."""
    with click.Context(group, info_name=name) as context:
        for part in group.list_commands(context):
            command = group.get_command(context, part)
            assert command is not None
            if isinstance(command, click.Group):
                yield from all_commands(command, f"{name} {part}")
            yield f"{name} {part}", command


COMMANDS = dict(all_commands(main, "penstock"))


# E6: options made in a loop over the costs, and -r and -m, were declared without help.
@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name: str) -> None:
    command = COMMANDS[name]
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert [option.name for option in options if not option.help] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    help_text = COMMANDS[name].help
    assert help_text is not None
    assert f"  {name}" in help_text.partition("Example")[2]


def test_commands_are_listed_by_name() -> None:
    assert " ".join(name.removeprefix("penstock ") for name in COMMANDS) == (
        "check compare curve demo explain list plan playground project revise show simulate soak "
        "trace verify"
    )

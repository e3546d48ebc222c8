"""Help: every option of every command says what it does, in which unit, under a heading."""

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from penstock.cli import main
from penstock.cli.options.grouping import group_of

# What the value of an option may be called: its unit, what it counts, or what it names.
UNITS = {
    *("SECONDS", "MINUTES", "BYTES", "BYTES/S", "TOKENS", "FLOPS", "FLOP/S"),
    *("SHARE", "FACTOR", "N", "ROWS", "NODE"),
    *("FILE", "DIRECTORY", "plan|FAMILY", "mlp|gpt|MODULE:FUNCTION"),
}


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


# E6: values were called NUMBER, FLOAT RANGE and TEXT, whatever they meant.
@pytest.mark.parametrize("name", COMMANDS)
def test_every_value_is_called_by_its_unit(name: str) -> None:
    command = COMMANDS[name]
    with click.Context(command, info_name=name) as context:
        for param in command.params:
            if isinstance(param, click.Option) and not param.is_flag:
                called = param.make_metavar(context).removesuffix("[,...]")
                assert called in UNITS or isinstance(param.type, click.Choice), param.name


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_every_option_once_under_its_heading(name: str) -> None:
    command = COMMANDS[name]
    with click.Context(command, info_name=name, terminal_width=400) as context:
        text = command.get_help(context)
    _, *sections = re.split(r"^([A-Z][a-z ]+):\n", text, flags=re.MULTILINE)
    listed = {
        flag: heading
        for heading, lines in zip(sections[::2], sections[1::2], strict=True)
        if not heading.startswith("Example")
        for flag in re.findall(r"^  (?:-\w, )?(--[\w-]+)", lines, re.MULTILINE)
    }
    options = [param for param in command.params if isinstance(param, click.Option)]
    expected = {param.opts[-1]: group_of(param.name or "") for param in options}
    assert listed == expected | {"--help": "Options"}


def test_costs_of_bytes_take_units() -> None:
    size = ("-r", "2", "-m", "2", "--json")
    short, long = (
        CliRunner().invoke(main, ["simulate", "1F1B", *size, "--activation-bytes", text])
        for text in ("1.5GiB,2kB", f"{1.5 * 2**30},2000")
    )
    assert (short.exit_code, short.output) == (0, long.output)
    wrong = CliRunner().invoke(main, ["simulate", "1F1B", "--activation-bytes", "2 bits"])
    assert wrong.exit_code == 2
    assert "'2 bits' must be a number" in wrong.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    help_text = COMMANDS[name].help
    assert help_text is not None
    assert f"  {name}" in help_text.partition("Example")[2]


def test_commands_are_listed_by_purpose_with_whole_sentences() -> None:
    text = CliRunner().invoke(main, ["--help"], terminal_width=400).output
    _, _, listed = text.partition("Look at schedules")
    names = re.findall(r"^  (\w+)  ", listed, re.MULTILINE)
    assert sorted(names) == [name.removeprefix("penstock ") for name in COMMANDS]
    assert "..." not in listed


def test_commands_are_listed_by_name() -> None:
    assert " ".join(name.removeprefix("penstock ") for name in COMMANDS) == (
        "check compare curve demo explain list plan playground project revise show simulate soak "
        "trace verify"
    )

"""Colours: in a terminal that shows them, and nowhere else."""

import pytest
from click.testing import CliRunner

from penstock.cli import main

COMMANDS = (
    ("show", "1F1B", "-r", "2", "-m", "2"),
    ("compare", "1F1B", "ZBV", "-r", "2", "-m", "2", "--draw"),
    ("explain", "1F1B", "-r", "2", "-m", "2"),
    ("list",),
)
# Rich takes the output for a terminal with colours if this is set.
TERMINAL = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "80"}


def run(arguments: tuple[str, ...], **environment: str) -> str:
    result = CliRunner(env={"NO_COLOR": None, **environment}).invoke(main, arguments)
    assert result.exit_code == 0
    return result.stdout


def test_a_terminal_gets_colours() -> None:
    assert "\x1b[" in run(COMMANDS[0], **TERMINAL)


@pytest.mark.parametrize("arguments", COMMANDS)
@pytest.mark.parametrize("setting", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_are_off_on_request_and_in_terminals_without_them(
    arguments: tuple[str, ...], setting: dict[str, str]
) -> None:
    text = run(arguments, **(TERMINAL | setting))
    assert "\x1b[3" not in text
    assert "\x1b[4" not in text
    assert "38;5" not in text


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_file_or_a_pipe_gets_plain_text(arguments: tuple[str, ...]) -> None:
    assert "\x1b" not in run(arguments, TERM="xterm-256color", COLUMNS="80")


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_terminal_that_lacks_letters_gets_question_marks(arguments: tuple[str, ...]) -> None:
    # `explain` ended in a traceback where the ellipsis could not be written, as with LC_ALL=C.
    command = (*arguments, "-r", "4", "-m", "8") if arguments[0] == "explain" else arguments
    result = CliRunner(charset="ascii", env={"COLUMNS": "40"}).invoke(main, command)
    assert (result.exit_code, result.exception) == (0, None)

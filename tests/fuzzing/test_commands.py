"""Whatever the arguments: an exit code that means something, a message, and no traceback."""

from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner, Result

from penstock.cli import main
from tests.fuzzing.arguments import COMMANDS, draw_arguments, write_files
from tests.fuzzing.bounds import bounded


def run(*arguments: str) -> Result:
    runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})
    with bounded(seconds=20, bytes_more=256 * 2**20):
        return runner.invoke(main, arguments, catch_exceptions=False)


def run_many(command: str, count: int, folder: Path) -> None:
    files, random = write_files(folder), Random(command)
    for _ in range(count):
        arguments = draw_arguments(random, files, command)
        result = run(*arguments)
        assert result.exit_code in (0, 1, 2), arguments
        assert result.output or result.exit_code == 0, arguments
        assert "Traceback" not in result.output, arguments


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for inputs; what commands write goes to another, which is the working one."""
    (tmp_path / "inputs").mkdir()
    (tmp_path / "outputs").mkdir()
    monkeypatch.chdir(tmp_path / "outputs")
    return tmp_path / "inputs"


@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_of_any_kind_are_answered(command: str, folder: Path) -> None:
    run_many(command, 20, folder)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_thousand_arguments_are_answered(command: str, folder: Path) -> None:
    run_many(command, 1000, folder)


@pytest.mark.parametrize("size", ["9" * 30, "100000000"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "1F1B", "--ranks"),
        ("check", "V-Min", "--microbatches"),
        ("simulate", "Interleaved1F1B", "--stages-per-rank"),
        ("plan", "--ranks"),
        ("plan", "--microbatches"),
    ],
)
def test_sizes_that_no_machine_has_room_for_are_refused(
    arguments: tuple[str, ...], size: str
) -> None:
    # They went to NumPy as they were, which ran out of memory or of digits.
    result = run(*arguments, size)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("penstock: a schedule must have at most 10,000,000 forwards")


def test_a_name_with_brackets_is_no_markup(folder: Path) -> None:
    # Names of files stood in tables as they were, where Rich takes brackets for styles.
    file = folder / "[bold]mine.csv"
    file.write_text("0F0,0B0\n")
    result = run("simulate", str(file))
    assert (result.exit_code, result.stdout.splitlines()[1].split()[0]) == (0, "[bold]mine")


@pytest.mark.parametrize("option", ["--png", "--svg", "--pdf"])
def test_a_figure_without_a_name_is_refused(option: str) -> None:
    # An empty path has no name to put an ending to, and Python said so in a traceback.
    result = run("show", "1F1B", option, "")
    assert (result.exit_code, result.stderr) == (
        2,
        f"penstock: {option} must be the name of a file (got nothing)\n",
    )


@pytest.mark.parametrize("command", ["verify", "demo"])
@pytest.mark.parametrize(
    "arguments",
    [("--ranks", "0"), ("--ranks", "many"), ("--schedule", "nope"), ("--what",), ("nope",)],
)
def test_commands_that_train_refuse_what_they_do_not_know(
    command: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, [command, *arguments], catch_exceptions=False)
    assert result.exit_code == 2
    assert result.stderr
    assert list(Path.cwd().iterdir()) == []

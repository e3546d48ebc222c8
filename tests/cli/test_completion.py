"""What a shell offers: commands, options, names of families, and files."""

import os
import subprocess
import sys

import pytest
from click.shell_completion import BashComplete

from penstock.cli import main


def offered(*words: str) -> list[tuple[str, str]]:
    """Return the kind and value of what is offered in place of the last word."""
    completion = BashComplete(main, {}, "penstock", "_PENSTOCK_COMPLETE")
    found = completion.get_completions(list(words[:-1]), words[-1])
    return [(item.type, item.value) for item in found]


def test_commands_and_options_are_completed() -> None:
    assert offered("pla") == [("plain", "plan"), ("plain", "playground")]
    assert offered("show", "--stages") == [("plain", "--stages-per-rank")]
    assert offered("plan", "--boundary", "g") == [("plain", "gradients")]


@pytest.mark.parametrize("command", ["show", "check", "simulate", "compare", "explain", "verify"])
def test_a_schedule_is_the_name_of_a_family_or_a_file(command: str) -> None:
    names = [("plain", name) for name in ("ZB-H1", "ZB-H2", "ZBV")]
    assert offered(command, "zb") == [*names, ("file", "zb")]


def test_the_shell_gets_its_function_and_its_answers() -> None:
    command = [sys.executable, "-c", "from penstock.cli import main; main(prog_name='penstock')"]
    answer = subprocess.run(
        command,
        env=os.environ
        | {
            "_PENSTOCK_COMPLETE": "bash_complete",
            "COMP_WORDS": "penstock show V-",
            "COMP_CWORD": "2",
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert 'eval "$(_PENSTOCK_COMPLETE=bash_source penstock)"' in (main.help or "")
    assert answer.stdout.splitlines() == ["plain,V-Half", "plain,V-Min", "file,V-"]

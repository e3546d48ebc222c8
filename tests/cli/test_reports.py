"""What the commands print, where the console matters."""

import pytest
from rich.console import Console

from penstock.assembly import build
from penstock.cli.reports import picture
from penstock.sim.engine import simulate

TIMELINE = simulate(build("1F1B", ranks=2, microbatches=2))


@pytest.mark.parametrize(
    ("console", "is_plain"),
    [
        (Console(width=80, force_terminal=True, color_system="truecolor", no_color=False), False),
        (Console(width=80, force_terminal=True, color_system="256", no_color=False), False),
        (Console(width=80, force_terminal=True, color_system="truecolor", no_color=True), True),
        # Sixteen colours are too few to tell the kinds of work apart.
        (Console(width=80, force_terminal=True, color_system="standard", no_color=False), True),
        (Console(width=80, force_terminal=False), True),
    ],
)
def test_picture_has_colours_where_there_are_enough(console: Console, is_plain: bool) -> None:
    assert ("F Forward" in str(picture(console, TIMELINE))) == is_plain

"""`penstock playground` writes the page."""

from pathlib import Path

from click.testing import CliRunner

from penstock.cli.commands import main
from tests.view.playground.pages import page


def test_playground_is_written_to_the_given_file(tmp_path: Path) -> None:
    file = tmp_path / "play.html"
    result = CliRunner().invoke(main, ["playground", "-o", str(file)])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"wrote {file}\n")
    assert file.read_text(encoding="utf-8") == page()

"""Pages from the command line."""

from pathlib import Path

from click.testing import CliRunner

from penstock.assembly import build
from penstock.cli import main
from penstock.costs import Costs
from penstock.sim.comparison import compare
from penstock.sim.engine import simulate
from penstock.view.html.page import page

SIZE = ("--ranks", "2", "--microbatches", "2", "--transfer", "0.5")


def test_show_writes_a_page(tmp_path: Path) -> None:
    file = tmp_path / "zbv.html"
    result = CliRunner().invoke(main, ["show", "ZBV", *SIZE, "--html", str(file)])
    assert (result.exit_code, result.stderr) == (0, f"wrote {file}\n")
    timeline = simulate(build("ZBV", ranks=2, microbatches=2), Costs(transfer=0.5))
    assert file.read_text(encoding="utf-8") == page(timeline)


def test_compare_writes_one_page_for_all_schedules(tmp_path: Path) -> None:
    file = tmp_path / "both.html"
    result = CliRunner().invoke(main, ["compare", "1F1B", "ZBV", *SIZE, "--html", str(file)])
    assert (result.exit_code, result.stderr) == (0, f"wrote {file}\n")
    schedules = [build(name, ranks=2, microbatches=2) for name in ("1F1B", "ZBV")]
    assert file.read_text(encoding="utf-8") == page(compare(schedules, Costs(transfer=0.5)))


def test_error_names_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "page.html"
    result = CliRunner().invoke(main, ["show", "1F1B", *SIZE, "--html", str(file)])
    assert result.exit_code == 2
    assert result.stderr == f"penstock: {file}: no such file or directory\n"

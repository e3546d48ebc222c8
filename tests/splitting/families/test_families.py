"""The page about families says what is found for some of them now."""

from pathlib import Path

import pytest

from tests.splitting.families.libraries import is_installed
from tests.splitting.families.measuring import COLUMNS, measure
from tests.splitting.families.optional import prepare_torchvision
from tests.splitting.families.table import NOT_MEASURED, read_page, row_of, write_table

# Traced stages have no plain linear layers, and a pipeline warns about that.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
PAGE = Path(__file__).parents[3] / "docs" / "families.md"
LINES = PAGE.read_text().split("\n## Left out", maxsplit=1)[0].splitlines()
ROWS = [line for line in LINES if line.count(" | ") == 5 and " `" in line]


def test_a_page_that_is_read_is_written_again() -> None:
    assert write_table(read_page(PAGE.read_text())) == PAGE.read_text()


@pytest.mark.parametrize("row", ROWS[::16], ids=lambda row: row.split(" | ")[0].strip("| "))
def test_a_family_splits_as_the_page_says(row: str) -> None:
    kind, *cells = row.strip("| ").split(" | ")
    library = kind.partition("/")[0] if "/" in kind else "transformers"
    if not is_installed(library):
        pytest.skip(f"{library} is not installed, or torchvision beside it")
    prepare_torchvision()
    shown = zip(COLUMNS, cells[2:], strict=True)
    found = measure(kind, [name for name, cell in shown if cell != NOT_MEASURED])
    if "Error: " in found.get("not built", "") and "requires" in found["not built"]:
        pytest.skip(found["not built"])
    assert row_of(found) == row

"""The page about families says what is found for some of them now."""

from pathlib import Path

import pytest

from tests.splitting.families.measuring import measure
from tests.splitting.families.table import row_of

# Traced stages have no plain linear layers, and a pipeline warns about that.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
PAGE = Path(__file__).parents[3] / "docs" / "families.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("row", ROWS[::8], ids=lambda row: row.split(" | ")[0].strip("| "))
def test_a_family_splits_as_the_page_says(row: str) -> None:
    assert row_of(measure(row.split(" | ")[0].strip("| "))) == row

"""The page docs/published.md: its tables are between comments that name them."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from docs_build.published import deepseek, llama3, primus, zero_bubble
from docs_build.published.table import Table

PAGE = Path(__file__).parents[2] / "docs" / "published.md"

TABLES: dict[str, Callable[[], Table]] = {
    "llama3": llama3.table,
    "primus": primus.table,
    "zero-bubble": zero_bubble.table,
    "deepseek": deepseek.table,
}

_TABLE = re.compile(r"<!-- published: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)


def read_tables(page: str) -> dict[str, str]:
    """Return the tables of the page by name."""
    return {name: table.strip() for name, table in _TABLE.findall(page)}


def fill(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with these tables."""

    def replaced(match: re.Match[str]) -> str:
        name, old = match.groups()
        return f"<!-- published: {name} -->\n\n{tables.get(name, old.strip())}\n\n<!-- end -->"

    return _TABLE.sub(replaced, page)

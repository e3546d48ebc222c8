"""Hold the simulator against published measurements: one table for each.

    python -m docs_build.published llama3           print a table
    python -m docs_build.published --write          write all tables into docs/published.md

Names: llama3, primus, zero-bubble, deepseek. Every input is in the module of that name, with its
source; the page says what is assumed.
"""

import argparse
from collections.abc import Sequence

from docs_build.published.page import PAGE, TABLES, fill


def main(given: Sequence[str] | None = None) -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TABLES))
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    arguments = parser.parse_args(given)
    if unknown := set(arguments.names) - set(TABLES):
        parser.error(f"a NAME must be one of {', '.join(TABLES)} (got {', '.join(unknown)})")
    found = {name: str(TABLES[name]()) for name in arguments.names or TABLES}
    for name, table in found.items():
        print(f"{name}\n\n{table}\n")  # noqa: T201  # a program
    if arguments.write:
        PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The site by version: a folder for each, the list that the selector reads, a way to the newest.

python -m docs_build.versions site    # lists every version that was built into site/

site/0.1.0/       what `mkdocs build` made of 0.1.0
site/0.2.0/       and of 0.2.0
site/versions.json, site/index.html    written here
"""

import json
import re
import sys
from html import escape
from pathlib import Path

from penstock.atomic_files import write_atomically

__all__ = ["list_versions"]


def list_versions(site: Path) -> list[str]:
    """Write the list of versions, and a start page that leads to the newest; return them."""
    built = [page.parent.name for page in site.glob("*/index.html")]
    versions = sorted(built, key=_numbers, reverse=True)
    entries = [{"version": name, "title": name, "aliases": []} for name in versions]
    write_atomically(site / "versions.json", json.dumps(entries, indent=1) + "\n")
    if versions:
        write_atomically(site / "index.html", _start_page(versions[0]))
    return versions


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _start_page(version: str) -> str:
    address = escape(f"{version}/index.html")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Penstock</title>\n'
        f'<meta http-equiv="refresh" content="0; url={address}"></head>\n'
        f'<body><a href="{address}">Penstock {escape(version)}</a></body></html>\n'
    )


if __name__ == "__main__":
    list_versions(Path(sys.argv[1]))

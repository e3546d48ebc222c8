"""Links of pages lead somewhere both on a code host and in the site."""

import re
from pathlib import Path

from docs_build.unbuilt_links import TARGETS, with_site_links

ROOT = Path(__file__).parents[2]


def _links_of(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)


# F1: pages that are generated with the site were dead links where the Markdown itself is read.
def test_every_link_of_every_page_leads_to_a_file() -> None:
    dead = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for link in _links_of(page)
        if not (page.parent / link).exists()
    ]
    assert dead == []


def test_the_site_links_to_its_own_pages() -> None:
    assert all((ROOT / path).exists() for path in TARGETS)
    text = "[a](../examples) [b](../playground.html) [c](running.md) [d](../LICENSE)"
    assert with_site_links("index.md", text) == (
        "[a](examples.md) [b](live/playground.html) [c](running.md) [d](../LICENSE)"
    )

"""The site: it builds without warnings, has every page, and fetches nothing."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock
from docs_build.next_steps import NEXT_STEPS
from docs_build.reference import REFERENCE

ROOT = Path(__file__).parents[2]
GENERATED = {"gallery.md", *REFERENCE, "commands.md", "examples.md", "changelog.md"}
LIMIT_SECONDS = 240


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, and let warnings be errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    result = subprocess.run(
        [*command, "--site-dir", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=LIMIT_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return folder


def pages_in(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in pages_in(entry)]


def nav() -> list[str]:
    return pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def test_every_page_is_in_the_navigation_once() -> None:
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(nav()) == sorted(written | GENERATED)


def test_every_page_has_next_steps() -> None:
    assert set(nav()) <= set(NEXT_STEPS)
    assert {target for steps in NEXT_STEPS.values() for target, _ in steps} <= set(NEXT_STEPS)


def test_every_page_is_built_with_its_next_steps(site: Path) -> None:
    for page in nav():
        text = (site / page).with_suffix(".html").read_text()
        assert "<strong>Next</strong>" in text, page


# The search found every microbatch of every picture, as one long number.
def test_the_search_leaves_the_digits_of_pictures_out(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    texts = [entry["text"] for entry in entries if entry["location"].startswith("gallery.html#")]
    assert any("1F1B, 4 ranks, 8 microbatches" in text for text in texts)
    assert [text for text in texts if re.search(r"\d{8}", text)] == []


def test_the_header_names_the_version(site: Path) -> None:
    for page in nav():
        text = (site / page).with_suffix(".html").read_text()
        assert f'title="Penstock {penstock.__version__}"' in text, page


def test_the_playground_page_opens_the_one_of_the_site(site: Path) -> None:
    text = (site / "playground.html").read_text()
    assert 'href="live/playground.html"' in text
    assert (site / "live" / "playground.html").exists()


def test_every_picture_is_drawn(site: Path) -> None:
    for page in nav():
        assert "<!-- picture:" not in (site / page).with_suffix(".html").read_text(), page
    assert (site / "how-it-works.html").read_text().count('<figure class="timeline">') == 12
    assert (site / "gallery.html").read_text().count('<figure class="timeline">') == 13


def test_site_fetches_nothing_from_other_hosts(site: Path) -> None:
    fetching = re.compile(r'<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)="(https?:)?//')
    imported = re.compile(r"""(?:@import|url\()\s*["']?(https?:)?//""")
    wrong = [
        str(path.relative_to(site))
        for path in site.rglob("*")
        if (path.suffix == ".html" and fetching.search(path.read_text()))
        or (path.suffix == ".css" and imported.search(path.read_text()))
    ]
    assert wrong == []


def test_pages_stay_small(site: Path) -> None:
    heavy = [path.name for path in site.rglob("*.html") if path.stat().st_size > 600_000]
    assert heavy == []

"""Hooks of MkDocs: generated pages, pictures, measured results, and next steps."""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

from docs_build.gallery import gallery_page
from docs_build.next_steps import with_next_steps
from docs_build.pictures import Sizes, draw_pictures, price
from docs_build.reference import commands_page, reference_pages
from docs_build.results import read_results, show_others, show_results
from docs_build.scripts import examples_page
from docs_build.unbuilt_links import with_site_links
from penstock import view
from penstock.view.playground.page import playground

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

__all__ = ["on_config", "on_files", "on_page_markdown"]

_ROOT = Path(__file__).parents[1]
_RESULTS = read_results()
_COMPARED = ("1F1B", "ZB-H1", "ZBV")


def on_config(config: "MkDocsConfig") -> None:
    """Name the version that the site is about in the header of every page."""
    config.site_name = f"{config.site_name} {version('penstock')}"


def on_files(files: Files, *, config: "MkDocsConfig") -> Files:
    """Add the pages that are generated from the package."""
    generated = {
        "gallery.md": gallery_page(),
        **reference_pages(),
        "commands.md": commands_page(),
        "examples.md": examples_page(_ROOT / "examples"),
        "changelog.md": (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "live/comparison.html": view.page(
            view.compare({name: price(name, Sizes()) for name in _COMPARED})
        ),
        "live/playground.html": playground(home="../index.html"),
    }
    for path, content in generated.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: "Page", files: Files, **_: object) -> str:
    """Draw the pictures of a page, show its results, and add its next steps at the end."""
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    measured = show_results(show_others(markdown, pages.values(), _RESULTS), _RESULTS)
    linked = with_site_links(page.file.src_uri, measured)
    titles = {name: _title(text) for name, text in pages.items()}
    return with_next_steps(page.file.src_uri, draw_pictures(linked), titles)


def _title(markdown: str) -> str:
    """Return the first heading of a page."""
    lines = (line.removeprefix("# ") for line in markdown.splitlines() if line.startswith("# "))
    return next(lines)

"""A real Chromium for tests: one per session, and a fresh page for each test."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

__all__ = ["Browser", "Opener", "Visit", "open_browser"]

# In a container Chromium runs as root and without a graphics card; it is to ask no network.
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
)
_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def open_browser() -> Iterator[Browser]:
    """The Chromium of this machine; without one, the test is skipped and says how to get it."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium; run make browser, or install Debian's chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(_ARGUMENTS))
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page of ours in the browser, with all that went wrong on it."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def ask(self, method: str, *args: Any) -> Any:
        """What a method of the page's hook `window.penstock` answers."""
        # As text, for long columns take the browser's driver seconds otherwise.
        call = f"async args => JSON.stringify(await penstock.{method}(...args) ?? null)"
        return json.loads(self.page.evaluate(call, args))

    def settle(self) -> None:
        """Wait until all is drawn and nothing moves."""
        self.ask("settle")


@dataclass
class Opener:
    """Opens pages of ours from files, and closes them all."""

    browser: Browser
    folder: Path
    visits: list[Visit] = field(default_factory=list)

    def __call__(self, text: str, **options: Any) -> Visit:
        """Open the text of a page; `options` are those of a browser context, as `viewport`."""
        file = self.folder / f"page-{len(self.visits)}.html"
        file.write_text(text, encoding="utf-8")
        visit = Visit(self.browser.new_context(**options).new_page())
        self.visits.append(visit)
        page = visit.page
        page.on("console", lambda message: visit.complaints.append(message.text))
        page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        page.on("request", lambda request: _note_request(visit, request.url))
        page.goto(file.as_uri())
        page.evaluate("penstock.ready")
        return visit

    def close(self) -> None:
        """Close the pages; whatever any of them complained about fails the test."""
        complaints = [complaint for visit in self.visits for complaint in visit.complaints]
        for visit in self.visits:
            visit.page.context.close()
        assert complaints == []


def _note_request(visit: Visit, url: str) -> None:
    """A page is to ask for nothing but itself."""
    if not url.startswith(("file:", "data:", "blob:")):
        visit.complaints.append(f"asked for {url}")

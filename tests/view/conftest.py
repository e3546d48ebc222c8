"""Pages in the browser that all tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, Opener


@pytest.fixture
def visit_page(browser: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Open pages; at the end, any console message fails the test."""
    opener = Opener(browser, tmp_path)
    yield opener
    opener.close()

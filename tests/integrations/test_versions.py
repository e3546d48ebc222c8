"""The page says which versions of other libraries were tested, and these are installed."""

import re
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
NAMES = ("transformers", "accelerate", "peft", "lightning")


def test_versions_on_the_page_are_those_that_the_tests_run_with() -> None:
    text = PAGE.read_text(encoding="utf-8")
    stated = {name: re.findall(rf"\b{name} (\d+\.\d+)", text) for name in NAMES}
    assert stated == {name: [".".join(version(name).split(".")[:2])] for name in NAMES}

"""The page says which versions of other libraries were tested, and these are installed."""

import re
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("transformers", "accelerate", "peft", "lightning")


def stated_of(name: str) -> tuple[str, str]:
    """Return the newest and the oldest version of a library that the page names."""
    table = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8").partition("Earlier")[0]
    (found,) = re.findall(rf"\b{name} (\d+\.\d+)(?: \(from (\d+\.\d+)\))?", table)
    newest, oldest = found
    return newest, oldest or newest


def test_versions_on_the_page_are_those_that_the_tests_run_with() -> None:
    stated = {name: stated_of(name)[0] for name in NAMES}
    assert stated == {name: ".".join(version(name).split(".")[:2]) for name in NAMES}


def test_the_oldest_versions_on_the_page_are_those_that_are_asked_for() -> None:
    # Any transformers 5 was asked for, of which the first has another Trainer.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    asked = {name: re.findall(rf'"{name}>=([\d.]+)"', text) for name in NAMES}
    assert asked == {name: [stated_of(name)[1]] for name in NAMES}

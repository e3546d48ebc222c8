"""Measured results: every file says how it was measured, and pages show files."""

import re
from pathlib import Path

import pytest

from docs_build.results import (
    FACTS,
    linked_results,
    read_result,
    read_results,
    show_others,
    show_results,
)
from penstock.errors import ParseError

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md")}
FILE = """# Planning

- measured: 2026-11-15
- command: `python benchmarks/planning.py`
- machine: 2 cores
- versions: torch 2.13
- spread: medians

## Build, lower (ZBV)

| a |

## Other

| b |
"""
SOURCE = (
    "*Measured 2026-11-15 by* `python benchmarks/planning.py` *on* 2 cores; torch 2.13. "
    "*Spread:* medians."
)
RESULTS = {"planning": read_result("planning", FILE)}


def test_every_result_file_says_how_it_was_measured() -> None:
    results = read_results()
    assert {"planning", "runtime", "gpu_ranks"} <= set(results)
    assert all(tuple(result.facts) == FACTS for result in results.values())
    # A command named a folder of the machine on which it ran.
    commands = [result.facts["command"] for result in results.values()]
    assert [command for command in commands if re.search(r"\s/\w", command)] == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "| a |\n",
        FILE.replace("- spread: medians\n", ""),
        FILE.replace("# Planning", "Planning"),
    ],
)
def test_a_file_that_does_not_say_it_is_refused(content: str) -> None:
    with pytest.raises(
        ParseError, match=r"results/planning\.md must begin with a title and lines"
    ):
        read_result("planning", content)


def test_a_link_on_a_line_of_its_own_shows_the_file_or_one_section() -> None:
    link = "[tables](../benchmarks/results/planning.md)"
    assert show_results(f"before\n\n{link}\n\nsee {link}", RESULTS) == (
        f"before\n\n{SOURCE}\n\n### Build, lower (ZBV)\n\n| a |\n\n### Other\n\n| b |\n\n"
        f"see {link}"
    )
    one = "[table](../../benchmarks/results/planning.md#build-lower-zbv)"
    assert show_results(f"{one}\n\n{one}", RESULTS) == (
        f"{SOURCE}\n\n### Build, lower (ZBV)\n\n| a |\n\n### Build, lower (ZBV)\n\n| a |"
    )


def test_a_file_that_no_page_links_to_is_shown_without_an_edit() -> None:
    page = "text\n\n<!-- results: all other files -->\n"
    linking = "[tables](../benchmarks/results/planning.md)"
    assert show_others(page, [linking], RESULTS) == "text\n\n\n"
    assert show_others(page, [page], RESULTS).startswith(
        f"text\n\n## Planning\n\n{SOURCE}\n\n### Build, lower (ZBV)"
    )


def test_pages_link_to_files_and_sections_that_exist() -> None:
    results = read_results()
    assert sum(len(linked_results(page)) for page in PAGES.values()) >= 8
    for page in PAGES.values():
        assert "](../benchmarks/results/" not in show_results(page, results)


# F3: tables were copied to the page by hand, and no longer those of any run.
def test_the_performance_page_has_no_table_and_no_ratio_of_its_own() -> None:
    page = PAGES["performance.md"]
    assert [line for line in page.splitlines() if line.startswith("|")] == []
    measured = " ".join(result.text for result in read_results().values())
    numbers = re.findall(r"\d+\.\d+", re.sub(r"`[^`]*`", "", page))
    assert [number for number in numbers if number not in measured] == []

"""The README's table of measured numbers is that of the result files."""

import pytest

from docs_build.measured import README, filled, measured_table
from docs_build.results import Result, read_results
from penstock.errors import ParseError


# Its numbers were typed, and stayed when planning.md and runtime.md were measured again.
def test_the_readme_shows_the_result_files_of_today() -> None:
    page = README.read_text(encoding="utf-8")
    table = measured_table(read_results())
    assert table in page
    assert filled(page, table) == page


def test_a_row_shows_both_numbers_and_their_ratio() -> None:
    results = read_results()
    text = results["planning"].sections["build-lower-and-check-zbv"]
    (line,) = (line for line in text.splitlines() if line.startswith("| 64 | 512 |"))
    ours, other = line.strip("| ").split(" | ")[3:5]
    row = measured_table(results).splitlines()[2].split(" | ")
    assert row[1:4] == [f"{ours} s", f"torch {other} s", f"{float(ours) / float(other):.2f}"]


def test_the_eager_run_is_not_taken_for_the_compiled_one() -> None:
    # "ours, compiled" begins with "ours", and is listed after it.
    text = read_results()["split_backward"].text
    eager = next(line for line in text.splitlines() if " | ours | " in line).split(" | ")
    assert f"| {eager[4]} | torch " in measured_table(read_results())


def test_a_row_that_a_file_no_longer_has_is_named() -> None:
    results = read_results()
    sections = {
        "build-lower-and-check-zbv": "| ranks | microbatches | Penstock s |\n|---|---|---|"
    }
    changed = Result("Planning", {}, "", sections)
    with pytest.raises(ParseError, match=r"planning\.md must have a number for \('64', '512'\)"):
        measured_table(results | {"planning": changed})

"""What the gallery says about families is complete."""

from pathlib import Path

from docs_build.families import ENTRIES
from penstock.schedules.formulae import FORMULAE
from penstock.schedules.registry import FAMILIES

ROOT = Path(__file__).parents[2]


def test_every_family_has_an_entry() -> None:
    assert list(ENTRIES) == list(FAMILIES)


def test_every_paper_is_linked() -> None:
    links = {paper.link for entry in ENTRIES.values() for paper in entry.papers}
    assert all(link.startswith("https://") for link in links)
    assert all(entry.papers for name, entry in ENTRIES.items() if name != "ForwardOnly")


# The page on schedules gave V-Half and V-Min other formulae than the gallery,
# and idle time without a unit.
def test_the_table_of_families_has_the_formulae_that_are_tested() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    shown = {row[0]: row[2:] for row in rows[1:]}
    expected = {
        name: [formulae.memory.text, formulae.bubble.text]
        for name, formulae in FORMULAE.items()
        if name != "ForwardOnly"
    }
    assert shown == expected

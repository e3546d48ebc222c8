"""What the gallery says about families is complete."""

from docs_build.families import ENTRIES
from penstock.schedules.registry import FAMILIES


def test_every_family_has_an_entry() -> None:
    assert list(ENTRIES) == list(FAMILIES)


def test_every_paper_is_linked() -> None:
    links = {paper.link for entry in ENTRIES.values() for paper in entry.papers}
    assert all(link.startswith("https://") for link in links)
    assert all(entry.papers for name, entry in ENTRIES.items() if name != "ForwardOnly")

"""The formulae of the gallery hold for the schedules of every family, at many sizes."""

import pytest

from docs_build.families import ENTRIES, At
from docs_build.pictures import Sizes, price
from penstock.schedules.registry import FAMILIES

# Enough microbatches to fill the pipe, in whole rounds.
SIZES = [(p, rounds * p) for p in (2, 4, 6, 8, 12) for rounds in (2, 3, 5)]
TRAINED = [name for name in ENTRIES if name != "ForwardOnly"]


def test_every_family_has_an_entry() -> None:
    assert list(ENTRIES) == list(FAMILIES)


@pytest.mark.parametrize("name", ENTRIES)
def test_bubble_matches_the_formula(name: str) -> None:
    formula = ENTRIES[name].bubble
    for ranks, microbatches in SIZES:
        timeline = price(name, Sizes(ranks, microbatches))
        expected = formula.value(At(ranks, microbatches, FAMILIES[name].stages_per_rank))
        idle = timeline.papers_bubble_rate * timeline.longest_span
        if formula.is_exact:
            assert idle == pytest.approx(expected, abs=1e-9), (ranks, microbatches)
        else:
            assert idle <= expected + 1e-9, (ranks, microbatches)


@pytest.mark.parametrize("name", TRAINED)
def test_memory_matches_the_formula(name: str) -> None:
    formula = ENTRIES[name].memory
    assert formula.is_exact
    for ranks, microbatches in SIZES:
        timeline = price(name, Sizes(ranks, microbatches))
        expected = formula.value(At(ranks, microbatches, FAMILIES[name].stages_per_rank))
        assert timeline.peak_microbatches == pytest.approx(expected), (ranks, microbatches)


def test_every_paper_is_linked() -> None:
    links = {paper.link for entry in ENTRIES.values() for paper in entry.papers}
    assert all(link.startswith("https://") for link in links)
    assert all(entry.papers for name, entry in ENTRIES.items() if name != "ForwardOnly")

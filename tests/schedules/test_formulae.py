"""The closed formulae hold for the schedules of every family, at many sizes and costs."""

import pytest

from penstock.assembly import build
from penstock.costs import Costs
from penstock.schedules.formulae import FORMULAE, At
from penstock.schedules.registry import FAMILIES
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline

# Enough microbatches to fill the pipe, in whole rounds.
SIZES = [(p, rounds * p) for p in (2, 4, 6, 8, 12) for rounds in (2, 3, 5)]
TRAINED = [name for name in FORMULAE if name != "ForwardOnly"]
# I is not shorter than W, which is where the orders with a split backward keep their shape.
UNEQUAL = [name for name in FORMULAE if not FORMULAE[name].bubble.for_equal_costs]


def price(name: str, ranks: int, microbatches: int, costs: Costs | None = None) -> Timeline:
    return simulate(build(name, ranks=ranks, microbatches=microbatches), costs)


def test_every_family_has_formulae() -> None:
    assert list(FORMULAE) == list(FAMILIES)


@pytest.mark.parametrize("name", FORMULAE)
def test_bubble_matches_the_formula(name: str) -> None:
    formula = FORMULAE[name].bubble
    for ranks, microbatches in SIZES:
        timeline = price(name, ranks, microbatches)
        expected = formula.value(At(ranks, microbatches, FAMILIES[name].stages_per_rank))
        idle = timeline.papers_bubble_rate * timeline.longest_span
        if formula.is_exact:
            assert idle == pytest.approx(expected, abs=1e-9), (ranks, microbatches)
        else:
            assert idle <= expected + 1e-9, (ranks, microbatches)


@pytest.mark.parametrize("name", TRAINED)
def test_memory_matches_the_formula(name: str) -> None:
    formula = FORMULAE[name].memory
    assert formula.is_exact
    for ranks, microbatches in SIZES:
        timeline = price(name, ranks, microbatches)
        expected = formula.value(At(ranks, microbatches, FAMILIES[name].stages_per_rank))
        assert timeline.peak_microbatches == pytest.approx(expected), (ranks, microbatches)


@pytest.mark.parametrize("name", UNEQUAL)
def test_bubble_matches_the_formula_where_costs_differ(name: str) -> None:
    seconds = {"forward": 1.0, "backward_input": 1.25, "backward_weight": 0.75}
    for ranks, microbatches in ((2, 4), (4, 12), (8, 16)):
        timeline = price(name, ranks, microbatches, Costs.from_mapping(seconds))
        at = At(ranks, microbatches, FAMILIES[name].stages_per_rank, **seconds)
        idle = timeline.papers_bubble_rate * timeline.longest_span
        expected = FORMULAE[name].bubble.value(at)
        assert idle == pytest.approx(expected, abs=1e-9), (ranks, microbatches)

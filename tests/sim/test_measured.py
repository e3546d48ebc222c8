"""Costs that are read off a timeline price its schedule as it ran."""

from dataclasses import replace

import pytest

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.sim.engine import simulate
from penstock.sim.measured import costs_of

COSTS = Costs(
    forward=[1, 2, 3, 4], backward_input=[2, 1, 2, 1], backward_weight=[1, 1, 2, 2], send=0.25
)


@pytest.mark.parametrize("family", ["GPipe", "1F1B", "ZB-H1", "ZB-H2"])
def test_what_was_simulated_comes_back(family: str) -> None:
    timeline = simulate(lower(build(family, ranks=4, microbatches=6)), COSTS)
    again = simulate(timeline.schedule, costs_of(timeline))
    assert again.start == pytest.approx(timeline.start)
    assert again.end == pytest.approx(timeline.end)


def test_kind_that_never_runs_costs_nothing() -> None:
    costs = costs_of(simulate(build("1F1B", ranks=4, microbatches=6), replace(COSTS, send=0.0)))
    assert costs.forward == (1, 2, 3, 4)
    assert costs.full_backward == (3, 2, 4, 3)
    assert costs.backward_input == costs.backward_weight == (0, 0, 0, 0)
    assert costs.send == 0

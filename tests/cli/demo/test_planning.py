"""The plan of the demo: which one is taken, and why."""

from typing import Literal

import pytest

from penstock.cli.demo.planning import describe_choice
from penstock.costs import Costs
from penstock.planner import plan

pytest.importorskip("torch")

from penstock.tools.demo.candidates import PlannedCandidate


def planned(placement: Literal["loop", "v"], costs: Costs) -> PlannedCandidate:
    found = plan(costs, ranks=2, microbatches=4, placement=placement, effort=2000)
    return PlannedCandidate(found, (1,) * found.schedule.num_stages)


# F5: the first row was called the fastest above a row with less time, without the rule.
def test_a_slower_plan_comes_with_the_rule_that_chose_it() -> None:
    loop, v = planned("loop", Costs()), planned("v", Costs())
    assert v.plan.seconds < loop.plan.seconds
    assert describe_choice([loop, v]).startswith(
        "the first is the plan, although v is predicted to be faster: it sends twice as many "
        "messages, which cost the host time that these costs leave out, so it must be faster by "
        "10%; "
    )
    assert describe_choice([v, loop]).startswith("the first is the plan; ")


def test_a_proven_plan_says_so() -> None:
    alone = plan(Costs(), ranks=1, microbatches=4, effort=2000)
    assert describe_choice([PlannedCandidate(alone, (1,))]) == (
        "the first is the plan; it is proven that no order of this cut is faster"
    )

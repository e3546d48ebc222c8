"""The outcome of the demo: the plan against the best family, and why if it is behind."""

from dataclasses import replace

import pytest

from penstock.assembly import build, lower
from penstock.cli.demo.learning import compare_with_family
from penstock.costs import Costs
from penstock.sim.engine import simulate

pytest.importorskip("torch")

from penstock.tools.demo.candidates import DemoCandidate
from penstock.tools.demo.comparison import Result


def result(name: str, family: str, *seconds: float, slower: float = 1.0) -> Result:
    schedule = build(family, ranks=2, microbatches=4)
    predicted = simulate(schedule)
    costs = Costs(forward=slower, backward_input=slower, backward_weight=slower)
    recorded = replace(simulate(lower(schedule), costs), program=None)
    candidate = DemoCandidate(name, schedule, (4, 4), predicted)
    return Result(candidate, seconds, (1.0,), recorded)


def test_a_plan_that_wins_is_said_to_win() -> None:
    outcome = compare_with_family(
        result("the plan", "ZB-H1", 1.0, 1.0), result("1F1B", "1F1B", 1.25, 1.25)
    )
    assert outcome == (
        "the plan was faster than 1F1B, the best family within the limit: 1F1B took 25.0 % longer "
        "(predicted: 15.4 %)"
    )


def test_what_is_below_the_variation_is_level() -> None:
    outcome = compare_with_family(
        result("the plan", "ZB-H1", 0.9, 1.0, 1.1), result("1F1B", "1F1B", 0.98, 0.98)
    )
    assert outcome == (
        "the plan and 1F1B, the best family within the limit, are level within the noise: 1F1B "
        "took 2.0 % less (predicted: 15.4 % longer), and steps of one schedule vary by up to "
        "10.0 %"
    )


def test_a_plan_that_loses_says_why() -> None:
    outcome = compare_with_family(
        result("the plan", "ZB-H1", 1.0, 1.0, slower=1.5), result("1F1B", "1F1B", 0.8, 0.8)
    )
    assert outcome == (
        "1F1B, the best family within the limit, was faster: it took 20.0 % less (predicted: "
        "15.4 % longer). the plan: 6500.0 ms longer than predicted (compute +6500.0 ms); "
        "1F1B: 0.0 ms longer than predicted (no cause)"
    )


def test_a_plan_in_the_order_of_a_family_has_nothing_to_win() -> None:
    outcome = compare_with_family(result("the plan", "1F1B", 1.0), result("1F1B", "1F1B", 1.0))
    assert outcome == "the plan runs in the order of 1F1B, the best family within the limit"

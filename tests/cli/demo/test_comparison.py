"""The verdict of a comparison: plain about who was faster, and about what cannot be told."""

import pytest

from penstock.assembly import build
from penstock.cli.demo.comparison import describe_race
from penstock.sim.engine import simulate

pytest.importorskip("torch")

from penstock.tools.demo.candidates import DemoCandidate
from penstock.tools.demo.comparison import Result


def result(name: str, *seconds: float) -> Result:
    timeline = simulate(build("1F1B", ranks=1, microbatches=1))
    return Result(
        DemoCandidate(name, timeline.schedule, (8,), timeline), seconds, (1.0,), timeline
    )


def test_fastest_is_named_where_it_is_clear() -> None:
    found = [result("the plan", 1.0, 1.01, 0.99), result("1F1B", 1.1), result("GPipe", 1.2)]
    assert describe_race(found) == (
        "the plan was fastest; times as long as the plan: 1F1B 1.10, GPipe 1.20"
    )


def test_rival_that_is_faster_is_named_too() -> None:
    found = [result("the plan", 1.0), result("1F1B", 0.8), result("GPipe", 1.2)]
    assert describe_race(found) == (
        "1F1B was fastest; times as long as the plan: 1F1B 0.80, GPipe 1.20"
    )


def test_what_varies_more_than_it_differs_has_no_winner() -> None:
    found = [result("the plan", 0.8, 1.0, 1.2), result("1F1B", 1.1, 1.1, 1.1)]
    assert describe_race(found) == (
        "no clear winner, for steps of one schedule vary by up to 20%; "
        "times as long as the plan: 1F1B 1.10"
    )

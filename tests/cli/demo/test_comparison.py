"""The summary of a comparison: the fastest schedule, or that there is no clear winner."""

import pytest

from penstock.assembly import build
from penstock.cli.demo.comparison import describe_times
from penstock.sim.engine import simulate

pytest.importorskip("torch")

from penstock.tools.demo.candidates import DemoCandidate
from penstock.tools.demo.comparison import Result


def result(name: str, *seconds: float) -> Result:
    timeline = simulate(build("1F1B", ranks=1, microbatches=1))
    return Result(
        DemoCandidate(name, timeline.schedule, (8,), timeline), seconds, (1.0,), timeline
    )


def test_fastest_schedule_is_named_if_it_is_clear() -> None:
    found = [result("the plan", 1.0, 1.01, 0.99), result("1F1B", 1.1), result("GPipe", 1.2)]
    assert describe_times(found) == (
        "the plan was fastest; relative to the plan: 1F1B 1.10, GPipe 1.20"
    )


def test_faster_baseline_is_named() -> None:
    found = [result("the plan", 1.0), result("1F1B", 0.8), result("GPipe", 1.2)]
    assert describe_times(found) == (
        "1F1B was fastest; relative to the plan: 1F1B 0.80, GPipe 1.20"
    )


def test_differences_below_the_variation_have_no_winner() -> None:
    found = [result("the plan", 0.8, 1.0, 1.2), result("1F1B", 1.1, 1.1, 1.1)]
    assert describe_times(found) == (
        "no clear winner, since steps of one schedule vary by up to 20.0 %; "
        "relative to the plan: 1F1B 1.10"
    )

"""The playground's orders and numbers are Python's, for every family."""

from itertools import product
from random import Random
from typing import Any

import pytest

from penstock.costs import Costs
from penstock.errors import SizeError
from penstock.ir.text import format_csv
from penstock.schedules.registry import FAMILIES
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.playground.catalogue import MICROBATCHES, RANKS, STAGES_PER_RANK
from tests.browser import Opener, Visit
from tests.view.playground.pages import COSTS, page, settings, stages_of


def price(
    name: str, ranks: int, microbatches: int, stages: int, costs: Costs = COSTS
) -> Timeline | str:
    try:
        schedule = FAMILIES[name].generate(ranks, microbatches, stages_of(name, stages))
    except SizeError as error:
        return str(error)
    return simulate(schedule, costs)


def numbers(timeline: Timeline) -> dict[str, object]:
    return {
        "endTime": timeline.end_time,
        "bubble": timeline.bubble_rate,
        "rankBubbles": list(timeline.rank_bubble_rates),
        "papersIdle": timeline.papers_bubble_rate * timeline.longest_span,
        "peakActivations": timeline.peak_activations,
        "peakMicrobatches": timeline.peak_microbatches,
        "rankActivations": list(timeline.rank_peak_activations),
        "peakBytes": timeline.peak_bytes,
    }


def compare_numbers(visit: Visit, ranks: int, microbatches: int, stages: int) -> None:
    compare_priced(visit, settings(ranks=ranks, microbatches=microbatches, stages=stages), COSTS)


def compare_priced(visit: Visit, sizes: dict[str, Any], costs: Costs) -> None:
    for found in visit.ask("measure", sizes):
        size = sizes["ranks"], sizes["microbatches"], sizes["stages"]
        expected = price(found["name"], *size, costs)
        if isinstance(expected, str):
            assert found == {"name": found["name"], "refusal": expected, "numbers": None}
            continue
        for name, value in numbers(expected).items():
            assert found["numbers"][name] == pytest.approx(value, rel=1e-9, abs=1e-9), (
                found["name"],
                sizes,
                name,
            )


def test_numbers_of_every_family_are_those_of_python(visit_page: Opener) -> None:
    visit = visit_page(page())
    assert [each["name"] for each in visit.ask("measure", {})] == [
        *(name for name in FAMILIES if name != "ForwardOnly"),
        "ForwardOnly",
    ]
    for ranks in RANKS:
        for microbatches in (1, 7, 16):
            compare_numbers(visit, ranks, microbatches, stages=2)
    compare_numbers(visit, 4, 8, stages=3)
    compare_numbers(visit, 3, 12, stages=4)


@pytest.mark.slow
def test_numbers_are_those_of_python_at_every_size(visit_page: Opener) -> None:
    visit = visit_page(page())
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            for stages in STAGES_PER_RANK:
                compare_numbers(visit, ranks, microbatches, stages)


@pytest.mark.slow
def test_numbers_are_those_of_python_at_any_costs(visit_page: Opener) -> None:
    visit, random = visit_page(page()), Random(7)
    for _ in range(20):
        stretch = {"forward": 40, "input": 40, "weight": 40}
        drawn = {name: random.randint(1, most) / 10 for name, most in stretch.items()}
        drawn |= {"transfer": random.randint(0, 50) * 0.02, "gain": random.randint(0, 20) * 0.05}
        drawn |= {name: random.randint(0, 64) * 0.25 for name in ("activation", "stash")}
        costs = Costs(
            forward=drawn["forward"],
            backward_input=drawn["input"],
            backward_weight=drawn["weight"],
            transfer=drawn["transfer"],
            overlap_gain=drawn["gain"],
            activation_bytes=drawn["activation"],
            weight_stash_bytes=drawn["stash"],
        )
        sizes = {"ranks": random.randint(2, 8), "microbatches": random.choice([1, 2, 3, 5, 8, 12])}
        compare_priced(visit, {**drawn, **sizes, "stages": random.randint(1, 4)}, costs)


def test_order_and_times_are_those_of_python(visit_page: Opener) -> None:
    visit = visit_page(page())
    for name, ranks in product(FAMILIES, range(2, 9)):
        expected = price(name, ranks, 8, 2)
        found = visit.ask("times", name, settings(ranks=ranks, microbatches=8, stages=2))
        if isinstance(expected, str):
            assert found is None
            continue
        schedule = expected.schedule
        assert found["csv"] == format_csv(schedule.orders, schedule.dataflow)
        assert found["start"] == pytest.approx(expected.start.tolist(), rel=1e-9, abs=1e-9)
        assert found["end"] == pytest.approx(expected.end.tolist(), rel=1e-9, abs=1e-9)


def test_page_is_small_and_carries_no_address() -> None:
    text = page()
    assert len(text) < 400_000
    # The only address is the name of SVG's namespace.
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == text.count("http-equiv")

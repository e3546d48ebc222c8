"""A search chooses everything together, keeps the limit, and says why others lost."""

from math import inf

import pytest

from penstock.checks.report import check
from penstock.errors import MemoryLimitError
from penstock.planner.order.families import fixed_schedules
from penstock.planner.partition.pieces import Piece
from penstock.planner.plans import Plan
from penstock.planner.search.choices import Choices
from penstock.planner.search.findings import Findings
from penstock.planner.search.search import search
from penstock.planner.search.space import Space


def layers(size: int = 1, count: int = 8, overhead: float = 0.0) -> list[Piece]:
    """Blocks that take a second per row and some overhead, with an embedding and a head."""
    seconds = size + overhead
    embedding = Piece("embedding", forward=0.25 * seconds, parameter_bytes=40)
    head = Piece(
        "head",
        forward=1.5 * seconds,
        backward_input=1.5 * seconds,
        backward_weight=1.5 * seconds,
        parameter_bytes=40,
        activation_bytes=20 * size,
        weight_stash_bytes=10 * size,
        message_bytes=size,
    )
    blocks = [
        Piece(
            f"block.{number}",
            forward=seconds,
            backward_input=seconds,
            backward_weight=0.75 * seconds,
            parameter_bytes=10,
            activation_bytes=8 * size,
            weight_stash_bytes=4 * size,
            message_bytes=size,
        )
        for number in range(count)
    ]
    return [embedding, *blocks, head]


def assert_sound(findings: Findings, batch: int, count: int = 10) -> None:
    seconds = [one.plan.seconds for one in findings.found]
    assert seconds == sorted(seconds)
    for one in findings.found:
        check(one.plan.schedule)
        assert one.plan.keeps_limit
        assert one.plan.gap >= -1e-9
        assert sum(one.choices.sizes) == count
        assert one.choices.microbatch_size * one.plan.problem.microbatches == batch


def best_known_seconds(memory: float | None) -> float:
    """Return the seconds of the fastest family over all cuts and checkpoints of a search."""
    space = Space.of(layers(), 2, 6, memory, 0.0, boundary="everything")
    plans = [
        Plan(one.problem, schedule, 0.0, one.choices)
        for one in space.candidates()
        for schedule in fixed_schedules(one.problem)
    ]
    return min((plan.seconds for plan in plans if plan.keeps_limit), default=inf)


@pytest.mark.parametrize("memory", [None, 400.0, 250.0, 180.0])
def test_search_keeps_the_limit_and_beats_every_family_on_every_cut(memory: float | None) -> None:
    findings = search(layers(), ranks=2, batch=6, memory=memory, seconds=0.5)
    assert_sound(findings, batch=6)
    assert findings.best.seconds <= best_known_seconds(memory)


def test_little_memory_is_worth_a_recomputation() -> None:
    findings = search(layers(), ranks=2, batch=8, memory=135.0, seconds=1.0)
    assert findings.best.choices == Choices((5, 5), checkpointed=(0,))


def test_overhead_per_microbatch_makes_larger_ones_worth_it() -> None:
    sizes = {size: layers(size, overhead=2.0) for size in (1, 2, 4)}
    findings = search(sizes, ranks=2, batch=16, seconds=0.5)
    assert_sound(findings, batch=16)
    assert findings.best.choices is not None
    assert findings.best.choices.microbatch_size > 1


def test_step_that_waits_for_nothing_is_never_slower() -> None:
    waiting = search(layers(), ranks=2, batch=6, seconds=0.5)
    free = search(layers(), ranks=2, batch=6, seconds=0.5, boundary="nothing")
    assert free.best.seconds <= waiting.best.seconds
    assert free.best.problem.boundary == "nothing"


def test_comparisons_name_the_causes() -> None:
    findings = search(layers(), ranks=2, batch=6, memory=250.0, seconds=0.5)
    assert findings.comparisons[0] == "fastest"
    assert all(v == "as fast" or v.startswith("slower by ") for v in findings.comparisons[1:])
    assert len(findings.found) > 1


def test_limit_that_nothing_keeps_names_what_comes_closest() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        search(layers(), ranks=2, batch=6, memory=100.0)
    message = str(caught.value)
    assert message.startswith("no choice fits; the closest is ")
    assert "over the limit by " in message
    assert message.endswith(" bytes per rank would do, or more ranks")


def test_limit_of_a_refusal_would_do() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        search(layers(), ranks=2, batch=6, memory=100.0)
    number = str(caught.value).rpartition("a limit of ")[2].partition(" bytes")[0]
    enough = float(number.replace(",", ""))
    assert search(layers(), ranks=2, batch=6, memory=enough, seconds=0.2).best.keeps_limit
    with pytest.raises(MemoryLimitError):
        search(layers(), ranks=2, batch=6, memory=enough - 1)


def test_searching_twice_gives_the_same() -> None:
    # Without any time the solver does what it does in any case, however busy the machine is.
    one, two = (search(layers(), ranks=2, batch=9, memory=250.0, seconds=0.0) for _ in range(2))
    assert (one.found, one.refused, one.num_slower) == (two.found, two.refused, two.num_slower)


def test_a_plan_for_less_memory_is_a_guess_for_more() -> None:
    tight = search(layers(), ranks=2, batch=6, memory=260, effort=200_000).best
    loose = search(layers(), ranks=2, batch=6, memory=300, effort=0, known=[tight]).best
    assert loose.seconds <= tight.seconds
    # Plans for another batch are left out.
    other = search(layers(), ranks=2, batch=8, memory=300, effort=0, known=[tight]).best
    assert other.choices is not None
    assert other.problem.microbatches * other.choices.microbatch_size == 8

"""Which stage feeds which."""

from collections.abc import Sequence

import pytest

from penstock.errors import ScheduleError
from penstock.ir.dataflow import Dataflow, Routed

SKIP = Dataflow(4, [(2, 3), (0, 3), (0, 1), (1, 2)])


def test_chain_feeds_the_next_stage() -> None:
    chain = Dataflow.chain(4)
    assert chain.edges == ((0, 1), (1, 2), (2, 3))
    assert [chain.producers(stage) for stage in range(4)] == [(), (0,), (1,), (2,)]
    assert [chain.consumers(stage) for stage in range(4)] == [(1,), (2,), (3,), ()]
    assert chain.is_chain


def test_single_stage_is_a_chain_without_edges() -> None:
    assert Dataflow.chain(1) == Dataflow(1, [])
    assert Dataflow.chain(1).is_chain


def test_skip_is_one_more_producer() -> None:
    assert SKIP.edges == ((0, 1), (0, 3), (1, 2), (2, 3))
    assert [SKIP.producers(stage) for stage in range(4)] == [(), (0,), (1,), (0, 2)]
    assert [SKIP.consumers(stage) for stage in range(4)] == [(1, 3), (2,), (3,), ()]
    assert not SKIP.is_chain


def test_order_and_repetition_of_edges_do_not_matter() -> None:
    assert Dataflow(2, [(0, 1), (0, 1)]) == Dataflow.chain(2)
    assert hash(Dataflow(2, [(0, 1), (0, 1)])) == hash(Dataflow.chain(2))


def test_copies_are_chains_side_by_side_that_run_the_same_parts() -> None:
    copies = Dataflow.copies(3, 2)
    assert copies.edges == ((0, 1), (1, 2), (3, 4), (4, 5))
    assert copies.parts == (0, 1, 2, 0, 1, 2)
    assert copies.num_parts == 3
    assert copies.stream_of_stage == (0, 0, 0, 1, 1, 1)
    assert not copies.is_chain


def test_stages_that_are_not_copies_are_all_in_one_stream() -> None:
    # Two encoders that feed one stage: no edge joins 0 and 1, yet both see every microbatch.
    assert Dataflow(3, [(0, 2), (1, 2)]).stream_of_stage == (0, 0, 0)


@pytest.mark.parametrize(
    ("stages", "edges", "parts", "message"),
    [
        (
            2,
            [(1, 0)],
            None,
            "an edge must go from a lower to a higher stage below 2 (got 1 > 0)",
        ),
        (
            2,
            [(1, 1)],
            None,
            "an edge must go from a lower to a higher stage below 2 (got 1 > 1)",
        ),
        (
            2,
            [(0, 2)],
            None,
            "an edge must go from a lower to a higher stage below 2 (got 0 > 2)",
        ),
        (
            2,
            [(-1, 1)],
            None,
            "an edge must go from a lower to a higher stage below 2 (got -1 > 1)",
        ),
        (2, [(0, 1)], [0], "parts must have one number per stage (stages: 2, parts: 1)"),
        # A part number was once taken as it came, and costs were made for that many parts.
        (
            2,
            [(0, 1)],
            [0, 999_999_999],
            "parts must be numbered from 0 without gaps (got 999999999 for 2 stages)",
        ),
        (2, [(0, 1)], [1, 1], "parts must be numbered from 0 without gaps (got 1 for 2 stages)"),
        (2, [(0, 1)], [0, -1], "parts must be numbered from 0 without gaps (got -1 for 2 stages)"),
    ],
)
def test_dataflow_that_makes_no_sense_is_refused(
    stages: int, edges: Sequence[tuple[int, int]], parts: Sequence[int] | None, message: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        Dataflow(stages, edges, parts)
    assert str(caught.value) == message


def test_a_dataflow_between_parts_is_laid_over_stages_that_run_them() -> None:
    flow = Dataflow(3, [(0, 1), (1, 2), (0, 2)])
    assert flow.with_parts([0, 1, 2]) == flow
    copied = flow.with_parts([0, 1, 2, 0, 1, 2])
    assert copied.edges == ((0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5))
    assert copied.parts == (0, 1, 2, 0, 1, 2)
    assert Dataflow.chain(3).with_parts((0, 1, 2) * 2) == Dataflow.copies(3, 2)


def test_what_is_routed_is_a_value() -> None:
    assert Routed({1: "a", 3: "b"}) == Routed({3: "b", 1: "a"})

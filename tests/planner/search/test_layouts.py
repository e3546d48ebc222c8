"""Placements are chosen by name, by the costs, or by the largest number of stages."""

import pytest

from penstock.costs import Costs
from penstock.errors import ArgumentError, SizeError
from penstock.ir.placement import Placement
from penstock.planner.search.layouts import (
    describe_placement,
    find_placement,
    placements_for,
    regular_placements,
)


def test_names_mean_placements() -> None:
    found = {name: find_placement(name, 4, Costs()) for name in ("loop", "interleaved", "v")}
    assert found == {
        "loop": Placement.loop(4),
        "interleaved": Placement.loop(4, 2),
        "v": Placement.v(4),
    }
    assert find_placement("v", 2, Costs(forward=[1] * 8)) == Placement.v(2, 4)
    assert find_placement(Placement.v(3), 3, Costs()) == Placement.v(3)


def test_unknown_placement_is_refused() -> None:
    with pytest.raises(ArgumentError) as caught:
        find_placement("w", 4, Costs())
    assert str(caught.value) == (
        "placement must be 'loop', 'interleaved', 'v' or a Placement (got 'w')"
    )
    with pytest.raises(SizeError, match="the placement must have 4 ranks"):
        find_placement(Placement.v(3), 4, Costs())


def test_costs_per_stage_fix_the_number_of_stages() -> None:
    assert placements_for(Costs(forward=[1] * 4), 4) == (Placement.loop(4),)
    assert placements_for(Costs(forward=[1] * 8), 4) == (Placement.loop(4, 2), Placement.v(4))
    assert placements_for(Costs(), 4) == (
        Placement.loop(4),
        Placement.loop(4, 2),
        Placement.v(4),
    )
    assert placements_for(Costs(), 1) == (Placement.loop(1), Placement.loop(1, 2))


def test_sizes_of_microbatches_and_wires_of_ranks_are_not_costs_per_stage() -> None:
    # Six microbatches of different size made plans for six stages, and five were refused.
    for uneven in (Costs(microbatch_scale=[1, 2, 1, 2, 1]), Costs(wires=[0, 1])):
        assert placements_for(uneven, 2) == placements_for(Costs(), 2)


def test_costs_for_other_numbers_of_stages_are_refused() -> None:
    with pytest.raises(SizeError, match="6 stages do not come out even on 4 ranks"):
        placements_for(Costs(forward=[1] * 6), 4)
    with pytest.raises(SizeError) as caught:
        placements_for(Costs(forward=[1] * 4, backward_input=[1] * 8), 4)
    assert str(caught.value) == (
        "costs per stage must be for one number of stages (got forward 4, backward_input 8)"
    )


def test_regular_placements_are_those_for_which_there_are_layers() -> None:
    known = (
        Placement.loop(2),
        Placement.loop(2, 2),
        Placement.v(2),
        Placement.loop(2, 3),
        Placement.v(2, 4),
    )
    assert regular_placements(2, most_stages=1) == ()
    assert regular_placements(2, most_stages=7) == known[:4]
    assert regular_placements(2, most_stages=99) == known


def test_placements_are_described_in_a_word() -> None:
    told = [
        describe_placement(placement)
        for placement in (
            Placement.loop(4),
            Placement.loop(4, 2),
            Placement.loop(4, 3),
            Placement.v(4),
            Placement.v(4, 4),
            Placement((0, 0, 1, 1)),
            Placement((0, 1, 1)),
        )
    ]
    assert told == [
        "loop",
        "interleaved",
        "interleaved x3",
        "v",
        "v x4",
        "free",
        "free x1.5",
    ]

"""Pieces count bytes as costs do."""

from dataclasses import replace

from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.partition.partition import partition
from penstock.planner.partition.pieces import Piece


# `parameter_bytes` of a piece were whatever was counted, those of costs the parameters alone: a
# plan for shards took gradients and optimizer state for parameters that come and go.
def test_a_piece_and_the_costs_of_its_stage_have_the_same_bytes_by_the_same_names() -> None:
    one = Piece("a", 1.0, 1.0, 1.0, 10.0, 8.0, 16.0, activation_bytes=2.0)
    pieces = [replace(one, name=name) for name in "abcd"]
    found = partition(pieces, Placement.loop(ranks=2), memory=2 * 34 + 4 * 2, in_flight=2)
    assert pieces[0].resident_bytes == 34.0
    assert found.stage_bytes == (2 * 34.0 + 4 * 2, 2 * 34.0 + 4 * 2)
    assert found.to_costs() == Costs(
        forward=(2.0, 2.0),
        backward_input=(2.0, 2.0),
        backward_weight=(2.0, 2.0),
        activation_bytes=(4.0, 4.0),
        weight_stash_bytes=(0.0, 0.0),
        message_bytes=(0.0, 0.0),
        workspace_bytes=(0.0, 0.0),
        parameter_bytes=(20.0, 20.0),
        gradient_bytes=(16.0, 16.0),
        optimizer_bytes=(32.0, 32.0),
    )

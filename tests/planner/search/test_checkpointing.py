"""A checkpointed stage holds its input, runs forward once more, and needs room to do so."""

from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.checkpointing import (
    checkpoint,
    fewest_checkpoints,
    is_worth_checkpointing,
)

COSTS = Costs(
    forward=[1, 2, 1, 2],
    activation_bytes=[10, 20, 10, 20],
    message_bytes=[2, 2, 2, 2],
    workspace_bytes=[1, 1, 1, 1],
)


def test_checkpointed_stage_holds_its_input_and_runs_forward_again() -> None:
    assert checkpoint(COSTS, [1, 3], 4) == Costs(
        forward=[1, 2, 1, 2],
        backward_input=[1, 4, 1, 4],
        backward_weight=[1, 0, 1, 0],
        weight_stash_bytes=[0, 0, 0, 0],
        activation_bytes=[10, 2, 10, 2],
        message_bytes=[2, 2, 2, 2],
        workspace_bytes=[1, 19, 1, 19],
    )


def test_full_backward_pays_for_the_forward_too() -> None:
    found = checkpoint(Costs(forward=2, full_backward=3), [0], 2)
    assert (found.backward_input, found.full_backward) == ((4, 1), (5, 3))


def test_without_stages_nothing_changes() -> None:
    assert checkpoint(COSTS, [], 4) is COSTS


def test_one_microbatch_at_a_time_needs_the_same_room_either_way() -> None:
    placement = Placement.loop(4)
    plain = SchedulingProblem.of(COSTS, placement, 4)
    saving = SchedulingProblem.of(checkpoint(COSTS, range(4), 4), placement, 4)
    assert plain.least_bytes.tolist() == saving.least_bytes.tolist()


def test_checkpoints_whose_size_is_unknown_are_not_worth_it() -> None:
    assert is_worth_checkpointing(COSTS, 4)
    assert not is_worth_checkpointing(Costs(activation_bytes=10), 4)
    assert not is_worth_checkpointing(Costs(activation_bytes=2, message_bytes=2), 4)


def test_as_few_stages_as_needed_are_checkpointed() -> None:
    placement = Placement.loop(2, 2)
    at = {
        limit: fewest_checkpoints(SchedulingProblem.of(COSTS, placement, 8, limit), [4, 4, 2, 2])
        for limit in (1000, 140, 100, 90)
    }
    # Rank 0 holds stages 0 and 2 (60 bytes in flight), rank 1 stages 1 and 3 (120 bytes).
    assert at == {1000: (), 140: (), 100: (1,), 90: (1,)}


def test_where_nothing_is_enough_all_stages_are_checkpointed() -> None:
    placement = Placement.loop(2, 2)
    problem = SchedulingProblem.of(COSTS, placement, 8, 60)
    assert fewest_checkpoints(problem, [40, 40, 20, 20]) == (0, 1, 2, 3)

from random import Random

from penstock.assembly import build
from penstock.checks.report import check
from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.passes.backward import split_backward
from penstock.planner.order.merge import make_whole, merge_for_free, with_whole_backwards
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from tests.planner.problems import draw_problem
from tests.strategies import every_family


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, works)) for works in schedule.orders]


def test_a_backward_is_merged_where_nobody_waits_for_its_gradient() -> None:
    problem = SchedulingProblem.of(Costs(), Placement.loop(2), 2)
    schedule = Schedule.from_orders(
        [
            ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"],
            ["1F0", "1I0", "1W0", "1F1", "1I1", "1W1"],
        ]
    )
    # Rank 0 takes up the gradient of microbatch 0 at once, and so it does that of microbatch 1.
    assert texts(merge_for_free(schedule, problem)) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1I0 1W0 1F1 1I1 1W1",
    ]


def test_merging_never_makes_anything_slower() -> None:
    for schedule in every_family(4, 8):
        if schedule.is_forward_only or not schedule.dataflow.is_chain:
            continue
        split = split_backward(schedule)
        for seed in range(3):
            problem = draw_problem(Random(seed), split.placement, 8)
            merged = merge_for_free(split, problem)
            check(merged)
            before, after = (simulate(s, problem.costs).end_time for s in (split, merged))
            assert after <= before


def test_a_cheaper_whole_backward_is_taken_where_it_helps() -> None:
    split = split_backward(build("1F1B", ranks=2, microbatches=4))
    cheaper = Costs(backward_input=2, backward_weight=2, full_backward=2.5)
    problem = SchedulingProblem.of(cheaper, Placement.loop(2), 4)
    assert merge_for_free(split, problem) == build("1F1B", ranks=2, microbatches=4)


def test_a_dearer_whole_backward_is_not_taken() -> None:
    split = split_backward(build("1F1B", ranks=2, microbatches=4))
    problem = SchedulingProblem.of(Costs(full_backward=3), Placement.loop(2), 4)
    assert merge_for_free(split, problem) == split


def test_the_problem_without_splitting_is_asked_for_only_where_splitting_costs() -> None:
    placement = Placement.loop(2)
    same = SchedulingProblem.of(Costs(full_backward=2), placement, 4)
    assert with_whole_backwards(same) is None
    assert with_whole_backwards(SchedulingProblem.of(Costs(), placement, 4)) is None
    cheaper = SchedulingProblem.of(
        Costs(full_backward=(2, 1.5), weight_stash_bytes=0), placement, 4
    )
    assert with_whole_backwards(cheaper) == SchedulingProblem.of(
        Costs(backward_input=(2, 1.5), backward_weight=0), placement, 4
    )
    stashes = SchedulingProblem.of(Costs(activation_bytes=1, weight_stash_bytes=2), placement, 4)
    assert with_whole_backwards(stashes) == SchedulingProblem.of(
        Costs(backward_input=(2, 2), backward_weight=0, activation_bytes=1), placement, 4
    )


def test_whole_backwards_replace_their_input_halves() -> None:
    schedule = Schedule.from_orders([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]])
    assert texts(make_whole(schedule)) == ["0F0 0F1 0B0 0B1"]

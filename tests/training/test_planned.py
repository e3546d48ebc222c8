"""Plans that run: the order is the plan's, the gradients are the unsplit model's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import ArgumentError, SizeError
from penstock.measuring.stages import measure
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.order.solver import solve
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.sim.recorded.costs_of_timeline import costs_of
from penstock.sim.recorded.review import Review, review
from tests.covering import all_but_slow
from tests.models import (
    copy_blocks,
    cut,
    differences,
    gradients_of,
    make_batch,
    make_blocks,
    mean_loss,
    run_reference,
)
from tests.processes import Processes

BLOCKS = make_blocks()
BATCH, TARGET = make_batch()
MICROBATCHES = 5
PLACEMENTS = {
    "one stage per rank": ps.Placement.loop(3),
    "loop": ps.Placement.loop(2, 2),
    "V": ps.Placement.v(3),
}
# Each for stages that are alike, for a heavy first and for a heavy last one.
SHAPES = {"even": (1.0, 1.0), "embedding-heavy": (3.0, 1.0), "head-heavy": (1.0, 3.0)}


def make_problem(placement: ps.Placement, shape: str, capacity: float | None) -> SchedulingProblem:
    """Uneven stages; the capacity is in activations of a microbatch through a whole rank."""
    stages = placement.num_stages
    first, last = SHAPES[shape]
    weight = [first, *[1.0] * (stages - 2), last]
    costs = ps.Costs(
        forward=weight,
        backward_input=[1.1 * w for w in weight],
        backward_weight=[0.9 * w for w in weight],
        transfer=0.1,
        activation_bytes=weight,
        weight_stash_bytes=[0.5 * w for w in weight],
    )
    held = [
        sum(weight[stage] for stage in placement.stages(r)) for r in range(placement.num_ranks)
    ]
    memory = None if capacity is None else [capacity * bytes_held for bytes_held in held]
    return SchedulingProblem.of(costs, placement, MICROBATCHES, memory)


@pytest.mark.parametrize("capacity", all_but_slow([1.0, 2.5, None], [1.0]))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_solved_schedules_give_the_gradients_of_the_unsplit_model(
    placement: ps.Placement, shape: str, capacity: float | None
) -> None:
    plan = solve(make_problem(placement, shape, capacity), seconds=0.2)
    blocks = copy_blocks(BLOCKS)
    stages = cut(blocks, placement.num_stages)
    pipeline = ps.Pipeline(stages, plan, loss=mean_loss)
    assert pipeline.schedule == plan.schedule
    for _ in range(2):
        for block in blocks:
            block.zero_grad()
        result = pipeline.step(BATCH, target=TARGET)
    reference = run_reference(BLOCKS, BATCH, TARGET)
    assert result.loss == pytest.approx(reference.loss, abs=1e-12)
    found = gradients_of(nn.Sequential(*blocks).named_parameters())
    assert differences(found, reference.gradients) == {}


def make_plan(placement: ps.Placement, family: str) -> Plan:
    problem = make_problem(placement, "even", None)
    per_rank = placement.num_stages // placement.num_ranks
    schedule = ps.build(
        family, ranks=placement.num_ranks, microbatches=MICROBATCHES, stages_per_rank=per_rank
    )
    return Plan(problem, schedule, lower_bound(problem))


def test_a_plan_brings_its_microbatches() -> None:
    plan = make_plan(PLACEMENTS["V"], "ZBV")
    pipeline = ps.Pipeline(cut(copy_blocks(BLOCKS), 6), plan, loss=mean_loss)
    recorded = pipeline.step(BATCH, target=TARGET, record=True).timeline
    assert recorded is not None
    assert recorded.schedule.microbatches == MICROBATCHES
    assert recorded.schedule == ps.lower(plan.schedule)


def test_a_schedule_brings_its_microbatches_too() -> None:
    schedule = ps.build("1F1B", ranks=2, microbatches=4)
    pipeline = ps.Pipeline(cut(copy_blocks(BLOCKS), 2), schedule, loss=mean_loss)
    recorded = pipeline.step(BATCH, target=TARGET, record=True).timeline
    assert recorded is not None
    assert recorded.schedule.microbatches == 4


def test_a_name_needs_a_number_of_microbatches() -> None:
    with pytest.raises(ArgumentError) as caught:
        ps.Pipeline(cut(BLOCKS, 2), "1F1B", loss=mean_loss)
    assert str(caught.value) == (
        "microbatches is required when the schedule is given by name (schedule: '1F1B'); give "
        "microbatches=..."
    )


def test_a_plan_for_other_stages_is_refused() -> None:
    plan = make_plan(PLACEMENTS["V"], "ZBV")
    with pytest.raises(SizeError) as caught:
        ps.Pipeline(cut(BLOCKS, 4), plan, loss=mean_loss)
    assert str(caught.value) == (
        "the schedule must fit the stages and ranks (schedule: 6 stages on 3 ranks, here: 4 on "
        "3); build it for these, or change the stages or ranks"
    )


@pytest.mark.filterwarnings("ignore::penstock.measuring.MeasurementWarning")
def test_what_was_measured_is_planned_run_compared_and_learned_from() -> None:
    stages = cut(copy_blocks(BLOCKS), 4)
    rows = BATCH[: len(BATCH) // 4], TARGET[: len(BATCH) // 4]
    costs = measure([*stages], example=rows[:1], loss=mean_loss, target=rows[1])
    plan = solve(SchedulingProblem.of(costs, ps.Placement.v(2), 4), seconds=0.2)
    pipeline = ps.Pipeline(stages, plan, loss=mean_loss)
    pipeline.step(BATCH, target=TARGET)
    recorded = pipeline.step(BATCH, target=TARGET, record=True).timeline
    assert recorded is not None
    found = review(plan.timeline, recorded)
    assert sum(tally.actions for tally in found.tallies) == len(plan.schedule.rows)
    learned = costs_of(recorded, like=costs)
    assert learned.activation_bytes == costs.activation_bytes
    revised = ps.revise(plan, recorded, seconds=0.2)
    assert revised.old.problem.costs == learned
    assert revised.best.timeline.end_time <= ps.simulate(plan.schedule, learned).end_time


def run_plan(rank: int, plan: Plan) -> tuple[dict[str, torch.Tensor], Review]:
    blocks = copy_blocks(BLOCKS)
    stages = cut(blocks, plan.schedule.num_stages)
    own = {stage: stages[stage] for stage in plan.schedule.placement.stages(rank)}
    pipeline = ps.Pipeline(own, plan, loss=mean_loss, group=dist.group.WORLD)
    recorded = pipeline.step(BATCH, target=TARGET, record=True).timeline
    assert recorded is not None
    names = {p: name for name, p in nn.Sequential(*blocks).named_parameters()}
    found = {names[p]: p.grad for p in pipeline.parameters() if p.grad is not None}
    return found, review(plan.timeline, recorded)


@pytest.mark.parametrize("shape", ["embedding-heavy", "head-heavy"])
@pytest.mark.parametrize("placement", [ps.Placement.loop(2, 2), ps.Placement.v(2)])
def test_solved_plans_run_on_two_processes_in_their_order(
    two_processes: Processes, placement: ps.Placement, shape: str
) -> None:
    plan = solve(make_problem(placement, shape, 1.5), seconds=0.2)
    answers = two_processes.run(run_plan, plan)
    gradients = {name: value for found, _ in answers for name, value in found.items()}
    assert differences(gradients, run_reference(BLOCKS, BATCH, TARGET).gradients) == {}
    for _, found in answers:
        # The review was made at all, so the recorded order is the predicted one.
        assert {tally.actions for tally in found.tallies} <= {*range(1, MICROBATCHES + 1)}

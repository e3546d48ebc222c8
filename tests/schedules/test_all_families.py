"""What holds for every family and every size that it exists for."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.errors import SizeError
from penstock.ir.actions import Kind
from penstock.ir.schedule import Schedule
from penstock.schedules.registry import FAMILIES
from penstock.sim.engine import simulate
from tests.strategies import examples

ANY_STAGES_PER_RANK = ("ForwardOnly", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
SIZES = {
    "ranks": st.integers(1, 8),
    "microbatches": st.integers(1, 16),
    "stages_per_rank": st.integers(1, 3),
}
every_family = pytest.mark.parametrize("name", FAMILIES)
every_size = given(**SIZES)
enough_examples = settings(max_examples=examples(60))


def generate(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Build the schedule of this size; skip the example if the family refuses the size."""
    family = FAMILIES[name]
    if name not in ANY_STAGES_PER_RANK:
        stages_per_rank = family.stages_per_rank
    try:
        return family.generate(ranks, microbatches, stages_per_rank)
    except SizeError:
        assume(False)
        raise


def stages_and_microbatches(schedule: Schedule, *kinds: Kind) -> list[tuple[int, int]]:
    """Return stage and microbatch of all actions of these kinds, rank after rank, in order."""
    rows = schedule.rows
    found = rows.is_kind(*kinds)
    return list(zip(rows.stage[found].tolist(), rows.microbatch[found].tolist(), strict=True))


def expected_work(schedule: Schedule) -> list[tuple[int, int]]:
    """Return every stage with every microbatch that its copy of the model takes."""
    streams = schedule.dataflow.stream_of_stage
    share = -(-schedule.microbatches // (max(streams) + 1))
    return [
        (stage, microbatch)
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.microbatches)
        if microbatch // share == streams[stage]
    ]


@every_family
@every_size
@enough_examples
def test_every_stage_runs_every_microbatch_once(
    name: str, ranks: int, microbatches: int, stages_per_rank: int
) -> None:
    schedule = generate(name, ranks, microbatches, stages_per_rank)
    once = expected_work(schedule)
    assert sorted(stages_and_microbatches(schedule, Kind.FORWARD)) == once
    for half in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        done = sorted(stages_and_microbatches(schedule, half, Kind.FULL_BACKWARD))
        assert done == ([] if schedule.is_forward_only else once)


@every_family
@every_size
@enough_examples
def test_every_rank_runs_its_own_stages_only(
    name: str, ranks: int, microbatches: int, stages_per_rank: int
) -> None:
    schedule = generate(name, ranks, microbatches, stages_per_rank)
    holder = np.array(schedule.placement.rank_of_stage)
    assert holder[schedule.rows.stage].tolist() == schedule.rows.rank_of_row().tolist()


@every_family
@every_size
@enough_examples
def test_microbatches_of_each_stage_come_in_order(
    name: str, ranks: int, microbatches: int, stages_per_rank: int
) -> None:
    schedule = generate(name, ranks, microbatches, stages_per_rank)
    for kinds in (
        (Kind.FORWARD,),
        (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD),
        (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD),
    ):
        # Only looped breadth-first goes back the way it came.
        step = -1 if name == "LoopedBFS" and kinds != (Kind.FORWARD,) else 1
        numbers: dict[int, list[int]] = {}
        for stage, microbatch in stages_and_microbatches(schedule, *kinds):
            numbers.setdefault(stage, []).append(microbatch)
        assert all(order == sorted(order)[::step] for order in numbers.values())


def first_round(ranks: int, microbatches: int) -> int:
    """Return the size of the first and largest round of an interleaved schedule."""
    return -(-microbatches // max(1, microbatches // ranks))


def peak_activations(name: str, r: int, p: int, m: int, v: int) -> int:
    """Stage activations that rank r of p holds at most, with m microbatches, v stages per rank."""
    match name:
        case "ForwardOnly" | "GPipe" | "LoopedBFS":
            return v * m
        case "1F1B":
            return min(p - r, m)
        case "Interleaved1F1B":
            return min((v - 1) * first_round(p, m) + 2 * (p - 1 - r) + 1, v * m)
        case "ZB-H1":
            return min(p, m)
        case "ZB-H2":
            return min(2 * p - 1, m)
        case "InterleavedZeroBubble":
            return min((v - 1) * first_round(p, m) + p, v * m)
        case "ZBV":
            return min(2 * p, 2 * m, m + r + 1)
        case "V-Half":
            return min(2 * ((p + 2) // 2), 2 * m)
        case "V-Min":
            return min(2 * ((p + 4) // 3), 2 * m)
        case "DualPipeV":
            return min(2 * p + 1, 2 * m, m + r + 1)
        case "DualPipe":
            # As in DualPipeV, with the share of the nearer end and the distance from it.
            near_share, distance = (m + (2 * r < p)) // 2, min(r, p - 1 - r)
            return min(p + 1, m, near_share + distance + 1)
        case _:
            raise AssertionError(f"write down the peak of {name} here")


@every_family
@every_size
@enough_examples
def test_order_runs_to_its_end_with_the_known_peak_of_activations(
    name: str, ranks: int, microbatches: int, stages_per_rank: int
) -> None:
    schedule = generate(name, ranks, microbatches, stages_per_rank)
    sizes = (ranks, microbatches, schedule.num_stages // ranks)
    expected = tuple(peak_activations(name, rank, *sizes) for rank in range(ranks))
    # The simulator raises where ranks wait for one another for ever.
    assert simulate(schedule).rank_peak_activations == expected

"""Host seconds, collectives, shared wires and microbatch sizes, beside timelines drawn by hand."""

import numpy as np
import pytest

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.errors import CostsError, DeadlockError
from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule
from penstock.passes.send_recv import add_send_recv
from penstock.planner.planning import plan
from penstock.sim.comparison import compare
from penstock.sim.engine import simulate
from penstock.sim.explain import explain
from penstock.sim.repeated import Repeated
from penstock.sim.timeline import Timeline
from tests import strategies
from tests.tables import read_schedule

TWO_CHAINS = Dataflow(4, [(0, 2), (1, 3)])
TWO_RANKS = """
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
"""


def spans(timeline: Timeline, rank: int) -> str:
    """Return a rank's actions with start and end, on one line."""
    return " ".join(f"{s.action}[{s.start:g},{s.end:g}]" for s in timeline.spans(rank))


def test_host_seconds_occupy_the_rank_in_every_action() -> None:
    timeline = simulate(read_schedule(TWO_RANKS), Costs(host_action=0.25))
    assert spans(timeline, 0) == "0F0[0,1.25] 0F1[1.25,2.5] 0B0[4.75,7] 0B1[8.25,10.5]"
    assert spans(timeline, 1) == "1F0[1.25,2.5] 1B0[2.5,4.75] 1F1[4.75,6] 1B1[6,8.25]"
    assert timeline.busy_seconds == (7, 7)


def test_host_seconds_of_a_message_are_spent_by_sender_and_receiver() -> None:
    schedule = read_schedule(TWO_RANKS)
    costs = Costs(host_message=0.25)
    implied = simulate(schedule, costs)
    assert spans(implied, 0) == "0F0[0,1.25] 0F1[1.25,2.5] 0B0[4.75,7] 0B1[8.25,10.5]"
    # Four messages for each rank, whether they are in the schedule or not.
    assert implied.busy_seconds == simulate(lower(schedule), costs).busy_seconds == (7, 7)


def test_work_that_takes_no_time_takes_none_of_the_host() -> None:
    costs = Costs(backward_weight=0, host_action=1)
    assert simulate(Schedule.from_orders([["0F0", "0I0", "0W0"]]), costs).end_time == 4


def test_collectives_run_beside_compute_and_the_rank_waits_for_the_last() -> None:
    costs = Costs(unshard=1, reduce_grad=2).for_each_stage(2)
    timeline = simulate(read_schedule(TWO_RANKS), costs)
    assert spans(timeline, 1) == (
        "1UNSHARD[0,1] 1F0[2,3] 1B0[3,5] 1F1[5,6] 1B1[6,8] 1REDUCE_GRAD[8,10] 1RESHARD[10,10]"
    )
    assert (timeline.end_time, timeline.busy_seconds) == (12, (6, 6))
    assert timeline.period("nothing") == 12
    found = explain(read_schedule(TWO_RANKS), costs)
    assert found.critical_seconds == {
        "UNSHARD": 1,
        "F": 3,
        "B": 6,
        "REDUCE_GRAD": 2,
        "transfer": 0,
    }


def test_reduction_of_one_stage_overlaps_compute_of_another() -> None:
    schedule = Schedule.from_orders([["0F0", "1F0", "1B0", "0B0"]])
    costs = Costs(unshard=[1, 3], reduce_grad=[1, 4]).for_each_stage(2)
    assert spans(simulate(schedule, costs), 0) == (
        "0UNSHARD[0,1] 1UNSHARD[1,4] 0F0[1,2] 1F0[4,5] 1B0[5,7] "
        "1REDUCE_GRAD[7,11] 1RESHARD[11,11] 0B0[7,9] 0REDUCE_GRAD[11,12] 0RESHARD[12,12]"
    )


def test_collectives_that_do_not_overlap_block_compute() -> None:
    schedule = Schedule.from_orders([["0F0", "1F0", "1B0", "0B0"]])
    costs = Costs(unshard=[1, 3], reduce_grad=[1, 4], collective_overlap=0).for_each_stage(2)
    timeline = simulate(schedule, costs)
    assert spans(timeline, 0) == (
        "0UNSHARD[0,1] 1UNSHARD[1,4] 0F0[4,5] 1F0[5,6] 1B0[6,8] "
        "1REDUCE_GRAD[8,12] 1RESHARD[12,12] 0B0[12,14] 0REDUCE_GRAD[14,15] 0RESHARD[15,15]"
    )
    assert (timeline.end_time, timeline.busy_seconds) == (15, (15,))


def test_messages_of_a_wire_wait_for_one_another() -> None:
    # Both ranks of the first node send a value that is ready after a second.
    schedule = Schedule.from_orders([["0F0"], ["1F0"], ["2F0"], ["3F0"]], dataflow=TWO_CHAINS)
    alone = simulate(schedule, Costs(transfer=2))
    shared = simulate(schedule, Costs(transfer=2, wires=[0, 0, 1, 1]))
    assert alone.start.tolist() == [0, 0, 3, 3]
    assert shared.start.tolist() == [0, 0, 3, 5]
    gap = simulate(add_send_recv(schedule), Costs(transfer=2, wires=[0, 0, 1, 1]))
    assert gap.end_time == shared.end_time == 6


def test_order_that_waits_for_ever_before_its_first_message_is_a_deadlock() -> None:
    # It was an error of NumPy: there was nothing for the wire to carry.
    schedule = read_schedule("""
        0B0 0F0
        1F0 1B0
    """)
    with pytest.raises(DeadlockError, match="ranks that wait for each other: 0"):
        simulate(schedule, Costs(transfer=1, wires=[[0, 1], [1, 0]]))


def test_microbatches_have_their_own_seconds_transfers_and_bytes() -> None:
    costs = Costs(transfer=0.5, activation_bytes=[4, 4], microbatch_scale=[1, 2])
    timeline = simulate(read_schedule(TWO_RANKS), costs)
    assert spans(timeline, 0) == "0F0[0,1] 0F1[1,3] 0B0[5,7] 0B1[11.5,15.5]"
    assert spans(timeline, 1) == "1F0[1.5,2.5] 1B0[2.5,4.5] 1F1[4.5,6.5] 1B1[6.5,10.5]"
    assert timeline.rank_peak_bytes == (12, 8)


def test_one_size_for_all_multiplies_costs() -> None:
    schedule = build("ZBV", ranks=3, microbatches=5)
    costs = Costs(transfer=0.25, send=0.125, activation_bytes=3, workspace_bytes=2)
    twice = simulate(schedule, Costs.from_mapping({**costs.to_mapping(), "microbatch_scale": 2}))
    once = simulate(schedule, costs)
    assert twice.end.tolist() == (2 * once.end).tolist()
    assert twice.rank_peak_bytes == tuple(2 * peak for peak in once.rank_peak_bytes)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"microbatch_scale": [1, 2]}, "microbatch_scale has 2 values, but the schedule has 3"),
        ({"wires": [1, 2, 3]}, "wires has 3 rows, but the schedule has 2 ranks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(costs: dict[str, object], message: str) -> None:
    schedule = build("1F1B", ranks=2, microbatches=3)
    with pytest.raises(CostsError, match=message):
        simulate(schedule, Costs.from_mapping(costs))


def test_host_seconds_make_fewer_stages_per_rank_better() -> None:
    schedules = [
        build("1F1B", ranks=4, microbatches=8),
        build("Interleaved1F1B", ranks=4, microbatches=8, stages_per_rank=4),
    ]
    free, priced = (
        [timeline.end_time for timeline in compare(schedules, costs).values()]
        for costs in (Costs(), Costs(host_action=0.5))
    )
    assert free[1] < free[0]
    assert priced[1] > priced[0]
    costs = Costs(host_action=0.5)
    assert plan(costs, ranks=3, microbatches=6, seconds=0.5).problem.stages == 3


def random_costs(schedule: Schedule, seed: int) -> Costs:
    """Return costs with every new term, in eighths of a second."""
    random = np.random.default_rng(seed)
    ranks, stages = schedule.num_ranks, schedule.num_stages

    def draw(size: int) -> list[float]:
        numbers: list[float] = (random.integers(1, 17, size) / 8).tolist()
        return numbers

    forward, backward, weight = (draw(stages) for _ in range(3))
    return Costs(
        forward,
        backward,
        weight,
        transfer=[draw(ranks) for _ in range(ranks)],
        send=0.125 * seed % 2,
        host_action=random.integers(0, 3) / 8,
        host_message=random.integers(0, 3) / 8,
        unshard=draw(stages),
        reshard=draw(stages),
        reduce_grad=draw(stages),
        collective_overlap=(0.0, 0.5, 1.0)[seed % 3],
        wires=None if seed % 2 else random.integers(0, 2, ranks).tolist(),
        microbatch_scale=draw(schedule.microbatches),
    )


def check_period(ranks: int, microbatches: int) -> None:
    for seed, schedule in enumerate(strategies.every_family(ranks, microbatches)):
        costs = random_costs(schedule, 100 * ranks + microbatches + seed)
        timeline = simulate(schedule, costs)
        assert timeline.program is not None
        program = timeline.program
        repeated = Repeated(program, np.zeros(ranks))
        begin, ends = np.zeros(program.rows.num_ranks), []
        for _ in range(61 + 50):
            begin = repeated.end_of_all(begin)
            ends.append(float(begin[:ranks].max()))
        mean = (ends[-1] - ends[-61]) / 60
        assert timeline.period("nothing") == pytest.approx(mean, rel=1e-9), schedule.name
        assert timeline.period() == timeline.end_time


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 5), (4, 4)])
def test_period_is_the_mean_of_steps_in_a_row_with_every_cost(
    ranks: int, microbatches: int
) -> None:
    check_period(ranks, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", range(1, 17))
@pytest.mark.parametrize("ranks", range(1, 9))
def test_period_is_that_mean_in_every_family_and_size(ranks: int, microbatches: int) -> None:
    check_period(ranks, microbatches)

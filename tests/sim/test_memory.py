"""The bytes that ranks hold, action by action."""

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.sim.engine import simulate
from tests.tables import read_schedule


def bytes_of(schedule: Schedule, costs: Costs) -> list[list[str]]:
    """Return what each rank holds because of each action, such as 0F0=10."""
    timeline = simulate(schedule, costs)
    return [
        [f"{span.action}={span.bytes:g}" for span in timeline.spans(rank)]
        for rank in range(schedule.num_ranks)
    ]


def test_activations_live_from_forward_to_backward() -> None:
    schedule = read_schedule("""
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """)
    assert bytes_of(schedule, Costs(activation_bytes=[10, 7])) == [
        ["0F0=10", "0F1=20", "0B0=10", "0B1=0"],
        ["1F0=7", "1B0=0", "1F1=7", "1B1=0"],
    ]


def test_what_the_weight_half_needs_lives_from_the_input_half_to_it() -> None:
    schedule = read_schedule("0F0 0F1 0I0 0I1 0W0 0W1")
    costs = Costs(activation_bytes=10, weight_stash_bytes=4)
    assert bytes_of(schedule, costs) == [["0F0=10", "0F1=20", "0I0=14", "0I1=8", "0W0=4", "0W1=0"]]
    timeline = simulate(schedule, costs)
    assert timeline.rank_peak_bytes == (20,)
    assert timeline.peak_bytes == 20


def test_parameters_count_always_where_they_are_never_sharded() -> None:
    schedule = read_schedule("""
        0F0 3F0 3B0 0B0
        1F0 2F0 2B0 1B0
    """)
    costs = Costs(parameter_bytes=[1, 2, 3, 4], activation_bytes=[100] * 4)
    assert bytes_of(schedule, costs) == [
        ["0F0=105", "3F0=205", "3B0=105", "0B0=5"],
        ["1F0=105", "2F0=205", "2B0=105", "1B0=5"],
    ]


def test_sharded_parameters_count_while_they_are_whole() -> None:
    schedule = read_schedule(
        "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD"
    )
    assert bytes_of(schedule, Costs(parameter_bytes=[10, 20], activation_bytes=[1, 1])) == [
        [
            *("0UNSHARD=10", "0F0=11", "0RESHARD=1", "1UNSHARD=21", "1F0=22"),
            *("1B0=21", "1RESHARD=1", "0UNSHARD=11", "0B0=10", "0RESHARD=0"),
        ]
    ]


def test_fewer_whole_stages_hold_fewer_bytes() -> None:
    schedule = build("LoopedBFS", ranks=2, microbatches=2, stages_per_rank=4)
    costs = Costs(parameter_bytes=400)
    peaks = [
        simulate(lower(schedule, whole_stages=limit), costs).rank_peak_bytes
        for limit in (1, 2, 3, 4)
    ]
    assert peaks == [(100, 100), (200, 200), (300, 300), (400, 400)]


def test_every_rank_begins_with_nothing_of_the_one_before() -> None:
    schedule = build("ForwardOnly", ranks=3, microbatches=2)
    assert simulate(schedule, Costs(activation_bytes=1)).rank_peak_bytes == (2, 2, 2)

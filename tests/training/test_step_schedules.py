"""Which schedule a step runs."""

import pytest

import penstock as ps
from penstock.errors import DeadlockError, SizeError
from penstock.passes.thin import thin_out
from penstock.training.step_schedules import StepSchedules, default_ranks
from tests.strategies import FAMILY_NAMES
from tests.tables import orders_of, read_orders, read_schedule


def test_family_is_built_for_every_number_of_microbatches() -> None:
    schedules = StepSchedules("1F1B", 4, 2, 2)
    assert schedules.schedule == ps.build("1F1B", ranks=2, microbatches=4)
    for microbatches in (1, 2, 4, 8):
        built = ps.build("1F1B", ranks=2, microbatches=microbatches)
        assert schedules.lowered(microbatches, is_training=True) == ps.lower(built)


def test_given_schedule_is_thinned_out_for_fewer_microbatches() -> None:
    given = ps.build("ZBV", ranks=2, microbatches=6)
    assert StepSchedules(given, 6, 4, 2).schedule == given
    schedules = StepSchedules(given, 2, 4, 2)
    thinned = thin_out(given, 2)
    assert schedules.schedule == thinned
    assert schedules.lowered(2, is_training=True) == ps.lower(thinned)


def test_given_schedule_cannot_train_more_microbatches_than_it_has() -> None:
    given = ps.build("ZBV", ranks=2, microbatches=6)
    schedules = StepSchedules(given, 6, 4, 2)
    for attempt in (
        lambda: StepSchedules(given, 7, 4, 2),
        lambda: schedules.lowered(7, is_training=True),
    ):
        with pytest.raises(SizeError) as caught:
            attempt()
        assert str(caught.value) == (
            "microbatches must be from 1 to the schedule's 6 (got 7); "
            "build a schedule for that many"
        )


def test_given_schedule_evaluates_any_number_of_microbatches_where_its_stages_are() -> None:
    source = StepSchedules(read_schedule("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"), 1, 4, 2)
    expected = """
        0F0 0F1 0F2 3F0 3F1 3F2
        1F0 1F1 1F2 2F0 2F1 2F2
    """
    rows = source.lowered(3, is_training=False).rows
    computes = rows.keep(rows.is_compute)
    kept = [[str(work) for work in computes.works(rank)] for rank in range(2)]
    assert kept == read_orders(expected)


def test_given_schedule_with_communication_is_run_unchanged() -> None:
    given = ps.lower(ps.build("1F1B", ranks=2, microbatches=4), receives="late")
    assert StepSchedules(given, 4, 2, 2).lowered(4, is_training=True) == given


def test_given_schedule_that_never_finishes_is_refused() -> None:
    given = read_schedule("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(DeadlockError) as caught:
        StepSchedules(given, 2, 2, 2)
    with pytest.raises(DeadlockError) as expected:
        ps.check(given)
    assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_ranks_of_a_family_are_counted_from_its_stages(family: str) -> None:
    schedule = ps.build(family, ranks=4, microbatches=4)
    assert default_ranks(family, schedule.num_stages) == 4
    assert default_ranks(schedule, 99) == 4


def test_evaluation_of_copies_shares_the_microbatches_out() -> None:
    source = StepSchedules("DualPipe", 4, 4, 2)
    rows = source.lowered(4, is_training=False).rows
    computes = rows.keep(rows.is_compute)
    assert sorted(str(computes.action(row)) for row in range(len(computes))) == sorted(
        ["0F0", "0F1", "1F0", "1F1", "2F2", "2F3", "3F2", "3F3"]
    )
    assert orders_of(source.schedule) == orders_of(ps.build("DualPipe", ranks=2, microbatches=4))

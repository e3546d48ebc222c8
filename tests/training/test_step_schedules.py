"""Which schedule a step runs."""

import pytest

import penstock as ps
from penstock.training.step_schedules import ScheduleSource, default_ranks
from tests.strategies import FAMILY_NAMES
from tests.tables import orders_of, read_orders, read_schedule


def test_family_is_built_anew_for_every_number_of_microbatches() -> None:
    source = ScheduleSource("1F1B", 2, 2)
    for microbatches in (1, 2, 8):
        built = ps.build("1F1B", ranks=2, microbatches=microbatches)
        assert source.training(microbatches) == built
        assert source.lowered(microbatches, is_training=True) == ps.lower(built)


def test_given_schedule_is_thinned_out_for_fewer_microbatches() -> None:
    given = ps.build("ZBV", ranks=2, microbatches=6)
    source = ScheduleSource(given, 4, 2)
    assert source.training(6) == given
    assert source.training(2) == ps.thin_out(given, 2)


def test_given_schedule_cannot_train_more_microbatches_than_it_has() -> None:
    source = ScheduleSource(ps.build("ZBV", ranks=2, microbatches=6), 4, 2)
    with pytest.raises(ps.SizeError) as caught:
        source.training(7)
    assert str(caught.value) == (
        "a schedule for 6 microbatches cannot run 7; build one for that many"
    )
    with pytest.raises(ps.SizeError) as caught:
        source.lowered(7, is_training=True)
    assert str(caught.value) == "ZBV was given for 6 microbatches"


def test_given_schedule_evaluates_any_number_of_microbatches_where_its_stages_are() -> None:
    source = ScheduleSource(read_schedule("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"), 4, 2)
    expected = """
        0F0 0F1 0F2 3F0 3F1 3F2
        1F0 1F1 1F2 2F0 2F1 2F2
    """
    rows = source.lowered(3, is_training=False).rows
    computes = rows.keep(rows.kind <= ps.Kind.FULL_BACKWARD)
    kept = [[str(work) for work in computes.works(rank)] for rank in range(2)]
    assert kept == read_orders(expected)


def test_given_schedule_with_communication_is_run_as_it_is() -> None:
    given = ps.lower(ps.build("1F1B", ranks=2, microbatches=4), receives="late")
    assert ScheduleSource(given, 2, 2).lowered(4, is_training=True) == given


def test_given_schedule_that_never_finishes_is_refused() -> None:
    given = read_schedule("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(ps.DeadlockError):
        ScheduleSource(given, 2, 2).training(2)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_ranks_of_a_family_are_counted_from_its_stages(family: str) -> None:
    schedule = ps.build(family, ranks=4, microbatches=4)
    assert default_ranks(family, schedule.num_stages) == 4
    assert default_ranks(schedule, 99) == 4


def test_evaluation_of_copies_shares_the_microbatches_out() -> None:
    source = ScheduleSource("DualPipe", 4, 2)
    rows = source.lowered(4, is_training=False).rows
    computes = rows.keep(rows.kind <= ps.Kind.FULL_BACKWARD)
    assert sorted(str(computes.action(row)) for row in range(len(computes))) == sorted(
        ["0F0", "0F1", "1F0", "1F1", "2F2", "2F3", "3F2", "3F3"]
    )
    assert orders_of(source.training(4)) == orders_of(
        ps.build("DualPipe", ranks=2, microbatches=4)
    )

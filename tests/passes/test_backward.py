"""Merging I and W into B, and splitting B into I and W."""

from hypothesis import given

from penstock.ir.actions import Kind
from penstock.ir.schedule import Schedule
from penstock.passes.backward import merge_backward, split_backward
from tests.strategies import schedules
from tests.tables import orders_of, read_orders, read_schedule


def merged(picture: str) -> list[list[str]]:
    return orders_of(merge_backward(read_schedule(picture)))


def test_halves_side_by_side_become_one_backward() -> None:
    picture = """
        0F0 0F1 0I0 0I1 0W1 0W0
        1F0 1I0 1W0 1F1 1I1 1W1
    """
    expected = """
        0F0 0F1 0I0 0B1 0W0
        1F0 1B0 1F1 1B1
    """
    assert merged(picture) == read_orders(expected)


def test_halves_of_different_stages_or_microbatches_stay_apart() -> None:
    picture = """
        0F0 1F0 0F1 1F1 1I0 0I0 1W0 1I1 0W0 0I1 1W1 0W1
    """
    assert merged(picture) == read_orders(picture)


def test_halves_with_a_send_between_them_stay_apart() -> None:
    picture = """
        0F0 0SEND_F0 0RECV_B0 0I0 0W0
        1RECV_F0 1F0 1I0 1SEND_B0 1W0
    """
    assert merged(picture) == read_orders(picture.replace("0I0 0W0", "0B0"))


def test_half_inside_an_overlap_stays_there() -> None:
    # The W of an overlap was once merged with the I before it, and took the overlap along.
    pictures = [
        "0F0 0F1 0I0 (0W0;0I1)OVERLAP_F_B 0W1",
        "0F0 (0F1;0I0)OVERLAP_F_B 0W0 0B1",
        "0F0 0F1 (0I0;0W0)OVERLAP_F_B 0B1",
    ]
    assert [merged(picture) for picture in pictures] == list(map(read_orders, pictures))


def test_every_backward_is_split_but_overlapped_ones() -> None:
    schedule = read_schedule("""
        0F0 (0F1;0B0)OVERLAP_F_B 0B1
        1F0 1B0 1F1 1I1 1W1
    """)
    expected = """
        0F0 (0F1;0B0)OVERLAP_F_B 0I1 0W1
        1F0 1I0 1W0 1F1 1I1 1W1
    """
    assert orders_of(split_backward(schedule)) == read_orders(expected)


@given(schedules())
def test_merging_undoes_splitting_where_no_halves_were_adjacent(schedule: Schedule) -> None:
    whole = merge_backward(schedule)
    assert merge_backward(split_backward(whole)) == whole
    assert merge_backward(split_backward(schedule)) == whole


@given(schedules())
def test_splitting_leaves_whole_backwards_only_in_overlaps(schedule: Schedule) -> None:
    rows = split_backward(schedule).rows
    assert rows.in_overlap()[rows.is_kind(Kind.FULL_BACKWARD)].all()
    assert split_backward(split_backward(schedule)) == split_backward(schedule)

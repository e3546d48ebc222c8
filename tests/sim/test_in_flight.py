"""How many messages are sent and not yet used, in schedules where that can be counted by hand."""

import penstock as ps
from penstock.sim.in_flight import messages_in_flight


def test_at_least_two_messages_are_expected_in_both_directions_of_every_pair() -> None:
    lowered = ps.lower(ps.build("1F1B", ranks=3, microbatches=4))
    pairs = [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert messages_in_flight(lowered) == dict.fromkeys(pairs, 2)


def test_messages_that_wait_for_a_busy_rank_are_counted() -> None:
    # The first rank uses what comes back only after all of its own forwards.
    order = [
        ["0F0", "0F1", "0F2", "0F3", "2F0", "2F1", "2F2", "2F3"],
        ["1F0", "1F1", "1F2", "1F3"],
    ]
    schedule = ps.Schedule.from_orders(order)
    assert messages_in_flight(ps.lower(schedule)) == {(0, 1): 2, (1, 0): 4}

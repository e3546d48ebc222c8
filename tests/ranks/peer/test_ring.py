"""Two ends of a ring place the same messages alike, and never on top of what is still there."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from penstock.ranks.peer.ring import ALIGNMENT, Ring, RingEntry

CAPACITIES = st.integers(2, 12).map(lambda blocks: blocks * ALIGNMENT)
SIZES = st.lists(st.integers(1, 8 * ALIGNMENT), min_size=1, max_size=60)


def bytes_of(message: int, size: int) -> bytes:
    return bytes((message * 31 + place * 7) % 256 for place in range(size))


@given(CAPACITIES, SIZES, st.randoms(use_true_random=False))
def test_every_message_arrives_whole_however_fast_the_two_ends_are(
    capacity: int, sizes: list[int], random: object
) -> None:
    memory = bytearray(capacity)
    sender, receiver = Ring(capacity), Ring(capacity)
    to_send: deque[tuple[int, RingEntry]] = deque(
        (message, entry) for message, size in enumerate(sizes) for entry in sender.place(size)
    )
    to_take: deque[tuple[int, RingEntry]] = deque(
        (message, entry) for message, size in enumerate(sizes) for entry in receiver.place(size)
    )
    assert to_send == to_take
    arrived = [bytearray(size) for size in sizes]
    ready = freed = 0
    while to_take:
        can_send = bool(to_send) and to_send[0][1].after <= freed
        can_take = to_take[0][1].number <= ready
        assert can_send or can_take, "neither end can continue"
        if can_send and (not can_take or random.random() < 0.5):  # type: ignore[attr-defined]  # a Random
            message, entry = to_send.popleft()
            part = bytes_of(message, sizes[message])[entry.start : entry.start + entry.size]
            memory[entry.offset : entry.offset + entry.size] = part
            ready = entry.number
        else:
            message, entry = to_take.popleft()
            taken = memory[entry.offset : entry.offset + entry.size]
            arrived[message][entry.start : entry.start + entry.size] = taken
            freed = entry.number
    assert arrived == [bytes_of(message, size) for message, size in enumerate(sizes)]


def test_a_message_that_fits_is_one_entry_and_the_next_one_lies_behind_it() -> None:
    ring = Ring(4 * ALIGNMENT)
    assert ring.place(300) == [RingEntry(number=1, start=0, size=300, offset=0, after=0)]
    assert ring.place(256) == [RingEntry(number=2, start=0, size=256, offset=512, after=0)]


def test_a_message_at_the_end_of_the_ring_waits_for_what_lies_at_its_beginning() -> None:
    ring = Ring(4 * ALIGNMENT)
    ring.place(3 * ALIGNMENT)
    assert ring.place(2 * ALIGNMENT) == [RingEntry(2, 0, 2 * ALIGNMENT, offset=0, after=1)]


def test_a_message_larger_than_the_ring_goes_through_it_in_halves() -> None:
    ring = Ring(4 * ALIGNMENT)
    sizes = [(entry.size, entry.offset, entry.after) for entry in ring.place(5 * ALIGNMENT)]
    half = 2 * ALIGNMENT
    assert sizes == [(half, 0, 0), (half, half, 0), (ALIGNMENT, 0, 1)]


def test_numbers_continue_in_other_memory() -> None:
    ring = Ring(4 * ALIGNMENT)
    ring.place(10)
    assert Ring(8 * ALIGNMENT, entries=ring.entries).place(10)[0].number == 2

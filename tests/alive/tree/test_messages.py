"""Whatever a rank is sent over a connection, it takes it or refuses it."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from selectors import PollSelector
from time import monotonic
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.alive.lost_rank import LostRank
from penstock.alive.rank_status import RankStatus
from penstock.alive.timeouts import Timeouts
from penstock.alive.tree.heartbeat_node import HeartbeatNode
from penstock.alive.tree.member import Member
from penstock.alive.tree.messages import is_fact, read_lost, read_statuses
from penstock.ranks.tree.json_connection import JsonConnection
from penstock.ranks.tree.values import encode_value

SIZE = 40
STATUS = RankStatus(doing="1F0 of step 0")
LOST = LostRank(3, "ended", None)
# One of each kind, up and down the tree.
MESSAGES: list[list[Any]] = [
    ["beat", [[17, STATUS.to_values()]]],
    ["beat", STATUS.to_values()],
    ["joined", 17, "process 17", 0, 1],
    ["record", 17, "/tmp/record"],
    ["record", "/tmp/record"],
    ["ended", 17, 1],
    ["silent", 17, 1],
    ["heard", 17],
    ["lost", LOST.to_values()],
    ["goodbye", 17, 2, "closed", 0, STATUS.to_values()],
    ["goodbye", 0, 2, "closed", 0, STATUS.to_values()],
    ["acknowledged"],
    ["all here"],
]
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5,
)


@st.composite
def nearly_messages(draw: st.DrawFn) -> list[Any]:
    """Return a message of which one value, at any depth, is something else."""
    words: list[Any] = draw(st.sampled_from(MESSAGES))
    whole: list[Any] = [_copy(words)]
    place, number = whole, 0
    while isinstance(place[number], list) and place[number] and draw(st.booleans()):
        place = place[number]
        number = draw(st.integers(0, len(place) - 1))
    place[number] = draw(anything)
    changed = whole[0]
    return changed if isinstance(changed, list) and changed else words


def _copy(value: Any) -> Any:
    return [_copy(one) for one in value] if isinstance(value, list) else value


@contextmanager
def open_node(rank: int) -> Iterator[tuple[PollSelector, HeartbeatNode]]:
    with PollSelector() as selector:
        node = HeartbeatNode(
            Member(rank, f"process {rank}"),
            SIZE,
            Timeouts(),
            selector,
            address="127.0.0.1",
            token="secret",
        )
        try:
            yield selector, node
        finally:
            node.close()


# A rank that sent a list of something else than statuses ended the heartbeat's thread, and with it
# the run; one that named a rank that does not exist did so on the rank above.
@given(messages=st.lists(nearly_messages(), max_size=8), rank=st.sampled_from([0, 1]))
def test_no_message_ends_the_heartbeat(messages: list[list[Any]], rank: int) -> None:
    with open_node(rank) as (selector, node), ExitStack() as stack:

        def connect() -> tuple[JsonConnection, socket.socket]:
            mine, other = socket.socketpair()
            stack.callback(other.close)
            return JsonConnection(mine, is_trusted=True), other

        for words in messages:
            connection, below = connect()
            node._admit(17, connection)
            ends = [below]
            if rank > 0:
                connection, above = connect()
                node._attach(0, connection)
                ends.append(above)
            for end in ends:
                end.sendall(encode_value(words) + b"\n")
            # As the heartbeat's thread does.
            for key, _ in selector.select(0):
                key.data()
        node.beat(STATUS)
        lost = node.find_lost(STATUS, monotonic())
        assert lost is None or 0 <= lost.rank < SIZE


def test_ranks_that_do_not_exist_are_refused() -> None:
    for rank in (-1, SIZE):
        with pytest.raises(ValueError, match=f"a rank must be below {SIZE}"):
            is_fact(["ended", rank, 0], SIZE)
        with pytest.raises(ValueError, match=f"a rank must be below {SIZE}"):
            list(read_statuses([[rank, STATUS.to_values()]], SIZE))
        with pytest.raises(ValueError, match=f"a rank must be below {SIZE}"):
            read_lost(LostRank(rank, "ended", None).to_values(), SIZE)
    assert list(read_statuses([[17, STATUS.to_values()]], SIZE)) == [(17, STATUS)]
    assert read_lost(LOST.to_values(), SIZE) == LOST
    assert not is_fact(["lost", 3], SIZE)

"""Short messages over a connection that never waits."""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ranks.tree.json_connection import ConnectionBrokenError, JsonConnection


@pytest.fixture
def ends() -> Iterator[tuple[JsonConnection, socket.socket]]:
    mine, other = socket.socketpair()
    connection = JsonConnection(mine)
    yield connection, other
    connection.close()
    other.close()


def test_messages_arrive_in_order(ends: tuple[JsonConnection, socket.socket]) -> None:
    connection, other = ends
    answer = JsonConnection(other)
    answer.send("beat", [1, None, "ü"])
    answer.send("bye")
    assert list(connection.receive()) == [["beat", [1, None, "ü"]], ["bye"]]
    assert list(connection.receive()) == []


def test_message_in_pieces_arrives_when_it_is_complete(
    ends: tuple[JsonConnection, socket.socket],
) -> None:
    connection, other = ends
    received: list[Any] = []
    for byte in b'["a", 1]\n["b"]\n':
        other.send(bytes([byte]))
        received += connection.receive()
    assert received == [["a", 1], ["b"]]


def test_last_message_arrives_before_the_end_of_the_connection(
    ends: tuple[JsonConnection, socket.socket],
) -> None:
    connection, other = ends
    other.send(b'["last"]\n')
    other.close()
    words = connection.receive()
    assert next(words) == ["last"]
    with pytest.raises(ConnectionBrokenError):
        next(words)


@pytest.mark.parametrize(
    "data", [b"x\n", b"{}\n", b"[]\n", b"\xff\n", b"[" * 1000 + b"\n", b"7\n"]
)
def test_invalid_message_breaks_the_connection(
    data: bytes, ends: tuple[JsonConnection, socket.socket]
) -> None:
    connection, other = ends
    other.send(data)
    with pytest.raises(ConnectionBrokenError, match=r"not a (message|plain value)"):
        list(connection.receive())


def test_message_without_an_end_breaks_the_connection(
    ends: tuple[JsonConnection, socket.socket],
) -> None:
    connection, other = ends
    other.send(b'["' + b"a" * 30_000)
    with pytest.raises(ConnectionBrokenError, match="a message is longer than 1024 bytes"):
        list(connection.receive())


def test_sender_never_waits_for_a_peer_that_does_not_read(
    ends: tuple[JsonConnection, socket.socket],
) -> None:
    # A send that waited would hang here for ever, because nobody reads meanwhile. What does not
    # fit is dropped as a whole: the peer later reads a run of complete messages, all in order.
    connection, other = ends
    sent = 20_000
    for number in range(sent):
        connection.send("beat", number, "a" * 100)
    peer, received = JsonConnection(other), list[list[Any]]()
    while received[-1:] != [["flush"]]:
        # Every message flushes what waits in the sender.
        connection.send("flush")
        received += peer.receive()
    numbers = [words[1] for words in received if words[0] == "beat"]
    assert received[: len(numbers)] == [["beat", number, "a" * 100] for number in numbers]
    assert numbers == list(range(len(numbers)))
    assert 0 < len(numbers) < sent


def test_sending_to_a_closed_connection_breaks_it(
    ends: tuple[JsonConnection, socket.socket],
) -> None:
    connection, other = ends
    other.close()
    with pytest.raises(ConnectionBrokenError):
        connection.send("beat")


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_break_the_connection(data: bytes) -> None:
    mine, other = socket.socketpair()
    connection = JsonConnection(mine)
    other.send(data)
    other.close()
    received: list[list[Any]] = []
    with suppress(ConnectionBrokenError):
        received.extend(connection.receive())
    connection.close()
    whole = data.split(b"\n")[:-1]
    assert received == [json.loads(text) for text in whole[: len(received)]]

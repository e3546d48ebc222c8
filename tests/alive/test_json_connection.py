"""Small things said over a connection."""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.alive.json_connection import ConnectionBrokenError, JsonConnection


@pytest.fixture
def ends() -> Iterator[tuple[JsonConnection, socket.socket]]:
    mine, other = socket.socketpair()
    line = JsonConnection(mine)
    yield line, other
    line.close()
    other.close()


def test_what_is_said_is_heard_in_order(ends: tuple[JsonConnection, socket.socket]) -> None:
    line, other = ends
    answer = JsonConnection(other)
    answer.say("beat", [1, None, "ü"])
    answer.say("bye")
    assert list(line.hear()) == [["beat", [1, None, "ü"]], ["bye"]]
    assert list(line.hear()) == []


def test_what_comes_in_pieces_is_heard_when_it_is_whole(
    ends: tuple[JsonConnection, socket.socket],
) -> None:
    line, other = ends
    heard: list[Any] = []
    for byte in b'["a", 1]\n["b"]\n':
        other.send(bytes([byte]))
        heard += line.hear()
    assert heard == [["a", 1], ["b"]]


def test_last_words_are_heard_before_the_end(ends: tuple[JsonConnection, socket.socket]) -> None:
    line, other = ends
    other.send(b'["last"]\n')
    other.close()
    words = line.hear()
    assert next(words) == ["last"]
    with pytest.raises(ConnectionBrokenError):
        next(words)


@pytest.mark.parametrize(
    "data", [b"x\n", b"{}\n", b"[]\n", b"\xff\n", b"[" * 9000 + b"\n", b"7\n"]
)
def test_what_is_no_message_breaks_the_line(
    data: bytes, ends: tuple[JsonConnection, socket.socket]
) -> None:
    line, other = ends
    other.send(data)
    with pytest.raises(ConnectionBrokenError, match=r"not a (message|plain value)"):
        list(line.hear())


def test_message_without_an_end_breaks_the_line(
    ends: tuple[JsonConnection, socket.socket],
) -> None:
    line, other = ends
    other.send(b'["' + b"a" * 30_000)
    with pytest.raises(ConnectionBrokenError, match="went on without an end"):
        list(line.hear())


def test_nobody_waits_for_one_who_does_not_listen(
    ends: tuple[JsonConnection, socket.socket],
) -> None:
    line, _ = ends
    for _ in range(20_000):
        line.say("beat", "a" * 100)


def test_saying_something_to_one_who_has_gone_breaks_the_line(
    ends: tuple[JsonConnection, socket.socket],
) -> None:
    line, other = ends
    other.close()
    with pytest.raises(ConnectionBrokenError):
        line.say("beat")


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_break_the_line(data: bytes) -> None:
    mine, other = socket.socketpair()
    line = JsonConnection(mine)
    other.send(data)
    other.close()
    heard: list[list[Any]] = []
    with suppress(ConnectionBrokenError):
        heard.extend(line.hear())
    line.close()
    whole = data.split(b"\n")[:-1]
    assert heard == [json.loads(text) for text in whole[: len(heard)]]

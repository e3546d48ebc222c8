"""Trace files are read piece by piece; anything else is refused at the place of the mistake."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from penstock.errors import ParseError
from penstock.files.trace.events import Event, Field, read_pieces


def pieces_of(text: str, folder: Path) -> list[Field | Event]:
    file = folder / "trace.json"
    file.write_text(text, encoding="utf-8")
    return list(read_pieces(file))


def test_fields_and_events_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = ' {"a": 1.5, "traceEvents": [{"ph": "X"} , {}],\n "b": [{"ph": "M"}] } \n'
    assert pieces_of(text, tmp_path) == [
        Field("a", 1.5),
        Event(0, {"ph": "X"}),
        Event(1, {}),
        Field("b", [{"ph": "M"}]),
    ]


def test_a_bare_list_of_events_is_a_trace_too(tmp_path: Path) -> None:
    assert pieces_of('[{"ph": "X"}]', tmp_path) == [Event(0, {"ph": "X"})]
    assert pieces_of("[]", tmp_path) == []
    assert pieces_of('{"traceEvents": []}', tmp_path) == []


# The text is read in parts of a mebibyte; wherever these end, nothing is lost.
@pytest.mark.parametrize("shift", [0, 1, 2, 3, 7, 8, 9, 10, 11, 12, 13])
def test_pieces_may_lie_across_the_parts_that_are_read(shift: int, tmp_path: Path) -> None:
    before = " " * (2**20 - 30 + shift)
    text = '{"traceEvents":' + before + '[{"ts":123.5},{"ts":1e3}],"n":123456}'
    assert pieces_of(text, tmp_path) == [
        Event(0, {"ts": 123.5}),
        Event(1, {"ts": 1000.0}),
        Field("n", 123456),
    ]


def test_long_events_are_read_whole(tmp_path: Path) -> None:
    fields = {"name": "x" * (3 * 2**20)}
    assert pieces_of(json.dumps([fields, {}]), tmp_path) == [Event(0, fields), Event(1, {})]


def test_compressed_files_are_recognised_by_their_content(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(gzip.compress(b'[{"ph": "X"}]'))
    assert list(read_pieces(file)) == [Event(0, {"ph": "X"})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not readable as JSON at the start: expected { or [ (got the end)"),
        ("3", "not readable as JSON at the start: expected { or [ (got 3)"),
        ("{", "not readable as JSON at the start: expecting value"),
        ("[{}", "not readable as JSON after event 0: expected , or ] (got the end)"),
        ("[{},]", "not readable as JSON in event 1: expecting value"),
        ("[{}] x", "not readable as JSON after event 0: expected the end (got x)"),
        ("[3]", "event 0 must be an object (got 3)"),
        ("[nope]", "not readable as JSON in event 0: expecting value"),
        ("[[[", "not readable as JSON in event 0: expecting value"),
        ('{"a" 3}', "not readable as JSON in 'a': expected : (got 3)"),
        ('{"traceEvents": 3}', "not readable as JSON in 'traceEvents': expected [ (got 3)"),
        (
            '{"a": 1, "a": 2}',
            "the name of a field must be a string that is not used yet (got 'a')",
        ),
        ("{3: 1}", "the name of a field must be a string that is not used yet (got 3)"),
        ('[{"a": 1, "a": 2}]', "not readable as JSON in event 0: 'a' appears twice in one object"),
        ('[{"a": NaN}]', "not readable as JSON in event 0: NaN is not a valid number"),
        ('[{"a": -Infinity}]', "not readable as JSON in event 0: -Infinity is not a valid number"),
    ],
)
def test_file_other_than_a_trace_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ParseError) as caught:
        pieces_of(text, tmp_path)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '[{"a":' * 50_000, '[{"a": ' + "9" * 5000 + "}]", '[{"a": "' + "x" * 2**25],
)
def test_files_made_to_exhaust_us_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="not readable as JSON in event 0: "):
        pieces_of(text, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"[{\xff}]",
        gzip.compress(b"[{}]", mtime=0)[:-9],
        b"\x1f\x8bnothing",
        gzip.compress(b"[]", mtime=0) + b"junk",
    ],
)
def test_undecodable_file_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(content)
    with pytest.raises(ParseError, match="not readable as text: "):
        list(read_pieces(file))


def test_a_missing_file_raises_the_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_pieces(tmp_path / "trace.json"))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    with gzip.open(file, "wt") as stream:
        stream.write('{"traceEvents": [')
        stream.writelines(['{"ph": "X", "name": "' + "aten::mm" * 5000 + '"},\n'] * 1000)
        stream.write("{}]}")
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_pieces(file))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The text has forty million characters.
    assert count == 1001
    assert peak < 8 * 2**20

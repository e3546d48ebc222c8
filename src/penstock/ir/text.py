"""Schedules as text: strict parsing of actions, CSV both ways, and a readable table."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from penstock.errors import ParseError
from penstock.ir.actions import OVERLAP_TEXT, Action, Kind, Overlap, Work
from penstock.ir.dataflow import Dataflow
from penstock.ir.wording import WORDING
from penstock.untrusted import quote

__all__ = ["format_csv", "format_table", "parse_cells", "parse_csv", "parse_work"]

_Cell = TypeVar("_Cell")

_KINDS = {kind.text: kind for kind in Kind}
# Longest first, so that SEND_F is not read as something shorter. Nine digits stay within int32.
_KIND_PATTERN = "|".join(sorted(_KINDS, key=len, reverse=True))
_ACTION = re.compile(rf"([0-9]{{1,9}})({_KIND_PATTERN})([0-9]{{1,9}})?(?:>([0-9]{{1,9}}))?")
_OVERLAP = re.compile(rf"\(([^()]*)\){OVERLAP_TEXT}")
_DATAFLOW = re.compile(r"# dataflow:((?: +[0-9]{1,9}>[0-9]{1,9})*) *\| *parts:((?: +[0-9]{1,9})*)")


def parse_work(text: str) -> Work:
    """Read one action or overlap from its text; spaces around it are dropped.

    >>> parse_work("2F0")
    Action(kind=<Kind.FORWARD: 0>, stage=2, microbatch=0, peer=None)
    >>> parse_work("1F0x")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.errors.ParseError: not a valid action: '1F0x' (expected STAGE KIND ...
    """
    stripped = text.strip()
    if group := _OVERLAP.fullmatch(stripped):
        members = tuple(_parse_action(member.strip()) for member in group[1].split(";"))
        try:
            return Overlap(members)
        except ValueError as error:
            raise ParseError(f"not a valid overlap: {quote(stripped)}: {error}") from error
    return _parse_action(stripped)


def _parse_action(text: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ParseError(WORDING["action"].format(text=quote(text)))
    stage, kind, microbatch, peer = match.groups()
    try:
        return Action(
            _KINDS[kind],
            int(stage),
            None if microbatch is None else int(microbatch),
            None if peer is None else int(peer),
        )
    except ValueError as error:
        raise ParseError(f"not a valid action: {quote(text)}: {error}") from error


def format_csv(orders: Iterable[Iterable[Work]], dataflow: Dataflow) -> str:
    """Return a row per rank and a cell per action, after a line for a dataflow but a chain."""
    lines = [] if dataflow.is_chain else [_format_dataflow(dataflow)]
    lines += [",".join(map(str, order)) for order in orders]
    return "\n".join(lines) + "\n"


def parse_csv(text: str) -> tuple[list[list[Work]], Dataflow | None]:
    """Read what `format_csv` wrote: every rank's list, and the dataflow where one is given.

    Empty cells are idle slots; they are dropped, and so are empty lines at the end.
    """
    lines = text.rstrip().splitlines()
    dataflow = None
    if lines and lines[0].lstrip().startswith("#"):
        dataflow = _parse_dataflow(lines.pop(0).strip())
    table = parse_cells("\n".join(lines), lambda cell: parse_work(cell) if cell.strip() else None)
    if not table:
        raise ParseError(WORDING["empty"])
    return [[work for work in row if work is not None] for row in table], dataflow


def parse_cells(text: str, parse: Callable[[str], _Cell]) -> list[list[_Cell]]:
    """Return what `parse` makes of every cell of a CSV file; an error names its rank and cell."""
    try:
        table = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ParseError(f"not a CSV file: {error}") from error
    rows: list[list[_Cell]] = [[] for _ in table]
    for rank, row in enumerate(table):
        for column, cell in enumerate(row):
            try:
                rows[rank].append(parse(cell))
            except ParseError as error:
                found = WORDING["cell"].format(rank=rank, cell=column, error=error)
                raise ParseError(found) from error
    return rows


def _format_dataflow(dataflow: Dataflow) -> str:
    edges = " ".join(f"{producer}>{consumer}" for producer, consumer in dataflow.edges)
    return f"# dataflow: {edges} | parts: {' '.join(map(str, dataflow.parts))}"


def _parse_dataflow(line: str) -> Dataflow:
    match = _DATAFLOW.fullmatch(line)
    if match is None:
        raise ParseError(
            f"not a valid dataflow: {quote(line)}; write # dataflow: 0>1 1>2 | parts: 0 1 2"
        )
    ends = [edge.split(">") for edge in match[1].split()]
    edges = [(int(producer), int(consumer)) for producer, consumer in ends]
    parts = [int(part) for part in match[2].split()]
    return Dataflow(len(parts), edges, parts)


def format_table(orders: Sequence[Sequence[Work]], first_position: int = 0) -> str:
    """Return a table with a column per rank and a row per position."""
    labels = [f"rank {rank}" for rank in range(len(orders))]
    length = max(map(len, orders), default=0)
    index_width = len(str(first_position + max(length - 1, 0)))
    texts = [[str(work) for work in order] for order in orders]
    widths = [max(map(len, [label, *text])) for label, text in zip(labels, texts, strict=True)]

    def line(index: str, cells: Iterable[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"{index.rjust(index_width)}  {'  '.join(padded)}".rstrip()

    body = (
        line(str(first_position + place), (t[place] if place < len(t) else "" for t in texts))
        for place in range(length)
    )
    return "\n".join([line("", labels), *body])

import io
from dataclasses import replace
from textwrap import dedent

from rich.console import Console
from rich.text import Text

from penstock.ir.actions import Kind
from penstock.ir.placement import Placement
from penstock.planner.partition.partition import Partition, partition
from penstock.planner.partition.pieces import Piece
from penstock.view.palette import LOOKS
from penstock.view.text.partition import balance_table

WITH_BYTES = """\
stage  rank  pieces         F  I  W  of slowest          resident  activations        rank memory
    0     0  a.0         1  1  1  1  █████       50.0 %     1 GiB    4 x 1 MiB  3.01 GiB of 4 GiB
    1     1  a.1         1  1  1  1  █████       50.0 %     1 GiB    3 x 1 MiB  2.01 GiB of 4 GiB
    2     1  a.2         1  1  1  1  █████       50.0 %     1 GiB    3 x 1 MiB  2.01 GiB of 4 GiB
    3     0  a.3 .. a.4  2  2  2  2  ██████████ 100.0 %     2 GiB    4 x 2 MiB  3.01 GiB of 4 GiB
balance 62.5 %: slowest stage 6 (stage 3), slowest rank 9"""


def printed(found: Partition) -> str:
    console = Console(file=io.StringIO(), width=140, color_system=None)
    with console.capture() as capture:
        console.print(balance_table(found))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def picture(text: str) -> str:
    return dedent(text).strip("\n")


def test_partition_by_weight_has_no_columns_of_bytes() -> None:
    names = ["embedding", *(f"layers.{i}" for i in range(4)), "head"]
    weights = [3, 3, 3, 3, 3, 6]
    pieces = [Piece.of_weight(n, w) for n, w in zip(names, weights, strict=True)]
    assert printed(partition(pieces, Placement.loop(3))) == picture("""
        stage  rank  pieces                    F  I  W  of slowest
            0     0  embedding .. layers.1  3  3  3  3  ██████████ 100.0 %
            1     1  layers.2 .. layers.3   2  2  2  2  ███████     66.7 %
            2     2  head                   1  2  2  2  ███████     66.7 %
        balance 77.8 %: slowest stage 9 (stage 0), slowest rank 9
    """)


def test_memory_of_a_rank_is_listed_with_its_limit() -> None:
    pieces = [
        replace(Piece.of_weight(f"a.{i}", 3), parameter_bytes=2**30, activation_bytes=2**20)
        for i in range(5)
    ]
    found = partition(pieces, Placement.v(2), memory=4 * 2**30, in_flight=[4, 3, 3, 4])
    assert printed(found) == WITH_BYTES


def test_bars_have_the_colours_of_forward_and_backward() -> None:
    pieces = [Piece("a", forward=1, backward_input=2, backward_weight=1)]
    bar = next(iter(balance_table(partition(pieces, Placement.loop(1))).columns[7].cells))
    assert isinstance(bar, Text)
    assert [(span.start, span.end, span.style) for span in bar.spans] == [
        (0, 2, LOOKS[Kind.FORWARD].colour),
        (2, 8, LOOKS[Kind.BACKWARD_INPUT].colour),
        (8, 10, LOOKS[Kind.BACKWARD_WEIGHT].colour),
    ]


def test_caption_says_if_the_partition_is_not_proven_best() -> None:
    found = partition([Piece("a", forward=1)], Placement.loop(1))
    assert balance_table(replace(found, is_best=False)).caption == (
        "balance 100.0 %: slowest stage 1 (stage 0), slowest rank 1 (not proven to be the fastest)"
    )

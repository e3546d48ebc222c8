"""The fastest cut comes first; others come where it does not fit, or stages recompute."""

from math import inf

from penstock.ir.placement import Placement
from penstock.planner.partition.pieces import Piece
from penstock.planner.search.cuts import cuts_for, rebalance


def make_layers(count: int) -> tuple[Piece, ...]:
    embedding = Piece("embedding", forward=0.1, parameter_bytes=40.0)
    blocks = [
        Piece(f"block.{n}", 1.0, 1.0, 1.0, parameter_bytes=10.0, activation_bytes=8.0)
        for n in range(count)
    ]
    return (embedding, *blocks)


def sizes(memory: float, in_flight: tuple[int, ...] = (2, 1)) -> list[tuple[int, ...]]:
    found = cuts_for(make_layers(8), Placement.loop(2), (memory, memory), in_flight)
    return [cut.sizes for cut in found]


def test_enough_memory_leaves_the_fastest_cut() -> None:
    assert sizes(inf) == sizes(1000.0) == [(5, 4)]


def test_little_memory_moves_layers_to_where_there_is_room() -> None:
    # With two microbatches in flight on the first rank, it can hold three blocks of 26 bytes;
    # with one, three or four of 18 bytes; without activations, more than there are.
    assert sizes(125.0) == [(5, 4), (4, 5)]
    assert sizes(100.0) == [(5, 4), (4, 5)]


def test_memory_that_not_even_parameters_fit_leaves_the_fastest_cut() -> None:
    assert sizes(10.0) == [(5, 4)]


def test_stages_that_recompute_get_fewer_layers() -> None:
    cut = cuts_for(make_layers(16), Placement.loop(2), (inf, inf), (2, 1))[0]
    assert cut.sizes == (9, 8)
    assert rebalance(cut, [0]).sizes == (8, 9)
    assert rebalance(cut, [1]).sizes == (10, 7)
    assert rebalance(cut, [0, 1]).sizes == (9, 8)
    assert rebalance(cut, [0]).pieces == cut.pieces

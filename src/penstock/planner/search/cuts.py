"""The cuts that a search considers: the fastest, those that fit, those for recomputation."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from penstock.ir.placement import Placement
from penstock.planner.partition.demand import Demand
from penstock.planner.partition.partition import Partition, find_partition
from penstock.planner.partition.pieces import Piece

__all__ = ["cuts_for", "cuts_for_speeds", "rebalance"]


def cuts_for(
    pieces: tuple[Piece, ...],
    placement: Placement,
    memory: Sequence[float],
    in_flight: tuple[int, ...],
) -> list[Partition]:
    """Return the fastest cut, and where it does not fit, those that do.

    To fit is to have room for these microbatches in flight per stage, or for fewer, down to one;
    or for none, since a checkpointed stage holds little.
    """
    fastest = _fastest(pieces, placement)
    capacity = max(piece.workspace_bytes + 2 * piece.message_bytes for piece in pieces)
    caps = tuple(max(0.0, limit - capacity) for limit in memory)
    bare = tuple(replace(piece, activation_bytes=0.0) for piece in pieces)
    targets = [(pieces, counts) for counts in _fewer_and_fewer(in_flight)]
    found = [fastest]
    for held, counts in [*targets, (bare, targets[-1][1])]:
        needed = replace(fastest, pieces=held, in_flight=counts).rank_bytes
        if any(bytes_ > cap for bytes_, cap in zip(needed, caps, strict=True)):
            other = find_partition(Demand.of(held, placement, caps, counts))
            found += [] if other is None else [replace(fastest, cuts=other.cuts)]
    return list({cut.cuts: cut for cut in found}.values())


def cuts_for_speeds(
    pieces: Sequence[Piece], rank_of_stage: Sequence[int], factors: Sequence[float]
) -> tuple[int, ...]:
    """Return the pieces per stage whose slowest stage is fastest on ranks of different speed.

    `factors` are per rank: what its stages take, as a multiple of the pieces' seconds. This is a
    dynamic program over stages and the number of pieces in all stages so far.

    >>> pieces = [Piece.of_weight(name, 1) for name in "abcdef"]
    >>> cuts_for_speeds(pieces, (0, 1), (1.0, 2.0))
    (4, 2)
    """
    before = (0.0, *accumulate(piece.seconds for piece in pieces))
    number, stages = len(pieces), len(rank_of_stage)
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *[None] * number]
    for stage, rank in enumerate(rank_of_stage):
        further: list[tuple[float, tuple[int, ...]] | None] = [None] * (number + 1)
        for end in range(stage + 1, number - (stages - stage - 1) + 1):
            further[end] = min(
                (max(known[0], factors[rank] * (before[end] - before[begin])), (*known[1], end))
                for begin in range(stage, end)
                if (known := best[begin]) is not None
            )
        best = further
    found = best[number]
    assert found is not None, "there are at least as many pieces as stages"
    return tuple(end - begin for begin, end in pairwise((0, *found[1])))


def _fewer_and_fewer(in_flight: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return these microbatches per stage, then at most half of the most, and so on down to one.

    >>> _fewer_and_fewer((5, 3, 1))
    [(5, 3, 1), (2, 2, 1), (1, 1, 1)]
    """
    found, most = [in_flight], max(in_flight)
    while most > 1:
        most //= 2
        found.append(tuple(min(count, most) for count in in_flight))
    return found


def rebalance(cut: Partition, checkpointed: Collection[int]) -> Partition:
    """Return the cut with less work for the stages that run their forwards twice."""
    heavier = tuple(
        replace(piece, backward_input=piece.backward_input + piece.forward)
        if stage in checkpointed
        else piece
        for stage, held in enumerate(cut.stages)
        for piece in held
    )
    return replace(cut, cuts=_fastest(heavier, cut.placement).cuts)


def _fastest(pieces: tuple[Piece, ...], placement: Placement) -> Partition:
    found = find_partition(Demand.of(pieces, placement, None, 1))
    assert found is not None, "without caps there are always cuts"
    return found

"""The cuts that a search considers: the fastest, those that fit, those for recomputation."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from penstock.ir.placement import Placement
from penstock.planner.partition.demand import Demand
from penstock.planner.partition.partition import Partition, find_partition
from penstock.planner.partition.pieces import Piece

__all__ = ["cuts_for", "rebalance"]


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
    room = max(piece.workspace_bytes + 2 * piece.message_bytes for piece in pieces)
    caps = tuple(max(0.0, limit - room) for limit in memory)
    bare = tuple(replace(piece, activation_bytes=0.0) for piece in pieces)
    targets = [(pieces, counts) for counts in _fewer_and_fewer(in_flight)]
    found = [fastest]
    for held, counts in [*targets, (bare, targets[-1][1])]:
        needed = replace(fastest, pieces=held, in_flight=counts).rank_bytes
        if any(bytes_ > cap for bytes_, cap in zip(needed, caps, strict=True)):
            other = find_partition(Demand.of(held, placement, caps, counts))
            found += [] if other is None else [replace(fastest, cuts=other.cuts)]
    return list({cut.cuts: cut for cut in found}.values())


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

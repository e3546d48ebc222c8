"""Pieces of a traced graph, between the places where a cut would send the fewest bytes.

At each place between two nodes some values are alive: computed before it, used after it. A cut
there would send them. Pieces begin where fewer bytes are alive than at all places nearby.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from penstock.errors import SizeError
from penstock.ir.placement import Placement
from penstock.planner.partition.partition import partition
from penstock.planner.partition.pieces import Piece
from penstock.splitting.by_tracing.capture.capture import Capture
from penstock.splitting.by_tracing.capture.traced_graph import module_paths
from penstock.splitting.by_tracing.cut.assignment import is_work
from penstock.splitting.by_tracing.cut.work import bytes_of, count_moved_bytes, count_operations

__all__ = ["GraphPiece", "estimate_work", "graph_pieces", "group_pieces"]

# How far to each side places are compared, in shares of the work of one stage. The widest window
# is used for which the heaviest stage is nearly as light as with cuts anywhere.
_WINDOWS = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 0)
_NEARLY = 1.15
# How many operations take as long as moving one byte, roughly, on modern devices.
_OPERATIONS_PER_BYTE = 64


@dataclass(frozen=True, eq=False)
class GraphPiece:
    """A contiguous part of a traced graph: the module that it begins in, its work, its input."""

    name: str
    start: fx.Node
    operations: int
    moved_bytes: int
    parameter_bytes: int
    crossing_bytes: int


def estimate_work(piece: GraphPiece) -> float:
    """Return the work of a piece: operations of matrix products, and bytes read and written."""
    return float(_weigh(piece.operations, piece.moved_bytes))


def _weigh(operations: int, moved_bytes: int) -> int:
    return operations + _OPERATIONS_PER_BYTE * moved_bytes


def graph_pieces(capture: Capture, stages: int) -> tuple[GraphPiece, ...]:
    """Return the pieces of a traced model, small enough to make this many stages."""
    nodes = [node for node in capture.module.graph.nodes if node.op not in ("get_attr", "output")]
    alive = _alive_bytes(nodes)
    work = [
        count_operations(node) + _OPERATIONS_PER_BYTE * count_moved_bytes(node) for node in nodes
    ]
    begins = [place for place, node in enumerate(nodes) if is_work(node)]
    places = _find_places(alive, work, begins, stages)
    ends = [*places[1:], len(nodes)]
    return tuple(
        _piece(nodes[start:end], alive[start]) for start, end in zip(places, ends, strict=True)
    )


def group_pieces(
    pieces: Sequence[GraphPiece], weigh: Callable[[GraphPiece], float], stages: int
) -> list[fx.Node]:
    """Return where stages but the first begin, so that the heaviest is as light as possible."""
    if not 1 <= stages <= len(pieces):
        raise SizeError(
            f"stages must be 1 to {len(pieces)} for this traced model (got {stages}); mark the "
            "places yourself to cut it finer"
        )
    weighed = [Piece.of_weight(piece.name, weigh(piece)) for piece in pieces]
    cuts = partition(weighed, Placement.loop(ranks=stages)).cuts
    return [pieces[cut].start for cut in cuts[1:-1]]


def _find_places(
    alive: Sequence[int], work: Sequence[int], begins: Sequence[int], stages: int
) -> list[int]:
    """Return where pieces begin, as far apart as the number of stages allows."""
    done = [0, *accumulate(work)]
    windows = (window * done[-1] / stages for window in _WINDOWS)
    tries = [list(_narrow_places(alive, done, begins, window)) for window in windows]
    heaviest = [
        _heaviest_stage([*(done[p] for p in places), done[-1]], stages) for places in tries
    ]
    return next(
        places
        for places, weight in zip(tries, heaviest, strict=True)
        if weight <= _NEARLY * heaviest[-1] and (len(places) >= stages or places is tries[-1])
    )


def _heaviest_stage(totals: Sequence[int], stages: int) -> int:
    """Return the smallest possible weight of the heaviest stage, by bisection."""
    low, high = 0, totals[-1] - totals[0]
    while low < high:
        middle = (low + high) // 2
        end = 0
        for _ in range(stages):
            end = bisect_right(totals, totals[end] + middle) - 1
        low, high = (low, middle) if end == len(totals) - 1 else (middle + 1, high)
    return low


def _narrow_places(
    alive: Sequence[int], done: Sequence[int], begins: Sequence[int], window: float
) -> Iterator[int]:
    """Yield the first place, and those with the fewest bytes alive within a window of work."""
    positions = [done[place] for place in begins]
    last = -1
    for index, (place, position) in enumerate(zip(begins, positions, strict=True)):
        low = bisect_left(positions, position - window)
        high = bisect_right(positions, position + window)
        is_narrow = alive[place] == min(alive[other] for other in begins[low:high])
        if index == 0 or (is_narrow and position > last):
            last = position
            yield place


def _alive_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """Return the bytes alive at each place before a node."""
    order = {node: position for position, node in enumerate(nodes)}
    changes = [0] * (len(nodes) + 1)
    for node, position in order.items():
        last = max((order.get(user, len(nodes)) for user in node.users), default=position)
        size = bytes_of(node.meta.get("val"))
        changes[position + 1] += size
        if last < len(nodes):
            changes[last + 1] -= size
    return list(accumulate(changes))


def _piece(nodes: Sequence[fx.Node], crossing: int) -> GraphPiece:
    attributes = {a for node in nodes for a in node.all_input_nodes if a.op == "get_attr"}
    start = nodes[0]
    paths = module_paths(start)
    return GraphPiece(
        paths[-1] if paths and paths[-1] else start.name,
        start,
        sum(map(count_operations, nodes)),
        sum(map(count_moved_bytes, nodes)),
        sum(bytes_of(attribute.meta.get("val")) for attribute in attributes),
        crossing,
    )

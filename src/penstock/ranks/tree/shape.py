"""The shape of the tree in which ranks exchange control messages: a function of ranks alone.

Rank 0 is the root, and every rank has up to 16 children, numbered level by level:

    0 -+- 1 -+- 17 ... 32
       |     `- ...
       +- 2 --- 33 ... 48
       `- ...

Up to 17 ranks, all others are children of rank 0. Two thousand ranks have three levels below it.
"""

__all__ = ["FANOUT", "ancestors_of", "children_of", "parent_of", "subtree_of"]

# Few enough connections for one thread, and enough that a message passes few ranks.
FANOUT = 16


def parent_of(rank: int) -> int:
    """Return the rank above one that is not the root.

    >>> [parent_of(rank) for rank in (1, 16, 17, 33)]
    [0, 0, 1, 2]
    """
    assert rank > 0, "the root has no parent"
    return (rank - 1) // FANOUT


def children_of(rank: int, size: int) -> range:
    """Return the ranks right below one, of a tree with this number of ranks."""
    first = rank * FANOUT + 1
    return range(min(first, size), min(first + FANOUT, size))


def ancestors_of(rank: int) -> tuple[int, ...]:
    """Return the ranks above one, the nearest first and the root last.

    >>> ancestors_of(300)
    (18, 1, 0)
    """
    found = []
    while rank > 0:
        rank = parent_of(rank)
        found.append(rank)
    return tuple(found)


def subtree_of(rank: int, size: int) -> list[int]:
    """Return a rank and all ranks below it, each before those below it."""
    found = [rank]
    for child in children_of(rank, size):
        found += subtree_of(child, size)
    return found

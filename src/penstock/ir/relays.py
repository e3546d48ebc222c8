"""How a value gets from the stage that makes it to all stages that need it.

A value goes from stage to stage, and reaches each rank once: a stage takes it from the last stage
of its own rank that has it, or else from the last of all stages that has it.

    made by 0, needed by 1 to 7, on 4 ranks with 2 stages each:

        rank 0   0 ----------> 4
        rank 1   `-> 1 ----------> 5
        rank 2       `-> 2 ----------> 6
        rank 3           `-> 3 ----------> 7
"""

from collections.abc import Hashable, Iterable, Sequence

__all__ = ["relay_sources"]


def relay_sources(
    origin: int, needed_by: Iterable[int], ranks: Sequence[Hashable]
) -> dict[int, int]:
    """Return, for each stage that needs a value, the stage from which it takes it.

    `ranks` has the place of each stage; stages with equal places are on one rank.

    >>> relay_sources(0, [1, 2, 3], ranks=[0, 1, 0, 1])
    {1: 0, 2: 0, 3: 1}
    """
    holders, sources = [origin], {}
    for stage in sorted(stage for stage in set(needed_by) if stage > origin):
        here = [holder for holder in holders if ranks[holder] == ranks[stage]]
        sources[stage] = (here or holders)[-1]
        holders.append(stage)
    return sources

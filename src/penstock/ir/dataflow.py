"""Which stage feeds which.

chain     0 -> 1 -> 2 -> 3
skip      0 -> 1 -> 2 -> 3  and  0 -> 3
chains    0 -> 1  and  2 -> 3, where stage 2 runs the same part of the model as stage 0
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.errors import ScheduleError

__all__ = ["Dataflow", "Routed"]


@dataclass(frozen=True)
class Dataflow:
    """Which stage feeds which, as (producer, consumer) edges from lower to higher stages.

    `parts` says which part of the model each stage runs; it is the stage's own number unless two
    stages are copies of one part, as in a pipeline that runs in both directions.

    >>> Dataflow.chain(3).edges
    ((0, 1), (1, 2))
    >>> Dataflow(3, [(0, 1), (1, 2), (0, 2)]).producers(2)
    (0, 1)
    """

    num_stages: int
    edges: tuple[tuple[int, int], ...]
    parts: tuple[int, ...]

    def __init__(
        self,
        num_stages: int,
        edges: Sequence[tuple[int, int]],
        parts: Sequence[int] | None = None,
    ) -> None:
        for producer, consumer in edges:
            if not 0 <= producer < consumer < num_stages:
                raise ScheduleError(
                    f"an edge must go from a lower to a higher stage below {num_stages} "
                    f"(got {producer} > {consumer})"
                )
        if parts is not None and len(parts) != num_stages:
            raise ScheduleError(
                f"parts must have one number per stage (stages: {num_stages}, parts: {len(parts)})"
            )
        for part, expected in zip(sorted(set(parts or ())), range(num_stages), strict=False):
            if part != expected:
                raise ScheduleError(
                    "parts must be numbered from 0 without gaps "
                    f"(got {part} for {num_stages} stages)"
                )
        object.__setattr__(self, "num_stages", num_stages)
        object.__setattr__(self, "edges", tuple(sorted(set(edges))))
        object.__setattr__(self, "parts", tuple(range(num_stages) if parts is None else parts))

    @classmethod
    def chain(cls, num_stages: int) -> "Dataflow":
        """Return the dataflow in which every stage feeds the next one."""
        return cls(num_stages, [(stage, stage + 1) for stage in range(num_stages - 1)])

    @classmethod
    def copies(cls, num_parts: int, num_copies: int) -> "Dataflow":
        """Return several copies of one chain; each microbatch goes through one of them."""
        starts = range(0, num_parts * num_copies, num_parts)
        edges = [
            (start + part, start + part + 1) for start in starts for part in range(num_parts - 1)
        ]
        return cls(num_parts * num_copies, edges, tuple(range(num_parts)) * num_copies)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every stage just feeds the next one and no two run the same part."""
        return self == Dataflow.chain(self.num_stages)

    @property
    def num_parts(self) -> int:
        """The number of parts of the model: as many as stages, unless some are copies."""
        return len(set(self.parts))

    def producers(self, stage: int) -> tuple[int, ...]:
        """Return the stages whose outputs `stage` takes in."""
        return self._neighbours[0][stage]

    def consumers(self, stage: int) -> tuple[int, ...]:
        """Return the stages that take in the outputs of `stage`."""
        return self._neighbours[1][stage]

    @cached_property
    def _neighbours(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        producers: list[list[int]] = [[] for _ in range(self.num_stages)]
        consumers: list[list[int]] = [[] for _ in range(self.num_stages)]
        for producer, consumer in self.edges:
            producers[consumer].append(producer)
            consumers[producer].append(consumer)
        return tuple(map(tuple, producers)), tuple(map(tuple, consumers))

    @cached_property
    def stream_of_stage(self) -> tuple[int, ...]:
        """The stream of each stage: which of the copies of the model it belongs to.

        Stages that are not copies of one another are all in stream 0, joined by edges or not.
        """
        seen: dict[int, int] = {}
        streams = []
        for part in self.parts:
            streams.append(seen.get(part, 0))
            seen[part] = streams[-1] + 1
        return tuple(streams)

    def with_parts(self, parts: Sequence[int]) -> "Dataflow":
        """Return the dataflow between stages that run these parts, from one between parts.

        >>> Dataflow(3, [(0, 1), (1, 2), (0, 2)]).with_parts([0, 1, 2, 0, 1, 2]).edges
        ((0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5))
        """
        streams = Dataflow(len(parts), (), parts).stream_of_stage
        stage_of = {
            (part, stream): stage
            for stage, (part, stream) in enumerate(zip(parts, streams, strict=True))
        }
        edges = [
            (stage_of[producer, stream], stage_of[consumer, stream])
            for stream in sorted(set(streams))
            for producer, consumer in self.edges
        ]
        return Dataflow(len(parts), edges, parts)


@dataclass(frozen=True, slots=True)
class Routed:
    """The outputs of a stage by the part of the model that gets them, where they differ.

    A module returns this in place of a plain output, which goes to all parts that it feeds.
    """

    values: Mapping[int, Any]

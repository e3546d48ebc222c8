"""The links of all stages of one rank, and a step on its way through them."""

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from penstock.dropin._headers import Channel, Host
from penstock.dropin._links import Link, Metas

__all__ = ["Boundaries", "Boundary", "Neighbour"]


class Neighbour(Protocol):
    """What the links have to know of a stage."""

    stage_index: int
    num_stages: int
    group: dist.ProcessGroup | None
    group_rank: int
    stage_index_to_group_rank: dict[int, int]

    def find_sources(self) -> Sequence[int]:
        """The stages that this one receives from."""

    def find_destinations(self) -> Sequence[int]:
        """The stages that this one sends to."""


class Boundary:
    """One stage's links to other ranks; a step opens them when the first of them is needed."""

    def __init__(
        self, stage: int, sources: Mapping[int, Link], destinations: Mapping[int, Link]
    ) -> None:
        self.stage = stage
        self.sources = sources
        self.destinations = destinations
        self._step: _Step | None = None

    def enter(self, step: "_Step") -> None:
        """A new step begins."""
        self._step = step

    def _open(self) -> None:
        if self._step is not None:
            self._step.open(self.stage)

    @property
    def rows(self) -> int | None:
        """How many rows the batch of this step has, if the first stage could tell."""
        self._open()
        return None if self._step is None else self._step.rows

    def knows_source(self, source: int) -> bool:
        """Whether it is known what a stage will send here in this step."""
        self._open()
        return self.sources[source].is_known

    def knows_destination(self, destination: int) -> bool:
        """Whether it is known what a stage will send back here in this step."""
        return self.destinations[destination].is_known

    @property
    def knows_all(self) -> bool:
        """Whether nothing is left to be told in this step."""
        return all(link.is_known for link in (*self.sources.values(), *self.destinations.values()))

    def expect_activations(self, source: int, microbatch: int) -> Metas:
        """What a stage sends for a microbatch; in a step of a new kind this waits for it."""
        self._open()
        return self.sources[source].learn(True, microbatch)

    def expect_gradients(self, destination: int, microbatch: int) -> Metas:
        """What a stage sends back for a microbatch."""
        return self.destinations[destination].learn(False, microbatch)

    def tell_activations(self, destination: int, microbatch: int, metas: Metas) -> None:
        """Before sending a microbatch on."""
        self._open()
        self.destinations[destination].tell(True, microbatch, metas)

    def tell_gradients(self, source: int, microbatch: int, metas: Metas) -> None:
        """Before sending gradients back."""
        self.sources[source].tell(False, microbatch, metas)


class _Step:
    """A step on its way through the stages of this rank.

    They are opened in rising order, so that nobody waits for an announcement that it holds up.
    """

    def __init__(
        self,
        boundaries: Mapping[int, Boundary],
        local: Mapping[int, Sequence[int]],
        calls: Mapping[int, str],
        rows: int | None,
    ) -> None:
        self.rows = rows
        self._boundaries = boundaries
        self._local = local
        self._calls = calls
        self._waiting = deque(sorted(boundaries))
        self._keys: dict[int, bytes] = {}

    def open(self, stage: int) -> None:
        """Hear and pass on which step this is, for this stage and those before it."""
        while self._waiting and self._waiting[0] <= stage:
            self._open_next(self._waiting.popleft())

    def _open_next(self, stage: int) -> None:
        parts = [self._keys[source] for source in self._local[stage]]
        for link in self._boundaries[stage].sources.values():
            announcement = link.hear()
            parts.append(announcement.key)
            self.rows = announcement.rows
        parts.append(self._calls[stage].encode())
        self._keys[stage] = hashlib.sha256(b"|".join(parts)).digest()
        for link in self._boundaries[stage].destinations.values():
            link.announce(self._keys[stage], self.rows)


class Boundaries:
    """All links of a rank's stages."""

    def __init__(self, stages: Sequence[Neighbour]) -> None:
        self._holder = dict(stages[0].stage_index_to_group_rank)
        self._rank = stages[0].group_rank
        self._num_stages = stages[0].num_stages
        self._host: Host | None = None
        if any(self._is_elsewhere(peer) for stage in stages for peer in _peers(stage)):
            self._host = Host(stages[0].group or _get_default_group())
        self._boundaries = {stage.stage_index: self._connect(stage) for stage in stages}
        self._local = {
            stage.stage_index: [s for s in stage.find_sources() if not self._is_elsewhere(s)]
            for stage in stages
        }

    def fits(self, stages: Sequence[Neighbour]) -> bool:
        """Whether these are still the links of these stages."""
        held = [stage.stage_index for stage in stages]
        return self._holder == stages[0].stage_index_to_group_rank and held == list(
            self._boundaries
        )

    def __getitem__(self, stage: int) -> Boundary:
        return self._boundaries[stage]

    def _is_elsewhere(self, stage: int) -> bool:
        return self._holder[stage] != self._rank

    def _connect(self, stage: Neighbour) -> Boundary:
        here = stage.stage_index
        sources = {
            s: self._link(s, here, s) for s in stage.find_sources() if self._is_elsewhere(s)
        }
        destinations = {
            d: self._link(here, d, d) for d in stage.find_destinations() if self._is_elsewhere(d)
        }
        return Boundary(here, sources, destinations)

    def _link(self, source: int, destination: int, peer: int) -> Link:
        assert self._host is not None, "there is somebody to talk to"
        number = source * self._num_stages + destination
        channel = Channel(self._host, self._holder[peer], number)
        return Link(f"stage {source} to stage {destination}", channel)

    def begin_step(self, calls: Mapping[int, str], rows: int | None, microbatches: int) -> None:
        """A step begins, in which each stage is called like this; the first stage tells others."""
        for link in self._links():
            link.remember(microbatches)
        self.end_step()
        step = _Step(self._boundaries, self._local, calls, rows)
        for stage, boundary in self._boundaries.items():
            boundary.enter(step)
            if not boundary.sources and not self._local[stage]:
                step.open(stage)

    def repeat_step(self, microbatches: int) -> None:
        """A step begins that is known to be like the one before; nobody is told."""
        for link in self._links():
            link.remember(microbatches)

    def end_step(self) -> None:
        """Wait until everything that was told has been heard."""
        if self._host is not None:
            self._host.finish()

    def abandon_step(self) -> None:
        """Let go of what nobody will hear any more."""
        if self._host is not None:
            self._host.forget()

    def _links(self) -> list[Link]:
        return [
            link
            for boundary in self._boundaries.values()
            for link in (*boundary.sources.values(), *boundary.destinations.values())
        ]


def _peers(stage: Neighbour) -> list[int]:
    return [*stage.find_sources(), *stage.find_destinations()]

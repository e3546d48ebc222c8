"""RECOMPUTE, OFFLOAD and RELOAD on one rank: what a schedule does with what forwards save."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch

from penstock.ir.actions import Action, Kind
from penstock.ir.schedule import Schedule
from penstock.step.saved.copies import CopyEngine, HostMemory
from penstock.step.saved.graph import PackedGraph, pack_graph
from penstock.step.saved.recompute import Inputs, InputsOnly
from penstock.step.stage import Stage
from penstock.step.step_data import Microbatches
from penstock.tensors.packet import Packet
from penstock.torch_private import tree_leaves

__all__ = ["Finish", "Run", "SavedActions"]

# Runs a stage's module forward: batch, stage, microbatch, received packets, arguments.
Run: TypeAlias = Callable[[Microbatches, Stage, int, Sequence[Packet], tuple[Any, ...]], Any]

# Ends the model for a microbatch, with its loss: last stage, microbatch, output.
Finish: TypeAlias = Callable[[Stage, int, Any], None]

_Place: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class _Offloaded:
    """What a graph holds, on its way to the host, there, or on its way back."""

    engine: CopyEngine
    graph: PackedGraph
    memories: list[HostMemory]
    event: torch.cuda.Event | None


class SavedActions:
    """What becomes of what the forwards of this process's stages save."""

    def __init__(self, schedule: Schedule, stages: Mapping[int, Stage], finish: Finish) -> None:
        self._flow = schedule.dataflow
        self._stages = stages
        self._finish = finish
        self._recomputed = _places(schedule, Kind.RECOMPUTE)
        self._offloaded = _places(schedule, Kind.OFFLOAD)
        self._inputs_only = {
            index: InputsOnly(index, stages[index].module)
            for index in {stage for stage, _ in self._recomputed} & set(stages)
        }
        self._engines: dict[torch.device, CopyEngine] = {}
        self._kept: dict[_Place, tuple[Microbatches, Inputs]] = {}
        self._away: dict[_Place, _Offloaded] = {}
        # The pieces of the batch that running forwards use; overlapped ones run by turns.
        self._batches: dict[_Place, tuple[Any, ...]] = {}

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that offloading has taken so far."""
        return sum(engine.host_bytes for engine in self._engines.values())

    def is_recomputed(self, place: tuple[int, int]) -> bool:
        """Return whether a RECOMPUTE runs the forward of a stage and microbatch again."""
        return place in self._recomputed

    def find_run(self, place: _Place, run: Run) -> Run:
        """Return how the module of a stage runs forward for a microbatch: `run`, or lightly."""
        if place in self._recomputed:
            return partial(self._save_inputs, run)
        return partial(self._note_batch, run) if place in self._offloaded else run

    def follow(self, place: _Place, forward: Callable[[], None]) -> Callable[[], None]:
        """Return a forward followed by what becomes of what it has saved."""
        if place in self._recomputed:
            after = partial(self._stages[place[0]].release, place[1])
        elif place in self._offloaded:
            after = partial(self._begin_offload, place)
        else:
            return forward

        def run() -> None:
            forward()
            after()

        return run

    def precede(self, place: _Place, backward: Callable[[], None]) -> Callable[[], None]:
        """Return a backward that first waits for what has been reloaded for it."""
        if place not in self._offloaded:
            return backward

        def run() -> None:
            self._await_reload(place)
            backward()

        return run

    def find_call(self, action: Action) -> Callable[[], None]:
        """Return what RECOMPUTE, OFFLOAD or RELOAD does."""
        place = action.stage, action.microbatch or 0
        match action.kind:
            case Kind.RECOMPUTE:
                return partial(self._recompute, place)
            case Kind.OFFLOAD:
                return partial(self._offload, place)
            case _:
                return partial(self._reload, place)

    def clear(self) -> None:
        """Forget everything after a step; host memory stays for the next one."""
        self._kept.clear()
        self._batches.clear()
        for place in list(self._away):
            # After a failure a copy may still be running.
            self._await_reload(place)

    def _save_inputs(
        self,
        run: Run,
        batch: Microbatches,
        stage: Stage,
        microbatch: int,
        received: Sequence[Packet],
        args: tuple[Any, ...],
    ) -> Any:
        kwargs = batch.kwargs[stage.index][microbatch]
        with self._inputs_only[stage.index].run(received, args, kwargs) as (given, held):
            output = run(batch, stage, microbatch, given, args)
        held.protect(output)
        self._kept[stage.index, microbatch] = batch, held.inputs
        return output

    def _note_batch(
        self,
        run: Run,
        batch: Microbatches,
        stage: Stage,
        microbatch: int,
        received: Sequence[Packet],
        args: tuple[Any, ...],
    ) -> Any:
        """Remember which memory belongs to the batch, and stays where it is."""
        targets = batch.targets[microbatch] if batch.targets else None
        given = batch.args[microbatch], batch.kwargs[stage.index][microbatch], targets
        self._batches[stage.index, microbatch] = given
        return run(batch, stage, microbatch, received, args)

    def _recompute(self, place: _Place) -> None:
        """Run a forward again from what it took in; what it sends has been sent already.

        The last stage makes the loss now, and only now: a loss may draw, count and write.
        """
        batch, inputs = self._kept.pop(place)
        index, microbatch = place
        stage, fed = self._stages[index], self._flow.consumers(index)
        observed = None if fed else batch.weigher.observe_stage(stage.module)
        with self._inputs_only[index].again(inputs), observed or nullcontext():
            output, added = stage.forward(microbatch, inputs.received, inputs.args, inputs.kwargs)
            for loss in added:
                weight = batch.row_weights[microbatch] * batch.gradient_scale
                stage.add_root(microbatch, loss, weight)
            if fed:
                stage.depart(microbatch, output, [self._flow.parts[other] for other in fed])
        if not fed:
            self._finish(stage, microbatch, output)

    def _begin_offload(self, place: _Place) -> None:
        """Pack what a graph holds, and begin to copy it to the host."""
        stage = self._stages[place[0]]
        flight = stage.flight(place[1])
        roots = [edge.node for edge in chain.from_iterable(flight.edges)]
        roots += [edge.node for edge, _ in flight.roots]
        given = tree_leaves(self._batches.pop(place))
        batch = (leaf for leaf in given if isinstance(leaf, torch.Tensor))
        own = chain(stage.module.parameters(), stage.module.buffers(), batch)
        stays = {tensor.untyped_storage().data_ptr() for tensor in own}
        graph = pack_graph(roots, chain.from_iterable(flight.inputs), stays)
        if pieces := graph.bytes:
            device = pieces[0].device
            engine = self._engines.setdefault(device, CopyEngine(device))
            self._away[place] = _Offloaded(engine, graph, *engine.begin_out(pieces))

    def _offload(self, place: _Place) -> None:
        """Wait until a graph is on the host, and let go of it on the device."""
        if away := self._away.get(place):
            away.engine.wait(away.event)
            away.graph.leave()

    def _reload(self, place: _Place) -> None:
        """Begin to copy back what a graph holds."""
        if away := self._away.get(place):
            targets, away.event = away.engine.begin_back(away.memories)
            away.graph.come_back(targets)

    def _await_reload(self, place: _Place) -> None:
        """Wait until a graph is back."""
        if away := self._away.pop(place, None):
            away.engine.wait(away.event)
            away.engine.release(away.memories, away.event)


def _places(schedule: Schedule, kind: Kind) -> set[_Place]:
    rows = schedule.rows
    found = rows.is_kind(kind)
    return set(zip(rows.stage[found].tolist(), rows.microbatch[found].tolist(), strict=True))

"""One stage of the model at work: its module, and what it holds for each microbatch in flight."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.deferred.own_pass import run_own_pass
from penstock.deferred.work import DeferredWork, add_weight_gradients
from penstock.errors import ArgumentError, BoundaryError, PipelineError
from penstock.ir.dataflow import Routed
from penstock.loss.added import collect_losses
from penstock.parallel.dtensor import Meshes, take_local_parts
from penstock.parallel.replica import Replica
from penstock.step.activation_checkpointing import CheckpointedModule
from penstock.step.backward import LayerRecorder, Root, run_backward
from penstock.step.crossing_hooks import InnerPasses, find_hooked
from penstock.step.cuda_graphs import StageGraphs
from penstock.step.layer_random import StageRandom
from penstock.tensors.packet import Packet, as_arguments
from penstock.tensors.plain import plain_value, require_plain
from penstock.tensors.tree import Structure, flatten, unflatten

__all__ = ["Stage"]


# The gradients of a stage's parameters at some moment, with their versions.
GradientMarks: TypeAlias = list[tuple[torch.Tensor | None, int]]


@dataclass(slots=True)
class _Flight:
    """A microbatch between its forward and the backward that lets go of its graph."""

    inputs: list[list[torch.Tensor]]
    is_replayed: bool = False
    # Whether somebody asks of a pass through this graph if it is the stage's own.
    is_watched: bool = False
    edges: list[list[GradientEdge]] = field(default_factory=list)
    roots: list[Root] = field(default_factory=list)


class _Enter(torch.autograd.Function):
    """Hands a received leaf to the module as an ordinary tensor, so that it may be written to."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        return gradient


class Stage:
    """Runs one stage's module forward and backward, microbatch by microbatch.

    `call` is called in the module's place, with the same arguments.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        replica: Replica,
        *,
        call: Callable[..., Any] | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self.replica = replica
        self._call = module if call is None else call
        self.peak_flights = 0
        self._flights: dict[int, _Flight] = {}
        self._waiting: dict[int, list[DeferredWork]] = {}
        self._recorder: LayerRecorder | None = None
        self._graphs: StageGraphs | None = None
        self._random: StageRandom | None = None
        self._checkpointed: CheckpointedModule | None = None
        self.inner_passes = InnerPasses(index)
        self._hooked: list[tuple[int, ...]] = []
        self._meshes = Meshes(module)
        self._parameters = tuple(module.parameters())
        # Whether the module writes in place to what it receives; found out in the first forward.
        self._writes: bool | None = None

    @property
    def num_flights(self) -> int:
        """How many microbatches hold their activations: from forward to B or I."""
        return len(self._flights)

    @property
    def num_waiting(self) -> int:
        """How many microbatches hold what their weight work needs: from I to W."""
        return len(self._waiting)

    def prepare_split(self) -> bool:
        """Watch the layers whose weight work can wait; whether there are any."""
        self._recorder = LayerRecorder()
        return self._recorder.watch(self.module)

    def undeferred_weights(self) -> list[str]:
        """Return the names of the weights that a split backward has left to I so far."""
        return [] if self._recorder is None else self._recorder.undeferred_weights()

    def checkpoint(self) -> None:
        """Hold inputs only, and run the module again in the backward."""
        self._checkpointed = CheckpointedModule(self.module)

    def draw_from(self, random: StageRandom) -> None:
        """Take random numbers from streams of our own, which are the same for every layout."""
        self._random = random

    def capture_graphs(self) -> None:
        """Run as CUDA graphs from the second step on; after `prepare_split`, if that is due."""
        if self._checkpointed is not None:
            raise ArgumentError(
                f"stage {self.index} is checkpointed, and running it again cannot be captured; "
                "leave cuda_graphs out"
            )
        if not self.replica.is_alone:
            raise ArgumentError(
                f"stage {self.index} is data-parallel, and its communication cannot be captured; "
                "leave cuda_graphs out"
            )
        self._graphs = StageGraphs(self.module, self._recorder)

    def evaluate(
        self,
        microbatch: int,
        received: Sequence[Packet],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the module without keeping a graph."""
        values = [self._unpack(packet.structure, packet.tensors) for packet in received]
        with torch.no_grad(), self._draw(microbatch, is_training=False):
            return self._call(*as_arguments(values), *args, **kwargs)

    def forward(
        self,
        microbatch: int,
        received: Sequence[Packet],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, list[torch.Tensor]]:
        """Run the module and hold what its backward needs; its output and the losses it added."""
        inputs = [[t for t in packet.tensors if t.requires_grad] for packet in received]
        is_watched = any(self.inner_passes.is_due(packet.hooked) for packet in received)
        arguments = self._enter(received, is_watched=is_watched)
        replayed = self._replay(arguments, args, kwargs)
        if replayed is not None:
            self._hold(microbatch, _Flight(inputs, is_replayed=True, is_watched=is_watched))
            return replayed[0], []
        context = self.replica.forward_context()
        random = self._draw(microbatch, is_training=True)
        with collect_losses() as losses, self._record(), context, random:
            if self._writes is None:
                output = self._watch_module(received, arguments, args, kwargs)
            else:
                output = self._call_module(arguments, args, kwargs)
        self._hold(microbatch, _Flight(inputs, is_watched=is_watched))
        return output, losses

    def _replay(
        self, arguments: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any] | None:
        """The output of a forward that is there as a CUDA graph, if it is."""
        # A graph starts from memory of its own, which a module must not write to.
        if self._graphs is None or self._writes:
            return None
        held = len(self._flights) + len(self._waiting)
        return self._graphs.run(((*arguments, *args), kwargs), held)

    def _hold(self, microbatch: int, flight: _Flight) -> None:
        self._flights[microbatch] = flight
        self.peak_flights = max(self.peak_flights, len(self._flights))

    def _enter(self, received: Sequence[Packet], *, is_watched: bool) -> list[Any]:
        """What was received, as arguments, behind `_Enter` if the module writes to it."""
        values = []
        for packet in received:
            tensors = packet.tensors
            if self._writes is not False:
                tensors = [_enter(tensor) for tensor in tensors]
            hooked = packet.hooked if is_watched else None
            values.append(self._unpack(packet.structure, tensors, hooked))
        if is_watched:
            self.inner_passes.end_first()
        return as_arguments(values)

    def _unpack(
        self,
        structure: Structure,
        tensors: Sequence[torch.Tensor],
        hooked: tuple[int, ...] | None = None,
    ) -> Any:
        structure, tensors = self._meshes.put_back(structure, tensors)
        if hooked is not None:
            self.inner_passes.watch(tensors, hooked)
        return unflatten(structure, tensors)

    def _watch_module(
        self,
        received: Sequence[Packet],
        arguments: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the module for the first time, and find out whether it writes to its inputs.

        All of them count: one that needs no gradient now may need one when the stage that makes
        it is no longer frozen.
        """
        tensors = [tensor for packet in received for tensor in packet.tensors]
        versions = [tensor._version for tensor in tensors]
        output = self._run_module(arguments, args, kwargs)
        self._writes = versions != [tensor._version for tensor in tensors]
        return output

    def _call_module(
        self, arguments: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return self._run_module(arguments, args, kwargs)
        except RuntimeError as error:
            if self._writes is False and "leaf Variable that requires grad" in str(error):
                self._writes = True
                raise PipelineError(
                    "the module writes in place to what it receives, but did not do so in its "
                    "first microbatch; from the next step on this is taken care of"
                ) from error
            raise

    def _run_module(
        self, arguments: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._checkpointed is not None:
            return self._checkpointed.run((*arguments, *args), kwargs)
        return self._call(*arguments, *args, **kwargs)

    def _record(self) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._recorder.record()

    def _draw(self, microbatch: int, *, is_training: bool) -> AbstractContextManager[None]:
        if self._random is None:
            return nullcontext()
        return self._random.forward(microbatch, is_training=is_training)

    def _draw_again(self, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext() if self._random is None else self._random.backward(microbatch)

    def depart(self, microbatch: int, output: Any, parts: Sequence[int]) -> list[Packet]:
        """Cut an output off from its graph, once per part of the model that it goes to.

        A tensor that goes to several of them is copied, for one of them may write to what another
        still reads.
        """
        flat = [flatten(tree) for tree in _share_out(output, parts)]
        hooked = self._find_hooked(microbatch, [tensors for _, tensors in flat])
        trees = [take_local_parts(*tree) for tree in flat]
        for part, (_, tensors) in zip(parts, trees, strict=True):
            require_plain(tensors, self.index, part)
        if microbatch in self._flights:
            self._flights[microbatch].edges = [
                [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
                for _, tensors in trees
            ]
        uses = Counter(id(tensor) for _, tensors in trees for tensor in tensors)
        return [
            Packet(structure, [_cut(tensor, uses[id(tensor)]) for tensor in tensors], places)
            for (structure, tensors), places in zip(trees, hooked, strict=True)
        ]

    def _find_hooked(
        self, microbatch: int, outputs: Sequence[Sequence[torch.Tensor]]
    ) -> list[tuple[int, ...]]:
        """The places of tensors with hooks in what goes to each part."""
        flight = self._flights.get(microbatch)
        if flight is None:
            return [()] * len(outputs)
        # A CUDA graph runs the hooks that were there when it was captured.
        if not flight.is_replayed or len(self._hooked) != len(outputs):
            self._hooked = [find_hooked(tensors) for tensors in outputs]
        return self._hooked

    def add_root(
        self, microbatch: int, loss: torch.Tensor, weight: float, edge: GradientEdge | None = None
    ) -> None:
        """Let the backward of this microbatch start from a loss too, with this weight.

        `edge` is its place in the graph if the tensor has none of its own. A loss of weight zero
        is left out: a mean over nothing is not a number, but asks for nothing.
        """
        if edge is None and loss.requires_grad:
            edge = get_gradient_edge(loss)
        if edge is not None and weight != 0:
            self.add_gradient(microbatch, edge, _constant(weight, loss.dtype, loss.device))

    def add_gradient(self, microbatch: int, edge: GradientEdge, gradient: torch.Tensor) -> None:
        """Let the backward of this microbatch start here too, with this gradient."""
        self._flights[microbatch].roots.append((edge, gradient))

    def release(self, microbatch: int) -> None:
        """Let go of a microbatch whose backward somebody else has run, or nobody will run."""
        self._flights.pop(microbatch, None)

    def mark_gradients(self, microbatch: int) -> GradientMarks | None:
        """Note what gradients hold before a loss runs; nothing where none can come from afar."""
        if not any(self._flights[microbatch].inputs):
            return None
        return [(p.grad, 0 if p.grad is None else p.grad._version) for p in self._parameters]

    def compare_gradients(self, microbatch: int, before: GradientMarks | None) -> None:
        """Refuse a backward of the loss's own whose traces it has removed here.

        What it leaves in `.grad` stays, and goes on to the stages before this one, as in the
        unsplit model. Their part of what it took back cannot be taken back any more.
        """
        if before is None:
            return
        leaves = [leaf for group in self._flights[microbatch].inputs for leaf in group]
        if all(leaf.grad is None for leaf in leaves):
            return
        after = [(p.grad, 0 if p.grad is None else p.grad._version) for p in self._parameters]
        if all(a is b and m == n for (a, m), (b, n) in zip(after, before, strict=True)):
            raise PipelineError(
                "the loss ran a backward through the stages before the last one and took its "
                "gradients back in the last one only; use torch.autograd.grad, or "
                "backward(inputs=[...]) with the parameters of the last stage"
            )

    def backward(
        self, microbatch: int, gradients: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        """The whole backward: from the gradients of each consumer to those for each producer."""
        answer, work = self._propagate(microbatch, gradients)
        add_weight_gradients(work)
        return answer

    def backward_input(
        self, microbatch: int, gradients: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        """The first half: gradients for each producer, with weight work left for later."""
        answer, self._waiting[microbatch] = self._propagate(microbatch, gradients)
        return answer

    def backward_weight(self, microbatch: int) -> None:
        """The second half: the weight work that was left."""
        add_weight_gradients(self._waiting.pop(microbatch))

    def _propagate(
        self, microbatch: int, gradients: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[list[torch.Tensor]], list[DeferredWork]]:
        """Send gradients through the graph and let go of it; weight work that is left over."""
        flight = self._flights.pop(microbatch)
        roots = _join_roots(flight, gradients)
        inputs = [leaf for group in flight.inputs for leaf in group]
        work: list[DeferredWork] = []
        with self._draw_again(microbatch):
            if flight.is_replayed or (flight.is_watched and self._recorder is None):
                answer = iter(run_own_pass(roots, inputs, work))
            elif self._recorder is None:
                answer = iter(run_backward(roots, inputs))
            else:
                found, work = self._recorder.run_backward(roots, inputs)
                answer = iter(found)
        return [[next(answer) for _ in group] for group in flight.inputs], work

    def clear(self) -> None:
        """Let go of everything, after a step that failed."""
        self._flights.clear()
        self._waiting.clear()
        if self._graphs is not None:
            self._graphs.clear()
        self.replica.abandon_step()


def _enter(tensor: torch.Tensor) -> torch.Tensor:
    return _Enter.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]  # untyped upstream


@lru_cache(maxsize=256)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number as a tensor; the weights of losses come again and again."""
    return torch.tensor(value, dtype=dtype, device=device)


def _share_out(output: Any, parts: Sequence[int]) -> list[Any]:
    """What goes to each part: what was made for it, or the whole output."""
    if not isinstance(output, Routed):
        return [output] * len(parts)
    if set(output.values) != set(parts):
        raise BoundaryError(
            f"a stage that feeds the parts {sorted(parts)} has made values for "
            f"{sorted(output.values)}; the dataflow and the stage belong to different splits"
        )
    return [output.values[part] for part in parts]


def _cut(tensor: torch.Tensor, uses: int) -> torch.Tensor:
    cut = plain_value(tensor.detach())
    if uses > 1:
        cut = cut.clone()
    return cut.requires_grad_(tensor.requires_grad)


def _join_roots(flight: _Flight, gradients: Sequence[Sequence[torch.Tensor]]) -> list[Root]:
    """Where the backward starts: losses, and outputs with what came back for them.

    An output that went to several stages is there several times; autograd sums.
    """
    roots = flight.roots
    if gradients:
        for edges, column in zip(flight.edges, gradients, strict=True):
            roots.extend(zip(edges, column, strict=True))
    return roots

"""One stage of the model: its module, and what it holds for each microbatch in flight."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from penstock.deferred.own_pass import find_edge, run_own_pass
from penstock.deferred.work import DeferredWork, add_weight_gradients
from penstock.errors import ArgumentError, PipelineError
from penstock.loss.added import begin_collecting, end_collecting
from penstock.parallel.dtensor import Meshes, take_local_parts
from penstock.parallel.replica import Replica
from penstock.step.activation_checkpointing import CheckpointedModule
from penstock.step.backward import LayerRecorder, Root, run_backward
from penstock.step.crossing_hooks import InnerPasses, find_hooked
from penstock.step.cuda_graphs import StageGraphs
from penstock.step.gradient_marks import GradientMarks, mark_gradients
from penstock.step.layer_random import StageRandom
from penstock.step.shown_graph import keep_graph, start_graph
from penstock.step.stage_boundary import InFlight, constant, edges_of, enter, values_for_parts
from penstock.tensors.packet import Packet, as_arguments, cut_off, cut_off_all
from penstock.tensors.plain import is_plain, require_plain
from penstock.tensors.rerouting import Rerouting
from penstock.tensors.tree import Structure, flatten, unflatten

__all__ = ["Stage"]


class Stage:
    """The module of one stage, run forward and backward microbatch by microbatch.

    `call` is called instead of the module, with the same arguments. A `rerouting` is between the
    module and what its stage receives and sends.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        replica: Replica,
        *,
        call: Callable[..., Any] | None = None,
        rerouting: Rerouting | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self.replica = replica
        self._call = module if call is None else call
        self._rerouting = rerouting
        self._call_to_train = self._call  # unless only the inputs are kept
        self.peak_flights = 0
        self._flights: dict[int, InFlight] = {}
        self._waiting: dict[int, list[DeferredWork]] = {}
        # Whether a pass through the module is nothing but that: none of the following is set.
        self._is_plain = replica.is_alone
        self._recorder: LayerRecorder | None = None
        self._graphs: StageGraphs | None = None
        self._random: StageRandom | None = None
        self.inner_passes = InnerPasses(index)
        self._hooked: list[tuple[int, ...]] = []
        self._meshes = Meshes(module)
        self._parameters = tuple(module.parameters())
        # Whether the module writes in place to what it receives; the first forward finds out.
        self._writes: bool | None = None

    @property
    def num_flights(self) -> int:
        """The number of microbatches that hold their activations: from F to B or I."""
        return len(self._flights)

    @property
    def num_waiting(self) -> int:
        """The number of microbatches that hold what their weight work needs: from I to W."""
        return len(self._waiting)

    def prepare_split(self) -> bool:
        """Record the layers whose weight work can be deferred; return whether there are any."""
        self._recorder, self._is_plain = LayerRecorder(), False
        return self._recorder.observe(self.module)

    def undeferred_weights(self) -> list[str]:
        """Return the names of the weights whose gradients I has computed instead of W."""
        return [] if self._recorder is None else self._recorder.undeferred_weights()

    def checkpoint(self) -> None:
        """Keep only the inputs, and run the module again in the backward."""
        run = CheckpointedModule(self.module).run
        self._call_to_train = lambda *args, **kwargs: run(args, kwargs)

    def draw_from(self, random: StageRandom) -> None:
        """Draw random numbers from streams of the stage, which are the same for every layout."""
        self._random, self._is_plain = random, False

    def capture_graphs(self) -> None:
        """Run as CUDA graphs from the second step on; call `prepare_split` before, if at all."""
        if self._call_to_train is not self._call:
            raise ArgumentError(
                f"stage {self.index} is checkpointed, and its recomputation cannot be captured; "
                "leave cuda_graphs out"
            )
        if not self.replica.is_alone:
            raise ArgumentError(
                f"stage {self.index} is data-parallel, and its communication cannot be captured; "
                "leave cuda_graphs out"
            )
        self._graphs, self._is_plain = StageGraphs(self.module, self._recorder), False

    def evaluate(
        self,
        microbatch: int,
        received: Sequence[Packet],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        with_graph: bool = False,
    ) -> Any:
        """Run the module, without keeping a graph unless something has to be read off it."""
        tensors: Sequence[Sequence[torch.Tensor]] = [packet.tensors for packet in received]
        if with_graph:
            tensors, args, kwargs = start_graph(tensors, args, kwargs)
        values = [self._unpack(p.structure, t) for p, t in zip(received, tensors, strict=True)]
        random = self._random.forward(microbatch, is_training=False) if self._random else None
        with keep_graph(self.replica) if with_graph else torch.no_grad(), random or nullcontext():
            return self._call(*as_arguments(values, self._rerouting), *args, **kwargs)

    def forward(
        self,
        microbatch: int,
        received: Sequence[Packet],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, list[torch.Tensor]]:
        """Run the module, hold what its backward needs, return its output and added losses."""
        is_observed = False
        if not received:
            inputs, given = [], args
        elif self._writes is False and len(received) == 1 and received[0].is_one_leaf:
            inputs, given = [received[0].tensors], (*received[0].tensors, *args)
        else:
            inputs = [[t for t in packet.tensors if t.requires_grad] for packet in received]
            is_observed = any(self.inner_passes.is_due(packet.hooked) for packet in received)
            given = (*self._enter(received, is_observed=is_observed), *args)
        # A graph reads its inputs from its own memory, which the module must not write to.
        if self._graphs is not None and not self._writes:
            held = len(self._flights) + len(self._waiting)
            replayed = self._graphs.run((given, kwargs), held)
            if replayed is not None:
                self._hold(microbatch, InFlight(inputs, is_replayed=True, is_observed=is_observed))
                return replayed[0], []
        losses: list[torch.Tensor] = []
        collecting = begin_collecting(losses)
        try:
            if self._is_plain:
                output = self._call_module(received, given, kwargs)
            else:
                record = self._recorder.record() if self._recorder else nullcontext()
                random = self._random and self._random.forward(microbatch, is_training=True)
                with record, self.replica.forward_context(), random or nullcontext():
                    output = self._call_module(received, given, kwargs)
        finally:
            end_collecting(collecting)
        self._hold(microbatch, InFlight(inputs, False, is_observed))
        return output, losses

    def _hold(self, microbatch: int, flight: InFlight) -> None:
        self._flights[microbatch] = flight
        if len(self._flights) > self.peak_flights:
            self.peak_flights = len(self._flights)

    def _enter(self, received: Sequence[Packet], *, is_observed: bool) -> list[Any]:
        """Return what was received as arguments, which the module may write to if it does so."""
        values = []
        for packet in received:
            tensors = packet.tensors
            if self._writes is not False:
                tensors = [enter(tensor) for tensor in tensors]
            hooked = packet.hooked if is_observed else None
            values.append(self._unpack(packet.structure, tensors, hooked))
        if is_observed:
            self.inner_passes.end_first()
        return as_arguments(values, self._rerouting)

    def _unpack(
        self,
        structure: Structure,
        tensors: Sequence[torch.Tensor],
        hooked: tuple[int, ...] | None = None,
    ) -> Any:
        structure, tensors = self._meshes.put_back(structure, tensors)
        if hooked is not None:
            self.inner_passes.observe(tensors, hooked)
        return unflatten(structure, tensors)

    def _observe_module(
        self, received: Sequence[Packet], given: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the module for the first time, and find out whether it writes to its inputs.

        One without a gradient counts, because the stage that makes it may be frozen only for now.
        """
        tensors = [tensor for packet in received for tensor in packet.tensors]
        versions = [tensor._version for tensor in tensors]
        output = self._call_to_train(*given, **kwargs)
        self._writes = versions != [tensor._version for tensor in tensors]
        return output

    def _call_module(
        self, received: Sequence[Packet], given: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._writes is None:
            return self._observe_module(received, given, kwargs)
        try:
            return self._call_to_train(*given, **kwargs)
        except RuntimeError as error:
            if self._writes is False and "leaf Variable that requires grad" in str(error):
                self._writes = True
                raise PipelineError(
                    "the module writes in place to what it receives, but did not do so in its "
                    "first microbatch; run the step again, because from now on this is allowed"
                ) from error
            raise

    def depart(self, microbatch: int, output: Any, parts: Sequence[int]) -> list[Packet]:
        """Cut an output off from its graph, once per part of the model that it goes to.

        A tensor that goes to several parts is copied, because one of them may write to what
        another still reads.
        """
        if self._rerouting is not None:
            output = self._rerouting.output(output)
        elif type(output) is torch.Tensor and len(parts) == 1:
            return [self._depart_alone(microbatch, output, parts[0])]
        flat = [flatten(tree) for tree in values_for_parts(output, parts)]
        hooked = self._find_hooked(microbatch, [tensors for _, tensors in flat])
        trees = [take_local_parts(*tree) for tree in flat]
        for part, (_, tensors) in zip(parts, trees, strict=True):
            require_plain(tensors, self.index, part)
        if microbatch in self._flights:
            self._flights[microbatch].edges = [edges_of(tensors) for _, tensors in trees]
        # A checkpointed stage runs again from its inputs, which it may just be handing on.
        is_checkpointed = self._call_to_train is not self._call
        return cut_off_all(trees, hooked, copies_all=is_checkpointed)

    def _depart_alone(self, microbatch: int, output: torch.Tensor, part: int) -> Packet:
        """Cut an output off that is one plain tensor for one part, as most are."""
        hooked: tuple[int, ...] = ()
        if output._backward_hooks or self._graphs is not None:
            (hooked,) = self._find_hooked(microbatch, [[output]])
        if not is_plain(output):
            require_plain([output], self.index, part)
        flight = self._flights.get(microbatch)
        if flight is not None:
            flight.edges = ((find_edge(output),) if output.requires_grad else (),)
        return Packet("T", [cut_off(output)], hooked)

    def _find_hooked(
        self, microbatch: int, outputs: Sequence[Sequence[torch.Tensor]]
    ) -> list[tuple[int, ...]]:
        """Return the places of tensors with hooks among those for each part."""
        flight = self._flights.get(microbatch)
        if flight is None:
            return [()] * len(outputs)
        # A CUDA graph runs the hooks that existed when it was captured.
        if not flight.is_replayed or len(self._hooked) != len(outputs):
            self._hooked = [find_hooked(tensors) for tensors in outputs]
        return self._hooked

    def add_root(
        self, microbatch: int, loss: torch.Tensor, weight: float, edge: GradientEdge | None = None
    ) -> None:
        """Make a loss with this weight a root of the backward of a microbatch.

        `edge` is the place of the loss in the graph, if the tensor itself has none. A loss of
        weight zero is left out, because a mean over nothing is NaN.
        """
        if edge is None and loss.requires_grad:
            edge = find_edge(loss)
        if edge is not None and weight != 0:
            self.add_gradient(microbatch, edge, constant(weight, loss.dtype, loss.device))

    def add_gradient(self, microbatch: int, edge: GradientEdge, gradient: torch.Tensor) -> None:
        """Make an edge with this gradient a root of the backward of a microbatch."""
        self._flights[microbatch].roots.append((edge, gradient))

    def flight(self, microbatch: int) -> InFlight:
        """Return what a microbatch in flight holds."""
        return self._flights[microbatch]

    def release(self, microbatch: int) -> None:
        """Free a microbatch whose backward is run elsewhere, or from another forward."""
        self._flights.pop(microbatch, None)

    def mark_gradients(self, microbatch: int) -> GradientMarks | None:
        """Mark the gradients before a loss runs; None if it cannot reach an earlier stage."""
        inputs = self._flights[microbatch].inputs
        return mark_gradients(self._parameters, inputs) if any(inputs) else None

    def backward(
        self, microbatch: int, gradients: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        """Run the whole backward: turn gradients of consumers into those for each producer."""
        answer, work = self._propagate(microbatch, gradients)
        if work:
            add_weight_gradients(work)
        return answer

    def backward_input(
        self, microbatch: int, gradients: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        """Return the gradients for each producer, and keep the weight work for later."""
        answer, self._waiting[microbatch] = self._propagate(microbatch, gradients)
        return answer

    def backward_weight(self, microbatch: int) -> None:
        """Do the weight work that `backward_input` kept."""
        add_weight_gradients(self._waiting.pop(microbatch))

    def _propagate(
        self, microbatch: int, gradients: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[list[torch.Tensor]], list[DeferredWork]]:
        """Run gradients through the graph and free it; return the weight work that is left."""
        flight = self._flights.pop(microbatch)
        roots = flight.join_roots(gradients)
        inputs = [leaf for group in flight.inputs for leaf in group]
        with nullcontext() if self._random is None else self._random.backward(microbatch):
            found, work = self._run_backward(flight, roots, inputs)
        answer = iter(found)
        return [[next(answer) for _ in group] for group in flight.inputs], work

    def _run_backward(
        self, flight: InFlight, roots: Sequence[Root], inputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[DeferredWork]]:
        work: list[DeferredWork] = []
        if self._recorder is not None and not flight.is_replayed:
            return self._recorder.run_backward(roots, inputs)
        if flight.is_replayed or flight.is_observed:
            return run_own_pass(roots, inputs, work), work
        return run_backward(roots, inputs), work

    def clear(self) -> None:
        """Free everything after a failed step."""
        self._flights.clear()
        self._waiting.clear()
        if self._graphs is not None:
            self._graphs.clear()
        self.replica.abandon_step()

"""F, I and W of a stage as CUDA graphs: three launches replace milliseconds of host time.

    first step   everything runs without graphs; inputs and the number held at once are noted
    then         when the stage holds nothing: as many slots are captured as were held
                 slot   inputs -> F -> outputs;   gradients -> I -> gradients of inputs;   W
    from then    a forward takes a free slot, and its W gives it back

A microbatch with other shapes, or without a free slot, runs without graphs. Graphs add to the same
memory each time, so weights keep their gradients there: a gradient that was set to None is zeroed
instead.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from penstock.deferred.own_pass import deferred_work
from penstock.deferred.work import DeferredWork, add_weight_gradients
from penstock.errors import BoundaryError, PipelineError
from penstock.ir.dataflow import Routed
from penstock.loss.added import collect_losses
from penstock.step.backward import LayerRecorder, run_backward
from penstock.step.graph_capture import (
    CapturePlace,
    GraphCapture,
    NotCapturableError,
    leaving_no_trace,
    nothing_cast_before,
    own_failures,
    places_of,
    require_capturable,
    require_device,
)
from penstock.tensors.tree import Structure, flatten, unflatten
from penstock.torch_private import foreach_copy_, foreach_zero_

__all__ = ["StageGraphs"]

# After this number of moves of weights or buffers in a row, the stage stops using graphs.
_MOST_MOVES = 3


@dataclass(frozen=True, slots=True)
class _Signature:
    """Everything about a call that is fixed in a graph."""

    structure: Structure
    tensors: tuple[tuple[torch.Size, torch.dtype, torch.device, bool], ...]
    settings: tuple[Any, ...]


class StageGraphs:
    """The graphs of a stage, and the decision which forwards are replayed."""

    def __init__(self, module: nn.Module, recorder: LayerRecorder | None) -> None:
        self._module, self._recorder = module, recorder
        self._slots: list[_Slot] = []
        self._signature: _Signature | None = None
        self._memory: tuple[CapturePlace, ...] = ()
        self._gradients: _Gradients | None = None
        self._peak = 0
        self._moves = 0
        self._is_given_up = False

    def run(self, call: Any, num_held: int) -> tuple[Any] | None:
        """Replay a forward and return its output, or None if it must run without graphs.

        `call` is a tuple of arguments and a dict of keywords; `num_held` is how many microbatches
        the stage holds already.
        """
        if self._is_given_up:
            return None
        self._peak = max(self._peak, num_held + 1)
        try:
            structure, tensors = flatten(call)
            signature = self._describe(structure, tensors)
            if num_held == 0:
                self._prepare(signature, tensors)
        except (NotCapturableError, BoundaryError) as reason:
            self._give_up(reason)
            return None
        slot = next((slot for slot in self._slots if slot.is_free), None)
        if slot is None or signature != self._signature:
            return None
        slot.is_free = False
        outputs = _Replay.apply(slot, slot.anchor, *tensors)  # type: ignore[no-untyped-call]  # upstream
        return (slot.put_together(outputs),)

    def clear(self) -> None:
        """Take all slots back, after a step that failed."""
        for slot in self._slots:
            slot.is_free = True

    def _describe(self, structure: Structure, tensors: Sequence[torch.Tensor]) -> _Signature:
        if not tensors:
            raise NotCapturableError("it takes no tensors")
        require_device(tensors, "takes")
        kinds = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in tensors)
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        return _Signature(structure, kinds, (self._module.training, *autocast))

    def _prepare(self, signature: _Signature, tensors: Sequence[torch.Tensor]) -> None:
        """Capture what is missing while nothing is held, once calls look the same."""
        memory = places_of(self._module)
        if signature != self._signature or memory != self._memory:
            # Seen for the first time: run without graphs, and capture when it comes again.
            self._moves = self._moves + 1 if signature == self._signature else 0
            if self._moves == _MOST_MOVES:
                raise NotCapturableError("its weights or buffers move in memory in every step")
            self._signature, self._memory = signature, memory
            self._slots, self._gradients, self._peak = [], None, 1
            return
        self._moves = 0
        if len(self._slots) == self._peak:
            return
        require_capturable(self._module)
        with own_failures(), torch.cuda.device(tensors[0].device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped upstream
            if self._gradients is None:
                self._gradients = self._rehearse(tensors, signature.structure, stream)
            with self._gradients.bound():
                while len(self._slots) < self._peak:
                    self._slots.append(self._capture(tensors, signature.structure, stream))

    def _rehearse(
        self, tensors: Sequence[torch.Tensor], structure: Structure, stream: torch.cuda.Stream
    ) -> "_Gradients":
        """Run once on the stream of the capture, to see which weights get gradients."""
        with leaving_no_trace(self._module):
            # After the copies of the buffers, which the forward may write to.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                passage = _Passage(self._module, self._recorder, _static(tensors), structure)
                passage.forward()
                passage.gradients = [torch.zeros_like(o) for o in passage.trained_outputs]
                passage.backward()
                passage.weights()
            weights = self._module.parameters()
            found = {p: p.grad for p in weights if p.grad is not None}
            # Afterwards the module has its own buffers again.
            has_moved = places_of(self._module) != self._memory
        torch.cuda.current_stream().wait_stream(stream)
        if has_moved:
            raise NotCapturableError("its forward puts buffers or weights into other memory")
        # Allocated on the stream that will use it, because the allocator tracks streams.
        return _Gradients({p: torch.zeros_like(gradient) for p, gradient in found.items()})

    def _capture(
        self, tensors: Sequence[torch.Tensor], structure: Structure, stream: torch.cuda.Stream
    ) -> "_Slot":
        assert self._gradients is not None, "gradients are allocated before graphs"
        passage = _Passage(self._module, self._recorder, _static(tensors), structure)
        capture = GraphCapture(stream)
        with capture.graph() as forward:
            passage.forward()
        passage.gradients = [torch.empty_like(o) for o in passage.trained_outputs]
        with capture.graph() as backward:
            passage.backward()
        with capture.graph() as weights:
            passage.weights()
        return _Slot(passage, self._gradients, forward, backward, weights)

    def _give_up(self, reason: Exception) -> None:
        self._is_given_up = True
        self._slots, self._gradients = [], None
        warnings.warn(
            f"a stage cannot run as CUDA graphs and runs without them: {reason}", stacklevel=2
        )


def _static(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


class _Passage:
    """One microbatch through the stage and back, at fixed addresses."""

    def __init__(
        self,
        module: nn.Module,
        recorder: LayerRecorder | None,
        inputs: list[torch.Tensor],
        structure: Structure,
    ) -> None:
        self._module, self._recorder = module, recorder
        self.inputs, self._structure = inputs, structure
        self.outputs: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.input_gradients: list[torch.Tensor] = []
        self.output_structure: Structure = []
        self.is_routed = False
        self.needs: list[bool] = []
        self._work: list[DeferredWork] = []

    @property
    def trained_outputs(self) -> list[torch.Tensor]:
        """Return the outputs that take a gradient."""
        return [output for output, needs in zip(self.outputs, self.needs, strict=True) if needs]

    def forward(self) -> None:
        """Run F."""
        arguments, keywords = unflatten(self._structure, self.inputs)
        with collect_losses() as losses, self._record(), nothing_cast_before():
            output = self._module(*arguments, **keywords)
        if losses:
            raise NotCapturableError("it adds losses of its own")
        self.is_routed = isinstance(output, Routed)
        self.output_structure, self.outputs = flatten(
            output.values if isinstance(output, Routed) else output
        )
        require_device(self.outputs, "gives")
        self.needs = [output.requires_grad for output in self.outputs]

    def _record(self) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._recorder.record()

    def backward(self) -> None:
        """Run I."""
        roots = [
            (get_gradient_edge(output), gradient)
            for output, gradient in zip(self.trained_outputs, self.gradients, strict=True)
        ]
        leaves = [tensor for tensor in self.inputs if tensor.requires_grad]
        if self._recorder is None:
            self.input_gradients = run_backward(roots, leaves)
        else:
            self.input_gradients, self._work = self._recorder.run_backward(roots, leaves)
        self.outputs = [output.detach() for output in self.outputs]

    def weights(self) -> None:
        """Run W."""
        add_weight_gradients(self._work)


class _Gradients:
    """The memory in which a stage's weights keep their gradients."""

    def __init__(self, memory: dict[nn.Parameter, torch.Tensor]) -> None:
        self._memory = memory

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let weights keep their gradients there inside, whatever is in it."""
        before = [parameter.grad for parameter in self._memory]
        for parameter, memory in self._memory.items():
            parameter.grad = memory
        try:
            yield
        finally:
            for parameter, gradient in zip(self._memory, before, strict=True):
                parameter.grad = gradient

    def bind(self) -> None:
        """Move the gradients of weights there for good, with their current values."""
        new, moved, values = [], [], []
        for parameter, memory in self._memory.items():
            gradient = parameter.grad
            if gradient is memory:
                continue
            parameter.grad = memory
            if gradient is None:
                new.append(memory)
            else:
                moved.append(memory)
                values.append(gradient)
        if new:
            foreach_zero_(new)
        if moved:
            foreach_copy_(moved, values)


@dataclass(eq=False)
class _Slot:
    """The three graphs of one microbatch at a time."""

    passage: _Passage
    weight_gradients: _Gradients
    forward_graph: torch.cuda.CUDAGraph
    backward_graph: torch.cuda.CUDAGraph
    weight_graph: torch.cuda.CUDAGraph
    is_free: bool = True
    # Makes autograd call the backward even if no input takes a gradient.
    anchor: torch.Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True))

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replay F and return copies, because the next microbatch uses the same memory."""
        if tensors:
            foreach_copy_(self.passage.inputs, list(tensors))
        self.forward_graph.replay()
        return [output.clone() for output in self.passage.outputs]

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Replay I and return copies of the gradients of the inputs."""
        if gradients:
            foreach_copy_(self.passage.gradients, list(gradients))
        self.weight_gradients.bind()
        self.backward_graph.replay()
        found = iter(self.passage.input_gradients)
        return [next(found).clone() if t.requires_grad else None for t in self.passage.inputs]

    def finish(self) -> None:
        """Replay W and free the slot for the next microbatch."""
        # Another stage may share a weight and have moved its gradient to its own memory.
        self.weight_gradients.bind()
        self.weight_graph.replay()
        self.is_free = True

    def put_together(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Return the outputs in the module's structure."""
        tree = unflatten(self.passage.output_structure, outputs)
        return Routed(tree) if self.passage.is_routed else tree


class _Replay(torch.autograd.Function):
    """A replayed forward with its replayed backward."""

    @staticmethod
    def forward(
        ctx: Any, slot: _Slot, _anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.slot = slot
        outputs = slot.forward(tensors)
        fixed = [o for o, needs in zip(outputs, slot.passage.needs, strict=True) if not needs]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        waiting = deferred_work()
        if waiting is None:
            raise PipelineError(
                "a stage that runs as CUDA graphs must be differentiated by its own backward only "
                "(a loss, a hook or the stage itself takes gradients through it); leave out "
                "cuda_graphs"
            )
        slot: _Slot = ctx.slot
        needs = slot.passage.needs
        taken = [g for g, needed in zip(gradients, needs, strict=True) if needed]
        found = slot.backward(taken)
        waiting.append(slot)
        return (None, None, *found)

"""A forward that saves only its inputs, and what it takes to run it again with the same result.

The first run makes a graph, so that its outputs look as they always do, but saves nothing in it.
The second run starts from the same inputs, the same buffers and the same state of torch's
generators, and leaves no trace but its graph.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import PipelineError
from penstock.step.saved.buffers import BufferValues, ChangingBuffers
from penstock.tensors.packet import Packet
from penstock.torch_private import tree_leaves

__all__ = ["Inputs", "InputsOnly"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a forward began with, besides its module's parameters."""

    received: Sequence[Packet]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: tuple[torch.Tensor, ...]
    buffers: BufferValues
    versions: Sequence[int] = ()

    def read_versions(self) -> list[int]:
        """Return the versions of all tensors that the forward was given."""
        tensors = [tensor for packet in self.received for tensor in packet.tensors]
        return _versions([*tensors, *_tensors_in((self.args, self.kwargs))])


class InputsOnly:
    """The forwards of one stage that save only their inputs.

    A module that writes to what it receives gets a copy. Whether it does is found out in its first
    forward.
    """

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._writes: bool | None = None
        self._buffers = ChangingBuffers(stage, module)

    @contextmanager
    def run(
        self, received: Sequence[Packet], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Sequence[Packet], "_Held"]]:
        """Save nothing in the forward that runs meanwhile; yield what it is to be given."""
        given = received if self._writes is False else [_copy(packet) for packet in received]
        tensors = [tensor for packet in given for tensor in packet.tensors]
        own = _tensors_in((args, kwargs))
        before, own_before = _versions(tensors), _versions(own)
        random = _random_states(self._module)
        with self._buffers.watch() as buffers:
            held = _Held(Inputs(received, args, kwargs, random, buffers))
            with saved_tensors_hooks(_drop, self._refuse):
                yield given, held
        if own_before != _versions(own):
            raise PipelineError(
                f"stage {self._stage} writes in place to its piece of the batch, so it cannot "
                "run again from it; take its RECOMPUTE actions out of the schedule"
            )
        self._note_writes(before != _versions(tensors))

    def _refuse(self, _: None) -> NoReturn:
        raise PipelineError(
            f"stage {self._stage} must not take gradients in a forward that saves only its inputs "
            "(its module or the loss did); take its RECOMPUTE actions out of the schedule"
        )

    def _note_writes(self, has_written: bool) -> None:
        if self._writes is False and has_written:
            self._writes = True
            raise PipelineError(
                f"stage {self._stage} must write to its inputs from its first microbatch on, or "
                "never (it began later); repeat the step, which now expects it"
            )
        self._writes = self._writes or has_written

    @contextmanager
    def again(self, inputs: Inputs) -> Iterator[None]:
        """Let a forward run as the first one has, and leave no trace but its graph."""
        if inputs.read_versions() != inputs.versions:
            raise PipelineError(
                f"stage {self._stage} must run again from what its forward was given, but another "
                "stage has written to it in place; let that stage write to a copy, or take the "
                f"RECOMPUTE actions of stage {self._stage} out of the schedule"
            )
        now = _random_states(self._module)
        _set_random_states(self._module, inputs.random)
        try:
            with self._buffers.as_they_were(inputs.buffers):
                yield
        finally:
            _set_random_states(self._module, now)


@dataclass(slots=True)
class _Held:
    """The inputs of a forward, complete once it has ended."""

    inputs: Inputs

    def protect(self, output: Any) -> None:
        """Copy inputs that the output shares memory with, because later stages may write to it.

        What else is written to until the second run shows in the versions of now.
        """
        shared = {_memory_of(leaf) for leaf in _tensors_in(output)}
        received = [
            _copy(packet)
            if _UNKNOWN in shared or shared & {_memory_of(tensor) for tensor in packet.tensors}
            else packet
            for packet in self.inputs.received
        ]
        self.inputs = replace(self.inputs, received=received)
        self.inputs = replace(self.inputs, versions=self.inputs.read_versions())


# The memory of a tensor that is made of others, or that has no strides.
_UNKNOWN = -1


def _memory_of(tensor: torch.Tensor) -> int:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if is_plain else _UNKNOWN


def _copy(packet: Packet) -> Packet:
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in packet.tensors]
    return replace(packet, tensors=copies)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how often each tensor was written to; those of inference mode do not count that."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _drop(tensor: torch.Tensor) -> None:
    """Save nothing."""


def _random_states(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the states of the generators that a module draws from."""
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state(device) for device in _cuda_devices(module)]
    return tuple(states)


def _set_random_states(module: nn.Module, states: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(_cuda_devices(module), states[1:], strict=True):
        torch.cuda.set_rng_state(state, device)


def _cuda_devices(module: nn.Module) -> list[torch.device]:
    """Return the CUDA device that holds a module, if one does."""
    first = next(module.parameters(), None)
    return [first.device] if first is not None and first.is_cuda else []

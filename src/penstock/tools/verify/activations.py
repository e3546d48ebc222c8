"""A counter of the activations that are alive while a pipeline runs.

Every forward ties a token to the graph of its output. The token is freed with the graph, so that
a stage which keeps a graph alive (for example by storing an output on `self`) is found. What a
weight backward still needs is not a graph: it counts from I to W.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from penstock.ir.actions import Action, Kind
from penstock.step.step_data import Around
from penstock.tensors.tree import flatten

__all__ = ["ActivationCounter"]


class _Token:
    """An object that lives as long as a graph."""

    __slots__ = ("__weakref__",)


class ActivationCounter:
    """The most stage activations that each rank held at once, so far.

    Give its `around` to the pipeline, and attach it to the modules of the pipeline's stages.
    """

    def __init__(self, rank_of_stage: Sequence[int]) -> None:
        self._rank_of_stage = rank_of_stage
        self._graphs: WeakValueDictionary[tuple[int, int], _Token] = WeakValueDictionary()
        # A token without a graph is kept here until the backward.
        self._kept: dict[tuple[int, int], _Token] = {}
        self._waiting: set[tuple[int, int]] = set()
        self._running = (0, 0)
        self.peaks: dict[int, int] = {}

    @property
    def around(self) -> Mapping[Kind, Around]:
        """Functions to be called around each kind of compute."""
        return {
            Kind.FORWARD: self._around_forward,
            Kind.FULL_BACKWARD: self._around_end,
            Kind.BACKWARD_INPUT: self._around_input,
            Kind.BACKWARD_WEIGHT: self._around_end,
        }

    def attach(self, module: nn.Module) -> None:
        """Observe every output of a stage."""
        module.register_forward_hook(self._tie)

    def _tie(self, _module: nn.Module, _args: Any, output: Any) -> None:
        token = self._graphs[self._running] = _Token()
        _, tensors = flatten(output)
        nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        for node in nodes:
            node.metadata[f"penstock {self._running}"] = token  # type: ignore[index]  # a dict in truth
        if not nodes and torch.is_grad_enabled():
            self._kept[self._running] = token

    def _around_forward(self, action: Action, call: Callable[[], None]) -> None:
        self._running = _key(action)
        call()
        rank = self._rank_of_stage[action.stage]
        held = {*self._graphs, *self._waiting}
        count = sum(self._rank_of_stage[stage] == rank for stage, _ in held)
        self.peaks[rank] = max(count, self.peaks.get(rank, 0))

    def _around_input(self, action: Action, call: Callable[[], None]) -> None:
        call()
        self._waiting.add(_key(action))

    def _around_end(self, action: Action, call: Callable[[], None]) -> None:
        call()
        self._waiting.discard(_key(action))
        self._kept.pop(_key(action), None)


def _key(action: Action) -> tuple[int, int]:
    assert action.microbatch is not None, "compute has a microbatch"
    return action.stage, action.microbatch

"""Marks that stay on a model, and sequences that are cut after each of their modules."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.splitting.marks import SplitPoint, add_marks, pipe_split

__all__ = [
    "PipeSequential",
    "PipeSplitWrapper",
    "_pipe_split",
    "_split_after_forward",
    "_split_before_forward",
    "annotate_split_points",
    "aten_pipe_split_alias",
    "pipe_split",
]

# What a split policy puts into a traced graph.
aten_pipe_split_alias = torch.ops.penstock.pipe_split.default
_pipe_split = aten_pipe_split_alias


class PipeSplitWrapper:
    """Where `SplitPoint` once was."""

    SplitPoint = SplitPoint


def _split_before_forward(*_: Any) -> None:
    pipe_split()


def _split_after_forward(*_: Any) -> None:
    pipe_split()


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Mark modules by their paths, for every trace of this model from now on."""
    add_marks(mod, spec)


class PipeSequential(nn.Sequential):
    """A sequence whose every module is a stage."""

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> "PipeSequential":
        """Return the same modules, with the same parameters."""
        return PipeSequential(*(copy.copy(module) for module in sequential_instance))

    def forward(self, input: Any) -> Any:  # noqa: A002  # torch's name, given by keyword
        """Run the modules, with a mark between each two of them."""
        for number, module in enumerate(self):
            if number:
                pipe_split()
            input = module(input)  # noqa: A001  # as above
        return input

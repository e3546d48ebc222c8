"""Packets: what travels from stage to stage."""

from dataclasses import dataclass

import torch

from penstock.tensors.tree import Structure

__all__ = ["Packet"]


@dataclass(frozen=True, slots=True)
class Packet:
    """A tree on its way between stages: its structure, and its tensors cut off from any graph.

    A tensor that requires a gradient gets one back.
    """

    structure: Structure
    tensors: list[torch.Tensor]

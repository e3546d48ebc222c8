"""Outputs of an evaluation, which the rank of the last stage has, on every rank of a pipeline."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from penstock.integrations.layout import Layout
from penstock.training.pipeline import Pipeline

__all__ = ["move", "share_outputs"]


def share_outputs(pipeline: Pipeline, layout: Layout, outputs: Any) -> Any:
    """Return the outputs of the last stage's rank on every rank, which all call this."""
    if layout.mesh is None:
        return outputs
    placement = pipeline.schedule.placement
    source = placement.rank_of_stage[placement.num_stages - 1]
    box = [move(outputs, torch.device("cpu"))]
    group = layout.mesh.get_group("pipeline")
    dist.broadcast_object_list(box, group=group, group_src=source)
    return move(box[0], pipeline.device)


def move(tree: Any, device: torch.device) -> Any:
    """Return a tree of tensors without their graphs, on a device."""
    if isinstance(tree, Mapping):
        moved = {key: move(value, device) for key, value in tree.items()}
        return moved if type(tree) is dict else type(tree)(**moved)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(move(part, device) for part in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(move(part, device) for part in tree)
    return tree.detach().to(device) if isinstance(tree, torch.Tensor) else tree

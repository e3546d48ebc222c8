"""Outputs of an evaluation, which the rank of the last stage has, on every rank of a pipeline."""

from collections.abc import Callable
from typing import Any

from penstock.integrations.layout import Layout
from penstock.integrations.sharing import share
from penstock.training.pipeline import Pipeline

__all__ = ["share_outputs"]


def share_outputs(pipeline: Pipeline, layout: Layout, find: Callable[[], Any]) -> Any:
    """Return what `find` returns on the rank of the last stage; every rank calls this."""
    if layout.mesh is None:
        return find()
    placement = pipeline.schedule.placement
    source = placement.rank_of_stage[placement.num_stages - 1]
    group = layout.mesh.get_group("pipeline")
    return share(find, "outputs", group=group, source=source, device=pipeline.device)

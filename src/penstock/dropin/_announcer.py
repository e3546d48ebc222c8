"""Before each step of a schedule: what it will run on, told to the ranks that have to know."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from penstock.dropin._boundaries import Boundaries
from penstock.dropin._links import describe_call, describe_module
from penstock.dropin.stage import PipelineStage, _PipelineStage

__all__ = ["Announcer"]


class Announcer:
    """Knows what the present step looks like on this rank, and owns the links of its stages."""

    def __init__(self) -> None:
        self._boundaries: Boundaries | None = None
        self._args_text = ""
        self._kwargs_text = ""
        self._num_rows: int | None = None

    def look_at(
        self,
        arg_mbs: Sequence[Any],
        kwarg_mbs: Sequence[Mapping[str, Any]],
        args_chunk_spec: tuple[Any, ...] | None,
    ) -> None:
        """Note what the microbatches of a step look like."""
        self._args_text = str([describe_call(args, {}) for args in arg_mbs])
        self._kwargs_text = str([describe_call((), kwargs) for kwargs in kwarg_mbs])
        self._num_rows = _count_rows(arg_mbs, args_chunk_spec)

    def announce(
        self,
        stages: Sequence[PipelineStage | _PipelineStage],
        microbatches: int,
        has_backward: bool,
        *,
        is_known: bool,
    ) -> None:
        """Begin a step: the first stage tells the next, and so on."""
        if not stages:
            return
        if self._boundaries is None or not self._boundaries.fits(stages):
            self._boundaries = Boundaries(stages)
        for stage in stages:
            stage.has_backward = has_backward
            stage.boundary = self._boundaries[stage.stage_index]
        # Stages that insist on the shapes of their first step have nothing to tell.
        if is_known and all(stage._runtime_validate for stage in stages):
            self._boundaries.repeat_step(microbatches)
            return
        mode = f"{has_backward}{torch.is_grad_enabled()}"
        calls = {stage.stage_index: f"{mode}{self._describe(stage)}" for stage in stages}
        rows = self._num_rows if any(stage.is_first for stage in stages) else None
        self._boundaries.begin_step(calls, rows, microbatches)

    def _describe(self, stage: PipelineStage | _PipelineStage) -> str:
        """All that decides, on this rank, what a stage will send."""
        args = self._args_text if stage.is_first else ""
        return f"{describe_module(stage.submod)}{args}{self._kwargs_text}"

    def find_rows(self, stage: Any) -> int | None:
        """How many rows the batch of this step has, if that is known here."""
        boundary = getattr(stage, "boundary", None)
        rows: int | None = self._num_rows if boundary is None else boundary.rows
        return rows

    def end_step(self) -> None:
        """Wait until everything that was told has been heard."""
        if self._boundaries is not None:
            self._boundaries.end_step()

    def abandon_step(self) -> None:
        """Let go of what nobody will hear any more."""
        if self._boundaries is not None:
            self._boundaries.abandon_step()


def _count_rows(arg_mbs: Sequence[Any], spec: tuple[Any, ...] | None) -> int | None:
    """How many rows the first tensor that is split has in all microbatches together."""
    dims = None if spec is None else [getattr(s, "split_dim", None) for s in tree_flatten(spec)[0]]
    total = 0
    for args in arg_mbs:
        leaves = tree_flatten(tuple(args))[0]
        splits = [0] * len(leaves) if dims is None else dims
        sizes = [
            leaf.shape[dim]
            for leaf, dim in zip(leaves, splits, strict=False)
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and dim is not None
        ]
        if not sizes:
            return None
        total += sizes[0]
    return total

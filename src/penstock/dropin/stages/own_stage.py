"""Stages around modules of the user's, which form a chain."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.dropin.stages.base import _PipelineStageBase
from penstock.dropin.stages.meshes import GetMeshCallback, _MeshCache
from penstock.dropin.stages.metadata import (
    InferenceMode,
    _StageMeta,
    extract_tensor_metas,
    validate_and_normalize_to_tuple,
    validate_static_arg_grad_correspondence,
)

__all__ = ["PipelineStage"]


class PipelineStage(_PipelineStageBase):
    """A stage around a module of the user's; stages form a chain.

    What crosses its boundaries is learned in the first step, and again when it changes.
    `input_args` and its like are compared with that. Tensors over a mesh are put on the
    mesh that `get_mesh` gives.
    """

    # Programs that print or pickle a stage's class find it under its public name.
    __module__ = "penstock.dropin.stage"

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_grads: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        input_grads: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., Any]] | None = None,
        get_mesh: GetMeshCallback | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group, dw_builder)
        self._mesh_cache = _MeshCache(get_mesh_cb=get_mesh)
        self._inference_mode: InferenceMode | None = None
        inputs, outputs = map(validate_and_normalize_to_tuple, (input_args, output_args))
        in_grads, out_grads = (
            validate_and_normalize_to_tuple(given, allow_none=True)
            for given in (input_grads, output_grads)
        )
        self._user_meta = _StageMeta(
            *map(extract_tensor_metas, (inputs, outputs)),
            *(extract_tensor_metas(grads, allow_none=True) for grads in (in_grads, out_grads)),
        )
        for known in (inputs, outputs, in_grads, out_grads):
            self._mesh_cache.update_from_tensors(known or ())
        if self._user_meta.has_dtensors():
            for tensors, grads, is_input in (
                (inputs, in_grads, True),
                (outputs, out_grads, False),
            ):
                if tensors and grads:
                    validate_static_arg_grad_correspondence(stage_index, tensors, grads, is_input)

    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: Any,
        kwargs: dict[str, Any] | None = None,  # noqa: ARG002  # torch's form
        has_backward: bool = False,
    ) -> None:
        self.chunks = num_microbatches
        self._stage_meta = _StageMeta()
        self._setup_forward_recv_info(num_microbatches, has_backward)
        needs_more = InferenceMode.needs_dynamic(self._user_meta, has_backward)
        self._inference_mode = InferenceMode.DYNAMIC if needs_more else InferenceMode.STATIC
        if self.is_first:
            self.note("inputs", args)

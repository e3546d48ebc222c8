"""The two kinds of stages: around a user's module in a chain, and cut from a traced model."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from penstock.dropin.stages.base import _PipelineStageBase
from penstock.dropin.stages.meshes import GetMeshCallback, PipeliningMetadataError, _MeshCache
from penstock.dropin.stages.metadata import (
    InferenceMode,
    _StageMeta,
    extract_tensor_metas,
    validate_and_normalize_to_tuple,
    validate_static_arg_grad_correspondence,
)
from penstock.dropin.stages.values import _RecvInfo

__all__ = ["PipeInfo", "PipelineStage", "_PipelineStage", "build_stage"]


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


@dataclass(slots=True)
class PipeInfo:
    """What a stage has to know of the pipe that it was cut from."""

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool


class _PipelineStage(_PipelineStageBase):
    """A stage that was cut from a traced model; values may skip stages."""

    def __init__(
        self,
        stage_module: nn.Module,
        stage_index: int,
        pipe_info: PipeInfo,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(stage_module, stage_index, pipe_info.num_stages, device, group)
        self.pipe_info = pipe_info
        nodes = pipe_info.graph.find_nodes(op="call_module", sort=True)
        if len(nodes) != self.num_stages:
            raise PipeliningMetadataError(
                f"the graph of a pipe calls {len(nodes)} modules for {self.num_stages} stages"
            )
        self.node = nodes[stage_index]
        self.name = self.node.name
        self.submod_to_stage_index = {node.name: index for index, node in enumerate(nodes)}
        # The names of the module's arguments, noted now because a trainer may wrap the module.
        placeholders = stage_module.graph.find_nodes(op="placeholder")  # type: ignore[operator,union-attr]  # a traced module
        self._names = [str(node.target) for node in placeholders]
        # Of every stage, each argument that it receives: a stage, and which of its outputs.
        self._origins = [[*map(self._origin, node.args)] for node in nodes]
        self._received = [origin for origin in self._origins[stage_index] if origin is not None]
        self.sources = sorted({stage for stage, _ in self._received})
        self._move_submod_to_device()

    def _move_submod_to_device(self) -> None:
        """Move the module, unless it has parameters without values."""
        if not any(parameter.is_meta for parameter in self.submod.parameters()):
            self.submod.to(self.device)

    def get_stage_index_of_submod(self, submod_name: str) -> int:
        """Return which stage runs a module of the pipe's graph."""
        if submod_name not in self.submod_to_stage_index:
            raise PipeliningMetadataError(
                f"no stage runs {submod_name!r}; there are {list(self.submod_to_stage_index)}"
            )
        return self.submod_to_stage_index[submod_name]

    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: Any,  # noqa: ARG002  # torch's form
        kwargs: dict[str, Any] | None = None,  # noqa: ARG002  # torch's form
        has_backward: bool = False,  # noqa: ARG002  # torch's form
    ) -> None:
        self.chunks = num_microbatches
        self._stage_meta = _StageMeta()
        self.act_send_info = self._create_act_send_info()
        self.args_recv_info[0] = self._create_act_recv_info()

    def _origin(self, node: Any) -> tuple[int, int] | None:
        """Return the stage that an argument comes from and its place there, or None if given."""
        if not isinstance(node, fx.Node) or node.op == "placeholder":
            return None
        place: Any = node.args if node.target is operator.getitem else (node, 0)
        return self.get_stage_index_of_submod(place[0].name), place[1]

    def find_edges(self) -> list[tuple[int, int]]:
        """Return which stage feeds which in the whole pipe."""
        found = enumerate(self._origins)
        return sorted({(origin[0], at) for at, origins in found for origin in origins if origin})

    def _arrange(self, received: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        by_origin = dict(zip(sorted(self._received), received, strict=True))
        values = tuple(by_origin[origin] for origin in self._received)
        is_given = [origin is None for origin in self._origins[self.stage_index]]
        if True not in is_given[: len(values)]:
            return values, {}
        # Arguments that the user gives by name come before some that are received.
        names = [name for name, given in zip(self._names, is_given, strict=True) if not given]
        return (), dict(zip(names, values, strict=True))

    def _create_act_send_info(self) -> dict[int, Sequence[int | None]]:
        users = self.node.users
        used: list[Any] = [u.args[1] if u.target is operator.getitem else 0 for u in users]
        found: dict[int, list[int]] = {number: [] for number in used}
        for stage, origins in enumerate(self._origins):
            for origin in dict.fromkeys(origins):
                if origin is not None and origin[0] == self.stage_index:
                    found[origin[1]].append(stage)
        count = max(len(self._stage_meta.outputs or ()), max(found, default=-1) + 1)
        return {number: found.get(number, []) for number in range(count)}

    def _create_act_recv_info(self) -> tuple[_RecvInfo, ...]:
        return tuple(_RecvInfo(f"from stage {source}", source) for source, _ in self._received)

    def find_dst_rank(self, user: fx.Node) -> int | None:
        """Return the stage that uses an output, if it is one."""
        return self.submod_to_stage_index.get(user.name)

    def _get_output_node(self) -> fx.Node:
        (node,) = self.submod.graph.find_nodes(op="output")  # type: ignore[operator,union-attr]  # a traced module
        output: fx.Node = node
        return output


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> _PipelineStage:
    """Return a stage of a traced pipe on this rank; `pipe.info()` says how the stages depend."""
    return _PipelineStage(stage_module, stage_index, pipe_info, device, group)

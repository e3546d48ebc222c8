"""The two kinds of stages: around a user's module in a chain, and cut from a traced model."""

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from penstock.dropin.stages.base import _PipelineStageBase
from penstock.dropin.stages.metadata import (
    GetMeshCallback,
    InferenceMode,
    PipeliningMetadataError,
    _MeshCache,
    _StageMeta,
    extract_tensor_metas,
)
from penstock.dropin.stages.values import Named, _RecvInfo

__all__ = [
    "PipeInfo",
    "PipelineStage",
    "_PipelineStage",
    "build_stage",
    "validate_and_normalize_to_tuple",
    "validate_static_arg_grad_correspondence",
]


class PipelineStage(_PipelineStageBase):
    """A stage around a module of the user's; what crosses is learned in the first step."""

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
        self._inference_mode: InferenceMode | None = None
        self._mesh_cache = _MeshCache(get_mesh)
        given = [validate_and_normalize_to_tuple(one) for one in (input_args, output_args)]
        grads = [validate_and_normalize_to_tuple(one, True) for one in (input_grads, output_grads)]
        self._user_meta = _StageMeta(
            *map(extract_tensor_metas, given),
            *(extract_tensor_metas(one, allow_none=True) for one in grads),
        )
        for known in (*given, *grads):
            self._mesh_cache.update_from_tensors(known or ())
        for tensors, theirs, is_input in zip(given, grads, (True, False), strict=True):
            if self._user_meta.has_dtensors() and tensors and theirs:
                validate_static_arg_grad_correspondence(stage_index, tensors, theirs, is_input)

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Named = None, has_backward: bool = False
    ) -> None:
        del kwargs
        self.chunks, self._stage_meta = num_microbatches, _StageMeta()
        self._setup_forward_recv_info(num_microbatches, has_backward)
        needs_more = InferenceMode.needs_dynamic(self._user_meta, has_backward)
        self._inference_mode = InferenceMode.DYNAMIC if needs_more else InferenceMode.STATIC
        if self.is_first:
            self.note("inputs", args)


def validate_and_normalize_to_tuple(args: Any, allow_none: bool = False) -> Any:
    """Return a tensor, or a tuple or list of tensors, as a tuple; refuse anything else."""
    if args is None:
        return None
    items = args if isinstance(args, tuple | list) else (args,)
    for number, item in enumerate(items):
        if not isinstance(item, torch.Tensor) and not (allow_none and item is None):
            raise PipeliningMetadataError(
                f"value {number} of a stage is of type {type(item).__name__}, not a tensor; give "
                "tensors in a tuple or list, and pass other values as keywords"
            )
    return tuple(items)


def validate_static_arg_grad_correspondence(
    stage_index: int,
    args: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    is_input: bool,
) -> None:
    """Refuse example gradients that do not fit the example tensors that they belong to."""
    kind = "input" if is_input else "output"
    name = f"stage {stage_index}: {kind}_grads"
    if len(args) != len(grads):
        text = f"{name} has {len(grads)} entries for {len(args)} of {kind}_args"
        raise PipeliningMetadataError(f"{text}; give one for each, None for no gradient")
    for number, (tensor, grad) in enumerate(zip(args, grads, strict=True)):
        place, is_spread = f"{name}[{number}]", isinstance(tensor, DTensor)
        if grad is None and tensor.requires_grad:
            text = f"{place} is None for a tensor that requires a gradient; is one missing?"
            warnings.warn(text, UserWarning, stacklevel=3)
        elif grad is not None and not tensor.requires_grad:
            text = f"{place} must be None for a tensor that requires no gradient (got a tensor)"
            raise PipeliningMetadataError(text)
        elif grad is not None and is_spread and not isinstance(grad, DTensor):
            raise PipeliningMetadataError(f"{place} must be a DTensor, as its tensor is")


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
        known = self.submod_to_stage_index
        if submod_name not in known:
            raise PipeliningMetadataError(
                f"no stage runs {submod_name!r}; there are {list(known)}"
            )
        return known[submod_name]

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Named = None, has_backward: bool = False
    ) -> None:
        del args, kwargs, has_backward
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
        return self.submod_to_stage_index.get(user.name)

    def _get_output_node(self) -> fx.Node:
        output: fx.Node = self.submod.graph.output_node()  # type: ignore[operator,union-attr]  # a traced module
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

"""What crosses a stage's boundaries: receives, sends, and tensors handed over on one rank.

What a stage will receive is learned from the stage before it (`_links`), microbatch by microbatch;
a buffer exists from the moment its receive is posted until the stage uses it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.tensor import DTensor

from penstock.dropin._boundaries import Boundary
from penstock.dropin.stages.metadata import (
    PipeliningMetadataError,
    TensorMeta,
    _derive_grad_metas,
    _DTensorMeta,
    _make_tensor_from_meta,
    _MeshCache,
    _StageMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    put_together,
    to_local_if_dtensor,
)
from penstock.dropin.stages.recv_info import _RecvInfo
from penstock.dropin.stages.told import compare_with_told, insist
from penstock.errors import ArgumentError, PipelineError
from penstock.tensors.plain import plain_value

__all__ = ["StageTraffic", "StageUseError", "as_tuple", "find_edge"]


class StageUseError(PipelineError, AssertionError):
    """A stage is asked for something at the wrong time; also an `AssertionError`, as in torch."""


class StageTraffic(ABC):
    """A stage as its neighbours see it."""

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if stage_index >= num_stages:
            raise ArgumentError(f"stage {stage_index} is out of range for {num_stages} stages")
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = device
        self.group = group
        self.group_rank = dist.get_rank(group)
        self.group_size = dist.get_world_size(group)
        if self.group_size > num_stages:
            raise PipelineError(
                f"a group of {self.group_size} ranks has {num_stages} stages; give every rank one"
            )
        self.log_prefix = f"[Stage {stage_index}]"
        self.has_backward = False
        # The number of microbatches, set by the schedule.
        self.chunks: int | None = None
        self.stage_index_to_group_rank = {
            stage: stage % self.group_size for stage in range(num_stages)
        }

        # By microbatch: outputs (or where their gradients enter) and received inputs; gradients
        # for the stage before.
        self.fwd_cache: dict[int, tuple[tuple[Any, ...], list[torch.Tensor]]] = {}
        self.bwd_cache: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self.output_chunks: list[Any] = []

        # By microbatch, what is expected; by output, where it goes; by input, whence it came.
        self.args_recv_info: dict[int, tuple[_RecvInfo, ...]] = {}
        self.grad_recv_info: dict[int, tuple[_RecvInfo, ...]] = {}
        self.act_send_info: dict[int, Sequence[int | None]] = {}
        self.grad_send_info: list[int | None] | None = None

        self._mesh_cache = _MeshCache()
        self._runtime_validate = get_debug_level() == DebugLevel.DETAIL
        self._stage_meta = _StageMeta()
        self._user_meta = _StageMeta()
        self._output_metas: dict[int, tuple[TensorMeta, ...]] = {}
        self.boundary: Boundary | None = None

    @property
    def has_backward(self) -> bool:
        """Whether this step has backwards."""
        return self._has_backward

    @has_backward.setter
    def has_backward(self, has_backward: bool) -> None:
        self._has_backward = has_backward

    @property
    def is_first(self) -> bool:
        """Whether the batch enters here."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage_index == self.num_stages - 1

    def find_sources(self) -> Sequence[int]:
        """The stages that this one receives from: the one before, as stages form a chain."""
        return [] if self.is_first else [self.stage_index - 1]

    def find_destinations(self) -> Sequence[int]:
        """The stages that this one sends to."""
        return [] if self.is_last else [self.stage_index + 1]

    @property
    def knows_inputs(self) -> bool:
        """Whether it is known what this step's microbatches will bring."""
        boundary = getattr(self, "boundary", None)
        return boundary is None or all(boundary.knows_source(stage) for stage in boundary.sources)

    def knows_gradients(self, microbatch: int) -> bool:
        """Whether it is known which gradients a microbatch will bring back."""
        boundary = getattr(self, "boundary", None)
        if boundary is None:
            return True
        is_told = all(boundary.knows_destination(stage) for stage in boundary.destinations)
        return is_told and (not self.has_backward or microbatch in self._output_metas)

    @property
    def knows_all(self) -> bool:
        """Whether nothing is left to be told in this step."""
        boundary = getattr(self, "boundary", None)
        return boundary is None or boundary.knows_all

    def _check_chunk_id(self, chunk_id: int) -> None:
        if self.chunks is None:
            raise PipelineError(
                f"stage {self.stage_index} has no number of microbatches yet; a schedule sets it"
            )
        if chunk_id >= self.chunks:
            raise PipelineError(f"microbatch {chunk_id} is out of range for {self.chunks}")

    @abstractmethod
    def _create_grad_recv_info(
        self, act_send_info: dict[int, Sequence[int | None]]
    ) -> tuple[_RecvInfo, ...]:
        """What gradients come back: one per output and stage that it goes to."""

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        """The global rank of the process that holds a stage."""
        rank = self.stage_index_to_group_rank[stage_idx]
        return dist.get_global_rank(self.group or _get_default_group(), rank)

    def _get_recv_ops(self, recv_infos: Sequence[_RecvInfo]) -> list[dist.P2POp]:
        """Receives for what is expected, with buffers made for them."""
        ops = []
        for info in recv_infos:
            if info.is_root_arg or (info.buffer is None and info.tensor_meta is None):
                continue
            assert info.source is not None, "info.source: what is received comes from somewhere"
            peer = self._resolve_peer_global_rank(info.source)
            if info.buffer is None:
                info.buffer = _make_buffer(info.tensor_meta, self.device)
            ops.append(dist.P2POp(dist.irecv, info.buffer, peer, self.group))
        return ops

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of a microbatch's inputs."""
        if self.boundary is not None and not self.is_first:
            self.args_recv_info[fwd_chunk_id] = self._expect_activations(fwd_chunk_id)
        return self._get_recv_ops(self.args_recv_info.get(fwd_chunk_id, ()))

    def _expect_activations(self, microbatch: int) -> tuple[_RecvInfo, ...]:
        """What the stages before this one send for a microbatch, as they have told."""
        assert self.boundary is not None, "somebody sends them"
        (source,) = self.find_sources()
        metas = self.boundary.expect_activations(source, microbatch)
        return tuple(_RecvInfo(f"from stage {source}", source, None, meta) for meta in metas)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of the gradients of a microbatch's outputs."""
        if not self.has_backward or self.is_last:
            return []
        if self.boundary is not None:
            self.grad_recv_info[bwd_chunk_id] = self._expect_gradients(bwd_chunk_id)
        return self._get_recv_ops(self.grad_recv_info.get(bwd_chunk_id, ()))

    def _expect_gradients(self, microbatch: int) -> tuple[_RecvInfo, ...]:
        assert self.boundary is not None, "somebody sends them"
        outputs = self._output_metas[microbatch]
        derived = _derive_grad_metas(outputs)
        told: dict[int, Iterator[TensorMeta | None]] = {}
        infos = self._create_grad_recv_info(self.act_send_info)
        for info, (number, stage) in zip(infos, self._slots(), strict=True):
            info.tensor_meta = derived[number]
            if outputs[number].requires_grad and isinstance(outputs[number], _DTensorMeta):
                if stage not in told:
                    told[stage] = iter(self.boundary.expect_gradients(stage, microbatch))
                info.tensor_meta = next(told[stage])
        return infos

    def _slots(self) -> list[tuple[int, int]]:
        """Each output with each stage that it goes to."""
        return [
            (number, stage)
            for number, stages in self.act_send_info.items()
            for stage in stages
            if stage is not None
        ]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the outputs of the stage before, which is on this rank too."""
        tensors = as_tuple(prev_stage_outputs)
        _check_tensors(tensors)
        self.args_recv_info[mb_index] = tuple(
            _RecvInfo(
                f"from stage {self.stage_index - 1}",
                self.stage_index - 1,
                to_local_if_dtensor(tensor, detach=True),
                extract_tensor_meta(tensor),
            )
            for tensor in tensors
        )
        self._mesh_cache.update_from_tensors(tensors)

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """Hand over the gradients for the stage before, which is on this rank too."""
        if not self.has_backward or self.is_first:
            raise StageUseError(f"stage {self.stage_index} has no gradients for a stage before it")
        self._check_chunk_id(mb_index)
        return self.bwd_cache.pop(mb_index)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        """Take gradients from the stage after this one, which is on this rank too."""
        if not isinstance(next_stage_bwd_outputs, tuple):
            raise StageUseError(
                f"gradients come in a tuple (got {type(next_stage_bwd_outputs).__name__})"
            )
        if not self.has_backward or self.is_last:
            raise StageUseError(f"stage {self.stage_index} takes no gradients from a stage after")
        _check_tensors([grad for grad in next_stage_bwd_outputs if grad is not None])
        infos = self._create_grad_recv_info(self.act_send_info)
        for info, grad in zip(infos, next_stage_bwd_outputs, strict=True):
            if grad is not None:
                info.buffer, info.tensor_meta = (
                    to_local_if_dtensor(grad),
                    extract_tensor_meta(grad),
                )
        self.grad_recv_info[mb_index] = infos

    def _take_received(self, infos: Sequence[_RecvInfo]) -> tuple[torch.Tensor | None, ...]:
        """What has come, with tensors over a mesh put together.

        Buffers of ours are given away; others belong to whoever has made them.
        """
        values: list[torch.Tensor | None] = []
        for info in infos:
            value = info.buffer
            if self.boundary is not None:
                info.buffer = None
            if value is not None and isinstance(info.tensor_meta, _DTensorMeta):
                mesh = self._mesh_cache.get_mesh(info.tensor_meta.mesh_cache_key)
                value = put_together(value.detach(), info.tensor_meta, mesh)
            values.append(value)
        return tuple(values)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        """The inputs of a microbatch, as leaves of a new graph."""
        infos = [info for info in self.args_recv_info[fwd_chunk_id] if not info.is_root_arg]
        self.grad_send_info = [info.source for info in infos]
        records = self.has_backward and torch.is_grad_enabled()
        activations = []
        for info, value in zip(infos, self._take_received(infos), strict=True):
            if value is None or info.tensor_meta is None:
                raise PipeliningMetadataError(
                    f"stage {self.stage_index}, microbatch {fwd_chunk_id}: {info} has not come; "
                    "wait for its receive before the forward"
                )
            activations.append(value.requires_grad_(info.tensor_meta.requires_grad and records))
        return tuple(activations)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor | None, ...]:
        """The gradients that came back for a microbatch, one per slot."""
        return self._take_received(self.grad_recv_info[bwd_chunk_id])

    def _keep_output(
        self, microbatch: int, outputs: tuple[Any, ...], received: Sequence[torch.Tensor]
    ) -> None:
        """Hold an output until it is sent, and what its backward needs."""
        _check_tensors(outputs)
        self._note("outputs", outputs)
        if len(self.act_send_info) != len(outputs):
            self.act_send_info = self._create_act_send_info(len(outputs))
        if self.has_backward:
            self._output_metas[microbatch] = extract_tensor_metas(outputs)
        if self.has_backward or any(self._is_elsewhere(stage) for _, stage in self._slots()):
            self.fwd_cache[microbatch] = outputs, list(received)

    def _is_elsewhere(self, stage: int) -> bool:
        return self.stage_index_to_group_rank[stage] != self.group_rank

    def _create_act_send_info(self, num_outputs: int) -> dict[int, Sequence[int | None]]:
        """Where each output goes."""
        return {number: self.find_destinations() for number in range(num_outputs)}

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of a microbatch's outputs; from then on only their graph is held here."""
        outputs, received = self.fwd_cache.pop(fwd_chunk_id)
        if self.boundary is not None:
            for stage in dict.fromkeys(stage for _, stage in self._slots()):
                sent = [outputs[number] for number, to in self._slots() if to == stage]
                metas = extract_tensor_metas(sent)
                self.boundary.tell_activations(stage, fwd_chunk_id, metas)
        ops = [
            self._send(to_local_if_dtensor(outputs[number], detach=True), stage)
            for number, stage in self._slots()
        ]
        if self.has_backward:
            self.fwd_cache[fwd_chunk_id] = tuple(map(find_edge, outputs)), received
        return ops

    def _send(self, tensor: torch.Tensor, stage: int) -> dist.P2POp:
        peer = self._resolve_peer_global_rank(stage)
        return dist.P2POp(dist.isend, plain_value(tensor).contiguous(), peer, self.group)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of the gradients of a microbatch's inputs."""
        if not self.has_backward or self.is_first:
            return []
        self._check_chunk_id(bwd_chunk_id)
        grads = self.bwd_cache.pop(bwd_chunk_id)
        pairs = list(zip(grads, self.grad_send_info or [], strict=True))
        if self.boundary is not None:
            for source in dict.fromkeys(stage for _, stage in pairs if stage is not None):
                sent = [grad for grad, stage in pairs if stage == source and _is_spread(grad)]
                if sent:
                    metas = extract_tensor_metas(sent)
                    self.boundary.tell_gradients(source, bwd_chunk_id, metas)
        ops = []
        for number, (grad, stage) in enumerate(pairs):
            tensor = self._choose_gradient(bwd_chunk_id, number, grad)
            if tensor is not None and stage is not None:
                ops.append(self._send(to_local_if_dtensor(tensor, detach=True), stage))
        return ops

    def _choose_gradient(
        self, microbatch: int, number: int, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What to send back for an input: its gradient, zeros if one is counted on, or nothing."""
        # Who has learned what comes counts on a gradient where there is one.
        if self.boundary is not None:
            return grad
        meta = self._find_gradient_meta(number)
        if grad is None:
            return None if meta is None else _make_tensor_from_meta(meta, self.device).zero_()
        if meta is None and _is_spread(grad):
            raise PipeliningMetadataError(
                f"stage {self.stage_index}, microbatch {microbatch}, input {number}: a gradient "
                "over a mesh has come that nobody counts on. DTensor grad metadata cannot be "
                "derived from the input's; give input_grads, or let the schedule find out"
            )
        return grad

    def _find_gradient_meta(self, number: int) -> TensorMeta | None:
        if self._stage_meta.input_grads is not None:
            return self._stage_meta.input_grads[number]
        return _derive_grad_metas(self._stage_meta.inputs or ())[number]

    def _note(self, field: str, values: Sequence[Any]) -> None:
        """Note what crosses here for the first time; if told to, insist on it from then on."""
        place = f"Stage {self.stage_index} {field}"
        if getattr(self._stage_meta, field) is not None:
            if self._runtime_validate:
                insist(place, getattr(self._stage_meta, field), values)
        elif all(value is None or isinstance(value, torch.Tensor) for value in values):
            metas = extract_tensor_metas(values, allow_none=True)
            compare_with_told(place, getattr(self._user_meta, field), metas)
            setattr(self._stage_meta, field, metas)


def as_tuple(output: Any) -> tuple[Any, ...]:
    """The values that a module returns."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def _check_tensors(values: Sequence[Any]) -> None:
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise StageUseError(
                f"expected tensor values between stages, got {type(value).__name__}; a stage "
                "returns a tensor, or a tuple or list of tensors"
            )


def _make_buffer(meta: TensorMeta | None, device: torch.device) -> torch.Tensor:
    assert meta is not None, "what is received is known"
    return torch.empty(meta.shape, dtype=meta.dtype, device=device)


def find_edge(value: Any) -> GradientEdge | None:
    """Where the gradient of an output enters, if it takes one."""
    if isinstance(value, torch.Tensor):
        return get_gradient_edge(value) if value.requires_grad else None
    return value if isinstance(value, GradientEdge) else None


def _is_spread(grad: object) -> bool:
    return isinstance(grad, DTensor)

"""A stage as its neighbours see it: its place, what it receives and what it sends.

What a step leaves here is what torch's users look at: tensors received and to be sent, by
microbatch. The executor carries them between ranks (`penstock.dropin.run`); the operations that
`get_fwd_send_ops` and the like return say what is sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.distributed.distributed_c10d import _get_default_group

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
    to_local_if_dtensor,
)
from penstock.dropin.stages.recv_info import _RecvInfo
from penstock.dropin.stages.values import (
    StageUseError,
    as_tuple,
    compare_with_told,
    find_edge,
    insist,
    require_tensors,
    take_buffers,
    to_send,
)
from penstock.errors import ArgumentError, PipelineError

__all__ = ["StageBoundary"]


class StageBoundary(ABC):
    """A stage of a pipeline on this rank, without its work."""

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

        # By microbatch, what is expected or has come; by output, where it goes; by input, whence.
        self.args_recv_info: dict[int, tuple[_RecvInfo, ...]] = {}
        self.grad_recv_info: dict[int, tuple[_RecvInfo, ...]] = {}
        self.act_send_info: dict[int, Sequence[int | None]] = {}
        self.grad_send_info: list[int | None] | None = None

        self._mesh_cache = _MeshCache()
        self._runtime_validate = get_debug_level() == DebugLevel.DETAIL
        self._stage_meta = _StageMeta()
        self._user_meta = _StageMeta()
        # By microbatch, what was sent on, since gradients come back in the same form.
        self.output_metas: dict[int, tuple[TensorMeta, ...]] = {}
        # Whether the ranks knew the shapes of the last step before it began.
        self.knows_all = True
        # Whether a schedule carries what crosses, and learns its form from the tensors.
        self.is_run = False

    # ------------------------------------------------------------------ its place

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
        """Return the stages that this one receives from: the one before, in a chain."""
        return [] if self.is_first else [self.stage_index - 1]

    def find_destinations(self) -> Sequence[int]:
        """Return the stages that this one sends to."""
        return [] if self.is_last else [self.stage_index + 1]

    def find_edges(self) -> list[tuple[int, int]]:
        """Return which stage feeds which in the whole pipeline."""
        return [(stage, stage + 1) for stage in range(self.num_stages - 1)]

    def find_slots(self) -> list[tuple[int, int]]:
        """Return each output with each stage that it goes to."""
        return [
            (number, stage)
            for number, stages in self.act_send_info.items()
            for stage in stages
            if stage is not None
        ]

    def _is_same_rank(self, other_stage: int) -> bool:
        return self.stage_index_to_group_rank[other_stage] == self.group_rank

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        """Return the global rank of the process that holds a stage."""
        rank = self.stage_index_to_group_rank[stage_idx]
        return dist.get_global_rank(self.group or _get_default_group(), rank)

    def _check_chunk_id(self, chunk_id: int) -> None:
        if self.chunks is None:
            raise PipelineError(
                f"stage {self.stage_index} has no number of microbatches yet; a schedule sets it"
            )
        if chunk_id >= self.chunks:
            raise PipelineError(f"microbatch {chunk_id} is out of range for {self.chunks}")

    # ------------------------------------------------------------------ before a step, and after

    @abstractmethod
    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: Any,
        kwargs: dict[str, Any] | None = None,
        has_backward: bool = False,
    ) -> Any:
        """Prepare for the first step, and for the first one of another mode."""

    @abstractmethod
    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        target: Any = None,
        received_grad_meta: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Prepare for its backwards."""

    @abstractmethod
    def _create_grad_recv_info(
        self, act_send_info: dict[int, Sequence[int | None]]
    ) -> tuple[_RecvInfo, ...]:
        """Return what gradients come back: one per output and stage that it goes to."""

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        """Make room for what will come; buffers are made when it does."""
        del has_backward
        self.args_recv_info.update((number, ()) for number in range(num_microbatches))

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        self.grad_recv_info.update((number, ()) for number in range(num_microbatches))

    def _create_act_send_info(self) -> dict[int, Sequence[int | None]]:
        """Return where each output goes, as far as outputs are known."""
        outputs = self._stage_meta.outputs or ()
        return {number: self.find_destinations() for number in range(len(outputs))}

    def _create_grad_send_info(self, args_recv_info: tuple[_RecvInfo, ...]) -> list[int | None]:
        return [info.source for info in args_recv_info if not info.is_root_arg]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return no operations: connections are opened before the first step."""
        return []

    # ------------------------------------------------------------------ what it receives

    def _get_recv_ops(self, recv_infos: Sequence[_RecvInfo]) -> list[dist.P2POp]:
        """Return receives for what is expected, with buffers made for them."""
        ops = []
        for info in recv_infos:
            if info.is_root_arg or (info.buffer is None and info.tensor_meta is None):
                continue
            assert info.source is not None, "info.source: what is received comes from somewhere"
            if info.buffer is None:
                assert info.tensor_meta is not None, "known by now"
                meta = info.tensor_meta
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            peer = self._resolve_peer_global_rank(info.source)
            ops.append(dist.P2POp(dist.irecv, info.buffer, peer, self.group))
        return ops

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a microbatch's inputs."""
        return self._get_recv_ops(self.args_recv_info.get(fwd_chunk_id, ()))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of the gradients of a microbatch's outputs."""
        if not self._has_backward or self.is_last:
            return []
        return self._get_recv_ops(self.grad_recv_info.get(bwd_chunk_id, ()))

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the outputs of the stage before, which is on this rank too."""
        tensors = as_tuple(prev_stage_outputs)
        require_tensors(tensors)
        source = self.stage_index - 1
        self.args_recv_info[mb_index] = tuple(
            _RecvInfo(
                f"from stage {source}",
                source,
                to_local_if_dtensor(tensor, detach=True),
                extract_tensor_meta(tensor),
            )
            for tensor in tensors
        )
        self._mesh_cache.update_from_tensors(tensors)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        """Take gradients from the stage after this one, which is on this rank too."""
        if not isinstance(next_stage_bwd_outputs, tuple):
            raise StageUseError(
                f"gradients come in a tuple (got {type(next_stage_bwd_outputs).__name__})"
            )
        if not self._has_backward or self.is_last:
            raise StageUseError(f"stage {self.stage_index} takes no gradients from a stage after")
        require_tensors([grad for grad in next_stage_bwd_outputs if grad is not None])
        infos = self._create_grad_recv_info(self.act_send_info)
        for info, grad in zip(infos, next_stage_bwd_outputs, strict=True):
            if grad is not None:
                info.buffer = to_local_if_dtensor(grad)
                info.tensor_meta = extract_tensor_meta(grad)
        self.grad_recv_info[mb_index] = infos

    def _map_tensor_from_recv_info(self, recv_infos: Sequence[_RecvInfo]) -> tuple[Any, ...]:
        return tuple(info.buffer for info in recv_infos if not info.is_root_arg)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        """Return the inputs of a microbatch, as leaves of a new graph."""
        infos = [i for i in self.args_recv_info.pop(fwd_chunk_id, ()) if not i.is_root_arg]
        self.grad_send_info = self._create_grad_send_info(tuple(infos))
        records = self._has_backward and torch.is_grad_enabled()
        activations = []
        for info, value in zip(infos, take_buffers(infos, self._mesh_cache), strict=True):
            if value is None or info.tensor_meta is None:
                raise PipeliningMetadataError(
                    f"stage {self.stage_index}, microbatch {fwd_chunk_id}: {info} has not come; "
                    "wait for its receive before the forward"
                )
            activations.append(value.requires_grad_(info.tensor_meta.requires_grad and records))
        return tuple(activations)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients that came back for a microbatch, one per slot."""
        return take_buffers(self.grad_recv_info.pop(bwd_chunk_id, ()), self._mesh_cache)

    # ------------------------------------------------------------------ what it sends

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a microbatch's outputs; then only their graph is held here."""
        outputs, received = self.fwd_cache.pop(fwd_chunk_id)
        ops = [self._send(to_send(outputs[number]), stage) for number, stage in self.find_slots()]
        if self._has_backward:
            self.fwd_cache[fwd_chunk_id] = tuple(map(find_edge, outputs)), received
        return ops

    def _send(self, tensor: torch.Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(dist.isend, tensor, self._resolve_peer_global_rank(stage), self.group)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of the gradients of a microbatch's inputs."""
        if not self._has_backward or self.is_first:
            return []
        self._check_chunk_id(bwd_chunk_id)
        grads = self.bwd_cache.pop(bwd_chunk_id)
        ops = []
        for number, (grad, stage) in enumerate(zip(grads, self.grad_send_info or [], strict=True)):
            meta = self._get_grad_send_meta(number) if grad is None else None
            if meta is not None:
                grad = _make_tensor_from_meta(meta, self.device).zero_()
            if grad is not None and stage is not None:
                ops.append(self._send(to_send(grad), stage))
        return ops

    def _get_grad_send_meta(self, input_idx: int) -> TensorMeta | None:
        """Return the form of the gradient that the stage before counts on for an input."""
        if self.is_run:
            return None
        if self._stage_meta.input_grads is not None:
            return self._stage_meta.input_grads[input_idx]
        return _derive_grad_metas(self._stage_meta.inputs or ())[input_idx]

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """Hand over the gradients for the stage before, which is on this rank too."""
        if not self._has_backward or self.is_first:
            raise StageUseError(f"stage {self.stage_index} has no gradients for a stage before it")
        self._check_chunk_id(mb_index)
        return self.bwd_cache.pop(mb_index)

    def keep_output(
        self, microbatch: int, outputs: tuple[Any, ...], received: Sequence[torch.Tensor]
    ) -> None:
        """Hold an output until it is sent, and what its backward needs."""
        require_tensors(outputs)
        self.note("outputs", outputs)
        if len(self.act_send_info) != len(outputs):
            self._stage_meta.outputs = extract_tensor_metas(outputs)
            self.act_send_info = self._create_act_send_info()
        if self._has_backward:
            metas: tuple[TensorMeta, ...] = extract_tensor_metas(outputs)
            self.output_metas[microbatch] = metas
            if any(isinstance(meta, _DTensorMeta) for meta in metas):
                self._mesh_cache.update_from_tensors(outputs)
        if self._has_backward or not all(self._is_same_rank(s) for _, s in self.find_slots()):
            self.fwd_cache[microbatch] = outputs, list(received)

    def note(self, field: str, values: Sequence[Any]) -> None:
        """Note what crosses here for the first time; if asked to, insist on it from then on."""
        known = getattr(self._stage_meta, field)
        if known is not None and not self._runtime_validate:
            return
        place = f"Stage {self.stage_index} {field}"
        if known is not None:
            insist(place, known, values)
        elif all(value is None or isinstance(value, torch.Tensor) for value in values):
            metas = extract_tensor_metas(values, allow_none=True)
            compare_with_told(place, getattr(self._user_meta, field), metas)
            setattr(self._stage_meta, field, metas)

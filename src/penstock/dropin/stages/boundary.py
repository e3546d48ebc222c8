"""A stage as its neighbours see it: its place, what it receives, and what it sends.

The executor carries it between ranks (`penstock.dropin.run`); the operations that
`get_fwd_send_ops` and its siblings return say what is sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.dropin.stages.metadata import (
    PipeliningMetadataError,
    TensorMeta,
    _derive_grad_metas,
    _make_tensor_from_meta,
    _MeshCache,
    _StageMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    to_local_if_dtensor,
    validate_tensors_metadata,
)
from penstock.dropin.stages.values import (
    Gradients,
    Named,
    StageUseError,
    _RecvInfo,
    as_tuple,
    compare_with_given,
    find_edge,
    require_tensors,
    take_buffers,
    to_send,
)
from penstock.errors import ArgumentError, PipelineError
from penstock.ir.dataflow import Dataflow
from penstock.torch_private import DebugLevel, get_debug_level, get_default_group

# Programs replace functions of `dist` in torch's module.
__all__ = ["StageBoundary", "dist"]


class StageBoundary(ABC):
    """A stage of a pipeline on this rank, without its work."""

    _has_backward: bool
    has_backward = property(
        attrgetter("_has_backward"), lambda self, value: setattr(self, "_has_backward", value)
    )

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., Any]] | None = None,
    ) -> None:
        if stage_index >= num_stages:
            raise ArgumentError(f"stage {stage_index} is out of range for {num_stages} stages")
        self.stage_index, self.num_stages = stage_index, num_stages
        self.submod, self.device, self.group = submodule, device, group
        self.dw_builder = dw_builder
        # By microbatch, the weight work that waits.
        self.dw_runner: dict[int, Callable[..., Any]] = {}
        self.group_rank = dist.get_rank(group)
        self.group_size = dist.get_world_size(group)
        if self.group_size > num_stages:
            raise PipelineError(
                f"a group of {self.group_size} ranks has {num_stages} stages; give every rank one"
            )
        # The stages that this one receives from: the one before, in a chain.
        self.sources: Sequence[int] = [] if self.is_first else [stage_index - 1]
        self.log_prefix = f"[Stage {stage_index}]"
        # Whether this step has backwards; trainers set it under either name.
        self._has_backward = False
        # The number of microbatches, set by the schedule.
        self.chunks: int | None = None
        self.stage_index_to_group_rank = {s: s % self.group_size for s in range(num_stages)}

        # By microbatch: outputs (or where their gradients enter) and received inputs; gradients
        # for the stage before.
        self.fwd_cache: dict[int, tuple[tuple[Any, ...], list[torch.Tensor]]] = {}
        self.bwd_cache: dict[int, Gradients] = {}
        self.output_chunks: list[Any] = []

        # By microbatch, what is expected or has come; by output or input, the other stage.
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
        # Whether a schedule carries what crosses, and learns its form from the tensors.
        self.is_run = False

    @property
    def is_first(self) -> bool:
        """Whether the batch enters here."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage_index == self.num_stages - 1

    def find_edges(self) -> list[tuple[int, int]]:
        """Return which stage feeds which in the whole pipeline."""
        return list(Dataflow.chain(self.num_stages).edges)

    def find_slots(self) -> list[tuple[int, int]]:
        """Return each output with each stage that it goes to."""
        going = self.act_send_info.items()
        return [(number, stage) for number, to in going for stage in to if stage is not None]

    def _is_same_rank(self, other_stage: int) -> bool:
        return self.stage_index_to_group_rank[other_stage] == self.group_rank

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        """Return the global rank of the process that holds a stage."""
        rank = self.stage_index_to_group_rank[stage_idx]
        return dist.get_global_rank(self.group or get_default_group(), rank)

    def _check_chunk_id(self, chunk_id: int) -> None:
        if self.chunks is None:
            raise PipelineError("a stage has no number of microbatches before a schedule sets it")
        if chunk_id >= self.chunks:
            raise PipelineError(f"microbatch {chunk_id} is out of range for {self.chunks}")

    @abstractmethod
    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Named = None, has_backward: bool = False
    ) -> Any:
        """Prepare for the first step, and for the first one of another mode."""

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Any = None,  # noqa: ARG002  # torch's form
        target: Any = None,  # noqa: ARG002  # torch's form
        received_grad_meta: Any = None,  # noqa: ARG002  # torch's form
        loss_kwargs: Named = None,  # noqa: ARG002  # torch's form
    ) -> Any:
        self._setup_backward_recv_info(num_microbatches)

    def _create_grad_recv_info(
        self, act_send_info: dict[int, Sequence[int | None]]
    ) -> tuple[_RecvInfo, ...]:
        """Return what gradients come back: one per output and stage that it goes to."""
        return tuple(
            _RecvInfo(f"gradient of output {number} from stage {stage}", stage)
            for number, stages in act_send_info.items()
            for stage in stages
        )

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        """Make room for what will come; buffers are made when it does."""
        del has_backward
        self.args_recv_info.update((number, ()) for number in range(num_microbatches))

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        self.grad_recv_info.update((number, ()) for number in range(num_microbatches))

    def _create_act_send_info(self) -> dict[int, Sequence[int | None]]:
        outputs = self._stage_meta.outputs or ()
        following: Sequence[int | None] = [] if self.is_last else [self.stage_index + 1]
        return dict.fromkeys(range(len(outputs)), following)

    def _create_grad_send_info(self, args_recv_info: tuple[_RecvInfo, ...]) -> list[int | None]:
        return [info.source for info in args_recv_info if not info.is_root_arg]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return no operations: connections are opened before the first step."""
        return []

    def _get_recv_ops(self, recv_infos: Sequence[_RecvInfo]) -> list[dist.P2POp]:
        ops = []
        for info in recv_infos:
            if info.is_root_arg:
                continue
            if info.buffer is None and (meta := info.tensor_meta) is not None:
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            if info.buffer is not None:
                assert info.source is not None, "info.source: what is received comes from a stage"
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
        tensors, source = as_tuple(prev_stage_outputs), self.stage_index - 1
        require_tensors(tensors)
        parts = [(to_local_if_dtensor(t, detach=True), extract_tensor_meta(t)) for t in tensors]
        name = f"from stage {source}"
        self.args_recv_info[mb_index] = tuple(_RecvInfo(name, source, *part) for part in parts)
        self._mesh_cache.update_from_tensors(tensors)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Gradients, mb_index: int) -> None:
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

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Gradients:
        return take_buffers(self.grad_recv_info.pop(bwd_chunk_id, ()), self._mesh_cache)

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
        if not self.is_run:
            grads = tuple(starmap(self._fit_grad, enumerate(grads)))
        pairs = zip(grads, self.grad_send_info or [], strict=True)
        return [
            self._send(to_send(grad), stage)
            for grad, stage in pairs
            if grad is not None and stage is not None
        ]

    def _fit_grad(self, number: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient of an input in the form that the stage before counts on."""
        meta = self._get_grad_send_meta(number)
        if grad is None and meta is not None:
            return _make_tensor_from_meta(meta, self.device).zero_()
        if isinstance(grad, DTensor) and meta is None:
            raise PipeliningMetadataError(
                f"stage {self.stage_index} has a gradient for input {number} that the stage "
                "before does not count on (DTensor grad metadata cannot be derived from that of "
                "the input, because it may be placed otherwise); give input_grads"
            )
        return grad

    def _get_grad_send_meta(self, input_idx: int) -> TensorMeta | None:
        if self._stage_meta.input_grads is not None:
            return self._stage_meta.input_grads[input_idx]
        return _derive_grad_metas(self._stage_meta.inputs or ())[input_idx]

    def get_local_bwd_output(self, mb_index: int) -> Gradients:
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
            self.output_metas[microbatch] = extract_tensor_metas(outputs)
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
            validate_tensors_metadata(place, known, tuple(values))
        elif all(value is None or isinstance(value, torch.Tensor) for value in values):
            metas = extract_tensor_metas(values, allow_none=True)
            compare_with_given(place, getattr(self._user_meta, field), metas)
            setattr(self._stage_meta, field, metas)

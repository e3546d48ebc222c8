"""A stage as its neighbours see it: what it receives and what it sends.

The executor carries it between ranks (`penstock.dropin.run`); the operations that
`get_fwd_send_ops` and its siblings return say what is sent.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from penstock.dropin.stages.meshes import PipeliningMetadataError
from penstock.dropin.stages.metadata import (
    TensorMeta,
    _derive_grad_metas,
    _DTensorMeta,
    _make_tensor_from_meta,
    extract_tensor_meta,
    extract_tensor_metas,
    to_local_if_dtensor,
    validate_tensors_metadata,
)
from penstock.dropin.stages.place import StagePlace
from penstock.dropin.stages.values import (
    StageUseError,
    _RecvInfo,
    as_tuple,
    compare_with_given,
    find_edge,
    require_tensors,
    take_buffers,
    to_send,
)

# Programs replace functions of `dist` in torch's module.
__all__ = ["StageBoundary", "_batch_p2p", "_sorted_batch_p2p", "_wait_batch_p2p", "dist"]


class StageBoundary(StagePlace):
    """A stage of a pipeline on this rank, without its work."""

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
            meta = None if self.is_run else self._get_grad_send_meta(number)
            if grad is None and meta is not None:
                grad = _make_tensor_from_meta(meta, self.device).zero_()
            elif isinstance(grad, DTensor) and meta is None and not self.is_run:
                raise PipeliningMetadataError(
                    f"stage {self.stage_index} has a gradient for input {number} that the stage "
                    "before does not count on (DTensor grad metadata cannot be derived from that "
                    "of the input, because it may be placed otherwise); give input_grads"
                )
            if grad is not None and stage is not None:
                ops.append(self._send(to_send(grad), stage))
        return ops

    def _get_grad_send_meta(self, input_idx: int) -> TensorMeta | None:
        """Return the form of the gradient that the stage before counts on for an input."""
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
            validate_tensors_metadata(place, known, tuple(values))
        elif all(value is None or isinstance(value, torch.Tensor) for value in values):
            metas = extract_tensor_metas(values, allow_none=True)
            compare_with_given(place, getattr(self._user_meta, field), metas)
            setattr(self._stage_meta, field, metas)


def _batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:  # noqa: ARG001  # torch's form
    """Start operations: each for itself if all go one way, else as one batch."""
    kinds = {op.op for op in p2p_ops}
    if len(kinds) > 1:
        return list(dist.batch_isend_irecv(p2p_ops))
    peer = "group_dst" if kinds == {dist.isend} else "group_src"
    return [
        op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer}) for op in p2p_ops
    ]


def _sorted_batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> dict[int, list[Any]]:
    """Start operations rank by rank, in rising order of ranks; return the works of each rank."""
    peers = sorted({op.peer for op in p2p_ops})
    return {peer: _batch_p2p([op for op in p2p_ops if op.peer == peer], desc) for peer in peers}


def _wait_batch_p2p(work: Sequence[Any]) -> None:
    """Wait until operations are done."""
    for item in work:
        item.wait()

"""What a stage sends and receives, as packets of the transport.

The operations that a stage's `get_fwd_send_ops` and `get_bwd_send_ops` return say what is sent, so
that a client may change it there. How tensors lie over a mesh goes along.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from penstock.dropin.stages.base import _PipelineStageBase
from penstock.dropin.stages.metadata import _DTensorMeta, _TensorMeta
from penstock.dropin.stages.values import StageUseError, _RecvInfo
from penstock.parallel.dtensor import (
    read_mesh_layout,
    read_placement,
    write_mesh_layout,
    write_placement,
)
from penstock.tensors.packet import Packet

__all__ = ["deliver_gradients", "deliver_inputs", "pack_gradients", "pack_outputs"]


def pack_outputs(stage: _PipelineStageBase, microbatch: int) -> dict[int, Packet]:
    """Return what goes to each stage that this one feeds, of one microbatch."""
    outputs, _ = stage.fwd_cache[microbatch]
    going: dict[int, list[Any]] = {}
    for number, destination in stage.find_slots():
        going.setdefault(destination, []).append(outputs[number])
    sent = _by_stage(stage, list(going), stage.get_fwd_send_ops(microbatch))
    for destination, values in going.items():
        if len(sent[destination]) != len(values):
            raise StageUseError(
                f"get_fwd_send_ops of stage {stage.stage_index} must return one operation for "
                f"each output to stage {destination}: {len(values)} (got {len(sent[destination])})"
            )
    return {to: _pack(sent[to], values, stage.has_backward) for to, values in going.items()}


def _by_stage(
    stage: _PipelineStageBase, others: Sequence[int], operations: Sequence[Any]
) -> dict[int, list[torch.Tensor]]:
    if len(others) == 1:
        return {others[0]: [operation.tensor for operation in operations]}
    rank_of = {other: stage._resolve_peer_global_rank(other) for other in others}
    return {to: [op.tensor for op in operations if op.peer == rank_of[to]] for to in others}


def _pack(tensors: Sequence[torch.Tensor], outputs: Sequence[Any], records: bool) -> Packet:
    structure: Any = ["t", ["T"] * len(tensors)]
    if any(isinstance(output, DTensor) for output in outputs):
        structure = ["m", [_write_layout(output) for output in outputs], structure]
    pairs = zip(tensors, outputs, strict=True)
    cut = [t.detach().requires_grad_() if records and o.requires_grad else t for t, o in pairs]
    return Packet(structure, cut)


def _write_layout(output: Any) -> list[Any] | None:
    if not isinstance(output, DTensor):
        return None
    meta = _DTensorMeta.from_dtensor(output)
    placements = [*map(write_placement, meta.placements)]
    mesh = write_mesh_layout(meta.mesh_layout)
    return [meta.mesh_dim_names, placements, meta.global_shape, meta.global_stride, mesh]


def deliver_inputs(
    stage: _PipelineStageBase, microbatch: int, source: int, packet: Packet
) -> None:
    """Give a stage what another one has sent for a microbatch."""
    metas = map(_describe, packet.tensors, _read_layouts(packet))
    infos = [
        _RecvInfo(f"input {number} from stage {source}", source, tensor, meta)
        for number, (tensor, meta) in enumerate(zip(packet.tensors, metas, strict=True))
    ]
    held = stage.args_recv_info.get(microbatch, ())
    others = [info for info in held if info.buffer is not None and info.source != source]
    stage.args_recv_info[microbatch] = tuple(
        sorted([*others, *infos], key=lambda info: -1 if info.source is None else info.source)
    )
    if _is_changed(stage, "get_fwd_recv_ops"):
        _fill_buffers(infos, stage.get_fwd_recv_ops, microbatch)


def _read_layouts(packet: Packet) -> list[Any]:
    """Return how each tensor of a packet lies over its mesh, if it does."""
    match packet.structure:
        case ["m", [*layouts], _]:
            return layouts
        case _:
            return [None] * len(packet.tensors)


def _describe(tensor: torch.Tensor, layout: Any) -> _TensorMeta:
    form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
    if layout is None:
        return _TensorMeta(*form)
    names, placements, shape, stride, mesh = layout
    whole = (torch.Size(shape), tuple(stride), tuple(map(read_placement, placements)))
    return _DTensorMeta(*form, *whole, tuple(names), read_mesh_layout(mesh))


def _is_changed(stage: _PipelineStageBase, name: str) -> bool:
    """Return whether a client has put a method of its own into a stage."""
    ours = getattr(_PipelineStageBase, name)
    return name in vars(stage) or getattr(type(stage), name) is not ours


def _fill_buffers(infos: Sequence[_RecvInfo], find_operations: Any, microbatch: int) -> None:
    """Let what has come arrive in the buffers of a client's own receives."""
    tensors = [info.buffer for info in infos if info.buffer is not None]
    for info in infos:
        info.buffer = None
    for operation, tensor in zip(find_operations(microbatch), tensors, strict=True):
        operation.tensor.copy_(tensor.detach())


def pack_gradients(stage: _PipelineStageBase, microbatch: int) -> dict[int, Packet]:
    """Return what goes back to each stage that feeds this one, of one microbatch."""
    sent = _by_stage(stage, stage.sources, stage.get_bwd_send_ops(microbatch))
    return {source: Packet("", tensors) for source, tensors in sent.items()}


def deliver_gradients(
    stage: _PipelineStageBase, microbatch: int, destination: int, packet: Packet
) -> None:
    """Give a stage what came back for its outputs from one that it feeds."""
    metas, rest = stage.output_metas[microbatch], iter(packet.tensors)
    known = stage.grad_recv_info.get(microbatch)
    infos = known or stage._create_grad_recv_info(stage.act_send_info)
    arrived = []
    for info, (number, to) in zip(infos, stage.find_slots(), strict=True):
        if to == destination and metas[number].requires_grad:
            info.buffer = next(rest)
            info.tensor_meta = replace(metas[number], requires_grad=False)
            arrived.append(info)
    stage.grad_recv_info[microbatch] = infos
    if _is_changed(stage, "get_bwd_recv_ops"):
        _fill_buffers(arrived, stage.get_bwd_recv_ops, microbatch)

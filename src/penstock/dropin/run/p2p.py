"""Torch's point-to-point operations, started and waited for; the executor does not need them."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

# Programs replace functions of `dist` in torch's module.
__all__ = ["_batch_p2p", "_sorted_batch_p2p", "_wait_batch_p2p", "dist"]


def _batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:  # noqa: ARG001  # torch's form
    """Start operations: each for itself if all go one way, else as one batch."""
    kinds = {op.op for op in p2p_ops}
    if not kinds:
        return []
    if kinds == {dist.isend}:
        return [
            op.op(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer) for op in p2p_ops
        ]
    if kinds == {dist.irecv}:
        return [
            op.op(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer) for op in p2p_ops
        ]
    return list(dist.batch_isend_irecv(p2p_ops))


def _sorted_batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> dict[int, list[Any]]:
    """Start operations rank by rank, in rising order of ranks; return the works of each rank."""
    peers = sorted({op.peer for op in p2p_ops})
    return {peer: _batch_p2p([op for op in p2p_ops if op.peer == peer], desc) for peer in peers}


def _wait_batch_p2p(work: Sequence[Any]) -> None:
    """Wait until operations are done."""
    for item in work:
        item.wait()

"""From schedule to schedule: plain functions that do not change their input."""

from penstock.passes.backward import merge_backward, split_backward
from penstock.passes.overlap import overlap_forward_backward
from penstock.passes.reduce_grad import add_reduce_grad
from penstock.passes.reroute import reroute
from penstock.passes.saved import add_offload, add_recompute
from penstock.passes.send_recv import add_send_recv, add_send_recv_by_cost, delay_receives
from penstock.passes.shard import add_unshard_reshard
from penstock.passes.thin import thin_out

__all__ = [
    "add_offload",
    "add_recompute",
    "add_reduce_grad",
    "add_send_recv",
    "add_send_recv_by_cost",
    "add_unshard_reshard",
    "delay_receives",
    "merge_backward",
    "overlap_forward_backward",
    "reroute",
    "split_backward",
    "thin_out",
]

"""An order of torch's actions as a schedule that the executor runs, with and without backwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.dropin.names.actions import _Action
from penstock.dropin.names.lists import to_rows
from penstock.dropin.names.passes import _add_reduce_grad, _add_unshard_reshard
from penstock.ir.actions import Kind
from penstock.ir.dataflow import Dataflow
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.passes.send_recv import add_send_recv

__all__ = ["Lowered", "lower_on_dataflow", "read_lowered"]


@dataclass(frozen=True, eq=False)
class Lowered:
    """What all ranks run.

    Where `sends_may_wait`, every message is received in the order in which it is sent, so that a
    send may wait for its receive.
    """

    training: Schedule
    sends_may_wait: bool

    @cached_property
    def evaluation(self) -> Schedule:
        """The same without gradients on their way; stages know that they have no backwards."""
        rows = self.training.rows
        return replace(self.training, rows=rows.keep(~rows.is_kind(Kind.SEND_B, Kind.RECV_B)))

    @property
    def is_split(self) -> bool:
        """Whether backwards are done in two halves."""
        return bool(self.training.rows.has_kind(Kind.BACKWARD_INPUT))


def read_lowered(
    order: Mapping[int, Sequence[_Action | None]],
    holder: Mapping[int, int],
    microbatches: int,
    *,
    sends_may_wait: bool,
) -> Lowered:
    """Convert an order that includes all communication, over a chain of stages."""
    rows = to_rows([order[rank] for rank in sorted(order)])
    placement = Placement(tuple(holder[stage] for stage in sorted(holder)))
    schedule = Schedule(rows, placement, Dataflow.chain(len(holder)), microbatches)
    return Lowered(schedule, sends_may_wait)


def lower_on_dataflow(
    order: Mapping[int, Sequence[_Action | None]],
    edges: Sequence[tuple[int, int]],
    num_stages: int,
    microbatches: int,
) -> Lowered:
    """Return a compute order of one stage per rank with its messages, along any dataflow."""
    lists = [
        _add_reduce_grad(_add_unshard_reshard(order[rank]), microbatches) for rank in sorted(order)
    ]
    placement = Placement(tuple(range(num_stages)))
    schedule = Schedule(to_rows(lists), placement, Dataflow(num_stages, edges), microbatches)
    return Lowered(add_send_recv(schedule), sends_may_wait=True)

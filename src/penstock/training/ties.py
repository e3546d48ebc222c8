"""Keeps parameters that several ranks share equal: their gradients are summed over these ranks."""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.ir.placement import Placement
from penstock.parallel.dtensor import own_part
from penstock.ranks.control import GroupControl, cannot
from penstock.ranks.private_groups import PrivateGroup, open_like
from penstock.tensors.plain import dense_value
from penstock.training.batch.batch import unwrap
from penstock.training.build.assemble import BUILDING, Assembly
from penstock.training.shared_parameters import SharedParameter, declared_ties, find_ties

__all__ = ["Holders", "Ties", "connect_holders", "keep_ties"]


def keep_ties(
    assembly: Assembly, names: Sequence[Sequence[str]], group: dist.ProcessGroup | None
) -> "Ties | None":
    """Find this process's shared parameters and keep them equal; every rank calls this.

    In one process a tied parameter is one object, unless sharding has made two of it.
    """
    part, schedule = assembly.part, assembly.part.schedule
    modules = {index: stage.module for index, stage in part.stages.items()}
    held = {
        f"{stage}.{name}": parameter
        for stage, module in modules.items()
        for name, parameter in unwrap(module).named_parameters(remove_duplicate=False)
    }
    if group is None:
        ties = declared_ties(names, held, Placement.loop(1, schedule.num_stages), 0)
        return Ties(ties, 0, {}, modules) if ties else None
    rank, placement = dist.get_rank(group), schedule.placement
    with assembly.control.together(cannot(BUILDING)):
        ties = declared_ties(names, held, placement, rank)
        if not isinstance(assembly.modules, Mapping):
            known = {tie.parameter for tie in ties}
            found = find_ties(assembly.modules, placement)
            ties += [tie for tie in found if tie.parameter not in known]
    groups = connect_holders(ties, group)
    return Ties(ties, rank, groups, modules) if ties else None


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks that share a parameter: a group for its values, and their control."""

    values: PrivateGroup
    control: GroupControl
    is_on_device: bool


def connect_holders(
    ties: Sequence[SharedParameter], group: dist.ProcessGroup
) -> dict[tuple[int, ...], Holders]:
    """Connect every set of ranks that share a parameter, if this rank is one of them."""
    rank = dist.get_rank(group)
    return {
        ranks: _connect(group, ranks)
        for ranks in sorted({tie.ranks for tie in ties})
        if rank in ranks and len(ranks) > 1
    }


def _connect(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> Holders:
    control = GroupControl(group, ranks)
    if dist.get_backend(group) == "gloo":
        return Holders(control.gloo, control, is_on_device=False)
    values = open_like(group, control.connections, ranks)
    return Holders(values, control, is_on_device=True)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a module holds a tied parameter, and its name."""

    name: str
    table: Mapping[str, nn.Parameter | None]
    key: str
    parameter: nn.Parameter

    @property
    def is_replaced(self) -> bool:
        """Whether the module holds something else by now."""
        return self.table.get(self.key) is not self.parameter


def _find_slots(
    modules: Mapping[int, nn.Module], parameters: Container[nn.Parameter]
) -> Iterator[_Slot]:
    """Yield where modules hold these parameters; sharding may replace them and put them back."""
    for stage, module in modules.items():
        for path, inner in module.named_modules():
            for key, parameter in inner._parameters.items():
                if type(parameter) is nn.Parameter and parameter in parameters:
                    name = ".".join(part for part in (str(stage), path, key) if part)
                    yield _Slot(name, inner._parameters, key, parameter)


class Ties:
    """Keeps the gradients of tied parameters equal on all ranks that hold them."""

    def __init__(
        self,
        ties: Sequence[SharedParameter],
        rank: int,
        groups: Mapping[tuple[int, ...], Holders],
        modules: Mapping[int, nn.Module],
    ) -> None:
        self._ties = [(tie, groups.get(tie.ranks)) for tie in ties if rank in tie.ranks]
        tied = {parameter for tie, _ in self._ties for parameter in _copies(tie)}
        self._slots = list(_find_slots(modules, tied))
        for tie, shared in self._ties:
            _start_with_one_value(tie, shared)
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self.counted_elsewhere = frozenset(
            parameter
            for tie, _ in self._ties
            for parameter in (tie.others if rank == tie.ranks[0] else _copies(tie))
        )

    def begin_step(self) -> None:
        """Put away what the gradients held before, so that only this step's part is summed."""
        for parameter in (p for tie, _ in self._ties for p in _copies(tie)):
            if parameter.grad is not None:
                self._before[parameter] = parameter.grad
                parameter.grad = None

    def end_step(self) -> None:
        """Sum this step's gradients over the ranks, and add what was there before."""
        for tie, group in self._ties:
            if tie.parameter.requires_grad:
                _sum_gradients(tie, group)
        for parameter, before in self._before.items():
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._before.clear()

    def are_trained(self) -> dict[str, bool]:
        """Return whether each tied parameter is trained here, by a name that its ranks share."""
        counts: Counter[tuple[int, ...]] = Counter()
        found = {}
        for tie, _ in self._ties:
            name = ", ".join(map(str, tie.ranks))
            found[f"{name} (number {counts[tie.ranks]})"] = tie.parameter.requires_grad
            counts[tie.ranks] += 1
        return found

    def find_replaced(self) -> str | None:
        """Return the name of a tied parameter that its module no longer holds, if any."""
        return next((slot.name for slot in self._slots if slot.is_replaced), None)

    def close(self) -> None:
        """Free the groups of a device at once; those of gloo are freed when they are collected."""
        for _, holders in self._ties:
            if holders is not None and holders.is_on_device:
                holders.values.abort()

    def abandon_step(self) -> None:
        """Restore what the gradients held before a step that failed."""
        for parameter, before in self._before.items():
            parameter.grad = before
        self._before.clear()


def _copies(tie: SharedParameter) -> tuple[nn.Parameter, ...]:
    return (tie.parameter, *tie.others)


def _start_with_one_value(tie: SharedParameter, holders: Holders | None) -> None:
    """Give all copies of a parameter the value that it has on the first rank."""
    value = own_part(tie.parameter.detach())
    if holders is not None:
        # Memory is sent, so it must hold the same numbers in the same order on all ranks.
        sent = dense_value(value)
        holders.values.broadcast(sent, 0).wait()
        value.copy_(sent)
    for other in tie.others:
        own_part(other.detach()).copy_(value)


def _sum_gradients(tie: SharedParameter, holders: Holders | None) -> None:
    """Give every copy the sum of all gradients; leave None if no rank has one."""
    copies = _copies(tie)
    is_used = any(parameter.grad is not None for parameter in copies)
    if not _is_used_anywhere(holders, is_used):
        return
    if tie.parameter.grad is None:
        tie.parameter.grad = torch.zeros_like(tie.parameter)
    if not isinstance(tie.parameter.grad, DTensor):
        # A gradient of a complex parameter may be lazily conjugated on some ranks only.
        tie.parameter.grad = dense_value(tie.parameter.grad)
    total = own_part(tie.parameter.grad)
    for other in tie.others:
        if other.grad is not None:
            total.add_(own_part(other.grad))
    if holders is not None:
        holders.values.allreduce([total]).wait()
    for other in tie.others:
        other.grad = tie.parameter.grad.clone()


def _is_used_anywhere(holders: Holders | None, is_used: bool) -> bool:
    """Return whether any rank has a gradient, which hosts know without waiting for a device."""
    if holders is None:
        return is_used
    return any(map(any, holders.control.gather_bytes(bytes([is_used]))))

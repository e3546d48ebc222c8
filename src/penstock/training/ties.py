"""Parameters that several stages share: their gradients are summed over the ranks that hold them.

Ties are found by identity among the modules of all stages, as in a model whose head is its
embedding, or in a schedule that runs two copies of every part. Where a process has only its own
stages, or sharding has replaced their parameters, they are declared by name.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from penstock.errors import ModelError
from penstock.ir.placement import Placement
from penstock.ranks.control import GroupControl
from penstock.ranks.private_groups import PrivateGroup, open_like
from penstock.splitting.pipe import Pipe
from penstock.tensors.plain import dense_value

__all__ = [
    "Holders",
    "SharedParameter",
    "Ties",
    "connect_holders",
    "declared_ties",
    "find_shared_names",
    "find_ties",
    "merge_names",
    "names_of_shared",
    "ties_of",
]


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """One parameter and the ranks whose stages use it.

    `others` are further parameters of this rank that are the same one: stages that are sharded
    one by one have each its own shard of it.
    """

    parameter: nn.Parameter
    ranks: tuple[int, ...]
    others: tuple[nn.Parameter, ...] = ()


def find_ties(stages: Sequence[nn.Module], placement: Placement) -> list[SharedParameter]:
    """The parameters that stages on more than one rank share, in the order of the stages."""
    holders: dict[nn.Parameter, set[int]] = {}
    for stage, module in enumerate(stages):
        for parameter in module.parameters():
            holders.setdefault(parameter, set()).add(placement.rank_of_stage[stage])
    shared = {parameter: ranks for parameter, ranks in holders.items() if len(ranks) > 1}
    if any(map(is_lazy, shared)):
        raise ModelError(
            "a parameter that several ranks share must have a shape before the pipeline is built "
            "(it is lazy and has not run yet); call the model once"
        )
    return [
        SharedParameter(parameter, tuple(sorted(ranks))) for parameter, ranks in shared.items()
    ]


def declared_ties(
    groups: Sequence[Sequence[str]],
    parameters: Mapping[str, nn.Parameter],
    placement: Placement,
    rank: int,
) -> list[SharedParameter]:
    """Ties by the names of their parameters, such as ("0.embedding.weight", "3.head.weight").

    `parameters` are those of this rank, named in the same way.
    """
    ties = []
    for names in groups:
        holders = {name: _rank_of(name, placement) for name in names}
        own = [name for name, holder in holders.items() if holder == rank]
        if unknown := [name for name in own if name not in parameters]:
            raise ModelError(f"rank {rank} has no parameter {unknown[0]!r} to tie")
        ranks = tuple(sorted(set(holders.values())))
        if not own:
            continue
        first, *others = dict.fromkeys(parameters[name] for name in own)
        if not all(isinstance(parameter, DTensor) for parameter in (first, *others)) and others:
            raise ModelError(
                f"rank {rank} has {own[0]!r} and {own[1]!r} as two parameters; make them one"
            )
        if others or len(ranks) > 1:
            ties.append(SharedParameter(first, ranks, tuple(others)))
    return ties


def find_shared_names(stages: Sequence[nn.Module]) -> list[list[str]]:
    """The names of each parameter that has several, as in `nn.Sequential` of all stages."""
    names: dict[nn.Parameter, list[str]] = {}
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(f"{stage}.{name}")
    return [same for same in names.values() if len(same) > 1]


def names_of_shared(
    pipe: Pipe | None,
    modules: Sequence[nn.Module] | Mapping[int, nn.Module],
    ties: Sequence[Sequence[str]],
) -> list[list[str]]:
    """The names of parameters that have several, as `named_parameters` has them."""
    if pipe is not None:
        declared = [[name.partition(".")[2] for name in names] for names in ties]
        return [[name for _, name in tie.places] for tie in pipe.shared] + declared
    found = [] if isinstance(modules, Mapping) else find_shared_names(modules)
    return found + [list(names) for names in ties]


def ties_of(pipe: Pipe) -> list[list[str]]:
    """What a pipe knows to be one parameter, even where sharding has hidden that since."""
    return [[f"{stage}.{name}" for stage, name in tie.places] for tie in pipe.ties]


def merge_names(groups: Iterable[Sequence[str]]) -> dict[str, str]:
    """For every further name of a parameter the first one.

    >>> merge_names([["embedding", "head"], ["head", "output"]])
    {'head': 'embedding', 'output': 'embedding'}
    """
    first_name: dict[str, str] = {}
    for first, *others in groups:
        first = first_name.get(first, first)
        first_name.update({other: first for other in others if other != first})
    return first_name


def _rank_of(name: str, placement: Placement) -> int:
    stage, _, _ = name.partition(".")
    if not stage.isdecimal() or int(stage) >= placement.num_stages:
        raise ModelError(
            f"{name!r} names no stage; begin with its number, as in '0.embedding.weight'"
        )
    return placement.rank_of_stage[int(stage)]


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks that share a parameter: a group for its values, and their control."""

    values: PrivateGroup
    control: GroupControl


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
        return Holders(control.gloo, control)
    return Holders(open_like(group, control.connections, ranks), control)


@dataclass(frozen=True, slots=True)
class _Seat:
    """Where a module holds a tied parameter, and its name."""

    name: str
    table: Mapping[str, nn.Parameter | None]
    key: str
    parameter: nn.Parameter

    @property
    def is_left(self) -> bool:
        """Whether something else is there now."""
        return self.table.get(self.key) is not self.parameter


def _find_seats(
    modules: Mapping[int, nn.Module], parameters: Container[nn.Parameter]
) -> Iterator[_Seat]:
    """Where modules hold these parameters; sharding puts others there and back, which is fine."""
    for stage, module in modules.items():
        for path, inner in module.named_modules():
            for key, parameter in inner._parameters.items():
                if type(parameter) is nn.Parameter and parameter in parameters:
                    name = ".".join(part for part in (str(stage), path, key) if part)
                    yield _Seat(name, inner._parameters, key, parameter)


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
        tied = {parameter for tie, _ in self._ties for parameter in _places(tie)}
        self._seats = list(_find_seats(modules, tied))
        for tie, shared in self._ties:
            _start_with_one_value(tie, shared)
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self.counted_elsewhere = frozenset(
            parameter
            for tie, _ in self._ties
            for parameter in (tie.others if rank == tie.ranks[0] else _places(tie))
        )

    def begin_step(self) -> None:
        """Put away what the gradients held before, so that only this step's part is summed."""
        for parameter in (p for tie, _ in self._ties for p in _places(tie)):
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
        """Return the name of a tied parameter that its module does not hold any more, if any."""
        return next((seat.name for seat in self._seats if seat.is_left), None)

    def abandon_step(self) -> None:
        """Take back what the gradients held before a step that failed."""
        for parameter, before in self._before.items():
            parameter.grad = before
        self._before.clear()


def _places(tie: SharedParameter) -> tuple[nn.Parameter, ...]:
    return (tie.parameter, *tie.others)


def _start_with_one_value(tie: SharedParameter, holders: Holders | None) -> None:
    """What is one parameter starts with one value: that of the first rank that holds it."""
    value = _local(tie.parameter.detach())
    if holders is not None:
        # Memory is sent, so it must hold the same numbers in the same order on all ranks.
        told = dense_value(value)
        holders.values.broadcast(told, 0).wait()
        value.copy_(told)
    for other in tie.others:
        _local(other.detach()).copy_(value)


def _sum_gradients(tie: SharedParameter, holders: Holders | None) -> None:
    """Give every place the sum of all gradients; none where no rank has one, as without ties."""
    places = _places(tie)
    is_used = any(parameter.grad is not None for parameter in places)
    if not _is_used_anywhere(holders, is_used):
        return
    if tie.parameter.grad is None:
        tie.parameter.grad = torch.zeros_like(tie.parameter)
    if not isinstance(tie.parameter.grad, DTensor):
        # A gradient of a complex parameter may be lazily conjugated on some ranks only.
        tie.parameter.grad = dense_value(tie.parameter.grad)
    total = _local(tie.parameter.grad)
    for other in tie.others:
        if other.grad is not None:
            total.add_(_local(other.grad))
    if holders is not None:
        holders.values.allreduce([total]).wait()
    for other in tie.others:
        other.grad = tie.parameter.grad.clone()


def _is_used_anywhere(holders: Holders | None, is_used: bool) -> bool:
    """Return whether any rank has a gradient, which hosts know without waiting for a device."""
    if holders is None:
        return is_used
    return any(map(any, holders.control.gather_bytes(bytes([is_used]))))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a parameter or gradient on this rank."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local

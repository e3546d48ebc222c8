"""Parameters that several stages share: how they are found, and under which names they go.

They are found by identity among the modules of all stages, as in a model whose head is its
embedding, or in a schedule that runs two copies of every part. Where a process has only its own
stages, or sharding has replaced their parameters, they are declared by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from penstock.errors import ModelError
from penstock.ir.placement import Placement
from penstock.splitting.pipe import Pipe

__all__ = [
    "SharedParameter",
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
    """Return the parameters that stages on several ranks share, in the order of the stages."""
    holders: dict[nn.Parameter, set[int]] = {}
    for stage, module in enumerate(stages):
        for parameter in module.parameters():
            holders.setdefault(parameter, set()).add(placement.rank_of_stage[stage])
    shared = {parameter: ranks for parameter, ranks in holders.items() if len(ranks) > 1}
    _require_shapes(shared)
    return [
        SharedParameter(parameter, tuple(sorted(ranks))) for parameter, ranks in shared.items()
    ]


def declared_ties(
    groups: Sequence[Sequence[str]],
    parameters: Mapping[str, nn.Parameter],
    placement: Placement,
    rank: int,
) -> list[SharedParameter]:
    """Return ties by the names of their parameters, as ("0.embedding.weight", "3.head.weight").

    `parameters` are those of this rank, named in the same way.
    """
    ties = []
    for names in groups:
        holders = {name: _rank_of(name, placement) for name in names}
        own = [name for name, holder in holders.items() if holder == rank]
        if unknown := [name for name in own if name not in parameters]:
            raise ModelError(
                f"ties must name parameters of the stages (rank {rank} has no {unknown[0]!r}); "
                "names are stage, dot, name in the stage"
            )
        ranks = tuple(sorted(set(holders.values())))
        if not own:
            continue
        first, *others = dict.fromkeys(parameters[name] for name in own)
        if not all(isinstance(parameter, DTensor) for parameter in (first, *others)) and others:
            raise ModelError(
                f"tied names must be one parameter within a rank (rank {rank} has two: {own[0]!r} "
                f"and {own[1]!r}); assign one to the other before building the pipeline"
            )
        if others or len(ranks) > 1:
            ties.append(SharedParameter(first, ranks, tuple(others)))
    _require_shapes(tie.parameter for tie in ties)
    return ties


def _require_shapes(shared: Iterable[nn.Parameter]) -> None:
    if any(map(is_lazy, shared)):
        raise ModelError(
            "a parameter that several ranks share must have a shape before the pipeline is built "
            "(it is lazy and has not run yet); call the model once"
        )


def find_shared_names(stages: Sequence[nn.Module]) -> list[list[str]]:
    """Return the names of each parameter that has several, as in `nn.Sequential` of all stages."""
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
    """Return the names of parameters that have several, as `named_parameters` has them."""
    if pipe is not None:
        declared = [[name.partition(".")[2] for name in names] for names in ties]
        return [[name for _, name in tie.places] for tie in pipe.shared] + declared
    found = [] if isinstance(modules, Mapping) else find_shared_names(modules)
    return found + [list(names) for names in ties]


def ties_of(pipe: Pipe) -> list[list[str]]:
    """Return what was one parameter when the model was split, before sharding could hide it."""
    return [[f"{stage}.{name}" for stage, name in tie.places] for tie in pipe.ties]


def merge_names(groups: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return, for every further name of a parameter, its first one.

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
            "a tied name must begin with the number of its stage, below "
            f"{placement.num_stages} (got {name!r}); write it as in '0.embedding.weight'"
        )
    return placement.rank_of_stage[int(stage)]

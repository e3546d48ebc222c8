"""A step's batch: what it looks like, whether it fits, and its microbatches."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import BatchError
from penstock.modules.compiled import is_compiler_wrapper, unwrap_compiled
from penstock.step.microbatches import Along, Ready, Shared, split_batch
from penstock.training.batch.rows import RowClaims, claim_rows, settle_rows

__all__ = [
    "Accepted",
    "BatchFacts",
    "accepted_arguments",
    "deal_keywords",
    "describe_batch",
    "describe_value",
    "try_split",
    "unwrap",
]


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What a rank was given for a step, as plain values.

    `claims` are what its arguments say of the rows of each microbatch. `error` says what is wrong
    with the batch on this rank alone. `no_graph` names the context, if any, in which a training
    step would record no graph. `trained_ties` says whether each parameter that this rank shares
    with others is trained here.
    """

    is_training: bool
    claims: RowClaims
    shapes: list[str]
    keywords: list[str]
    has_inputs: bool
    has_target: bool
    error: str | None = None
    no_graph: str | None = None
    trained_ties: Mapping[str, bool] = field(default_factory=dict)


def describe_batch(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Any,
    *,
    microbatches: int,
    is_training: bool,
    needs_target: bool = True,
    uses_target: bool = True,
) -> BatchFacts:
    """Describe what this rank was given, and what is wrong with it, for all ranks to know."""
    named = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
    if target is not None:
        named["target"] = target
    claims, error = RowClaims(microbatches, (), ()), None
    try:
        claims = claim_rows(named, microbatches)
        settle_rows(claims)
    except BatchError as wrong:
        error = str(wrong)
    if target is not None and not uses_target:
        error = "target must be left out, since the loss takes the output alone"
    shapes = [f"{name}: {describe_value(value)}" for name, value in named.items()]
    return BatchFacts(
        is_training,
        claims,
        shapes,
        sorted(kwargs),
        bool(args or kwargs),
        target is not None or not needs_target,
        error,
        _name_context() if is_training else None,
    )


def _name_context() -> str | None:
    """Return the context that keeps autograd from recording, if this thread is in one."""
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode()"
    return None if torch.is_grad_enabled() else "torch.no_grad()"


def try_split(facts: BatchFacts, values: Iterable[Any]) -> BatchFacts:
    """Return the facts, with an error if one of the values cannot be split by its rows."""
    settled = settle_rows(facts.claims) if facts.error is None else None
    if settled is not None:
        try:
            for value in values:
                split_batch(value, len(settled.rows))
        except BatchError as wrong:
            return replace(facts, error=str(wrong))
    return facts


def describe_value(value: Any) -> str:
    """Return everything about a value that the shapes of a step can depend on."""
    match value:
        case torch.Tensor():
            grad = " with gradient" if value.requires_grad else ""
            return f"{tuple(value.shape)} {value.dtype}{grad}{getattr(value, 'placements', '')}"
        case Ready():
            return f"ready {describe_value(list(value.items))}"
        case Shared():
            return f"shared {describe_value(value.value)}"
        case Along():
            return f"along {value.dim} {describe_value(value.value)}"
        case Mapping():
            return str({key: describe_value(item) for key, item in value.items()})
        case list() | tuple():
            return str([describe_value(item) for item in value])
        case int() | float() | str() | None:
            return repr(value)
        case _:
            return type(value).__name__


@dataclass(frozen=True, slots=True)
class Accepted:
    """The keywords that a stage's forward takes; all of them if `takes_all`.

    It takes at most `most_positional` positional arguments, if that is known.
    """

    names: frozenset[str]
    takes_all: bool
    most_positional: int | None = None


def accepted_arguments(module: nn.Module) -> Accepted:
    """Return what a module takes, seen through the wrappers of DDP and torch.compile."""
    inner = unwrap(module)
    parameters = inspect.signature(inner.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # A hook may change the arguments on their way to forward.
    is_open = any(p.kind == p.VAR_POSITIONAL for p in parameters) or inner._forward_pre_hooks
    return Accepted(
        frozenset(p.name for p in named),
        any(p.kind == p.VAR_KEYWORD for p in parameters),
        None if is_open else len(by_position),
    )


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside the wrappers of DDP and torch.compile."""
    while True:
        match module:
            case DistributedDataParallel():
                module = module.module
            case _ if is_compiler_wrapper(module):
                module = unwrap_compiled(module)
            case _:
                return module


def deal_keywords(
    columns: Mapping[str, Sequence[Any]], accepted: Mapping[int, Accepted], microbatches: int
) -> dict[int, Sequence[dict[str, Any]]]:
    """Return, for each stage and microbatch, the keywords that the stage takes."""
    result: dict[int, Sequence[dict[str, Any]]] = {}
    for stage, takes in accepted.items():
        own = {name: c for name, c in columns.items() if takes.takes_all or name in takes.names}
        rows = zip(*own.values(), strict=True) if own else ()
        dicts = [dict(zip(own, row, strict=True)) for row in rows]
        result[stage] = dicts or [{} for _ in range(microbatches)]
    return result

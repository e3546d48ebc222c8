"""The parts of a loss that count for more or less than the rest of it."""

import math
from collections.abc import Hashable, Sequence

import torch
from torch.autograd.graph import get_gradient_edge

from penstock.errors import BatchError
from penstock.loss.calls import LossCall
from penstock.loss.memory import KnownForm, LossMemory
from penstock.loss.term_weights import ADVICE
from penstock.loss.weigher import Part

__all__ = ["make_parts"]


def make_parts(
    memory: LossMemory,
    names: Hashable,
    loss: torch.Tensor,
    used: Sequence[LossCall],
    extra: Sequence[float],
) -> list[Part]:
    """Return what each call counts for beside the weight of the whole loss.

    `names` say what the step was given, by which the memory knows how the loss is made.
    """
    known = memory.forms.get(names)
    trained: list[torch.Tensor | None] = [None] * len(used)
    if loss.requires_grad and known is not None:
        edges = [call.edge for call in used if call.edge is not None]
        found = torch.autograd.grad(loss, edges, retain_graph=True, create_graph=True)
        trained = [factor if factor.requires_grad else None for factor in found]
        factors = tuple(factor.item() for factor in found)
        is_trained = any(factor is not None for factor in trained)
        known = KnownForm(known.num_calls, known.form, factors, is_trained)
        memory.forms[names] = known
    elif known is None or not _still_holds(known, loss, used):
        raise BatchError(
            "what the parts of a loss count for must be known where they count differently, "
            "but a loss without a graph does not show it (got an evaluation of a model that "
            "makes its own loss, and no step before it with these factors); call step first, "
            f"or {ADVICE}"
        )
    parts = []
    for call, factor, graph, weight in zip(used, known.factors, trained, extra, strict=True):
        if weight:
            parts.append(Part(call.value, call.edge, factor * weight))
        if weight and graph is not None:
            # The factor's own gradient; what it adds to the loss is counted already.
            edge = get_gradient_edge(graph)
            parts.append(Part(torch.zeros_like(graph.detach()), edge, float(call.value) * weight))
    return parts


def _still_holds(known: KnownForm, loss: torch.Tensor, used: Sequence[LossCall]) -> bool:
    """Whether the factors of the last step may be those of a loss without a graph."""
    if len(known.factors) != len(used):
        return False
    if known.form.has_rest:
        return not known.has_trained_factor
    found = sum(factor * float(c.value) for factor, c in zip(known.factors, used, strict=True))
    return math.isclose(found, float(loss), rel_tol=256 * torch.finfo(loss.dtype).eps)

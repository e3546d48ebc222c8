"""Losses as users write them, also those that take gradients through the last part themselves.

Where a reduction is "found", the pipeline is to find out what the loss is a mean over. A loss is
additive if the losses of microbatches, weighed as its `reduction` says, make up that of the batch.
Any other is compared with the plain model run microbatch by microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from tests.differential.case import CLASSES, Case
from tests.differential.model.building import Model

__all__ = ["IGNORED", "LOSSES", "Loss", "LossFunction", "count_targets", "make_loss"]

# A label that no loss looks at.
IGNORED = -100

LossFunction: TypeAlias = Callable[..., torch.Tensor]
Maker: TypeAlias = Callable[[Model], LossFunction]
# From a loss, the scores and a place in the last part to another loss.
Combination: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Loss:
    """A kind of loss: what it wants from the last part and from the target, and how it adds up."""

    make: Maker
    output: Literal["scores", "hidden", "nested", "loss"] = "scores"
    target: Literal["numbers", "labels", "sparse_labels"] = "numbers"
    reduction: Literal["mean", "sum", "count", "found"] = "mean"
    is_additive: bool = True
    takes_gradients: bool = False


def count_targets(target: torch.Tensor) -> float:
    """How many labels of a target a loss looks at."""
    return float((target != IGNORED).sum())


def make_loss(case: Case, model: Model) -> LossFunction:
    """The loss function of a case, for its model."""
    return LOSSES[case.loss].make(model)


def _plain(function: LossFunction) -> Maker:
    return lambda _: function


def _mse(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(scores, target)


def _sum(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(scores, target, reduction="sum")


def _one_element(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(scores, target).reshape(1)


def _one_by_one(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.l1_loss(scores, target).reshape(1, 1)


def _cross_entropy(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


def _of_nested(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    doubled, number = output["more"][1]
    penalty: torch.Tensor = 0.1 * number * doubled.square().mean()
    return F.mse_loss(output["scores"], target) + penalty


def _of_output(output: torch.Tensor) -> torch.Tensor:
    """The model has made its loss from labels that it was given."""
    return output


def _unreduced(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(scores, target, reduction="none")


def _paired(scores: torch.Tensor, target: torch.Tensor) -> Any:
    return F.mse_loss(scores, target), scores.mean()


def _cut_off(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(scores.detach(), target)


def _with_class_weights(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
    return F.cross_entropy(scores.flatten(0, -2), target.flatten(), weights)


def _smooth(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, -2), target.flatten(), label_smoothing=0.1)


def _likelihood(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    chances = F.log_softmax(scores, -1)
    return F.nll_loss(chances.flatten(0, -2), target.flatten())


def _mixed(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0.7 * _cross_entropy(scores, target) + 0.1 * scores.square().mean()


def _two_terms(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _cross_entropy(scores, target) + 0.5 * _with_class_weights(torch.tanh(scores), target)


def _handmade(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    every = F.cross_entropy(scores.flatten(0, -2), target.flatten(), reduction="none")
    return every.sum() / (target != IGNORED).sum()


def _shifted(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Each position predicts the label of the next, as in language models."""
    return _cross_entropy(scores[:, :-1], target[:, 1:])


def _masked(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean over labels that count, without any of torch's losses."""
    every = -scores.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    is_label = target != IGNORED
    return (every * is_label).sum() / is_label.sum()


def _weighted(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    weights = target.abs() + 0.1
    return ((scores - target).square() * weights).sum() / weights.sum()


def _root(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((scores - target).square().mean() + 0.1).sqrt()


def _contrast(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Each row is to be told from the others of its batch."""
    chances = (scores.flatten(1) @ target.flatten(1).T).log_softmax(-1)
    return -chances.diagonal().mean()


def _divided_by_rows(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (scores - target).square().sum() / len(scores)


def _divided(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (scores - target).square().sum() / 7


def _absolute(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (scores - target).abs().mean()


def _focal(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    every = F.cross_entropy(
        scores.flatten(0, -2), target.flatten(), reduction="none", ignore_index=IGNORED
    )
    return ((1 - torch.exp(-every)).square() * every).mean()


class _WithParameters(nn.Module):
    """A loss with a temperature of its own, which is trained too."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.full((), 0.8, dtype=torch.float64))

    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(scores * self.temperature, target) + 0.1 * self.temperature.square()


def _hidden(output: dict[str, torch.Tensor], model: Model) -> torch.Tensor:  # noqa: ARG001  # one form for all
    """Where the last part began."""
    return output["hidden"]


def _head(output: dict[str, torch.Tensor], model: Model) -> torch.Tensor:  # noqa: ARG001  # one form for all
    """The weight of the last part's head."""
    return model.head.weight


def _taking(combine: Combination, find: Callable[..., torch.Tensor] = _hidden) -> Maker:
    """A loss that takes gradients with respect to a place in the last part.

    Where that is frozen or has no graph, as in an evaluation, it is the plain loss.
    """

    def make(model: Model) -> LossFunction:
        def loss_of(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
            loss, place = F.mse_loss(output["scores"], target), find(output, model)
            if not (loss.requires_grad and place.requires_grad):
                return loss
            return combine(loss, output["scores"], place)

        return loss_of

    return make


def _norm(value: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The norm of a gradient, as a constant; the graph is kept."""
    (found,) = torch.autograd.grad(value, place, retain_graph=True)
    return found.square().sum().sqrt()


def _adapt(loss: torch.Tensor, scores: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """One gradient balances two terms."""
    return loss / (1 + _norm(loss, place)) + 0.1 * scores.square().mean()


def _balance(loss: torch.Tensor, scores: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Gradients of two terms, each twice."""
    other = scores.square().mean()
    norms = [_norm(value, place) for value in (loss, other, loss, other)]
    return loss + other * ((norms[0] + norms[2]) / (1 + norms[1] + norms[3]))


def _penalize(loss: torch.Tensor, scores: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The gradient's norm is part of the loss."""
    value = loss + scores.square().mean()
    (found,) = torch.autograd.grad(value, place, create_graph=True)
    return loss + 0.3 * found.square().sum()


def _leave(loss: torch.Tensor, _scores: torch.Tensor, _place: torch.Tensor) -> torch.Tensor:
    """Nothing is added yet."""
    return loss


class _Late:
    """A loss that changes after some steps, as after a warm-up."""

    def __init__(self, early: LossFunction, late: LossFunction) -> None:
        self.is_late = False
        self._early, self._late = early, late

    def __call__(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        return (self._late if self.is_late else self._early)(output, target)


def _late(early: Maker, late: Maker) -> Maker:
    return lambda model: _Late(early(model), late(model))


def _decaying(model: Model) -> LossFunction:
    """A weight is part of the loss, beside its use in the model."""
    return lambda scores, target: (
        F.mse_loss(scores, target) + 0.1 * model.head.weight.square().sum()
    )


def _fused(model: Model) -> LossFunction:
    """The loss uses the head's weight in a product of its own."""

    def loss_of(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        again = F.linear(output["hidden"], model.head.weight)
        return F.mse_loss(output["scores"], target) + 0.1 * again.square().mean()

    return loss_of


def _looking(model: Model) -> LossFunction:
    """A backward to the weights of the last part, whose gradients are looked at and taken back."""

    def combine(loss: torch.Tensor, scores: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        own = {p: p.grad for p in model.parts[-1].parameters() if p.requires_grad}
        for parameter in own:
            parameter.grad = None
        torch.autograd.backward(loss, retain_graph=True, inputs=list(own))
        assert place.grad is not None, "the head's weight is behind the loss"
        norm = place.grad.square().sum().sqrt()
        for parameter, gradient in own.items():
            parameter.grad = gradient
        return loss / (1 + norm) + 0.1 * scores.square().mean()

    return _taking(combine, _head)(model)


def _leaving(model: Model) -> LossFunction:
    """A backward to all that is behind the loss, whose gradients are looked at and left."""

    def combine(loss: torch.Tensor, scores: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        before = torch.zeros_like(place) if place.grad is None else place.grad.clone()
        torch.autograd.backward(loss, retain_graph=True)
        assert place.grad is not None, "the head's weight is behind the loss"
        norm = (place.grad - before).square().sum().sqrt()
        return loss / (1 + norm) + 0.1 * scores.square().mean()

    return _taking(combine, _head)(model)


def _greedy(make: Maker) -> Loss:
    return Loss(make, "hidden", is_additive=False, takes_gradients=True)


def _found(make: Maker, output: Literal["scores", "loss"] = "scores") -> Loss:
    """A mean over labels that count, computed by hand."""
    return Loss(make, output, "sparse_labels", "found")


LOSSES: dict[str, Loss] = {
    "mse": Loss(_plain(_mse)),
    "sum": Loss(_plain(_sum), reduction="sum"),
    "one_element": Loss(_plain(_one_element)),
    "one_by_one": Loss(_plain(_one_by_one)),
    "labels": Loss(_plain(_cross_entropy), target="labels"),
    "sparse_labels": Loss(_plain(_cross_entropy), target="sparse_labels", reduction="count"),
    "nested": Loss(_plain(_of_nested), "nested"),
    "own": Loss(_plain(_of_output), "loss", target="labels"),
    "found_mse": Loss(_plain(_mse), reduction="found"),
    "found_sum": Loss(_plain(_sum), reduction="found"),
    "found_labels": _found(_plain(_cross_entropy)),
    "found_class_weights": _found(_plain(_with_class_weights)),
    "found_smooth": _found(_plain(_smooth)),
    "found_likelihood": _found(_plain(_likelihood)),
    "found_mixed": _found(_plain(_mixed)),
    "found_two_terms": _found(_plain(_two_terms)),
    "found_handmade": _found(_plain(_handmade)),
    "found_shifted": _found(_plain(_shifted)),
    "found_masked": _found(_plain(_masked)),
    "found_weighted": Loss(_plain(_weighted), reduction="found"),
    "found_root": Loss(_plain(_root), reduction="found"),
    "found_contrast": Loss(_plain(_contrast), reduction="found"),
    "found_divided_by_rows": Loss(_plain(_divided_by_rows), reduction="found"),
    "found_divided": Loss(_plain(_divided), reduction="found"),
    "found_absolute": Loss(_plain(_absolute), reduction="found"),
    "found_focal": _found(_plain(_focal)),
    "found_late_root": Loss(_late(_plain(_absolute), _plain(_root)), reduction="found"),
    "found_own": _found(_plain(_of_output), "loss"),
    "unreduced": Loss(_plain(_unreduced)),
    "paired": Loss(_plain(_paired)),
    "cut_off": Loss(_plain(_cut_off)),
    "decaying": Loss(_decaying),
    "late_decaying": Loss(_late(_plain(_mse), _decaying)),
    "fused": Loss(_fused, "hidden"),
    "parameters": Loss(lambda _: _WithParameters()),
    "adaptive": _greedy(_taking(_adapt)),
    "adaptive_weight": _greedy(_taking(_adapt, _head)),
    "balanced": _greedy(_taking(_balance)),
    "penalty": _greedy(_taking(_penalize)),
    "weight_penalty": _greedy(_taking(_penalize, _head)),
    "late_penalty": _greedy(_late(_taking(_leave), _taking(_penalize))),
    "retained": _greedy(_looking),
    "retained_whole": _greedy(_leaving),
}

"""The loss in what a model returns, for models that compute it themselves."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError

__all__ = ["LossSpec", "WithLoss", "find_loss"]

# A tree of booleans like the output, with one True in the place of the loss; None to look for it.
LossSpec = Any


def find_loss(output: Any, *, spec: LossSpec = None) -> torch.Tensor | None:
    """The loss in a model's output: at the one True of `spec`, or where models have it.

    Without `spec` it is the output itself, if that is a single number, or what is called `loss` in
    it; a model that names its outputs may have made none, when it was given no labels.

    >>> float(find_loss((torch.tensor(3.0), torch.zeros(2)), spec=(True, False)))
    3.0
    >>> float(find_loss({"loss": torch.tensor(2.0), "logits": torch.zeros(2)}))
    2.0
    """
    found = [_named_loss(output)] if spec is None else list(_pick(output, spec, "output"))
    if len(found) != 1:
        raise ModelError(
            f"the loss is one of the outputs, but the spec {spec!r} names {len(found)}"
        )
    if found[0] is None and spec is None:
        return None
    if not isinstance(found[0], torch.Tensor) or found[0].numel() != 1:
        raise ModelError(f"a loss is a tensor with one number (got {_describe(found[0])})")
    return found[0]


def _named_loss(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    raise ModelError(
        f"no loss found in the output ({_describe(output)}); say where it is, with a tree like it "
        "of True for the loss and False for the rest"
    )


def _pick(output: Any, spec: LossSpec, place: str) -> Iterator[Any]:
    """The parts of an output where the spec has True."""
    match spec, output:
        case bool(), _:
            yield from [output] if spec else []
        case Mapping(), Mapping() if spec.keys() == output.keys():
            for key in spec:
                yield from _pick(output[key], spec[key], f"{place}[{key!r}]")
        case Sequence(), Sequence() if len(spec) == len(output) and not isinstance(spec, str):
            for index, (part, inner) in enumerate(zip(output, spec, strict=True)):
                yield from _pick(part, inner, f"{place}[{index}]")
        case _:
            raise ModelError(
                f"the loss spec {spec!r} does not fit {place}, which is {_describe(output)}"
            )


def _describe(value: Any) -> str:
    match value:
        case torch.Tensor():
            return f"a tensor of shape {tuple(value.shape)}"
        case Mapping():
            return f"a {type(value).__name__} with {', '.join(map(str, value))}"
        case Sequence():
            return f"a {type(value).__name__} of {len(value)}"
        case _:
            return f"a {type(value).__name__}"


class WithLoss(nn.Module):
    """A model and its loss as one model, which takes the target last and returns the loss."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *args: Any, target: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of the model's output."""
        return self.loss(self.model(*args, **kwargs), target)

"""Finds the loss in the output of a model that computes it itself."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock.errors import ModelError

__all__ = ["LossSpec", "find_loss", "pick"]

# A tree like the output with True for the loss and False for the rest; None to search for it.
LossSpec = Any


def find_loss(output: Any, *, spec: LossSpec = None) -> torch.Tensor | None:
    """Return the loss in a model's output, at the one True of `spec`.

    Without `spec` it is the output itself, if that is a single number, or what is named `loss` in
    it. A model that names its outputs may have no loss, if it was given no labels.

    >>> float(find_loss((torch.tensor(3.0), torch.zeros(2)), spec=(True, False)))
    3.0
    >>> float(find_loss({"loss": torch.tensor(2.0), "logits": torch.zeros(2)}))
    2.0
    """
    found = [_named_loss(output)] if spec is None else list(pick(output, spec, "output"))
    if len(found) != 1:
        raise ModelError(f"the loss spec must have one True (got {spec!r}, with {len(found)})")
    if found[0] is None and spec is None:
        return None
    if not isinstance(found[0], torch.Tensor) or found[0].numel() != 1:
        raise ModelError(f"the loss must be a tensor with one number (got {_describe(found[0])})")
    return found[0]


def _named_loss(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    raise ModelError(
        f"no loss found in the output ({_describe(output)}); give a loss spec, a tree like the "
        "output with True for the loss and False for the rest"
    )


def pick(output: Any, spec: LossSpec, place: str) -> Iterator[Any]:
    """Yield the parts of an output where the spec has True."""
    match spec, output:
        case bool(), _:
            yield from [output] if spec else []
        case Mapping(), Mapping() if spec.keys() == output.keys():
            for key in spec:
                yield from pick(output[key], spec[key], f"{place}[{key!r}]")
        case Sequence(), Sequence() if len(spec) == len(output) and not isinstance(spec, str):
            for index, (part, inner) in enumerate(zip(output, spec, strict=True)):
                yield from pick(part, inner, f"{place}[{index}]")
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

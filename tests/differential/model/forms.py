"""The forms in which a part sends its activation, and how a part makes one of all it is given.

A receiver takes any form from any number of senders: numbers are recognised by type and shape.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tests.differential.case import WIDTH

__all__ = ["ALIASING", "FORMS", "gather"]


def _count(h: torch.Tensor) -> torch.Tensor:
    """A whole number for each row."""
    return (h.detach().flatten(1).sum(1).abs() * 7).long() % 3


def _out_of_order(h: torch.Tensor) -> torch.Tensor:
    """The same numbers, laid out with the rows last."""
    return h.movedim(0, -1).contiguous().movedim(-1, 0)


def _imaginary(h: torch.Tensor) -> torch.Tensor:
    """The imaginary part of a conjugate: a tensor with a lazy minus sign."""
    return torch.complex(0.1 * h, -h).conj().imag


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda h: h,
    "tuple": lambda h: (h, _count(h)),
    "list": lambda h: [h, h.detach() > 0],
    "dict": lambda h: {"h": h, "nothing": None, "factor": 0.5, "name": "h", "turn": True},
    "nested": lambda h: ({"deep": [(h,), {"number": 3}]}, (), []),
    "pair": lambda h: (0.5 * h, torch.tanh(h)),
    "twice": lambda h: (h, h),
    "views": lambda h: (h, h[..., 1:3]),
    "complex": lambda h: torch.complex(h, 0.5 * h),
    "conjugate": lambda h: {"wave": torch.complex(h, 0.5 * h).conj()},
    "negative": lambda h: (_imaginary(h), h.detach()),
    "out_of_order": _out_of_order,
    "expanded": lambda h: h.mean(-1, keepdim=True).expand(*h.shape),
    "scalar": lambda h: (h, h.mean(tuple(range(1, h.dim()))).sum() * 0, torch.tensor(0.5)),
    "empty": lambda h: (h, h[:0], torch.zeros(0, 3, dtype=torch.int32)),
    "integers": lambda h: (h, _count(h).to(torch.int16), _count(h).to(torch.uint8)),
    "detached": lambda h: (h, h.detach()),
    "sparse": lambda h: (h, torch.eye(2).to_sparse()),
    "object": lambda h: (h, {1, 2}),
}
# Forms of which one tensor cannot be written to in the plain model without changing another.
ALIASING = frozenset(
    {"twice", "views", "expanded", "negative", "complex", "conjugate", "detached"}
)


def gather(values: tuple[Any, ...]) -> torch.Tensor:
    """One activation from all that a part was given."""
    leaves = list(_leaves(values))
    h: torch.Tensor | None = None
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and _is_activation(leaf):
            # A first activation is taken as it is, so that a part can write to what it received.
            h = _as_real(leaf) if h is None else h + _as_real(leaf)
    assert h is not None, "every form has an activation"
    for leaf in leaves:
        h = _modify(h, leaf)
    return h


def _is_activation(value: torch.Tensor) -> bool:
    is_number = value.is_floating_point() or value.is_complex()
    return is_number and value.dim() > 1 and value.shape[-1] == WIDTH and value.shape[0] > 0


def _as_real(value: torch.Tensor) -> torch.Tensor:
    return value.real + 0.5 * value.imag if value.is_complex() else value


def _modify(h: torch.Tensor, leaf: Any) -> torch.Tensor:
    match leaf:
        case torch.Tensor() if leaf.layout is not torch.strided:
            return h * (1 + 0.1 * leaf.to_dense().sum())
        case torch.Tensor() if _is_activation(leaf) or not leaf.numel():
            return h
        case torch.Tensor() if leaf.dtype == torch.bool:
            return torch.where(leaf, h, 0.9 * h)
        case torch.Tensor() if not leaf.is_floating_point():
            return h * (1 + 0.1 * leaf.view(-1, *[1] * (h.dim() - 1)))
        case torch.Tensor() if not leaf.dim():
            return h * (1 + 0.1 * leaf)
        case torch.Tensor():
            return h * (1 + 0.1 * leaf.sum(-1, keepdim=True))
        case bool() | None | str() | set():
            return h
        case int() | float():
            return h * (1 + 0.1 * leaf)
        case _:
            raise AssertionError(f"a part was given {leaf!r}")


def _leaves(value: Any) -> Iterator[Any]:
    match value:
        case Mapping():
            for item in value.values():
                yield from _leaves(item)
        case list() | tuple():
            for item in value:
                yield from _leaves(item)
        case _:
            yield value

"""Parts of a model, as modules that a pipeline takes for stages, and the whole model of them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import nn

import penstock as ps
from tests.differential.case import CLASSES, VOCABULARY, WIDTH, Case, Part
from tests.differential.model.blocks import WrappedBlock
from tests.differential.model.forms import FORMS, gather

__all__ = ["KeywordPart", "PlainPart", "Whole", "find_tensor", "make_entry", "make_part"]


class _Core(nn.Module):
    """What a part computes: what it was given becomes one activation, which goes through blocks.

    The first part has an entry for the model's input; the last one a head, and gives an output in
    the form that the loss wants.
    """

    def __init__(
        self, part: Part, entry: nn.Module | None, output: str | None, consumers: Sequence[int]
    ) -> None:
        super().__init__()
        self.entry = entry
        self.blocks = nn.ModuleList(WrappedBlock(block) for block in part.blocks)
        self.head = None if output is None else nn.Linear(WIDTH, CLASSES)
        self._sends = FORMS[part.sends]
        self._traits = frozenset(part.traits)
        self._output = output
        self._consumers = consumers
        # Set where a step is to fail, and in which half.
        self.fails: Literal["", "fail", "break"] = ""

    def compute(self, given: tuple[Any, ...], scale: Any, gain: Any, labels: Any) -> Any:
        """From the model's input, or from what other parts sent, to what this part sends."""
        if self.fails == "fail":
            raise ArithmeticError("planted in a part")
        h = self._enter(given)
        if scale is not None:
            h = h * scale.view(-1, *[1] * (h.dim() - 1))
        if gain is not None:
            h = h * gain
        if self.fails == "break":
            h = _Broken.apply(h)  # type: ignore[no-untyped-call]  # untyped upstream
        hidden = h
        for block in self.blocks:
            h = block(h)
        if "adds_loss" in self._traits and h.requires_grad and self.training:
            ps.add_loss(0.1 * h.square().mean())
        if self.head is not None:
            return finish(self._output, hidden, self.head(h), labels)
        if "routes" in self._traits:
            return ps.Routed({c: self._sends(h * (0.9 + 0.1 * c)) for c in self._consumers})
        # Nothing keeps this product for its backward, so that the next part may write to it.
        return self._sends(h * 0.9)

    def _enter(self, given: tuple[Any, ...]) -> torch.Tensor:
        h = gather(given) if self.entry is None else find_tensor(given)
        if isinstance(self.entry, nn.Embedding):
            h = self.entry(h)
        if "writes" in self._traits:
            h.sub_(0.1).mul_(0.9)
            h[..., 0].add_(0.2)
        return self.entry(h) if isinstance(self.entry, nn.Linear) else h


class _Broken(torch.autograd.Function):
    """Fails in its backward."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        raise ArithmeticError("planted in a part")


class PlainPart(nn.Module):
    """A part that takes no keywords."""

    def __init__(self, core: _Core) -> None:
        super().__init__()
        self.core = core

    def forward(self, *given: Any) -> Any:
        return self.core.compute(given, None, None, None)


class KeywordPart(nn.Module):
    """A part that takes the model's keywords."""

    def __init__(self, core: _Core) -> None:
        super().__init__()
        self.core = core

    def forward(self, *given: Any, scale: Any = None, gain: Any = None, labels: Any = None) -> Any:
        return self.core.compute(given, scale, gain, labels)


def make_entry(kind: str) -> nn.Module:
    """What takes the model's input."""
    return nn.Embedding(VOCABULARY, WIDTH) if kind == "tokens" else nn.Linear(WIDTH, WIDTH)


def make_part(case: Case, number: int, output: str) -> PlainPart | KeywordPart:
    """One part of a case's model, with numbers from torch's generator."""
    part, last = case.parts[number], len(case.parts) - 1
    core = _Core(
        part,
        None if number else make_entry(case.inputs),
        output if number == last else None,
        [b for a, b in case.edges if a == number],
    )
    if "frozen" in part.traits:
        core.requires_grad_(False)
    wants_labels = output == "loss" and number == last
    return KeywordPart(core) if "keyword" in part.traits or wants_labels else PlainPart(core)


def finish(kind: str | None, hidden: torch.Tensor, scores: torch.Tensor, labels: Any) -> Any:
    """What the model gives, in the form that its loss wants."""
    match kind:
        case "scores":
            return scores
        case "hidden":
            return {"scores": scores, "hidden": hidden}
        case "nested":
            return {"scores": scores, "more": [None, (2 * scores, 3)], "name": "nested"}
        case "loss":
            return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())
        case _:
            raise AssertionError(f"no model gives {kind}")


def find_tensor(given: Any) -> torch.Tensor:
    """The one tensor of the model's input, in whatever form it came."""
    match given:
        case torch.Tensor():
            return given
        case dict():
            return find_tensor(tuple(given.values()))
        case tuple() | list() if len(given) == 1:
            return find_tensor(given[0])
        case _:
            raise AssertionError(f"a model's input is one tensor (got {given})")


class RandomPlaces(Protocol):
    """Gives a part its random numbers."""

    def forward(self, microbatch: int, *, is_training: bool) -> AbstractContextManager[None]:
        """Around the forward of a part."""


class Whole(nn.Module):
    """All parts as one model, without cuts: what the pipeline must be equal to.

    What several parts get is copied for each, as a pipeline does, so that they can write to it.
    """

    def __init__(self, parts: Sequence[nn.Module], edges: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.randoms: Sequence[RandomPlaces] = ()
        self.microbatch = 0
        self._producers = [[a for a, b in edges if b == part] for part in range(len(parts))]
        self._consumers = [sum(a == part for a, _ in edges) for part in range(len(parts))]

    def forward(self, *given: Any, **keywords: Any) -> Any:
        made: list[Any] = []
        for number, part in enumerate(self.parts):
            arguments = self._receive(made, number) if number else list(given)
            taken = keywords if isinstance(part, KeywordPart) else {}
            with self._draw(number):
                made.append(part(*arguments, **taken))
        return made[-1]

    def _draw(self, number: int) -> AbstractContextManager[None]:
        if not self.randoms:
            return nullcontext()
        return self.randoms[number].forward(self.microbatch, is_training=True)

    def _receive(self, made: Sequence[Any], number: int) -> list[Any]:
        arguments: list[Any] = []
        for producer in self._producers[number]:
            value = made[producer]
            if isinstance(value, ps.Routed):
                value = value.values[number]
            elif self._consumers[producer] > 1:
                value = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, value)
            arguments.extend(value if isinstance(value, tuple) else [value])
        return arguments

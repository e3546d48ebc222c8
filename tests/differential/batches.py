"""The batches of a case: whole, in microbatches, and as a pipeline is given them."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

import penstock as ps
from tests.differential.case import CLASSES, VOCABULARY, WIDTH, Case, Step
from tests.differential.losses import IGNORED, LOSSES

__all__ = ["Batch", "make_batch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's numbers, and how many rows each microbatch gets.

    `inputs` asks for a gradient where the case says so. A model that makes its own loss gets the
    target as a keyword.
    """

    inputs: torch.Tensor
    scale: torch.Tensor | None
    gain: torch.Tensor | float | None
    target: torch.Tensor
    rows: tuple[int, ...]
    is_target_keyword: bool

    def keywords(self) -> dict[str, Any]:
        """What the plain model gets beside its input."""
        found = {"scale": self.scale, "gain": self.gain}
        if self.is_target_keyword:
            found["labels"] = self.target
        return {name: value for name, value in found.items() if value is not None}

    def as_given(self, given: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords of `Pipeline.step`, with the target among them."""
        keywords = self.keywords()
        if not self.is_target_keyword:
            keywords["target"] = self.target
        if "gain" in keywords:
            keywords["gain"] = ps.Shared(keywords["gain"])
        inputs: Any = self.inputs
        match given:
            case "plain":
                pass
            case "nested":
                inputs = {"inputs": [inputs]}
            case "ready":
                # Each in memory of its own, as a loader makes them.
                inputs = ps.Ready([part.clone() for part in _cut(self.inputs, self.rows)])
                for name in keywords.keys() - {"gain"}:
                    keywords[name] = ps.Ready(_cut(keywords[name], self.rows))
            case "along" if self.scale is not None:
                keywords["scale"] = ps.Along(self.scale.view(1, -1), dim=1)
            case "mixed" if self.gain is not None:
                keywords["gain"] = ps.Ready([self._gain(i) for i in range(len(self.rows))])
            case "along" | "mixed":
                pass
            case _:
                raise AssertionError(f"no batch is given as {given}")
        return (inputs,), keywords

    def _gain(self, microbatch: int) -> torch.Tensor | float | None:
        """What some microbatches get as a tensor, some as a number, and some not at all."""
        return (self.gain, None, 0.7)[microbatch % 3]

    def microbatches(self, given: str) -> list["Batch"]:
        """The microbatches, each a batch of its own."""
        scales = [None] * len(self.rows) if self.scale is None else _cut(self.scale, self.rows)
        inputs, targets = _cut(self.inputs, self.rows), _cut(self.target, self.rows)
        numbers, is_mixed = range(len(self.rows)), given == "mixed" and self.gain is not None
        gains = [self._gain(number) if is_mixed else self.gain for number in numbers]
        return [
            Batch(x, scale, gain, y, (len(x),), self.is_target_keyword)
            for x, scale, gain, y in zip(inputs, scales, gains, targets, strict=True)
        ]


def _cut(value: torch.Tensor, rows: Sequence[int]) -> Sequence[torch.Tensor]:
    return torch.split(value, list(rows))


def make_batch(case: Case, number: int) -> Batch:
    """The batch of one step, with the same numbers at every call."""
    step, loss = case.steps[number], LOSSES[case.loss]
    generator = torch.Generator().manual_seed(case.seed * 1000 + 500 + number)
    shape = (step.rows, step.length) if step.length else (step.rows,)
    scale = gain = None
    if "keyword" in case.traits:
        scale = 0.5 + torch.rand(step.rows, generator=generator, dtype=torch.float64)
        gain = 0.5 + torch.rand(WIDTH, generator=generator, dtype=torch.float64)
    return Batch(
        _make_inputs(case, shape, generator),
        scale,
        gain,
        _make_target(loss.target, shape, generator),
        _share_out(case, step, number),
        loss.output == "loss",
    )


def _make_inputs(case: Case, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if case.inputs == "tokens":
        return torch.randint(VOCABULARY, shape, generator=generator)
    inputs = torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)
    return inputs.requires_grad_(case.inputs == "trained")


def _make_target(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if kind == "numbers":
        return torch.randn(*shape, CLASSES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, shape, generator=generator)
    if kind == "sparse_labels":
        ignored = torch.rand(shape, generator=generator) < 0.6
        # Something is always left to average, for losses that leave out the first moment too.
        ignored[0].fill_(False)
        labels = labels.masked_fill(ignored, IGNORED)
    return labels


def _share_out(case: Case, step: Step, number: int) -> tuple[int, ...]:
    """Rows as equal as can be, the larger parts first; ready ones have any sizes."""
    parts = min(case.order.microbatches, step.rows)
    if step.given == "ready":
        chance = Random(case.seed * 10 + number)
        cuts = sorted(chance.sample(range(1, step.rows), parts - 1))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, step.rows], strict=True))
    size, larger = divmod(step.rows, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)

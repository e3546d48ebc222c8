"""The labels of a step's microbatches, and how the target of a loss function derives from them.

What a mean counts must be known of all microbatches before the first backward, so it is counted in
the labels that the step was given, the way in which one microbatch's labels have become a target.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.nn import functional

from penstock.loss.calls import HINTED_IGNORE_INDEX, Labelled, LossCall, Mean
from penstock.torch_private import keystr, tree_flatten_with_path

__all__ = ["LABELS", "BatchLabels", "Relation", "Source", "derive", "fetch_numbers"]

# What transformers call the keyword from which a model makes its loss.
LABELS = "labels"
# What the target is called among the arguments of a step.
TARGET = "target"


class Relation(Enum):
    """How a target is made of labels: as they are, or from the second of each row on."""

    SAME = "same"
    SHIFTED = "shifted"


@dataclass(frozen=True, slots=True)
class Source:
    """The labels that a target is made of: which argument, where in it, and how."""

    argument: str
    place: str
    relation: Relation


def derive(labels: torch.Tensor, relation: Relation) -> torch.Tensor:
    """Return the labels that a target of this relation counts."""
    is_shifted = relation is Relation.SHIFTED and labels.dim() > 0
    return labels[..., 1:] if is_shifted else labels


class BatchLabels:
    """What a step was given that may be labels, by argument, one value per microbatch."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        # What is called labels comes first: a model may well be given its inputs as labels too.
        names = sorted(columns, key=lambda name: LABELS not in name and name != TARGET)
        self._columns = {name: columns[name] for name in names}

    def pick(self, microbatches: Sequence[int], targets: Sequence[Any]) -> "BatchLabels":
        """Return the labels of some microbatches, as if there were no others.

        `targets` take the place of theirs, if these were given any.
        """
        columns = {
            name: [column[i] for i in microbatches] for name, column in self._columns.items()
        }
        if TARGET in columns:
            columns[TARGET] = list(targets)
        return BatchLabels(columns)

    def find(self, call: LossCall, microbatch: int) -> Iterator[Source]:
        """Find what the target of a call may be made of, by its values; then up to their order.

        What the target is a view of comes first, since others may have the same values here.
        """
        leaves = [
            (name, place, leaf)
            for name, column in self._columns.items()
            for place, leaf in _leaves(column[microbatch])
            if leaf.is_floating_point() == call.target.is_floating_point()
        ]
        leaves.sort(key=lambda found: not _is_view(call.target, found[2]))
        for name, place, leaf in leaves:
            for relation in Relation:
                if any(_is_equal(call.target, each) for each in _targets(leaf, relation, call)):
                    yield Source(name, place, relation)
        for name, place, leaf in leaves:
            if _is_equal(_sort(call.target), _sort(leaf)):
                yield Source(name, place, Relation.SAME)

    def count(self, source: Source, mean: Mean) -> list[float] | None:
        """Count the labels of every microbatch, if this step has them."""
        if source.argument not in self._columns:
            return None
        counts = []
        for value in self._columns[source.argument]:
            leaf = dict(_leaves(value)).get(source.place)
            counts.append(0.0 if leaf is None else mean.count(derive(leaf, source.relation)))
        return fetch_numbers(counts)

    def find_uneven(self) -> str | None:
        """Find labels of -100, or a mask in a target, that are not spread evenly.

        They are signs of a mean that is not one over rows.
        """
        has_target = TARGET in self._columns
        for name, column in self._columns.items():
            if has_target and name != TARGET:
                continue
            leaves = [dict(_leaves(value)) for value in column]
            for place in dict.fromkeys(place for each in leaves for place in each):
                found = [each.get(place) for each in leaves]
                if any(_is_hint(leaf, has_target) for leaf in found) and _is_uneven(found):
                    return name + place
        return None


def _leaves(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value that may be labels, and their places."""
    if isinstance(value, torch.Tensor):
        yield "", value
    elif value is not None:
        for path, leaf in tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                yield keystr(path), leaf


def _targets(labels: torch.Tensor, relation: Relation, call: LossCall) -> Iterator[torch.Tensor]:
    """What a call's target may look like that is made of these labels."""
    if relation is Relation.SHIFTED and not (labels.dim() and labels.shape[-1]):
        return
    derived = derive(labels, relation)
    if labels.is_floating_point() or not isinstance(call.mean, Labelled):
        yield derived
        return
    ignored, is_counted = call.mean.ignore_index, call.mean.find_counted(derived)
    # Only those that count may have been picked, or ignored ones put in the place of others.
    yield derived[is_counted]
    if ignored is not None:
        derived = derived.where(is_counted, ignored)
        if relation is Relation.SHIFTED:
            yield functional.pad(derived, (0, 1), value=ignored)
    yield derived


def _is_view(target: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether a target lies in the memory of these labels."""
    if not labels.numel() or target.device != labels.device:
        return False
    first = labels.data_ptr()
    span = sum((n - 1) * step for n, step in zip(labels.shape, labels.stride(), strict=True))
    return first <= target.data_ptr() <= first + span * labels.element_size()


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() != other.numel():
        return False
    return torch.equal(one.flatten(), other.flatten().to(one))


def _sort(values: torch.Tensor) -> torch.Tensor:
    return values.flatten().sort().values


def _is_hint(leaf: torch.Tensor | None, has_target: bool) -> bool:
    if leaf is None or leaf.dim() == 0 or leaf.is_floating_point() or leaf.is_complex():
        return False
    return leaf.dtype is not torch.bool or has_target


def _is_uneven(leaves: Sequence[torch.Tensor | None]) -> bool:
    """Whether some microbatches have a larger part of what counts than of all that there is."""
    counts = fetch_numbers([0.0 if leaf is None else _count_hint(leaf) for leaf in leaves])
    sizes = [0 if leaf is None else leaf.numel() for leaf in leaves]
    pairs = zip(counts, sizes, strict=True)
    return any(count * sum(sizes) != size * sum(counts) for count, size in pairs)


def _count_hint(leaf: torch.Tensor) -> torch.Tensor:
    return (leaf if leaf.dtype is torch.bool else leaf != HINTED_IGNORE_INDEX).sum()


def fetch_numbers(counts: Sequence[torch.Tensor | float]) -> list[float]:
    """Counts as numbers; those on a device are fetched at once."""
    tensors = [count for count in counts if isinstance(count, torch.Tensor)]
    if not tensors:
        return [float(count) for count in counts]
    device = tensors[0].device
    fetched = iter(torch.stack([t.to(device, torch.float64) for t in tensors]).tolist())
    return [next(fetched) if isinstance(count, torch.Tensor) else count for count in counts]

"""The labels of a step's microbatches, and how the target of a loss function derives from them.

What a mean counts in each microbatch must be known before the first backward. So it is counted in
the labels that the step was given, derived as the target of one microbatch is from its labels.
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

# The keyword of transformers from which a model computes its loss.
LABELS = "labels"
# The name of the target among the arguments of a step.
TARGET = "target"


class Relation(Enum):
    """How a target derives from labels: unchanged, or without the first label of each row."""

    SAME = "same"
    SHIFTED = "shifted"


@dataclass(frozen=True, slots=True)
class Source:
    """The labels that a target derives from: which argument, where in it, and how."""

    argument: str
    place: str
    relation: Relation


def derive(labels: torch.Tensor, relation: Relation) -> torch.Tensor:
    """Return the labels that are in a target of this relation."""
    is_shifted = relation is Relation.SHIFTED and labels.dim() > 0
    return labels[..., 1:] if is_shifted else labels


class BatchLabels:
    """The arguments of a step that may be labels, each with one value per microbatch."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        # Arguments named labels come first, since inputs may have the same values.
        names = sorted(columns, key=lambda name: LABELS not in name and name != TARGET)
        self._columns = {name: columns[name] for name in names}

    def pick(self, microbatches: Sequence[int], targets: Sequence[Any]) -> "BatchLabels":
        """Return the labels of some microbatches only.

        `targets` replace their targets, if the step has any.
        """
        columns = {
            name: [column[i] for i in microbatches] for name, column in self._columns.items()
        }
        if TARGET in columns:
            columns[TARGET] = list(targets)
        return BatchLabels(columns)

    def find(self, call: LossCall, microbatch: int) -> Iterator[Source]:
        """Find labels with the values of a call's target; then labels with its values sorted.

        Labels that the target is a view of come first, since others may have the same values.
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
            is_possible = leaf.numel() == call.target.numel()
            if is_possible and _is_equal(_sort(call.target), _sort(leaf)):
                yield Source(name, place, Relation.SAME)

    def count(self, source: Source, mean: Mean) -> list[float] | None:
        """Count the labels of every microbatch, if this step has them."""
        if source.argument not in self._columns:
            return None
        leaves = [_find_leaf(value, source.place) for value in self._columns[source.argument]]
        derived = [derive(leaf, source.relation) for leaf in leaves if leaf is not None]
        counts = iter(fetch_numbers(mean.count_each(derived)))
        return [0.0 if leaf is None else next(counts) for leaf in leaves]

    def count_all(self, only: str = "") -> Iterator[tuple[str, list[float]]]:
        """Yield, by name, what may be counted: labels, and masks of zeros and ones; or one name.

        Nothing else is read then, since reading waits for a device.
        """
        for name, column in self._columns.items():
            leaves = [dict(_leaves(value)) for value in column]
            for place in leaves[0]:
                found = [each[place] for each in leaves if place in each]
                if len(found) < len(leaves) or any(leaf.is_complex() for leaf in found):
                    continue
                ones, labels = f"ones of {name}{place}", f"labels of {name}{place}"
                if only in ("", ones) and all(
                    bool(((leaf == 0) | (leaf == 1)).all()) for leaf in found
                ):
                    # Counted exactly, whatever their type.
                    yield ones, fetch_numbers([(leaf == 1).sum() for leaf in found])
                if only in ("", labels) and not any(leaf.is_floating_point() for leaf in found):
                    counts = [(leaf != HINTED_IGNORE_INDEX).sum() for leaf in found]
                    yield labels, fetch_numbers(counts)

    def find_uneven(self) -> str | None:
        """Find labels of -100, or a mask in a target, that are spread unevenly.

        They are a sign that the loss is not a mean over rows.
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
    """Yield the tensors in a value, and their paths in it."""
    if isinstance(value, torch.Tensor):
        yield "", value
    elif value is not None:
        for path, leaf in tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                yield keystr(path), leaf


def _find_leaf(value: Any, place: str) -> torch.Tensor | None:
    """Return the tensor at a path of a value, if there is one."""
    if isinstance(value, torch.Tensor):
        return None if place else value
    return dict(_leaves(value)).get(place)


def _targets(labels: torch.Tensor, relation: Relation, call: LossCall) -> Iterator[torch.Tensor]:
    """Yield the forms that a call's target may have if it derives from these labels."""
    if relation is Relation.SHIFTED and not (labels.dim() and labels.shape[-1]):
        return
    derived = derive(labels, relation)
    if labels.is_floating_point() or not isinstance(call.mean, Labelled):
        yield derived
        return
    ignored, is_counted = call.mean.ignore_index, call.mean.find_counted(derived)
    # The target may have only the labels that count, or others replaced by the ignored one.
    yield derived[is_counted]
    if ignored is not None:
        derived = derived.where(is_counted, ignored)
        if relation is Relation.SHIFTED:
            yield functional.pad(derived, (0, 1), value=ignored)
    yield derived


def _is_view(target: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether a target shares the memory of these labels."""
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
    """Whether some microbatches have a larger share of what counts than of all labels."""
    counts = fetch_numbers([0.0 if leaf is None else _count_hint(leaf) for leaf in leaves])
    sizes = [0 if leaf is None else leaf.numel() for leaf in leaves]
    pairs = zip(counts, sizes, strict=True)
    return any(count * sum(sizes) != size * sum(counts) for count, size in pairs)


def _count_hint(leaf: torch.Tensor) -> torch.Tensor:
    return (leaf if leaf.dtype is torch.bool else leaf != HINTED_IGNORE_INDEX).sum()


def fetch_numbers(counts: Sequence[torch.Tensor | float]) -> list[float]:
    """Return counts as numbers; those on a device are fetched in one go."""
    tensors = [count for count in counts if isinstance(count, torch.Tensor)]
    if not tensors:
        return [float(count) for count in counts]
    if len({(tensor.device, tensor.dtype) for tensor in tensors}) > 1:
        tensors = [tensor.to(tensors[0].device, torch.float64) for tensor in tensors]
    fetched = iter(torch.stack(tensors).to(torch.float64).tolist())
    return [next(fetched) if isinstance(count, torch.Tensor) else count for count in counts]

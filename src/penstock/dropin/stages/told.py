"""What users have told of a stage's boundaries, or have asked it to insist on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.dropin._utils import validate_metadata, validate_tensors_metadata
from penstock.dropin.stages.metadata import TensorMeta

__all__ = ["compare_with_told", "insist"]


def compare_with_told(
    place: str,
    told: Sequence[TensorMeta | None] | None,
    metas: Sequence[TensorMeta | None],
) -> None:
    """Warn if what the user has told is not what crosses; what crosses is used."""
    for number, (wanted, meta) in enumerate(zip(told or (), metas, strict=False)):
        if wanted is not None and meta is not None:
            # How a tensor lies in memory may change on the way.
            same_stride = replace(wanted, stride=meta.stride)
            validate_metadata(f"{place}[{number}]", same_stride, meta, warn_on_mismatch=True)


def insist(place: str, known: Sequence[TensorMeta | None], values: Sequence[Any]) -> None:
    """Refuse what is not like the first that has crossed here."""
    validate_tensors_metadata(place, known, tuple(values))

"""What processes send each other about a save, as plain values: nothing is ever unpickled.

Torch's own objects are taken apart where they leave a process, and rebuilt where they arrive.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from penstock.checkpoint.manifest import find_dtype
from penstock.torch_private import StorageInfo

__all__ = [
    "Written",
    "plan_from_values",
    "plan_to_values",
    "section_of",
    "setting_from_value",
    "setting_to_value",
]


@dataclass(frozen=True, slots=True)
class Written:
    """An item that torch has written to a file; `position` is where a tensor's numbers begin."""

    result: WriteResult
    position: int | None

    def to_values(self) -> list[Any]:
        """Return the fields as plain values, in order."""
        index, stored = self.result.index, self.result.storage_data
        offset = None if index.offset is None else list(index.offset)
        where = [stored.relative_path, stored.offset, stored.length]
        return [index.fqn, offset, self.result.size_in_bytes, *where, self.position]

    @classmethod
    def from_values(cls, values: Iterable[Any]) -> "Written":
        """Return the item of plain values."""
        key, offset, size, file, start, length, position = values
        index = MetadataIndex(key, None if offset is None else torch.Size(offset))
        return cls(WriteResult(index, size, StorageInfo(file, start, length)), position)


def plan_to_values(plan: SavePlan) -> list[list[Any]]:
    """Return the tensors that a process could write: key, kind, whole shape, type and part."""
    return [_item_to_values(item) for item in plan.items]


def plan_from_values(values: Iterable[list[Any]]) -> SavePlan:
    """Return the plan of a process, as torch's planner has made it there."""
    items = [_item_from_values(*item) for item in values]
    return SavePlan(
        items, planner_data={item.index.fqn: section_of(item.index.fqn) for item in items}
    )


def section_of(key: str) -> tuple[str, str]:
    """Return the section and the rest of a key, as in the nested state of torch.

    >>> section_of("model.layers.0.weight")
    ('model', 'layers.0.weight')
    """
    section, _, rest = key.partition(".")
    return section, rest


def _item_to_values(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    assert data is not None, "plain values are not in plans that travel"
    dtype = str(data.properties.dtype).removeprefix("torch.")
    part = data.chunk
    return [
        item.index.fqn,
        item.type.name,
        list(data.size),
        dtype,
        list(part.offsets),
        list(part.sizes),
    ]


def _item_from_values(
    key: str, kind: str, shape: list[int], dtype: str, offsets: list[int], sizes: list[int]
) -> WriteItem:
    part = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    properties = TensorProperties(dtype=find_dtype(dtype))
    data = TensorWriteData(part, properties, torch.Size(shape))
    index = MetadataIndex(key, part.offsets)
    return WriteItem(index, WriteItemType[kind], tensor_data=data)


def setting_to_value(setting: Any) -> Any:
    """Return a plain value of a checkpoint for JSON, which has no tuples.

    >>> setting_to_value((0.9, 0.999))
    {'tuple': [0.9, 0.999]}
    """
    return {"tuple": list(setting)} if isinstance(setting, tuple) else setting


def setting_from_value(value: Any) -> Any:
    """Return the plain value of one from JSON."""
    return tuple(value["tuple"]) if isinstance(value, dict) else value

"""Rows of data as a dataset."""

from typing import Any

from torch.utils.data import Dataset

__all__ = ["Rows"]


class Rows(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        return self._rows[number]

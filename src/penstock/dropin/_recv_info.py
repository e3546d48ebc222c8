"""A tensor that a stage waits for."""

import torch

from penstock.dropin._metadata import TensorMeta

__all__ = ["_RecvInfo"]


class _RecvInfo:
    """One input (or gradient) of a stage: where it comes from, and into what.

    An argument that the user gives comes from nowhere (`is_root_arg`).
    """

    def __init__(
        self,
        input_name: str,
        source: int | None = None,
        buffer: torch.Tensor | None = None,
        tensor_meta: TensorMeta | None = None,
        *,
        is_root_arg: bool = False,
    ) -> None:
        self.input_name = input_name
        self.source = source
        self.buffer = buffer
        self.tensor_meta = tensor_meta
        self.is_root_arg = is_root_arg

    def __repr__(self) -> str:
        if self.is_root_arg:
            return f"_RecvInfo({self.input_name}, given by the user)"
        return f"_RecvInfo({self.input_name}, from stage {self.source}, {self.tensor_meta})"

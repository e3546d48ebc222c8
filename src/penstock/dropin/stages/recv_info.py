"""A tensor that a stage waits for."""

from dataclasses import KW_ONLY, dataclass

import torch

from penstock.dropin.stages.metadata import TensorMeta

__all__ = ["_RecvInfo"]


@dataclass(eq=False, repr=False)
class _RecvInfo:
    """One input (or gradient) of a stage: where it comes from, and into what.

    An argument that the user gives comes from nowhere (`is_root_arg`).
    """

    input_name: str
    source: int | None = None
    buffer: torch.Tensor | None = None
    tensor_meta: TensorMeta | None = None
    _: KW_ONLY
    is_root_arg: bool = False

    def __repr__(self) -> str:
        if self.is_root_arg:
            return f"_RecvInfo({self.input_name}, given by the user)"
        return f"_RecvInfo({self.input_name}, from stage {self.source}, {self.tensor_meta})"

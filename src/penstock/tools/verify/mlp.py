"""A chain of small dense layers with random numbers to fit."""

import torch
from torch import nn

from penstock.tools.verify.case import Case

__all__ = ["mlp_case"]


def mlp_case(num_stages: int, *, rows: int, width: int = 16) -> Case:
    """Return a case of two layers per stage, and a batch with this number of rows.

    >>> len(mlp_case(3, rows=4).stages)
    3
    """
    stages = [
        nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        for _ in range(num_stages)
    ]
    batch = torch.randn(rows, width)
    return Case(stages, (batch,), torch.randn(rows, width), nn.MSELoss())

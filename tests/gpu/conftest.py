"""Worlds of ranks that share one GPU, or one processor where the jobs are only rehearsed."""

from collections.abc import Iterator

import pytest
import torch

from tests.processes import Processes, backend_of


@pytest.fixture(scope="session")
def accelerator() -> torch.device:
    """Where the jobs of these tests run: on the GPU, unless `--rehearse-gpu` was given."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def two_ranks(accelerator: torch.device) -> Iterator[Processes]:
    with Processes(2, backend_of(accelerator)) as processes:
        yield processes


@pytest.fixture(scope="session")
def four_ranks(accelerator: torch.device) -> Iterator[Processes]:
    with Processes(4, backend_of(accelerator)) as processes:
        yield processes

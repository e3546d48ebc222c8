"""What every test shares: the settings of Hypothesis, and worlds of processes."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.processes import Processes

# The same examples on every machine and every run, however slow the machine.
settings.register_profile("penstock", deadline=None, derandomize=True)
settings.load_profile("penstock")


@pytest.fixture(scope="session")
def two_processes() -> Iterator[Processes]:
    with Processes(2) as processes:
        yield processes


@pytest.fixture(scope="session")
def four_processes() -> Iterator[Processes]:
    with Processes(4) as processes:
        yield processes

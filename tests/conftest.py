"""What every test shares: the settings of Hypothesis, worlds of processes, and who needs a GPU."""

import gc
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from tests.processes import Processes, start_server

# A machine with a GPU need not have what only other tests use.
try:
    from hypothesis import settings
except ImportError:
    pass
else:
    # The same examples on every machine and in every run; `make test-all` draws fresh ones, and
    # more of them. A test with a number of its own takes the same share: `strategies.examples`.
    settings.register_profile("penstock", deadline=None, derandomize=True, max_examples=40)
    settings.register_profile(
        "fresh", deadline=None, derandomize=False, max_examples=100, print_blob=True
    )
    settings.load_profile("penstock")
with suppress(ImportError):
    from tests.browser import Browser, open_browser

# What other packages warn of on a machine with a GPU depends on its versions, not on us.
_GPU_WARNINGS = ("default", "error:::penstock")


def pytest_configure() -> None:
    """Let Ctrl-C reach what tests start, also if a shell started the tests in its background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rehearse-gpu",
        action="store_true",
        help="run the jobs of tests/gpu over gloo on the processor, to try them out",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_rehearsed = config.getoption("--rehearse-gpu")
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        item.add_marker(pytest.mark.filterwarnings(*_GPU_WARNINGS))
        can_rehearse = is_rehearsed and "accelerator" in getattr(item, "fixturenames", ())
        if not torch.cuda.is_available() and not can_rehearse:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Leave what all modules hold out of garbage collections, of which some tests make many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def server_of_processes() -> None:
    """Let tests that start processes with the package's launcher get those that start fast."""
    start_server()


@pytest.fixture(scope="session")
def two_processes() -> Iterator[Processes]:
    with Processes(2) as processes:
        yield processes


@pytest.fixture(scope="session")
def four_processes() -> Iterator[Processes]:
    with Processes(4) as processes:
        yield processes


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    """One Chromium per worker, because a process can run only one at a time."""
    with open_browser() as found:
        yield found

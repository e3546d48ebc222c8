"""The error of names that need torch where it is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import MissingDependencyError

__all__ = ["torch_needed_by"]


@contextmanager
def torch_needed_by(name: str) -> Iterator[None]:
    """Say how to install torch if it is missing and something inside imports it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MissingDependencyError(
            f"{name} needs torch, which is not installed; run pip install 'penstock[torch]'"
        ) from error

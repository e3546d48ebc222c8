"""The one line that says what is missing where a library is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import MissingDependencyError

__all__ = ["needs"]


@contextmanager
def needs(*libraries: str, by: str, extra: str) -> Iterator[None]:
    """Say how to install these libraries if one is missing and something inside imports it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in libraries:
            raise
        raise MissingDependencyError(
            f"{by} needs {missing}, which is not installed; run pip install 'penstock[{extra}]'"
        ) from error

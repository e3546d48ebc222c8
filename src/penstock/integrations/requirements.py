"""The one line that says what is missing where a library is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import MissingDependencyError

__all__ = ["needs"]


@contextmanager
def needs(*libraries: str, by: str, extra: str) -> Iterator[None]:
    """Say how to install these libraries, or torch, if something inside imports a missing one."""
    try:
        yield
    except ImportError as error:
        extras = {**dict.fromkeys(libraries, extra), "torch": "torch"}
        missing = next((name for name in _missing_names(error) if name in extras), None)
        if missing is None:
            raise
        raise MissingDependencyError(
            f"{by} needs {missing}, which is not installed; run pip install "
            f"'penstock[{extras[missing]}]'"
        ) from error


def _missing_names(error: BaseException | None) -> Iterator[str]:
    """Yield what was not found, in the errors that an error comes from.

    transformers says that one of its names could not be imported, and not why.
    """
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            yield (error.name or "").partition(".")[0]
        error = error.__cause__ or error.__context__

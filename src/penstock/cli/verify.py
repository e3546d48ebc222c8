"""The way from the command line to what needs torch: only commands that run load it."""

from penstock.errors import MissingDependencyError

__all__ = ["require_torch"]


def require_torch() -> None:
    """Stop with the way to install torch if it is not there."""
    try:
        import torch  # noqa: F401  # it is enough that it can be imported
    except ImportError as error:
        raise MissingDependencyError(
            "running needs torch; run pip install 'penstock[torch]'"
        ) from error

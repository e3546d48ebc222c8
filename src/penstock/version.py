"""The version of the package."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["own_version"]


def own_version() -> str:
    """Return the installed version; a source tree that is not installed has none."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "without a version"

"""Which version of the package this is."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["own_version"]


def own_version() -> str:
    """Return the version as installed; a source tree that is run as it is has none."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "without a version"

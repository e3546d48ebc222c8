"""The command line: `penstock`, also as `python -m penstock`."""

from penstock.cli.commands import main

__all__ = ["main"]

"""The command line: `penstock` and `python -m penstock`."""

from penstock.cli.commands import main

__all__ = ["main"]

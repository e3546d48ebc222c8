"""The folder of a run's checkpoints: one folder per step, there as a whole or not at all.

step-00000020.partial   being written, or left by a crash: never read
step-00000020           complete: renamed when all that is in it was on the disk
"""

import os
import re
import shutil
from pathlib import Path

from penstock.checkpoint.manifest import MANIFEST
from penstock.errors import CheckpointError

__all__ = ["StepFolders"]

_COMPLETE = re.compile(r"step-([0-9]{8,18})")
_PARTIAL = ".partial"


class StepFolders:
    """The steps that a folder has, and how they come and go."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def complete(self, step: int) -> Path:
        """Where a complete step lies."""
        return self.path / f"step-{step:08}"

    def partial(self, step: int) -> Path:
        """Where a step is written."""
        return self.path / f"step-{step:08}{_PARTIAL}"

    def steps(self) -> tuple[int, ...]:
        """The complete steps, oldest first."""
        if not self.path.is_dir():
            return ()
        names = (path.parent.name for path in self.path.glob(f"step-*/{MANIFEST}"))
        matches = (_COMPLETE.fullmatch(name) for name in names)
        return tuple(sorted(int(match[1]) for match in matches if match is not None))

    def begin(self, step: int) -> Path:
        """An empty folder to write a step to; what crashes have left is removed."""
        if newer := [other for other in self.steps() if other >= step]:
            raise CheckpointError(
                f"{self.path} has step {max(newer)} already, and step {step} is not newer; save "
                "to another folder, or remove the later steps from this one"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        for entry in self.path.glob(f"step-*{_PARTIAL}"):
            shutil.rmtree(entry)
        path = self.partial(step)
        path.mkdir()
        return path

    def publish(self, step: int) -> None:
        """Make a step complete, all at once; its files are on the disk already."""
        _sync(self.partial(step))
        self.partial(step).rename(self.complete(step))
        _sync(self.path)

    def prune(self, keep: int) -> None:
        """Remove all complete steps but the newest; each stops being complete first."""
        for step in self.steps()[:-keep]:
            self.complete(step).rename(self.partial(step))
            shutil.rmtree(self.partial(step))


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

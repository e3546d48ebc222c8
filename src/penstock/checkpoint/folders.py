"""The folder of a run's checkpoints: one folder per step, complete or not there at all.

step-00000020.partial   being written, or left by a crash: never read
step-00000020           complete: renamed when everything in it was on the disk
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
    """The steps in a folder: written, published and pruned."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def complete(self, step: int) -> Path:
        """Return the folder of a complete step."""
        return self.path / f"step-{step:08}"

    def partial(self, step: int) -> Path:
        """Return the folder in which a step is written."""
        return self.path / f"step-{step:08}{_PARTIAL}"

    def steps(self) -> tuple[int, ...]:
        """Return the complete steps, oldest first."""
        if not self.path.is_dir():
            return ()
        names = (path.parent.name for path in self.path.glob(f"step-*/{MANIFEST}"))
        matches = (_COMPLETE.fullmatch(name) for name in names)
        return tuple(sorted(int(match[1]) for match in matches if match is not None))

    def begin(self, step: int) -> Path:
        """Return an empty folder to write a step to; remove what crashes have left."""
        if newer := [other for other in self.steps() if other >= step]:
            raise CheckpointError(
                f"step must be newer than the last step in {self.path} (got {step}, last step "
                f"{max(newer)}); save to another folder, or remove the later steps from this one"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        for entry in self.path.glob(f"step-*{_PARTIAL}"):
            shutil.rmtree(entry)
        path = self.partial(step)
        path.mkdir()
        return path

    def publish(self, step: int) -> None:
        """Make a step complete, atomically; its files are already on the disk."""
        _sync(self.partial(step))
        self.partial(step).rename(self.complete(step))
        _sync(self.path)

    def prune(self, keep: int) -> None:
        """Remove all complete steps but the newest; each one is renamed first."""
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

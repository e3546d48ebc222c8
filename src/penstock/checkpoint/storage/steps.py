"""The steps in a storage: one folder each, complete or not seen at all.

in a file system                                  in an object store
.penstock/step-00000020-JOB  being written        .penstock/step-00000020-JOB  JOB writes it
step-00000020                complete: renamed    step-00000020/penstock.json  complete: comes last
"""

import logging
import re
from pathlib import Path
from secrets import token_hex
from typing import Protocol

from penstock.checkpoint.storage.interface import OWN_FOLDER, Storage
from penstock.checkpoint.storage.local import LocalStorage
from penstock.checkpoint.storage.objects import ObjectStorage
from penstock.errors import CheckpointError

__all__ = ["MANIFEST", "MarkedSteps", "RenamedSteps", "Steps", "folder_of", "open_steps"]

_logger = logging.getLogger(__name__)

MANIFEST = "penstock.json"
_COMPLETE = re.compile(r"step-([0-9]{8,18})")
_PARTIAL = re.compile(r"(step-[0-9]{8,18})-[0-9a-f]+")


class Steps(Protocol):
    """Steps that are written, published and pruned by the job that holds the lease."""

    @property
    def storage(self) -> Storage:
        """Where they are."""

    def complete(self) -> tuple[int, ...]:
        """Return the complete steps, oldest first."""

    def begin(self, step: int, job: str) -> str:
        """Return an empty folder to write a step to; remove what crashed jobs have left."""

    def file_name(self, rank: int, job: str) -> str:
        """Return the name of the file of a process, which a late write of another job lacks."""

    def publish(self, step: int, job: str, manifest: bytes) -> None:
        """Make a step complete; all its other files are stored."""

    def discard(self, step: int, job: str) -> None:
        """Remove a step that was begun and failed."""

    def prune(self, keep: int, job: str) -> None:
        """Remove all complete steps but the newest."""


def open_steps(folder: Path | str) -> Steps:
    """Return the steps of a folder, or of a URL such as `s3://bucket/run`."""
    if isinstance(folder, str) and "://" in folder:
        if folder.startswith("file://"):
            return RenamedSteps(LocalStorage(Path(folder.removeprefix("file://"))))
        return MarkedSteps(ObjectStorage(folder))
    return RenamedSteps(LocalStorage(Path(folder)))


def folder_of(step: int) -> str:
    """Return the folder of a complete step."""
    return f"step-{step:08}"


class RenamedSteps:
    """Steps in a file system, where a folder is renamed at once."""

    def __init__(self, storage: LocalStorage) -> None:
        self.storage = storage

    def complete(self) -> tuple[int, ...]:
        """Return the complete steps, oldest first."""
        return _complete_steps(self.storage)

    def begin(self, step: int, job: str) -> str:
        """Return an empty folder to write a step to; remove what crashed jobs have left."""
        _check_step(self.storage, step)
        for name in _leftovers(self.storage):
            # Renamed first, so that nobody can complete a step of which a part is removed.
            removed = _own_path_of(_PARTIAL.sub(r"\1", name), token_hex(12))
            self.storage.rename(f"{OWN_FOLDER}/{name}", removed)
            self._remove_now_or_later(removed)
        return _own_path(step, job)

    def file_name(self, rank: int, job: str) -> str:  # noqa: ARG002  # the folder has it
        """Return the name of the file of a process, in a folder that is the job's own."""
        return f"__{rank}_0.distcp"

    def publish(self, step: int, job: str, manifest: bytes) -> None:
        """Make a step complete, at once."""
        path = _own_path(step, job)
        # A folder that another job has removed must not come back with a manifest alone.
        self.storage.write(f"{path}/{MANIFEST}", [manifest], makes_folders=False)
        self.storage.rename(path, folder_of(step))

    def discard(self, step: int, job: str) -> None:
        """Remove a step that was begun and failed."""
        self.storage.remove(_own_path(step, job))

    def prune(self, keep: int, job: str) -> None:
        """Remove all complete steps but the newest; each one is renamed first."""
        for step in self.complete()[:-keep]:
            path = _own_path(step, job)
            self.storage.rename(folder_of(step), path)
            self._remove_now_or_later(path)

    def _remove_now_or_later(self, path: str) -> None:
        """Remove what was a step; what cannot be removed now must not end a run.

        Network file systems keep a folder while somebody still reads a file of it.
        """
        try:
            self.storage.remove(path)
        except CheckpointError as error:
            _logger.warning("%s; the next save will try again", error)


class MarkedSteps:
    """Steps in an object store, where the manifest is written last and removed first."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def complete(self) -> tuple[int, ...]:
        """Return the complete steps, oldest first."""
        return _complete_steps(self.storage)

    def begin(self, step: int, job: str) -> str:
        """Return an empty folder to write a step to; remove what crashed jobs have left."""
        for name in _leftovers(self.storage):
            folder = _PARTIAL.sub(r"\1", name)
            if not _is_complete(self.storage, folder):
                self.storage.remove(folder)
            self.storage.remove(f"{OWN_FOLDER}/{name}")
        _check_step(self.storage, step)
        self.storage.replace(_own_path(step, job), b"{}")
        return folder_of(step)

    def file_name(self, rank: int, job: str) -> str:
        """Return the name of the file of a process, in a folder that jobs share."""
        return f"__{rank}_{job}.distcp"

    def publish(self, step: int, job: str, manifest: bytes) -> None:
        """Make a step complete: readers look for the manifest."""
        if self.storage.size(_own_path(step, job)) is None:
            raise CheckpointError(
                f"{self.storage.show(folder_of(step))} was removed by another job, which has "
                "taken over; save to another folder, or end the other job"
            )
        self.storage.replace(f"{folder_of(step)}/{MANIFEST}", manifest)
        self.storage.remove(_own_path(step, job))

    def discard(self, step: int, job: str) -> None:
        """Remove a step that was begun and failed."""
        # Without the note, another job has taken over, and may write the same step.
        if self.storage.size(_own_path(step, job)) is not None:
            if not _is_complete(self.storage, folder_of(step)):
                self.storage.remove(folder_of(step))
            self.storage.remove(_own_path(step, job))

    def prune(self, keep: int, job: str) -> None:
        """Remove all complete steps but the newest; the manifest of each goes first."""
        for step in self.complete()[:-keep]:
            self.storage.replace(_own_path(step, job), b"{}")
            self.storage.remove(f"{folder_of(step)}/{MANIFEST}")
            self.discard(step, job)


def _own_path(step: int, job: str) -> str:
    return _own_path_of(folder_of(step), job)


def _own_path_of(folder: str, name: str) -> str:
    return f"{OWN_FOLDER}/{folder}-{name}"


def _is_complete(storage: Storage, folder: str) -> bool:
    return storage.size(f"{folder}/{MANIFEST}") is not None


def _complete_steps(storage: Storage) -> tuple[int, ...]:
    matches = (_COMPLETE.fullmatch(name) for name in storage.names(""))
    found = [int(match[1]) for match in matches if match and _is_complete(storage, match[0])]
    return tuple(sorted(found))


def _leftovers(storage: Storage) -> list[str]:
    """Return our own entries of steps that no job has finished."""
    return [name for name in storage.names(OWN_FOLDER) if _PARTIAL.fullmatch(name)]


def _check_step(storage: Storage, step: int) -> None:
    """Refuse a step that would not be the newest, or whose folder belongs to somebody else."""
    if newer := [other for other in _complete_steps(storage) if other >= step]:
        raise CheckpointError(
            f"step must be newer than the last step in {storage.show('').rstrip('/')} (got "
            f"{step}, last step {max(newer)}); save to another folder, or remove the later steps "
            "from this one"
        )
    if storage.names(folder_of(step)):
        raise CheckpointError(
            f"{storage.show(folder_of(step))} must not exist yet (it holds files that are not a "
            "checkpoint of Penstock); move it away"
        )

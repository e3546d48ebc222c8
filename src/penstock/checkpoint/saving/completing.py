"""The last act of a save, by the first process: index, manifest, and the step is there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.checkpoint.digests import digest_bytes
from penstock.checkpoint.manifest import Chunk, File, Manifest, SavedTensor
from penstock.checkpoint.saving.torch_index import TORCH_INDEX, StoredPart, make_index
from penstock.checkpoint.storage.lease import Lease
from penstock.checkpoint.storage.steps import Steps
from penstock.errors import CheckpointError
from penstock.version import own_version

__all__ = ["Completion", "Whole"]


@dataclass(frozen=True, slots=True)
class Whole:
    """What all processes save, beside tensors; `folder` is where they write."""

    step: int
    folder: str
    processes: int
    optimizer: str | None
    data: dict[str, Any]
    values: dict[str, Any]
    aliases: dict[str, str]


class Completion:
    """Completes steps; torch's index is made again only if something has another place."""

    def __init__(self, steps: Steps, lease: Lease, keep: int) -> None:
        self._steps, self._lease, self._keep = steps, lease, keep
        self._indexed: tuple[Any, ...] = ()
        self._index = b""

    def complete(
        self,
        whole: Whole,
        files: dict[str, File],
        parts: Sequence[StoredPart],
        values_file: str,
        values: Mapping[str, tuple[int, int]],
    ) -> str | None:
        """Make a step complete, and remove older ones; return why those cannot be removed."""
        manifest = self._describe(whole, files, parts, values_file, values)
        # Another job may have taken over while this one was stopped.
        self._lease.hold()
        self._steps.publish(whole.step, self._lease.job, manifest)
        try:
            # Another job may count on what is older than this step.
            self._lease.hold()
            self._steps.prune(self._keep, self._lease.job)
        except CheckpointError as error:
            return f"step {whole.step} is complete, but older ones were not removed: {error}"
        return None

    def _describe(
        self,
        whole: Whole,
        files: dict[str, File],
        parts: Sequence[StoredPart],
        values_file: str,
        values: Mapping[str, tuple[int, int]],
    ) -> bytes:
        storage = self._steps.storage
        for name, file in files.items():
            path = f"{whole.folder}/{name}"
            if storage.size(path) != file.bytes:
                raise CheckpointError(
                    f"{storage.show(path)} must be visible to rank 0 as it was written; use a "
                    "folder that all ranks share"
                )
        depends_on = (parts, values, values_file, whole.aliases)
        if self._indexed != depends_on:
            self._index = make_index(parts, values, values_file, whole.aliases)
            self._indexed = depends_on
        storage.write(f"{whole.folder}/{TORCH_INDEX}", [self._index])
        index = File(len(self._index), digest_bytes(self._index))
        return Manifest(
            whole.step,
            whole.processes,
            whole.optimizer,
            _tensors(parts),
            whole.values,
            whole.aliases,
            {**files, TORCH_INDEX: index},
            whole.data,
            {"penstock": own_version(), "torch": str(torch.__version__)},
        ).to_bytes()


def _tensors(parts: Sequence[StoredPart]) -> dict[str, SavedTensor]:
    chunks: dict[str, list[Chunk]] = {}
    kinds = {}
    for stored in parts:
        part = stored.part
        kinds[part.key] = part.shape, part.dtype
        chunks.setdefault(part.key, []).append(Chunk(part.box, stored.file, stored.place.position))
    return {key: SavedTensor(*kinds[key], tuple(found)) for key, found in chunks.items()}

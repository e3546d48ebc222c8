"""The second half of a save: every process writes its file, and the first makes it complete."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from penstock.checkpoint.drafts import Draft, Whole
from penstock.checkpoint.folders import StepFolders
from penstock.checkpoint.manifest import Chunk, File, Manifest, SavedTensor, describe_file
from penstock.checkpoint.messages import Written, section_of
from penstock.checkpoint.tensor_bytes import find_numbers
from penstock.errors import CheckpointError
from penstock.ranks.control import Control, describe_error
from penstock.version import own_version

__all__ = ["write_draft"]

_logger = logging.getLogger(__name__)
# The index that torch reads.
_TORCH_INDEX = ".metadata"


@dataclass(frozen=True, slots=True)
class _Part:
    """What one process has written, or why it could not."""

    items: list[Written]
    files: dict[str, File]
    error: str | None = None

    def to_values(self) -> list[Any]:
        """Return the fields as plain values, in order."""
        items = [item.to_values() for item in self.items]
        return [items, {name: astuple(file) for name, file in self.files.items()}, self.error]

    @classmethod
    def from_values(cls, values: Iterable[Any]) -> "_Part":
        """Return the part of plain values."""
        items, files, error = values
        described = {name: File(*file) for name, file in files.items()}
        return cls([Written.from_values(item) for item in items], described, error)


def write_draft(control: Control, folders: StepFolders, draft: Draft, keep: int) -> None:
    """Write a draft; the step is complete on return, or every process raises why not."""
    collected = control.collect(_write_part(folders.partial(draft.step), draft).to_values())
    message: str | None = None
    if draft.whole is not None:
        try:
            parts = [_Part.from_values(values) for values in collected]
            _complete(folders, draft, draft.whole, parts)
            folders.prune(keep)
        except Exception as error:
            message = describe_error(error)
    message = control.broadcast(message)
    if message is not None:
        complete = list(folders.steps())
        raise CheckpointError(
            f"step {draft.step} was not saved: {message}; complete steps: {complete or 'none'}"
        )
    _logger.debug("step %d is complete in %s", draft.step, folders.path)


def _write_part(folder: Path, draft: Draft) -> _Part:
    """Write this process's file; an error is part of the result, so that all learn of it."""
    _logger.debug("writing %d bytes of step %d", draft.copies.num_bytes, draft.step)
    try:
        results = draft.writer.write_data(draft.plan, draft.copies).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        files = {name: describe_file(folder / name) for name in names}
        return _Part(
            [Written(result, _find_position(folder, result)) for result in results], files
        )
    except Exception as error:
        return _Part([], {}, describe_error(error))


def _find_position(folder: Path, result: WriteResult) -> int | None:
    """Return where the numbers of a tensor begin in the file."""
    # Plain values have no offset in a tensor; torch reads them, and we have them in JSON.
    if result.index.offset is None:
        return None
    stored = result.storage_data
    with (folder / stored.relative_path).open("rb") as file:
        return find_numbers(file, stored.offset, stored.length)


def _complete(folders: StepFolders, draft: Draft, whole: Whole, parts: Sequence[_Part]) -> None:
    for rank, part in enumerate(parts):
        if part.error is not None:
            raise CheckpointError(f"rank {rank}: {part.error}")
    folder = folders.partial(draft.step)
    files = {name: file for part in parts for name, file in part.files.items()}
    for name, file in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != file.bytes:
            raise CheckpointError(
                f"{folder / name} must be visible to rank 0 as it was written; use a folder that "
                "all ranks share"
            )
    written = {item.result.index: item for part in parts for item in part.items}
    tensors = _list_tensors(whole, written)
    results = {index: item.result for index, item in written.items()}
    _add_aliases(whole, results)
    draft.writer.finish(whole.metadata, [list(results.values())])
    files[_TORCH_INDEX] = describe_file(folder / _TORCH_INDEX)
    versions = {"penstock": own_version(), "torch": str(torch.__version__)}
    manifest = Manifest(
        draft.step, len(parts), tensors, whole.values, whole.aliases, files, whole.data, versions
    )
    manifest.write(folder)
    folders.publish(draft.step)


def _list_tensors(whole: Whole, written: dict[MetadataIndex, Written]) -> dict[str, SavedTensor]:
    found = {}
    for key, kept in whole.metadata.state_dict_metadata.items():
        if isinstance(kept, TensorStorageMetadata):
            chunks = []
            for chunk in kept.chunks:
                item = written[MetadataIndex(key, chunk.offsets)]
                file = item.result.storage_data.relative_path
                assert item.position is not None, "a tensor has a position"
                chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file, item.position))
            dtype = str(kept.properties.dtype).removeprefix("torch.")
            found[key] = SavedTensor(tuple(kept.size), dtype, tuple(chunks))
    return found


def _add_aliases(whole: Whole, results: dict[MetadataIndex, WriteResult]) -> None:
    """Let torch find what is saved once under all of its keys."""
    index = whole.metadata.state_dict_metadata
    stored: dict[str, list[WriteResult]] = {}
    for result in results.values():
        stored.setdefault(result.index.fqn, []).append(result)
    same = dict(whole.same) | _aliased_keys(whole.aliases, {**index, **whole.same})
    for key, saved in same.items():
        first = whole.same.get(saved, saved)
        if key not in index:
            index[key] = index[first]
            whole.metadata.planner_data[key] = section_of(key)
            for result in stored[first]:
                own = MetadataIndex(key, result.index.offset)
                results[own] = replace(result, index=own)


def _aliased_keys(aliases: dict[str, str], keys: dict[str, Any]) -> dict[str, str]:
    """Return the keys of parameters under further names, with the keys that were saved."""
    others: dict[str, list[str]] = {}
    for name, saved in aliases.items():
        others.setdefault(saved, []).append(name)
    found = {}
    for key in keys:
        section, rest = section_of(key)
        kind, _, detail = rest.partition(".")
        name, dot, last = detail.rpartition(".")
        if section == "model":
            found.update({f"model.{other}": key for other in others.get(rest, ())})
        elif section == "optim":
            for other in others.get(name, ()):
                found[f"optim.{kind}.{other}{dot}{last}"] = key
    return found

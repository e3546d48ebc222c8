"""Whole models on disk as safetensors shards, which every rank writes and reads for itself.

    model-00001-of-00004.safetensors   written by rank 0, and so on
    model.safetensors.index.json       which tensor is in which file
    config.json                        if the model has a configuration

These are the folders that `from_pretrained` of transformers reads and `save_pretrained` writes. No
rank ever holds more than its own share and one shard.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.atomic_files import replacing, write_atomically
from penstock.errors import ModelError, PipelineError
from penstock.integrations.requirements import needs
from penstock.training.held_model import fit_value
from penstock.training.pipeline import Pipeline
from penstock.training.whole_state import to_host

with needs("safetensors", by="penstock.integrations.pretrained", extra="hugging-face"):
    from safetensors import safe_open
    from safetensors.torch import save_file

__all__ = ["load_pretrained", "save_pretrained"]

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 2**30


def save_pretrained(
    pipeline: Pipeline,
    folder: Path | str,
    *,
    model: nn.Module | None = None,
    shard_bytes: int = _SHARD_BYTES,
    is_writer: bool = True,
) -> None:
    """Save the trained model, complete and tied; every rank calls this and writes its own part.

    With `model`, the one that was split, its configuration is saved too. Of several replicas, one
    `is_writer`; the others take part, because shards of parameters have to be gathered.
    """
    folder, state = Path(folder), pipeline.state_dict()
    with _together(pipeline, "save the model"):
        sizes = _sizes(state, pipeline.shared_names)
        if is_writer:
            folder.mkdir(parents=True, exist_ok=True)
            # An interrupted save must not look complete.
            (folder / _INDEX).unlink(missing_ok=True)
    files = _name_files(pipeline.exchange(sizes), shard_bytes)
    with _together(pipeline, "save the model"):
        for file, names in files[pipeline.rank].items():
            tensors = {name: _alone(to_host(state[name], always_copy=False)) for name in names}
            if is_writer:
                with replacing(folder / file) as partial:
                    save_file(tensors, partial, metadata={"format": "pt"})
    with _together(pipeline, "save the model"):
        if is_writer and pipeline.rank == 0:
            _write_index(folder, files)
            if model is not None:
                _save_settings(folder, model)


def load_pretrained(pipeline: Pipeline, folder: Path | str) -> None:
    """Load a model from a folder of safetensors; every rank reads only the tensors it holds."""
    held = pipeline.state_dict()
    with _together(pipeline, "load the model"), torch.no_grad():
        where = _find_tensors(Path(folder))
        for file, names in _by_file(held, where, pipeline.shared_names).items():
            with safe_open(file, framework="pt") as stored:
                for name, key in names:
                    held[name].copy_(fit_value(name, held[name], stored.get_tensor(key)))


@contextmanager
def _together(pipeline: Pipeline, doing: str) -> Iterator[None]:
    """Raise on every rank if the inside fails on one; it waits for no other rank of these."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    errors = pipeline.exchange("" if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(errors):
        if text:
            raise PipelineError(f"rank {rank} could not {doing}: {text}")


def _sizes(state: Mapping[str, Any], shared_names: Mapping[str, str]) -> dict[str, int]:
    """Return the bytes of every tensor that is to be saved, by name."""
    sizes: dict[str, int] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"{name!r} must be a tensor to be saved (got {type(value).__name__}); save with "
                "penstock.Checkpoints, which keeps any extra state"
            )
        if name not in shared_names:
            sizes[name] = value.numel() * value.element_size()
    return sizes


def _name_files(
    everyone: list[dict[str, int]], shard_bytes: int
) -> list[dict[str, dict[str, int]]]:
    """Return the files of every rank and what is in them; each tensor is in one file."""
    seen: set[str] = set()
    shards: list[list[dict[str, int]]] = []
    for sizes in everyone:
        own = {name: size for name, size in sizes.items() if name not in seen}
        seen.update(own)
        shards.append(_fill(own, shard_bytes))
    total, named, number = sum(map(len, shards)), [], 0
    for part in shards:
        files = {}
        for shard in part:
            number += 1
            name = _WHOLE if total == 1 else f"model-{number:05}-of-{total:05}.safetensors"
            files[name] = shard
        named.append(files)
    return named


def _fill(sizes: Mapping[str, int], shard_bytes: int) -> list[dict[str, int]]:
    """Return the tensors in shards of at most `shard_bytes`, unless one tensor has more."""
    shards: list[dict[str, int]] = []
    for name, size in sizes.items():
        if not shards or sum(shards[-1].values()) + size > shard_bytes:
            shards.append({})
        shards[-1][name] = size
    return shards


def _write_index(folder: Path, files: list[dict[str, dict[str, int]]]) -> None:
    tables = {file: names for part in files for file, names in part.items()}
    # transformers prefers a whole file, so one of an earlier save would hide these shards.
    for old in [folder / _WHOLE, *folder.glob("model-*-of-*.safetensors")]:
        if old.name not in tables:
            old.unlink(missing_ok=True)
    if tables.keys() == {_WHOLE}:
        return
    where = {name: file for file, names in tables.items() for name in names}
    total = sum(size for names in tables.values() for size in names.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    write_atomically(folder / _INDEX, json.dumps(index, indent=2) + "\n")


def _save_settings(folder: Path, model: Any) -> None:
    """Save a model's configurations in the way of transformers."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has its memory for itself, as the format asks."""
    own = tensor.numel() * tensor.element_size()
    is_alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == own
    return tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)


def _find_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor in a folder."""
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text("utf-8"))
        return {name: folder / Path(file).name for name, file in index["weight_map"].items()}
    if not (folder / _WHOLE).is_file():
        raise ModelError(f"{folder} must have {_WHOLE} or {_INDEX}; give the folder of a model")
    with safe_open(folder / _WHOLE, framework="pt") as stored:
        return dict.fromkeys(stored.keys(), folder / _WHOLE)


def _by_file(
    held: Mapping[str, Any], where: Mapping[str, Path], shared_names: Mapping[str, str]
) -> dict[Path, list[tuple[str, str]]]:
    """Return what to read from each file: names here, and the names in the file."""
    found: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for name in held:
        first = shared_names.get(name, name)
        tied = [other for other, known in shared_names.items() if known == first]
        key = next((k for k in (name, first, *tied) if k in where), None)
        if key is None:
            raise ModelError(
                f"the folder must have every tensor of the model (missing: {name!r}); give the "
                "folder of this model"
            )
        found[where[key]].append((name, key))
    return found

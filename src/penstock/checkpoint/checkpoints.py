"""Checkpoints of a run: saved by any layout in the background, loaded by any other.

save    agree who writes what, copy it to host memory  |  write, complete, notify all ranks
                      the caller waits                 |           in the background
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from penstock.checkpoint.background import Background
from penstock.checkpoint.content import (
    Content,
    collect_content,
    restore_generators,
)
from penstock.checkpoint.drafts import draft_save, refuse_save
from penstock.checkpoint.folders import StepFolders
from penstock.checkpoint.manifest import Manifest, read_manifest
from penstock.checkpoint.reading import check_files, read_tensors
from penstock.checkpoint.restoring import (
    check_names,
    generator_targets,
    model_targets,
    optimizer_part,
)
from penstock.checkpoint.writing import write_draft
from penstock.errors import ArgumentError, CheckpointError
from penstock.ranks.control import open_control
from penstock.ranks.faults import LinkLostError
from penstock.training.pipeline import Pipeline

__all__ = ["Checkpoints", "Restored"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """The step that was loaded, and the data that was saved with it.

    Torch's generators are restored if as many processes load as have saved.
    """

    step: int
    data: dict[str, Any]
    has_generator_states: bool


@dataclass(frozen=True, slots=True)
class _Save:
    """A save that was not waited for yet, and its pipeline."""

    writing: Background
    pipeline: Pipeline


class Checkpoints:
    """The checkpoints of a run, in a folder that all its processes can access.

    All processes that train together make one and call the same methods: those of `group`, or all
    processes. The `keep` newest complete steps are kept. If a rank of the pipeline is lost during
    a call, the others raise `PeerLostError`, as in a step.
    """

    def __init__(
        self, folder: Path | str, *, keep: int = 2, group: dist.ProcessGroup | None = None
    ) -> None:
        if keep < 1:
            raise ArgumentError(f"keep must be at least 1 (got {keep}); use 1 or more")
        self._folders = StepFolders(Path(folder).absolute())
        self._keep = keep
        self._control = open_control(group)
        self._save: _Save | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        elif self._save is not None:
            self._save.writing.end()
            self._control.abort()

    def save(
        self,
        step: int,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        data: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> None:
        """Save the state after a step; return once it is copied, and write in the background.

        `data` is what else the run needs to continue, such as its position in the data and the
        state of a learning rate scheduler: anything that JSON can hold, the same on all ranks.
        This waits for the save before it, and raises the error of that save if it failed.
        """
        with self._guarded(pipeline):
            self._wait()
            self._begin(step, pipeline, optimizer, data or {})
            if wait:
                self._wait()

    def finish(self) -> None:
        """Wait until the last save is complete, and raise its error if it failed."""
        if self._save is not None:
            with self._guarded(self._save.pipeline):
                self._wait()

    def steps(self) -> tuple[int, ...]:
        """Return the steps that are complete now, oldest first."""
        return self._folders.steps()

    def load(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
    ) -> Restored | None:
        """Load a step, or the newest one; return None if there is none.

        Every process loads its own part, whatever layout has saved it. Files, names and shapes are
        checked on all processes before anything is changed on one of them.
        """
        with self._guarded(pipeline):
            self._wait()
            steps = self._control.broadcast(self._folders.steps())
            if step is None and not steps:
                return None
            chosen = steps[-1] if step is None else step
            try:
                return self._load(pipeline, optimizer, chosen)
            except CheckpointError as error:
                others = [other for other in steps if other != chosen]
                hint = f"complete steps besides this one: {others}" if others else "no other step"
                raise CheckpointError(f"cannot load step {chosen}: {error}; {hint}") from error

    @contextmanager
    def _guarded(self, pipeline: Pipeline) -> Iterator[None]:
        """Guard something that all processes do together, so that no rank waits for a lost one."""
        try:
            with pipeline.guarded(self._abort), self._naming():
                yield
        except LinkLostError as error:
            # A pipeline in one process has no guard, so that nobody knows which rank is lost.
            raise CheckpointError(str(error)) from error

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Say that a lost connection is one of those that save, which may be more processes."""
        try:
            yield
        except LinkLostError as error:
            raise LinkLostError(f"saving and loading need all processes: {error}") from error

    def _abort(self) -> None:
        """End all waits of this process for another, and for the thread that may wait for one."""
        self._control.abort()
        save = self._save
        if save is not None:
            save.writing.abandon()

    def _wait(self) -> None:
        if self._save is not None:
            try:
                self._save.writing.wait()
            finally:
                self._save = None

    def _begin(
        self,
        step: int,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        data: Mapping[str, Any],
    ) -> None:
        control, folders, keep = self._control, self._folders, self._keep
        with control.together(refuse_save(control)):
            content = _checked_content(step, data, pipeline, optimizer, control.rank)
        draft = draft_save(control, folders, step, content, data)
        _logger.debug("step %d: %d bytes copied to host memory", step, draft.copies.num_bytes)
        writing = Background(
            lambda: write_draft(control, folders, draft, keep),
            f"save step {step}",
            control.abort,
        )
        self._save = _Save(writing, pipeline)

    def _load(
        self, pipeline: Pipeline, optimizer: torch.optim.Optimizer | None, step: int
    ) -> Restored:
        control, folder = self._control, self._folders.complete(step)
        refuse = refuse_save(control)
        with control.together(refuse):
            manifest = read_manifest(folder)
        held = control.gather(list(pipeline.state_dict()))
        with control.together(refuse):
            model = model_targets(manifest, pipeline)
        with control.together(refuse):
            check_names(manifest, pipeline, held)
            part = None if optimizer is None else optimizer_part(manifest, pipeline, optimizer)
            self._check_files(step, manifest)
        is_alike = manifest.processes == control.size
        states = generator_targets(manifest, pipeline, control.rank) if is_alike else {}
        fresh = states if part is None else states | part.targets
        # The model is changed last, when all processes have read everything else.
        with control.together(refuse):
            read_tensors(folder, manifest, fresh)
        with control.together(refuse):
            read_tensors(folder, manifest, model)
        if part is not None:
            part.apply()
        pipeline.random_step = manifest.values["pipeline.random_step"]
        restore_generators({key: state for key, (_, state) in states.items()})
        return Restored(step, manifest.data, bool(states))

    def _check_files(self, step: int, manifest: Manifest) -> None:
        """Check this process's share of the files."""
        names = sorted(manifest.files)[self._control.rank :: self._control.size]
        others = [self._folders.complete(other) for other in self.steps() if other != step]
        check_files(self._folders.complete(step), manifest, names, others)


def _checked_content(
    step: int,
    data: Mapping[str, Any],
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer | None,
    rank: int,
) -> Content:
    """Return what this process has to save, or refuse it if it cannot be saved."""
    if step < 0:
        raise ArgumentError(f"step must be 0 or more (got {step})")
    try:
        json.dumps(data)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"data must be what JSON can hold: {error}") from error
    return collect_content(pipeline, optimizer, rank)

"""Checkpoints of a run: saved by any layout in the background, loaded by any other.

save    agree who writes what, copy it to host memory  |  write, complete, notify all ranks
                      the caller waits                 |           in the background
"""

import json
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from penstock.checkpoint.background import Background
from penstock.checkpoint.content import Content, collect_content
from penstock.checkpoint.loading.loader import Restore
from penstock.checkpoint.refusing import refuse_save
from penstock.checkpoint.saving.saver import Saver
from penstock.checkpoint.storage.lease import Lease
from penstock.checkpoint.storage.steps import open_steps
from penstock.errors import ArgumentError, CheckpointError
from penstock.ranks.abortable_sockets import Connections
from penstock.ranks.control import Control, open_control
from penstock.ranks.faults import LinkLostError
from penstock.training.pipeline import Pipeline

__all__ = ["Checkpoints", "Restored"]


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

    `folder` may be a URL that fsspec knows, such as `s3://bucket/run`. All processes that train
    together make one and call the same methods: those of `group`, or all processes. The `keep`
    newest complete steps are kept. If a rank of the pipeline is lost during a call, the others
    raise `PeerLostError`, as in a step.

    One job at a time saves to a folder: from its first `save` on it holds a lease, which it renews
    while it lives, and gives back when the `with` block or the process ends. The lease of a job
    that was killed ends after `lease_seconds`, or at once on the same machine.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int = 2,
        group: dist.ProcessGroup | None = None,
        lease_seconds: float = 30.0,
    ) -> None:
        if keep < 1:
            raise ArgumentError(f"keep must be at least 1 (got {keep}); use 1 or more")
        if not lease_seconds > 0:
            raise ArgumentError(f"lease_seconds must be more than 0 (got {lease_seconds})")
        self._folder, self._steps = folder, open_steps(folder)
        self._group, self._keep = group, keep
        self._connections = Connections()
        self._lease = Lease(self._steps.storage, lease_seconds)
        self._save: _Save | None = None
        # Also when this is dropped, or the program ends.
        self._release = weakref.finalize(self, self._lease.release)

    @cached_property
    def _control(self) -> Control:
        """The connections of all processes, opened in the first call that their guard watches."""
        return open_control(self._group, self._connections)

    @cached_property
    def _saver(self) -> Saver:
        return Saver(self._control, self._steps, self._lease, self._keep)

    def __repr__(self) -> str:
        return f"<Checkpoints in {self._folder}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.finish()
            elif self._save is not None:
                self._save.writing.end()
                self._connections.abort()
        finally:
            self._release()

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
        return self._steps.complete()

    def load(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
        *,
        allow_other_optimizer: bool = False,
    ) -> Restored | None:
        """Load a step, or the newest one; return None if there is none.

        Every process loads its own part, whatever layout has saved it. Everything is read and
        checked on all processes before anything is changed on one of them. An optimizer of another
        class than the one that was saved is refused, unless `allow_other_optimizer`.
        """
        with self._guarded(pipeline):
            self._wait()
            with self._control.together(refuse_save(self._control)):
                found = self._steps.complete()
            steps = self._control.broadcast(found)
            if step is None and not steps:
                return None
            chosen = steps[-1] if step is None else step
            restore = Restore(
                self._control,
                self._steps,
                pipeline,
                optimizer,
                is_other_allowed=allow_other_optimizer,
            )
            try:
                manifest, has_generator_states = restore.run(chosen)
            except CheckpointError as error:
                others = [other for other in steps if other != chosen]
                hint = f"complete steps besides this one: {others}" if others else "no other step"
                raise CheckpointError(f"cannot load step {chosen}: {error}; {hint}") from error
            return Restored(chosen, manifest.data, has_generator_states)

    @contextmanager
    def _guarded(self, pipeline: Pipeline) -> Iterator[None]:
        """Guard something that all processes do together, so that no rank waits for a lost one."""
        try:
            with pipeline.guarded(self._abort, group=self._processes()), self._naming():
                yield
        except LinkLostError as error:
            # A pipeline in one process has no guard, so that nobody knows which rank is lost.
            raise CheckpointError(str(error)) from error

    def _processes(self) -> dist.ProcessGroup | None:
        """Return the processes that save and load together, if there are several."""
        if self._group is None and dist.is_initialized():
            return dist.group.WORLD
        return self._group

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Say that a lost connection is one of those that save, which may be more processes."""
        try:
            yield
        except LinkLostError as error:
            raise LinkLostError(f"saving and loading need all processes: {error}") from error

    def _abort(self) -> None:
        """End all waits of this process for another, and for the thread that may wait for one."""
        self._connections.abort()
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
        control, saver = self._control, self._saver
        with control.together(refuse_save(control)):
            content = _checked_content(step, data, pipeline, optimizer, control.rank)
        draft = saver.draft(step, content, data)
        writing = Background(lambda: saver.write(draft), f"save step {step}", control.abort)
        self._save = _Save(writing, pipeline)


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
        json.dumps(data, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"data must be what JSON can hold: {error}") from error
    return collect_content(pipeline, optimizer, rank)

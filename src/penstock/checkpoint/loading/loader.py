"""A restore that changes everything or nothing, on all processes.

check      manifest, names, shapes, optimizer, files     every process, then all agree
prepare    all is in memory beside the model; generators and optimizer try their state; all agree
commit     copy what is ready to the model: nothing is left that could fail
"""

import torch

from penstock.checkpoint.content import restore_generators
from penstock.checkpoint.loading.files import check_files
from penstock.checkpoint.loading.optimizer_state import OptimizerPart, optimizer_part
from penstock.checkpoint.loading.reading import Reading, Target
from penstock.checkpoint.loading.targets import check_names, generator_targets, model_targets
from penstock.checkpoint.manifest import Manifest
from penstock.checkpoint.manifest_reading import read_manifest
from penstock.checkpoint.parts import local_part
from penstock.checkpoint.refusing import refuse_save
from penstock.checkpoint.storage.interface import Storage
from penstock.checkpoint.storage.steps import Steps
from penstock.errors import CheckpointError
from penstock.ranks.control import Control
from penstock.torch_private import foreach_copy_
from penstock.training.pipeline import Pipeline

__all__ = ["Restore"]


class Restore:
    """One step on its way into a pipeline and its optimizer."""

    def __init__(
        self,
        control: Control,
        steps: Steps,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        *,
        is_other_allowed: bool,
    ) -> None:
        self._control, self._steps = control, steps
        self._pipeline, self._optimizer = pipeline, optimizer
        self._is_other_allowed = is_other_allowed
        self._model: list[tuple[torch.Tensor, Target]] = []
        self._part: OptimizerPart | None = None
        self._generators: dict[str, Target] = {}
        self._reading: Reading | None = None

    def run(self, step: int) -> tuple[Manifest, bool]:
        """Restore a step; return its manifest, and whether it had torch's generators."""
        refuse = refuse_save(self._control)
        with self._control.together(refuse):
            manifest = read_manifest(self._steps.storage, step)
            names = list(self._pipeline.state_dict())
        held = self._control.gather(names)
        with self._control.together(refuse):
            self._model = model_targets(manifest, self._pipeline)
        with self._control.together(refuse):
            check_names(manifest, self._pipeline, held)
            self._check(manifest)
        is_agreed = False
        try:
            with self._control.together(refuse):
                self._prepare(self._steps.storage)
            is_agreed = True
            self._commit(manifest)
        except BaseException:
            # Whatever interrupts, such as Ctrl-C, comes before the agreement or after it.
            if is_agreed:
                self._commit(manifest)
            elif self._part is not None:
                self._part.undo()
            raise
        return manifest, bool(self._generators)

    def _check(self, manifest: Manifest) -> None:
        """Check this process's share of the files, and what it holds itself.

        Long pieces of that share are read into memory on the way.
        """
        control, steps = self._control, self._steps
        if self._optimizer is not None:
            self._part = optimizer_part(
                manifest, self._pipeline, self._optimizer, is_other_allowed=self._is_other_allowed
            )
        if manifest.processes == control.size:
            self._generators = generator_targets(manifest, self._pipeline, control.rank)
        names = sorted(manifest.files)[control.rank :: control.size]
        others = [other for other in steps.complete() if other != manifest.step]
        self._reading = Reading(manifest, self._targets())
        check_files(steps.storage, manifest, names, others, self._reading.take_long(set(names)))

    def _targets(self) -> list[Target]:
        """Return memory for all that this process needs."""
        targets = [target for _, target in self._model]
        targets += self._generators.values()
        return targets if self._part is None else targets + self._part.targets

    def _prepare(self, storage: Storage) -> None:
        """Read the rest, and let whatever could refuse it try it."""
        assert self._reading is not None, "the files were checked before"
        self._reading.read(storage)
        self._model = [
            (tensor, Target(t.key, t.box, t.numbers.to(tensor.dtype))) for tensor, t in self._model
        ]
        for device, target in self._generators.items():
            try:
                torch.Generator(device).set_state(target.numbers)
            except RuntimeError as error:
                raise CheckpointError(
                    f"{target.key} must be the state of a generator: {error}"
                ) from error
        if self._part is not None:
            self._part.apply()

    def _commit(self, manifest: Manifest) -> None:
        """Change the model; the optimizer has its state. It may be repeated."""
        pairs = [(local_part(tensor), t.numbers) for tensor, t in self._model if t.box.count]
        # One call cannot write to lazily conjugated or negated tensors, so these come first.
        plain = [(to, numbers) for to, numbers in pairs if not (to.is_conj() or to.is_neg())]
        for to, numbers in pairs:
            if to.is_conj() or to.is_neg():
                to.copy_(numbers)
        if plain:
            # One call, which cannot be interrupted.
            foreach_copy_([to for to, _ in plain], [numbers for _, numbers in plain])
        self._pipeline.random_step = manifest.values["pipeline.random_step"]
        restore_generators({key: target.numbers for key, target in self._generators.items()})

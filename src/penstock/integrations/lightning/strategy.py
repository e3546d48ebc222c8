"""The strategy for the Trainer of Lightning: the model of a module is trained by a pipeline.

    strategy = PipelineStrategy(PipelineConfig("ZBV", microbatches=8))
    trainer = Trainer(strategy=strategy, devices=4)

Steps, hooks, logging, callbacks, optimizers, schedulers, accumulation, clipping and checkpoints
stay as they were written; the model returns its loss, as those of transformers do.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from penstock.errors import ArgumentError, PipelineError
from penstock.integrations.calls import PipelineCalls, train_by_calls
from penstock.integrations.layout import Layout, PipelineConfig, find_layout
from penstock.integrations.lightning import processes
from penstock.integrations.lightning.clipping import clip_by_pipeline
from penstock.integrations.lightning.files import find_parts, save
from penstock.integrations.lightning.module import (
    find_model,
    refuse_averages,
    rest_of_state,
    watch_metrics,
)
from penstock.integrations.optimizers import Places, load_whole_optimizer
from penstock.integrations.parts import load_parts
from penstock.integrations.processes import barrier, broadcast
from penstock.loss.reduction import Reduction
from penstock.splitting.output_loss import find_loss
from penstock.step.step_data import LossFunction
from penstock.training.pipeline import Pipeline

__all__ = ["PipelineStrategy"]


class PipelineStrategy(ParallelStrategy):
    """Trains the model of a LightningModule in pipelines, and replicas of them.

    `model` names the attribute that has the model; without it, it is the only child that has
    parameters. A model that does not return its loss needs `loss`, a function of its output and
    the `target` that it is called with; `reduction` is as in a `Pipeline`. With `share_outputs`,
    calls while gradients are off return what the model returns, on every rank. Dropout draws by
    `seed`, that of `seed_everything` if it is None.
    """

    def __init__(
        self,
        config: PipelineConfig | None = None,
        *,
        model: str | None = None,
        loss: LossFunction = find_loss,
        reduction: Reduction = "auto",
        share_outputs: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.num_nodes = 1
        self._config = PipelineConfig() if config is None else config
        self._name, self._loss, self._reduction = model, loss, reduction
        self._shares, self._seed = share_outputs, seed
        self._layout = Layout(self._config.ranks or 1, 1, 0, None)
        self._calls: PipelineCalls | None = None
        self._places: Places = []
        self._parts: Path | None = None

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of this process, to save the model or gather its state."""
        return self._built.pipeline

    @property
    def _built(self) -> PipelineCalls:
        if self._calls is None:
            raise PipelineError("there is no pipeline yet; it is built by fit, validate or test")
        return self._calls

    @property
    def layout(self) -> Layout:
        """Which replica this process is in, such as the one that saves the model."""
        return self._layout

    # ---- processes

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return processes.device_of(self.parallel_devices, self.local_rank)

    @property
    def num_processes(self) -> int:
        """The processes of this machine."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Whether replicas need different data, for which Lightning replaces the sampler."""
        return self._layout.replicas > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which replica this process is in, and of how many."""
        return {"num_replicas": self._layout.replicas, "rank": self._layout.replica}

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        if environment is not None and not environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                environment, self.num_processes, self.num_nodes
            )

    def setup_environment(self) -> None:
        """Open the process group, and arrange pipelines and replicas."""
        super().setup_environment()
        if self.cluster_environment is not None:
            processes.join(
                self.cluster_environment,
                nodes=self.num_nodes,
                processes=self.num_processes,
                device=self.root_device,
            )
        self._layout = find_layout(self._config, self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        del name
        barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the value of one process on all of them."""
        return broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over replicas."""
        return processes.all_reduce(tensor, self._layout, group, reduce_op)

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Gather a tensor over replicas."""
        return processes.gather(tensor, self._layout, group, has_graph=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # Lightning's name
        """Return whether all processes, or any of them, have decided so."""
        return processes.vote(decision, self.root_device, is_all=all)

    # ---- the model and its optimizer

    def setup(self, trainer: pl.Trainer) -> None:
        """Split the model, move the stages of this process, and make the optimizer."""
        module = self._module
        self._require_supported(trainer, module)
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        self._build(module)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting:
            clip_by_pipeline(self.precision_plugin, module, self.pipeline)
        barrier()

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _build(self, module: pl.LightningModule) -> None:
        model = find_model(module, self._name)[1]
        if self._calls is not None and self._calls.model is model:
            return
        if self._calls is not None:
            self._calls.remove()
        self._calls = train_by_calls(
            model,
            self._config,
            self._layout,
            self.root_device,
            loss=self._loss,
            reduction=self._reduction,
            seed=self._seed,
            share_outputs=self._shares,
        )
        for child in module.children():
            if child is not model:
                child.to(self.root_device)
        _update_properties(module, device=self.root_device)
        watch_metrics(module, model, self._layout)

    def _require_supported(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            raise ArgumentError(
                f"{type(module).__name__} optimizes manually, which a PipelineStrategy would not "
                "see; set automatic_optimization to True"
            )
        if trainer.state.fn == TrainerFn.FITTING and trainer.checkpoint_callbacks:
            refuse_averages(trainer, self._layout)
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ArgumentError(
                "a PipelineStrategy does not scale gradients (got precision='16-mixed'); use "
                "'bf16-mixed' or '32-true'"
            )
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ArgumentError(
                "a PipelineStrategy writes its own folders (got the plugin "
                f"{type(self.checkpoint_io).__name__}); leave it out"
            )
        if self._layer_sync is not None:
            raise ArgumentError(
                "batch norm is not synchronized in a pipeline; leave out sync_batchnorm"
            )
        if is_overridden("backward", module):
            raise ArgumentError(
                f"{type(module).__name__} has a backward of its own; the pipeline has one, so "
                "remove it"
            )

    def model_to_device(self) -> None:
        """Leave the model where it is: every process moves its own stages only."""

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the module's optimizer, and leave it the parameters of this process."""
        super().setup_optimizers(trainer)
        calls = self._built
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ArgumentError(
                    "LBFGS computes with all parameters at once, of which each process has a "
                    "part; use another optimizer"
                )
            self._places = calls.keep_own_parameters(optimizer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step."""
        module = self._module
        trainer = module.trainer
        is_first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        if is_first and not is_overridden("optimizer_zero_grad", module):
            # Lightning does it after this step, which would have to keep them meanwhile.
            self.pipeline.zero_grad()
        return super().training_step(*args, **kwargs)

    # ---- files

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are loaded once the pipeline is built."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the module without the model, which every process saves in part."""
        return rest_of_state(self._module, *find_model(self._module, self._name))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return nothing, because every process saves its own part."""
        del optimizer
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a folder: what Lightning has, and the parts of all processes."""
        refuse_averages(self._module.trainer, self._layout)
        has_optimizer = "optimizer_states" in checkpoint
        save(
            Path(filepath),
            int(checkpoint["global_step"]),
            self.pipeline,
            self.optimizers[0] if has_optimizer and self.optimizers else None,
            lambda path: self.checkpoint_io.save_checkpoint(
                checkpoint, path, storage_options=storage_options
            ),
            is_first=self.is_global_zero,
        )

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return what Lightning has saved; files of one process are read, too."""
        found = find_parts(Path(checkpoint_path))
        self._parts = None if found is None else found[0]
        path = checkpoint_path if found is None else found[1]
        return super().load_checkpoint(path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this process's part of the model, and of the optimizer that was saved with it."""
        name, model = find_model(self._module, self._name)
        state, prefix = checkpoint["state_dict"], f"{name}."
        rest = rest_of_state(self._module, name, model)
        self._module.load_state_dict(
            {key: value for key, value in state.items() if key in rest}, strict=False
        )
        if self._parts is None:
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            self.pipeline.load_state_dict(own, strict=strict)
            return
        has_optimizer = bool(self.optimizers) and "optimizer_states" in checkpoint
        load_parts(self._parts, self.pipeline, self.optimizers[0] if has_optimizer else None)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this process's part of an optimizer that one process has saved."""
        if self._parts is None:
            for optimizer, state in zip(
                self.optimizers, checkpoint["optimizer_states"], strict=True
            ):
                load_whole_optimizer(optimizer, self._places, state)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a folder."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    def teardown(self) -> None:
        """Leave the model where it is, so that it can be saved, and trained further."""
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()

"""The Trainer of transformers, with a pipeline in place of a model that every process has.

    trainer = PipelineTrainer(model, args, train_dataset=data, pipeline=PipelineConfig("ZBV"))

Arguments, callbacks, logging, evaluation, schedulers, accumulation, clipping, bf16, checkpoints
and resuming are the Trainer's own.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size, nested_detach

from penstock.integrations.hugging_face.data import gather_over_replicas, loading_by_replica
from penstock.integrations.hugging_face.facade import PipelineModule, refuse_calls
from penstock.integrations.hugging_face.random_states import (
    load_random_states,
    save_random_states,
)
from penstock.integrations.hugging_face.settings import require_supported
from penstock.integrations.layout import PipelineConfig, build_pipeline, find_layout
from penstock.integrations.optimizers import (
    Places,
    keep_own_parameters,
    load_whole_optimizer,
    names_of,
)
from penstock.integrations.outputs import share_outputs
from penstock.integrations.parts import load_parts, save_parts
from penstock.integrations.pretrained import load_pretrained, save_pretrained
from penstock.training.pipeline import Pipeline
from penstock.training.step_result import StepResult

__all__ = ["PipelineTrainer"]

_STATE = "pipeline"
_SCHEDULER = "scheduler.pt"
_OPTIMIZER = "optimizer.pt"


class PipelineTrainer(Trainer):
    """Trains a model in pipelines, each of several processes, with replicas of them.

    It takes what `Trainer` takes, and `pipeline`. The batch of a process is that of a pipeline.
    """

    def __init__(self, *args: Any, pipeline: PipelineConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_supported(self)
        self._config = PipelineConfig() if pipeline is None else pipeline
        self._layout = find_layout(self._config, self.args.device)
        self._wrapped: PipelineModule | None = None
        self._whole: nn.Module | None = None
        self._names: dict[int, str] = {}
        self._kept: torch.optim.Optimizer | None = None
        self._places: Places = []

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of this process, which is built when it is first needed."""
        return self._module.pipeline

    @property
    def _module(self) -> PipelineModule:
        whole: Any = self.model
        # With model_init, every train() has a new model.
        if self._wrapped is None or self._whole is not whole:
            if self._wrapped is not None:
                self._wrapped.pipeline.close()
            self._whole, self._names = whole, names_of(whole)
            device, seed = self.args.device, self.args.seed
            pipeline = build_pipeline(whole, self._config, self._layout, device, "auto", seed)
            self._wrapped = PipelineModule(pipeline, getattr(whole, "config", None))
            if self._layout.mesh is not None and self._layout.ranks > 1:
                refuse_calls(whole)
        return self._wrapped

    # ---- the model and its optimizer

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: every process moves its own stages only."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        del model, dataloader
        module = self._module
        if training:
            self._keep_own_parameters()
        return module

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer, once the parameters of this process are on its device."""
        assert self._module is not None
        made: torch.optim.Optimizer = super().create_optimizer(model)
        return made

    def _keep_own_parameters(self) -> None:
        """Leave the optimizer, whoever has made it, the parameters of this process."""
        made = self._raw_optimizer()
        if made is None or made is self._kept:
            return
        whole: Any = self.model
        names = {**self._names, **names_of(whole)}
        self._places = keep_own_parameters(made, self.pipeline, names)
        self._kept = made

    # ---- data

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with loading_by_replica(self.accelerator, self._layout):
            return super()._get_dataloader(*args, **kwargs)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the rows of one optimizer step: those of every replica."""
        rows: int = self._train_batch_size * args.gradient_accumulation_steps
        return rows * self._layout.replicas

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        found = super()._get_num_items_in_batch(batch_samples, device)
        is_sum = self.args.average_tokens_across_devices and self.args.world_size > 1
        # All ranks of a pipeline have counted the same rows.
        return found // self._layout.ranks if found is not None and is_sum else found

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        # Every rank of a pipeline has counted the same rows.
        found = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + found // self._copies

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return this process's share of the operations of a batch."""
        whole: int = super().floating_point_ops(inputs)
        return whole // self._copies

    @property
    def _copies(self) -> int:
        """The processes that have the same rows."""
        return 1 if self._layout.mesh is None else self._layout.ranks

    # ---- steps

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run a batch forward and backward, and return its part of the loss of the step."""
        model.train()
        made: Any = self.optimizer
        if callable(getattr(made, "train", None)):
            made.train()
        given = self._arguments(self._prepare_inputs(inputs), num_items_in_batch)
        scale = self._loss_scale(num_items_in_batch)
        with self.accelerator.autocast():
            result = self.pipeline.step(**given, gradient_scale=scale)
        return self._loss_of(result, scale)

    def _arguments(self, inputs: Mapping[str, Any], num_items: Any) -> dict[str, Any]:
        counted = self.model_accepts_loss_kwargs and num_items is not None
        return {**inputs, **({"num_items_in_batch": int(num_items)} if counted else {})}

    def _loss_scale(self, num_items: Any) -> float:
        """Return what the loss of a batch is multiplied by, as part of a step over replicas."""
        if not self.model_accepts_loss_kwargs or num_items is None:
            return 1 / self.current_gradient_accumulation_steps
        # Gradients are averaged over replicas, and the number of items is that of all of them.
        is_sum = self.args.average_tokens_across_devices
        return float(self._layout.replicas) if is_sum else 1.0

    def _loss_of(self, result: StepResult, scale: float) -> torch.Tensor:
        return torch.tensor(result.loss, device=self.args.device) * scale

    def _clip_grad_norm(self, model: nn.Module) -> float:
        del model
        return self.pipeline.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        del model
        return self.pipeline.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # ---- evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; every replica runs its part of the data."""
        self.gather_function = partial(gather_over_replicas, self.accelerator, self._layout)
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Run a batch forward; every process gets the loss, and the outputs if they are used."""
        inputs = self._prepare_inputs(inputs)
        is_labelled = bool(self.label_names) and all(
            inputs.get(name) is not None for name in self.label_names
        )
        num_items = self._get_num_items_in_batch([inputs], self.args.device)
        model.eval()
        with self.accelerator.autocast():
            result = self.pipeline.evaluate(
                **self._arguments(inputs, num_items),
                microbatches=min(self._config.microbatches, find_batch_size(inputs)),
                return_outputs=not prediction_loss_only,
            )
        counted = self.model_accepts_loss_kwargs and num_items is not None
        scale = self._loss_scale(num_items) if counted else 1.0
        loss = self._loss_of(result, scale) if is_labelled else None
        if prediction_loss_only:
            return loss, None, None
        labels = nested_detach(tuple(inputs.get(name) for name in self.label_names))
        logits = share_outputs(
            self.pipeline,
            self._layout,
            lambda: _logits(result.outputs, [*self._ignored(ignore_keys), "loss"]),
        )
        return loss, logits, (labels[0] if len(labels) == 1 else labels) if is_labelled else None

    def _ignored(self, ignore_keys: list[str] | None) -> list[str]:
        if ignore_keys is not None:
            return ignore_keys
        config = getattr(self.model, "config", None)
        return list(getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]))

    # ---- files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model; every process writes its own part of it."""
        folder = Path(str(output_dir or self.args.output_dir))
        if hasattr(self.model, "peft_config"):
            state = self.pipeline.full_state_dict()
            if self.args.should_save:
                self._save(str(folder), state_dict=state)
            self.pipeline.exchange(None)
            return
        is_writer = self._layout.replica == 0
        save_pretrained(self.pipeline, folder, model=self.model, is_writer=is_writer)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        parts, step = Path(output_dir) / _STATE, self.state.global_step
        is_first = self.is_world_process_zero()
        save_parts(parts, step, self.pipeline, self._raw_optimizer(), is_first=is_first)
        if self.args.should_save:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _save_rng_state(self, output_dir: str) -> None:
        save_random_states(Path(output_dir), self._layout)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_random_states(Path(checkpoint), self._layout)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Leave the model as it is until the pipeline is there, which loads its own part."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._load(Path(checkpoint), self._raw_optimizer())
        scheduler: Any = self.lr_scheduler
        saved = Path(checkpoint) / _SCHEDULER
        if saved.is_file():
            scheduler.load_state_dict(torch.load(saved, weights_only=True))

    def _load_best_model(self) -> None:
        self._load(Path(str(self.state.best_model_checkpoint)), None)

    def _load(self, folder: Path, optimizer: torch.optim.Optimizer | None) -> None:
        if (folder / _STATE).is_dir():
            load_parts(folder / _STATE, self.pipeline, optimizer)
            return
        if hasattr(self.model, "peft_config"):
            whole: Any = self.model
            whole.load_adapter(folder, whole.active_adapters[0], is_trainable=True)
        else:
            load_pretrained(self.pipeline, folder)
        saved = folder / _OPTIMIZER
        if optimizer is not None and saved.is_file():
            # One process of the library has saved it.
            load_whole_optimizer(optimizer, self._places, torch.load(saved, weights_only=True))

    def _raw_optimizer(self) -> torch.optim.Optimizer | None:
        made: Any = self.optimizer
        found: torch.optim.Optimizer | None = getattr(made, "optimizer", made)
        return found


def _logits(outputs: Any, ignored: list[str]) -> Any:
    """Return the outputs that metrics are computed from, on the rank that has them."""
    if outputs is None:
        return None
    if isinstance(outputs, Mapping):
        kept = tuple(value for key, value in outputs.items() if key not in ignored)
    else:
        kept = tuple(outputs[1:])
    return kept[0] if len(kept) == 1 else kept

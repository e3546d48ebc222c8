"""The Accelerator of Hugging Face, for loops of one's own, with a model that a pipeline trains.

    accelerator = PipelineAccelerator(pipeline=PipelineConfig("ZBV"))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The loop is unchanged: accumulation, clipping, bf16, gathering, trackers, files of its state.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from penstock.errors import ArgumentError, PipelineError
from penstock.integrations.calls import PipelineCalls, train_by_calls
from penstock.integrations.hugging_face.data import gather_rows, load_by_replica
from penstock.integrations.layout import PipelineConfig, find_layout
from penstock.integrations.parts import load_parts, save_parts
from penstock.integrations.pretrained import save_pretrained
from penstock.integrations.processes import share_random_states
from penstock.loss.reduction import Reduction
from penstock.splitting.output_loss import find_loss
from penstock.step.step_data import LossFunction
from penstock.training.pipeline import Pipeline

__all__ = ["PipelineAccelerator"]

_STATE = "pipeline"
_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class PipelineAccelerator(Accelerator):  # type: ignore[misc]  # untyped upstream
    """Trains one model in pipelines, and replicas of them.

    It takes what `Accelerator` takes, and `pipeline`. A model that does not return its loss needs
    `loss`, a function of its output and the `target` that it is called with; `reduction` is as in
    a `Pipeline`. With `share_outputs`, calls while gradients are off return what the model
    returns, on every rank.
    """

    def __init__(
        self,
        *args: Any,
        pipeline: PipelineConfig | None = None,
        loss: LossFunction = find_loss,
        reduction: Reduction = "auto",
        share_outputs: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.distributed_type not in _SUPPORTED or self.mixed_precision in ("fp16", "fp8"):
            raise ArgumentError(
                "a PipelineAccelerator takes neither DeepSpeed, FSDP or Megatron nor fp16 or fp8 "
                f"(got {self.distributed_type.value} and {self.mixed_precision}); use bf16 or no "
                "mixed precision"
            )
        self._config = PipelineConfig() if pipeline is None else pipeline
        self._loss, self._reduction = loss, reduction
        self._shares, self._seed = share_outputs, seed
        self._layout = find_layout(self._config, self.device)
        self._calls: PipelineCalls | None = None
        self._folder = Path()
        self.register_save_state_pre_hook(self._note_save)
        self.register_load_state_pre_hook(self._note_load)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of this process, to do with it what the library does not."""
        return self._prepared.pipeline

    @property
    def _prepared(self) -> PipelineCalls:
        if self._calls is None:
            raise PipelineError("there is no pipeline yet; prepare the model first")
        return self._calls

    # ---- what is prepared

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare the model first, and what was given with it."""
        for one in args:
            if isinstance(one, nn.Module):
                self.prepare_model(one)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Split the model; its calls are run by the pipeline from now on."""
        del device_placement, evaluation_mode
        if self._calls is None:
            self._calls = train_by_calls(
                model,
                self._config,
                self._layout,
                self.device,
                loss=self._loss,
                reduction=self._reduction,
                seed=self._seed,
                share_outputs=self._shares,
                around=self.autocast,
            )
            self._models.append(model)
        elif model is not self._calls.model:
            raise ArgumentError(
                "a PipelineAccelerator prepares one model (got another one); make it one module"
            )
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """Leave the optimizer the parameters of this process."""
        if not self._optimizers:
            self._prepared.keep_own_parameters(optimizer)
        elif not any(optimizer in (one, one.optimizer) for one in self._optimizers):
            raise ArgumentError("a PipelineAccelerator prepares one optimizer (got another one)")
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Give all ranks of a pipeline the same rows, and replicas different ones."""
        del device_placement, slice_fn_for_dispatch
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        return load_by_replica(self, self._layout, data_loader)

    # ---- gradients and values

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip by the norm of the whole model, whichever of its parameters are given."""
        del parameters
        return torch.tensor(self.pipeline.clip_grad_norm_(float(max_norm), float(norm_type)))

    def gather(self, tensor: Any) -> Any:
        """Return the rows of all replicas."""
        if isinstance(tensor, list | tuple):
            return type(tensor)(self.gather(part) for part in tensor)
        if isinstance(tensor, dict):
            return {key: self.gather(value) for key, value in tensor.items()}
        row = tensor if tensor.dim() else tensor[None]
        return gather_rows(self, self._layout, row)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of all replicas, without those that fill up the last batch."""
        if use_gather_object:
            raise ArgumentError(
                "objects are not gathered over replicas (got use_gather_object=True); give tensors"
            )
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over replicas, because the ranks of a pipeline have one value together."""
        share = scale / self._layout.ranks if reduction == "sum" else scale
        is_alone = self._layout.mesh is None
        return super().reduce(tensor, reduction=reduction, scale=scale if is_alone else share)

    # ---- files

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole model's state on the first process of each pipeline."""
        del model, unwrap
        return self.pipeline.full_state_dict()

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: Any = None, **_: Any
    ) -> None:
        """Save the whole model as safetensors; every process writes its own part of it."""
        del model, max_shard_size
        is_writer = self._layout.replica == 0
        save_pretrained(
            self.pipeline, save_directory, model=self._prepared.model, is_writer=is_writer
        )

    def save_state(self, output_dir: Any = None, **kwargs: Any) -> Any:
        """Save everything; every process saves its own part of the model and the optimizer."""
        optimizer = self._take()
        try:
            place = super().save_state(output_dir, **kwargs)
        finally:
            self._give_back(optimizer)
        parts = self._folder / _STATE
        step, is_first = self.pipeline.random_step, self.is_main_process
        save_parts(parts, step, self.pipeline, _raw(optimizer), is_first=is_first)
        return place

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load everything, each process its own part, whatever layout has saved it."""
        optimizer = self._take()
        try:
            super().load_state(input_dir, *args, **kwargs)
        finally:
            self._give_back(optimizer)
        load_parts(self._folder / _STATE, self.pipeline, _raw(optimizer))
        # A process that another layout did not have has found no state of its own.
        share_random_states(self._layout)

    def _take(self) -> Any:
        """Keep the library from saving and loading the model and its optimizer as if whole."""
        found = (list(self._models), list(self._optimizers))
        self._models.clear()
        self._optimizers.clear()
        return found

    def _give_back(self, found: Any) -> None:
        self._models.extend(found[0])
        self._optimizers.extend(found[1])

    def _note_save(self, models: Any, weights: Any, folder: str) -> None:
        del models, weights
        self._folder = Path(folder)

    def _note_load(self, models: Any, folder: str) -> None:
        del models
        self._folder = Path(folder)


def _raw(found: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer inside of what was prepared, if there is one."""
    optimizers = found[1]
    return optimizers[0].optimizer if optimizers else None

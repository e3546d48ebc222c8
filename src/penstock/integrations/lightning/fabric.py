"""The strategy for Fabric: a loop of one's own, with a model that is trained by a pipeline.

fabric = L.Fabric(strategy=PipelineFabricStrategy(PipelineConfig("ZBV")), devices=4)
model, optimizer = fabric.setup(model, optimizer)
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import nn

from penstock.errors import ArgumentError, PipelineError
from penstock.integrations.calls import PipelineCalls, train_by_calls
from penstock.integrations.layout import Layout, PipelineConfig, find_layout
from penstock.integrations.lightning import processes
from penstock.integrations.lightning.files import find_parts, save
from penstock.integrations.parts import load_parts
from penstock.integrations.processes import barrier, broadcast
from penstock.loss.reduction import Reduction
from penstock.splitting.output_loss import find_loss
from penstock.step.step_data import LossFunction
from penstock.training.pipeline import Pipeline

__all__ = ["PipelineFabricStrategy"]


class PipelineFabricStrategy(ParallelStrategy):
    """Trains one model in pipelines, and replicas of them; its arguments are as for the Trainer.

    `fabric.setup` takes the model together with its optimizer. Clip by `fabric.clip_gradients`,
    because each process has a part of the gradients.
    """

    def __init__(
        self,
        config: PipelineConfig | None = None,
        *,
        loss: LossFunction = find_loss,
        reduction: Reduction = "auto",
        share_outputs: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.num_nodes = 1
        self._config = PipelineConfig() if config is None else config
        self._loss, self._reduction = loss, reduction
        self._shares, self._seed = share_outputs, seed
        self._layout = Layout(self._config.ranks or 1, 1, 0, None)
        self._calls: PipelineCalls | None = None

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of this process, for what Fabric leaves out, such as saving the model."""
        if self._calls is None:
            raise PipelineError("there is no pipeline yet; fabric.setup builds it")
        return self._calls.pipeline

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
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Which replica this process is in, if there are several."""
        if self._layout.replicas == 1:
            return None
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

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over replicas."""
        return processes.all_reduce(tensor, self._layout, group, reduce_op)

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Gather a tensor over replicas."""
        return processes.gather(tensor, self._layout, group, has_graph=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # Fabric's name
        """Return whether all processes, or any of them, have decided so."""
        return processes.vote(decision, self.root_device, is_all=all)

    # ---- the model and its optimizer

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the model where it is: every process moves its own stages only."""

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Split the model, and leave its optimizer the parameters of this process."""
        self.setup_module(module)
        for optimizer in optimizers:
            self.setup_optimizer(optimizer)
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Split the model; its calls are run by the pipeline from now on."""
        if self._calls is not None:
            raise ArgumentError(
                "a PipelineFabricStrategy has one model (got another one); make it one module"
            )
        if getattr(self.precision, "scaler", None) is not None:
            raise ArgumentError(
                "a PipelineFabricStrategy does not scale gradients (got precision='16-mixed'); "
                "use 'bf16-mixed' or '32-true'"
            )
        self._calls = train_by_calls(
            module,
            self._config,
            self._layout,
            self.root_device,
            loss=self._loss,
            reduction=self._reduction,
            seed=self._seed,
            share_outputs=self._shares,
        )
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Leave the optimizer the parameters of this process."""
        if self._calls is None:
            raise PipelineError("a model must be set up before its optimizer; call fabric.setup")
        self._calls.keep_own_parameters(optimizer)
        return optimizer

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip by the norm of the whole model."""
        del module, optimizer
        norm = torch.tensor(self.pipeline.clip_grad_norm_(float("inf"), float(norm_type)))
        if error_if_nonfinite and not norm.isfinite():
            raise PipelineError(
                f"the norm of the gradients must be finite to be clipped (got {float(norm)}); "
                "give error_if_nonfinite=False to clip anyway"
            )
        self.pipeline.clip_grad_norm_(float(max_norm), float(norm_type))
        return norm

    # ---- files

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002  # Fabric's name
    ) -> None:
        """Save a folder: every process its own part of the model and its optimizer."""
        if storage_options is not None or filter is not None:
            raise ArgumentError(
                "a pipeline saves the whole model to a folder (got a filter or storage options); "
                "leave them out"
            )
        _, optimizer, rest = self._sort(state)
        number = self.pipeline.random_step
        kept = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in rest.items()
        }
        folder, write = Path(path), partial(torch.save, kept)
        save(folder, number, self.pipeline, optimizer, write, is_first=self.is_global_zero)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load this process's part of a folder, and return what was not asked for."""
        found = find_parts(Path(path))
        if found is None or not isinstance(state, Mapping):
            raise ArgumentError(
                f"a pipeline loads a folder that it has saved into the objects of state (got "
                f"{path} and {type(state).__name__}); give fabric.load both"
            )
        parts, file = found
        model, optimizer, rest = self._sort(state)
        stored = torch.load(file, weights_only=bool(weights_only))
        if model is not None:
            load_parts(parts, self.pipeline, optimizer)
        if strict and (missing := sorted(rest.keys() - stored.keys())):
            raise KeyError(f"the checkpoint does not have {missing}; give strict=False")
        for name, value in rest.items():
            if name in stored and hasattr(value, "load_state_dict"):
                value.load_state_dict(stored.pop(name))
            elif name in stored:
                state[name] = stored.pop(name)  # type: ignore[index]  # Fabric passes a dict
        return dict(stored)

    def _sort(
        self, state: Mapping[str, Any]
    ) -> tuple[nn.Module | None, torch.optim.Optimizer | None, dict[str, Any]]:
        """Return the model, its optimizer and the rest of what is saved or loaded."""
        rest = dict(state)
        model: nn.Module | None = None
        optimizer: torch.optim.Optimizer | None = None
        for name, value in state.items():
            if self._calls is not None and value is self._calls.model:
                model = rest.pop(name)
            elif isinstance(value, torch.optim.Optimizer):
                if optimizer is not None:
                    raise ArgumentError("a pipeline has one optimizer; save one")
                optimizer = rest.pop(name)
        if optimizer is not None and model is None:
            raise ArgumentError("an optimizer is saved and loaded with its model; give both")
        return model, optimizer, rest

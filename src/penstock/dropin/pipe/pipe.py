"""A traced and cut model: its stages, the graph that calls them, a run of it in one process."""

import copy
from collections.abc import Callable, Mapping
from enum import Enum
from inspect import Parameter, Signature
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.export import ExportedProgram

from penstock.dropin._backward import stage_backward
from penstock.dropin._utils import PipeInfo
from penstock.dropin.pipe.loss import _find_loss_output
from penstock.dropin.pipe.submod_names import PP_SUBMOD_PREFIX, get_submod_name
from penstock.dropin.pipe.symbolic_backward import _insert_stage_symbolic_backward
from penstock.dropin.pipe.tracing import Traced, trace_and_cut
from penstock.dropin.stage import _PipelineStage, build_stage
from penstock.errors import ArgumentError, ModelError, PipelineError
from penstock.splitting.marks import SplitPoint
from penstock.torch_private import tree_map_only

__all__ = ["DetachExecutor", "MultiUseParamSpec", "MultiUseParameterConfig", "Pipe"]


class MultiUseParameterConfig(Enum):
    """What becomes of a parameter that several stages use."""

    TRANSMIT = 1
    REPLICATE = 2


MultiUseParamSpec: TypeAlias = MultiUseParameterConfig | dict[str, MultiUseParameterConfig]
SplitPolicy: TypeAlias = Callable[[fx.GraphModule], fx.GraphModule]


class DetachExecutor(fx.Interpreter):
    """Runs the graph of a pipe with gradients cut between stages, as they are on ranks.

    What a stage is given are leaves; the backwards in the graph, if there are any, get these.
    """

    def __init__(self, module: nn.Module, garbage_collect_values: bool = True) -> None:
        super().__init__(module, garbage_collect_values)
        self._leaves: dict[torch.Tensor, torch.Tensor] = {}

    def run(self, *args: Any, **settings: Any) -> Any:
        """Run the graph on these inputs."""
        self._leaves = {}
        return super().run(*args, **settings)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a stage on leaves."""
        args, kwargs = tree_map_only(torch.Tensor, self._cut, (args, kwargs))
        return super().call_module(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Take a part of an output, or run a backward down to the leaves of its stage."""
        if target is stage_backward:
            values = kwargs["input_values"]
            kwargs = {**kwargs, "input_values": [self._leaves.get(v, v) for v in values]}
        return super().call_function(target, args, kwargs)

    def _cut(self, value: torch.Tensor) -> torch.Tensor:
        if not value.requires_grad:
            return value
        return self._leaves.setdefault(value, value.detach().requires_grad_())


class Pipe(nn.Module):
    """A model cut into stages; called, it runs them all and returns the leaves of the output."""

    def __init__(
        self,
        split_gm: fx.GraphModule,
        num_stages: int,
        has_loss_and_backward: bool,
        loss_spec: Any,
    ) -> None:
        super().__init__()
        self.split_gm = split_gm
        self.num_stages = num_stages
        self.has_loss_and_backward = has_loss_and_backward
        self.loss_spec = loss_spec
        self.replicated_params = _give_each_its_own(split_gm)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in this process, and their backwards if the loss is known."""
        names = [str(node.target) for node in self.split_gm.graph.find_nodes(op="placeholder")]
        signature = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
        values = signature.bind(*args, **kwargs).arguments.values()
        return DetachExecutor(self.split_gm).run(*values)

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """Return the module of a stage."""
        if not 0 <= stage_idx < self.num_stages:
            raise ArgumentError(f"stage {stage_idx} is out of range for {self.num_stages} stages")
        return self.split_gm.get_submodule(get_submod_name(stage_idx))

    @staticmethod
    def _number_and_count_forward_stages(gm: fx.GraphModule) -> int:
        """Note for each call of a stage in a graph which one it is, and count them."""
        count = 0
        for node in gm.graph.find_nodes(op="call_module"):
            prefix, _, number = str(node.target).rpartition("_")
            if prefix == PP_SUBMOD_PREFIX:
                node.meta["stage_idx"] = int(number)
                count += 1
        return count

    @staticmethod
    def _trace_with_export(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
    ) -> ExportedProgram:
        """Return a model as `torch.export` sees it."""
        try:
            return torch.export.export(mod, example_args, example_kwargs)
        except Exception as error:
            raise PipelineError(f"torch.export cannot trace the model: {error}") from error

    @staticmethod
    def _from_traced(
        mod: nn.Module,
        exported_program: ExportedProgram,
        multi_use_param_spec: MultiUseParamSpec | None = None,
        output_loss_value_spec: Any = None,
        split_policy: SplitPolicy | None = None,
    ) -> "Pipe":
        """Cut a model that was exported; it is traced again, with the same example."""
        if exported_program.example_inputs is None:
            raise ModelError("the exported program does not know what it was traced with")
        args, kwargs = exported_program.example_inputs
        return Pipe.from_tracing(
            mod,
            args,
            kwargs,
            split_policy,
            multi_use_param_spec=multi_use_param_spec,
            output_loss_value_spec=output_loss_value_spec,
        )

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: SplitPolicy | None = None,
        *,
        split_spec: Mapping[str, SplitPoint] | None = None,
        multi_use_param_spec: MultiUseParamSpec | None = None,
        output_loss_value_spec: Any = None,
    ) -> "Pipe":
        """Trace a model with an example, and cut it at its marks.

        With a spec of where the loss is in the output, the pipe runs its own backward when it is
        called.
        """
        traced = trace_and_cut(
            mod,
            example_args,
            example_kwargs or {},
            at=split_spec or {},
            policy=split_policy,
            transmits=_is_transmitted(multi_use_param_spec),
        )
        stages = {get_submod_name(i): stage for i, stage in enumerate(traced.form.stages)}
        if output_loss_value_spec is not None:
            output_loss_value_spec = _add_backward(mod, traced, output_loss_value_spec)
        split_gm = fx.GraphModule(stages, traced.form.graph)
        has_loss = output_loss_value_spec is not None
        count = Pipe._number_and_count_forward_stages(split_gm)
        return Pipe(split_gm, count, has_loss, output_loss_value_spec)

    def print_readable(self) -> None:
        """Print the graph that calls the stages, then that of each stage."""
        self.split_gm.print_readable()
        for index in range(self.num_stages):
            stage: Any = self.get_stage_module(index)
            stage.print_readable()

    def __str__(self) -> str:
        return str(self.split_gm)

    def __repr__(self) -> str:
        return repr(self.split_gm)

    def info(self) -> PipeInfo:
        """Return what a stage has to know of the pipe, without other stages' modules."""
        graph = copy.deepcopy(self.split_gm.graph)
        return PipeInfo(graph, self.num_stages, self.has_loss_and_backward)

    def build_stage(
        self, stage_index: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> _PipelineStage:
        """Return a stage on this rank, on its device and ready for a schedule."""
        module = self.get_stage_module(stage_index)
        return build_stage(module, stage_index, self.info(), device, group)


def _is_transmitted(spec: MultiUseParamSpec | None) -> bool:
    wishes = set(spec.values()) if isinstance(spec, dict) else {spec}
    if len(wishes) > 1:
        raise ArgumentError(
            "parameters that several stages use are all replicated, or all transmitted; give one "
            "MultiUseParameterConfig for all of them"
        )
    return wishes == {MultiUseParameterConfig.TRANSMIT}


def _add_backward(mod: nn.Module, traced: Traced, spec: Any) -> Any:
    """Write the backwards into the graph, and return the spec of the loss in its output."""
    graph = traced.form.graph
    is_tree = isinstance(spec, tuple | list | dict)
    leaves = tuple(traced.output_spec.flatten_up_to(spec)) if is_tree else spec
    loss, output, found = _find_loss_output(mod, graph, leaves)
    if loss is None:
        raise PipelineError(f"the loss spec {spec!r} names no output; set one of it to True")
    _insert_stage_symbolic_backward(graph, loss, output)
    return spec if is_tree else found


def _give_each_its_own(split_gm: fx.GraphModule) -> list[dict[str, str]]:
    """Copy parameters that several stages hold, and say which they are, by stage and name.

    On ranks of their own they would be copies too: each gets the gradient of its own uses.
    """
    places: dict[nn.Parameter, dict[str, list[str]]] = {}
    for stage, module in split_gm.named_children():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            places.setdefault(parameter, {}).setdefault(stage, []).append(name)
    shared = {parameter: stages for parameter, stages in places.items() if len(stages) > 1}
    for parameter, stages in shared.items():
        for stage, names in stages.items():
            own = copy.deepcopy(parameter)
            for name in names:
                path, _, attribute = name.rpartition(".")
                setattr(split_gm.get_submodule(stage).get_submodule(path), attribute, own)
    return [{stage: names[0] for stage, names in stages.items()} for stages in shared.values()]

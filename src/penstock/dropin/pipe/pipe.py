"""Models that are traced and cut: a graph that calls the stages, and a module for each of them.

Tracing and cutting are `splitting.by_tracing`; `cut_form` gives the result torch's form.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.export import ExportedProgram

from penstock.dropin.pipe.cut_form import give_form, signature_of
from penstock.dropin.pipe.graphs import PP_SUBMOD_PREFIX, get_submod_name
from penstock.dropin.pipe.loss import (
    DetachExecutor,
    _find_loss_output,
    _insert_stage_symbolic_backward,
)
from penstock.dropin.stages.kinds import PipeInfo, _PipelineStage, build_stage
from penstock.errors import ArgumentError, ModelError, PipelineError
from penstock.splitting.by_tracing.capture.capture import Capture, capture
from penstock.splitting.by_tracing.cut.assignment import is_scalar
from penstock.splitting.by_tracing.cut.cut import Cut, cut_graph
from penstock.splitting.by_tracing.stage.graph_stage import check_names
from penstock.splitting.marks import SplitPoint, find_module, is_mark, mark_modules

__all__ = ["MultiUseParamSpec", "MultiUseParameterConfig", "Pipe", "SplitPoint", "pipeline"]


class MultiUseParameterConfig(Enum):
    """What becomes of a parameter that several stages use."""

    TRANSMIT = 1
    REPLICATE = 2


MultiUseParamSpec: TypeAlias = MultiUseParameterConfig | dict[str, MultiUseParameterConfig]
SplitPolicy: TypeAlias = Callable[[fx.GraphModule], fx.GraphModule]


class _TracingError(ModelError, PipelineError):
    """A model cannot be traced or cut; also a `RuntimeError`, as in torch."""


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
) -> "Pipe":
    """Trace a model with one microbatch; cut it at its marks, those of a spec, or of a policy."""
    if split_spec is not None and split_policy is not None:
        raise ArgumentError("split_spec and split_policy both say where to cut; give only one")
    for path in split_spec or ():
        find_module(module, path)
    return Pipe.from_tracing(module, mb_args, mb_kwargs, split_policy, split_spec=split_spec)


class Pipe(nn.Module):
    """A model as stages, and a graph that calls them; a shared parameter becomes one of each."""

    def __init__(
        self,
        split_gm: fx.GraphModule,
        num_stages: int,
        has_loss_and_backward: bool,
        loss_spec: Any,
    ) -> None:
        super().__init__()
        self.split_gm, self.num_stages = split_gm, num_stages
        self.has_loss_and_backward, self.loss_spec = has_loss_and_backward, loss_spec
        self.replicated_params = _replicate_shared(split_gm)

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
        """Trace a model and cut it at its marks; with a known loss, a call runs backwards too."""
        shared, kwargs = _how_shared(multi_use_param_spec), example_kwargs or {}

        def cut(*, dynamic: bool) -> tuple[Capture, Cut]:
            with mark_modules(mod, split_spec or {}):
                traced = capture(mod, example_args, kwargs, dynamic=dynamic)
            if split_policy is not None:
                traced = replace(traced, module=split_policy(traced.module))
            marks = [node for node in traced.module.graph.nodes if is_mark(node)]
            return traced, cut_graph(traced, marks, shared=shared)

        try:
            check_names(mod)
            traced, found = _cut_with_free_sizes(cut)
        except ModelError as error:
            raise _TracingError(str(error)) from error
        modules, graph = give_form(traced, found, example_args, kwargs)
        spec = output_loss_value_spec
        if spec is not None:
            is_tree = isinstance(spec, tuple | list | dict)
            leaves = tuple(traced.output_spec.flatten_up_to(spec)) if is_tree else spec
            loss, output, named = _find_loss_output(mod, graph, leaves)
            if loss is None:
                raise PipelineError(
                    f"the loss spec {leaves!r} names no output; set one of it to True"
                )
            _insert_stage_symbolic_backward(graph, loss, output)
            spec = spec if is_tree else named
        stages = {get_submod_name(number): stage for number, stage in enumerate(modules)}
        split_gm = fx.GraphModule(stages, graph)
        count = Pipe._number_and_count_forward_stages(split_gm)
        return Pipe(split_gm, count, spec is not None, spec)

    @staticmethod
    def _trace_with_export(
        mod: nn.Module, example_args: tuple[Any, ...], example_kwargs: dict[str, Any] | None = None
    ) -> ExportedProgram:
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
        example: tuple[tuple[Any, ...], dict[str, Any]] | None = exported_program.example_inputs
        if example is None:
            raise ModelError("the exported program does not know what it was traced with")
        args, kwargs = example
        return Pipe.from_tracing(
            mod,
            args,
            kwargs,
            split_policy,
            multi_use_param_spec=multi_use_param_spec,
            output_loss_value_spec=output_loss_value_spec,
        )

    @staticmethod
    def _number_and_count_forward_stages(gm: fx.GraphModule) -> int:
        """Note for each call of a stage in a graph which one it is, and count them."""
        calls = gm.graph.find_nodes(op="call_module")
        stages = [node for node in calls if str(node.target).startswith(f"{PP_SUBMOD_PREFIX}_")]
        for node in stages:
            node.meta["stage_idx"] = int(str(node.target).rpartition("_")[2])
        return len(stages)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in this process, and their backwards if the loss is known."""
        signature = signature_of(self.split_gm.graph.find_nodes(op="placeholder"))
        return DetachExecutor(self.split_gm).run(*signature.bind(*args, **kwargs).args)

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """Return the module of a stage."""
        if not 0 <= stage_idx < self.num_stages:
            raise ArgumentError(f"stage {stage_idx} is out of range for {self.num_stages} stages")
        return self.split_gm.get_submodule(get_submod_name(stage_idx))

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

    def print_readable(self) -> None:
        """Print the graph that calls the stages, then that of each stage."""
        stages: list[Any] = [self.get_stage_module(number) for number in range(self.num_stages)]
        for module in (self.split_gm, *stages):
            module.print_readable()

    def __str__(self) -> str:
        return str(self.split_gm)

    def __repr__(self) -> str:
        return repr(self.split_gm)


def _how_shared(spec: MultiUseParamSpec | None) -> Literal["replicate", "transmit"]:
    wishes = set(spec.values()) if isinstance(spec, dict) else {spec}
    if len(wishes) > 1:
        raise ArgumentError(
            "parameters that several stages use are all replicated, or all transmitted; give one "
            "MultiUseParameterConfig for all of them"
        )
    return "transmit" if wishes == {MultiUseParameterConfig.TRANSMIT} else "replicate"


def _cut_with_free_sizes(cut: Callable[..., tuple[Capture, Cut]]) -> tuple[Capture, Cut]:
    """Cut with sizes left free; if that fails, or numbers would have to cross, with fixed ones."""
    try:
        traced, found = cut(dynamic=True)
    except ModelError:
        return cut(dynamic=False)
    for graph in found.graphs:
        inputs, output = graph.find_nodes(op="placeholder"), graph.output_node()
        if any(is_scalar(node) for node in (*inputs, *output.all_input_nodes)):
            return cut(dynamic=False)
    return traced, found


def _replicate_shared(split_gm: fx.GraphModule) -> list[dict[str, str]]:
    """Copy parameters that several stages hold, and name them by stage."""
    uses: dict[nn.Parameter, dict[str, list[str]]] = {}
    for stage, module in split_gm.named_children():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            uses.setdefault(parameter, {}).setdefault(stage, []).append(name)
    shared = {parameter: stages for parameter, stages in uses.items() if len(stages) > 1}
    for parameter, stages in shared.items():
        for stage, names in stages.items():
            own = copy.deepcopy(parameter)
            for name in names:
                path, _, attribute = f"{stage}.{name}".rpartition(".")
                setattr(split_gm.get_submodule(path), attribute, own)
    return [{stage: names[0] for stage, names in stages.items()} for stages in shared.values()]

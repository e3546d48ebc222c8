"""What `torch.distributed.pipelining._IR` has: pipes of traced models."""  # noqa: N999  # torch's

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from penstock.dropin._backward import _null_coalesce_accumulate, stage_backward
from penstock.dropin._unflatten import _outline_submodules
from penstock.dropin._utils import PipeInfo
from penstock.dropin.pipe.graph_edits import (
    _modify_graph_op_device,
    _move_placeholders_to_front,
    _recursive_getattr_with_parent,
)
from penstock.dropin.pipe.loss import (
    LossWrapper,
    TrivialLossWrapper,
    _find_loss_from_output_and_spec,
    _find_loss_output,
)
from penstock.dropin.pipe.marking import (
    PipeSequential,
    PipeSplitWrapper,
    _pipe_split,
    _split_after_forward,
    _split_before_forward,
    annotate_split_points,
    aten_pipe_split_alias,
    check_split_points,
)
from penstock.dropin.pipe.pipe import (
    DetachExecutor,
    MultiUseParameterConfig,
    MultiUseParamSpec,
    Pipe,
)
from penstock.dropin.pipe.serialization import (
    _direct_serialization_deserialize,
    _direct_serialization_reduce,
    _LinearNodeList,
    _NodeReference,
)
from penstock.dropin.pipe.submod_names import PP_SUBMOD_PREFIX, get_submod_name
from penstock.dropin.pipe.symbolic_backward import _insert_stage_symbolic_backward
from penstock.dropin.stage import _PipelineStage
from penstock.errors import ArgumentError
from penstock.splitting.marks import SplitPoint, pipe_split

__all__ = [
    "PP_SUBMOD_PREFIX",
    "DetachExecutor",
    "LossWrapper",
    "MultiUseParamSpec",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeInfo",
    "PipeSequential",
    "PipeSplitWrapper",
    "SplitPoint",
    "TrivialLossWrapper",
    "_LinearNodeList",
    "_NodeReference",
    "_PipelineStage",
    "_direct_serialization_deserialize",
    "_direct_serialization_reduce",
    "_find_loss_from_output_and_spec",
    "_find_loss_output",
    "_insert_stage_symbolic_backward",
    "_modify_graph_op_device",
    "_move_placeholders_to_front",
    "_null_coalesce_accumulate",
    "_outline_submodules",
    "_pipe_split",
    "_recursive_getattr_with_parent",
    "_split_after_forward",
    "_split_before_forward",
    "annotate_split_points",
    "aten_pipe_split_alias",
    "get_submod_name",
    "pipe_split",
    "pipeline",
    "stage_backward",
]


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Trace a model with one microbatch, and cut it into stages.

    It is cut where it calls `pipe_split`, at the modules of `split_spec`, or where `split_policy`
    puts marks into the traced graph.
    """
    if split_spec is not None and split_policy is not None:
        raise ArgumentError(
            "split_spec and split_policy both say where to cut; give only one of them"
        )
    check_split_points(module, split_spec or {})
    return Pipe.from_tracing(module, mb_args, mb_kwargs, split_policy, split_spec=split_spec)

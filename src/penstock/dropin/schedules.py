"""The schedules under torch's names, and everything that its users import beside them."""

from typing import Any

import torch.distributed as dist

from penstock.dropin._utils import (
    InferenceMode,
    generate_rank_to_stage_mapping,
    generate_stage_to_rank_mapping,
)
from penstock.dropin.classes.base import (
    _TARGET_CHUNK_SPEC,
    _CustomFunctionProtocol,
    _PipelineContext,
    _PipelineSchedule,
)
from penstock.dropin.classes.families import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _check_torch_compile_compatibility,
)
from penstock.dropin.classes.multi import PipelineScheduleMulti
from penstock.dropin.classes.runtime import _PipelineScheduleRuntime
from penstock.dropin.classes.single import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    _ScheduleForwardOnly,
)
from penstock.dropin.microbatch import (
    TensorChunkSpec,
    _split_tensor,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from penstock.dropin.names.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    WAIT_SEND_B,
    WAIT_SEND_F,
    B,
    F,
    I,
    W,
    _Action,
    _action_regex,
    _ComputationType,
    _get_profiler_function_name,
)
from penstock.dropin.names.passes import (
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _defer_recv_ops,
    _merge_bw,
    _requires_reduce_grad,
)
from penstock.dropin.names.validation import _validate_schedule
from penstock.dropin.orders.simulation import (
    _dump_chrometrace,
    _format_pipeline_order,
    _simulate_comms_compute,
)
from penstock.dropin.orders.tables import _get_1f1b_rank_ops, _get_warmup_ops
from penstock.dropin.run.p2p import _batch_p2p, _sorted_batch_p2p, _wait_batch_p2p
from penstock.dropin.stage import PipelineStage, _PipelineStageBase, _RecvInfo
from penstock.errors import ScheduleNameError

__all__ = [
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "FULL_BACKWARD",
    "OVERLAP_F_B",
    "RECV_B",
    "RECV_F",
    "REDUCE_GRAD",
    "RESHARD",
    "SEND_B",
    "SEND_F",
    "UNSHARD",
    "WAIT_SEND_B",
    "WAIT_SEND_F",
    "_TARGET_CHUNK_SPEC",
    "B",
    "F",
    "I",
    "InferenceMode",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "TensorChunkSpec",
    "W",
    "_Action",
    "_ComputationType",
    "_CustomFunctionProtocol",
    "_PipelineContext",
    "_PipelineSchedule",
    "_PipelineScheduleRuntime",
    "_PipelineStageBase",
    "_RecvInfo",
    "_ScheduleForwardOnly",
    "_action_regex",
    "_add_reduce_grad",
    "_add_send_recv",
    "_add_unshard_reshard",
    "_batch_p2p",
    "_check_torch_compile_compatibility",
    "_defer_recv_ops",
    "_dump_chrometrace",
    "_format_pipeline_order",
    "_get_1f1b_rank_ops",
    "_get_profiler_function_name",
    "_get_warmup_ops",
    "_merge_bw",
    "_requires_reduce_grad",
    "_simulate_comms_compute",
    "_sorted_batch_p2p",
    "_split_tensor",
    "_validate_schedule",
    "_wait_batch_p2p",
    "dist",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "get_schedule_class",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
]

_CLASSES: dict[str, type[Any]] = {
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "GPipe": ScheduleGPipe,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


def get_schedule_class(schedule_name: str) -> type[Any]:
    """Return the class of a schedule by its name, in upper or lower case."""
    by_name = {name.lower(): _CLASSES[name] for name in _CLASSES}
    if schedule_name.lower() not in by_name:
        raise ScheduleNameError(
            f"not a schedule: {schedule_name!r} (expected one of {', '.join(_CLASSES)})"
        )
    return by_name[schedule_name.lower()]

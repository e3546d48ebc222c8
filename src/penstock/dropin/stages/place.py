"""Where a stage is in its pipeline, and what it holds for torch's users to look at."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.dropin.stages.meshes import _MeshCache
from penstock.dropin.stages.metadata import TensorMeta, _StageMeta
from penstock.dropin.stages.values import _RecvInfo
from penstock.errors import ArgumentError, PipelineError
from penstock.ir.dataflow import Dataflow
from penstock.torch_private import DebugLevel, get_debug_level, get_default_group

__all__ = ["StagePlace"]


class StagePlace(ABC):
    """A stage of a pipeline on this rank, by its place."""

    _has_backward: bool
    has_backward = property(
        attrgetter("_has_backward"), lambda self, value: setattr(self, "_has_backward", value)
    )

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., Any]] | None = None,
    ) -> None:
        if stage_index >= num_stages:
            raise ArgumentError(f"stage {stage_index} is out of range for {num_stages} stages")
        self.stage_index, self.num_stages = stage_index, num_stages
        self.submod, self.device, self.group = submodule, device, group
        self.dw_builder = dw_builder
        # By microbatch, the weight work that waits.
        self.dw_runner: dict[int, Callable[..., Any]] = {}
        self.group_rank = dist.get_rank(group)
        self.group_size = dist.get_world_size(group)
        if self.group_size > num_stages:
            raise PipelineError(
                f"a group of {self.group_size} ranks has {num_stages} stages; give every rank one"
            )
        # The stages that this one receives from: the one before, in a chain.
        self.sources: Sequence[int] = [] if self.is_first else [stage_index - 1]
        self.log_prefix = f"[Stage {stage_index}]"
        # Whether this step has backwards; trainers set it under either name.
        self._has_backward = False
        # The number of microbatches, set by the schedule.
        self.chunks: int | None = None
        self.stage_index_to_group_rank = {
            stage: stage % self.group_size for stage in range(num_stages)
        }

        # By microbatch: outputs (or where their gradients enter) and received inputs; gradients
        # for the stage before.
        self.fwd_cache: dict[int, tuple[tuple[Any, ...], list[torch.Tensor]]] = {}
        self.bwd_cache: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self.output_chunks: list[Any] = []

        # By microbatch, what is expected or has come; by output or input, the other stage.
        self.args_recv_info: dict[int, tuple[_RecvInfo, ...]] = {}
        self.grad_recv_info: dict[int, tuple[_RecvInfo, ...]] = {}
        self.act_send_info: dict[int, Sequence[int | None]] = {}
        self.grad_send_info: list[int | None] | None = None

        self._mesh_cache = _MeshCache()
        self._runtime_validate = get_debug_level() == DebugLevel.DETAIL
        self._stage_meta = _StageMeta()
        self._user_meta = _StageMeta()
        # By microbatch, what was sent on, since gradients come back in the same form.
        self.output_metas: dict[int, tuple[TensorMeta, ...]] = {}
        # Whether a schedule carries what crosses, and learns its form from the tensors.
        self.is_run = False

    # ------------------------------------------------------------------ its place

    @property
    def is_first(self) -> bool:
        """Whether the batch enters here."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage_index == self.num_stages - 1

    def find_edges(self) -> list[tuple[int, int]]:
        """Return which stage feeds which in the whole pipeline."""
        return list(Dataflow.chain(self.num_stages).edges)

    def find_slots(self) -> list[tuple[int, int]]:
        """Return each output with each stage that it goes to."""
        return [
            (number, stage)
            for number, stages in self.act_send_info.items()
            for stage in stages
            if stage is not None
        ]

    def _is_same_rank(self, other_stage: int) -> bool:
        return self.stage_index_to_group_rank[other_stage] == self.group_rank

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        """Return the global rank of the process that holds a stage."""
        rank = self.stage_index_to_group_rank[stage_idx]
        return dist.get_global_rank(self.group or get_default_group(), rank)

    def _check_chunk_id(self, chunk_id: int) -> None:
        if self.chunks is None:
            raise PipelineError(
                f"stage {self.stage_index} has no number of microbatches yet; a schedule sets it"
            )
        if chunk_id >= self.chunks:
            raise PipelineError(f"microbatch {chunk_id} is out of range for {self.chunks}")

    # ------------------------------------------------------------------ before a step, and after

    @abstractmethod
    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: Any,
        kwargs: dict[str, Any] | None = None,
        has_backward: bool = False,
    ) -> Any:
        """Prepare for the first step, and for the first one of another mode."""

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,  # noqa: ARG002  # torch's form
        target: Any = None,  # noqa: ARG002  # torch's form
        received_grad_meta: Any = None,  # noqa: ARG002  # torch's form
        loss_kwargs: dict[str, Any] | None = None,  # noqa: ARG002  # torch's form
    ) -> Any:
        """Prepare for its backwards."""
        self._setup_backward_recv_info(num_microbatches)

    def _create_grad_recv_info(
        self, act_send_info: dict[int, Sequence[int | None]]
    ) -> tuple[_RecvInfo, ...]:
        """Return what gradients come back: one per output and stage that it goes to."""
        return tuple(
            _RecvInfo(f"gradient of output {number} from stage {stage}", stage)
            for number, stages in act_send_info.items()
            for stage in stages
        )

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        """Make room for what will come; buffers are made when it does."""
        del has_backward
        self.args_recv_info.update((number, ()) for number in range(num_microbatches))

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        self.grad_recv_info.update((number, ()) for number in range(num_microbatches))

    def _create_act_send_info(self) -> dict[int, Sequence[int | None]]:
        """Return where each output goes, as far as outputs are known."""
        outputs = self._stage_meta.outputs or ()
        following: Sequence[int | None] = [] if self.is_last else [self.stage_index + 1]
        return dict.fromkeys(range(len(outputs)), following)

    def _create_grad_send_info(self, args_recv_info: tuple[_RecvInfo, ...]) -> list[int | None]:
        return [info.source for info in args_recv_info if not info.is_root_arg]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return no operations: connections are opened before the first step."""
        return []

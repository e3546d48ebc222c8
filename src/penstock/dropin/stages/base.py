"""What all stages do: run their module on what they receive, forward and backward."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map_only

from penstock.deferred.work import DeferredWork, add_weight_gradients
from penstock.dropin._debug import map_debug_info
from penstock.dropin._module_runner import ModuleRunner
from penstock.dropin._stage_traffic import StageTraffic, StageUseError, as_tuple, find_edge
from penstock.errors import PipelineError
from penstock.step.backward import Root

__all__ = ["_PipelineStageBase"]


class _PipelineStageBase(StageTraffic):
    """A stage of a pipeline on this rank.

    A stand-in may leave out `__init__` and have `submod`, `num_stages`, `group_size`, `group_rank`
    and `group` only: that is all that schedules read before their first step.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group)
        self.dw_builder = dw_builder
        # By microbatch, the weight work that waits.
        self.dw_runner: dict[int, Callable[..., Any]] = {}
        self._runner = ModuleRunner()
        self._scale_to_undo = 1

    @abstractmethod
    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: Any,
        kwargs: dict[str, Any] | None = None,
        has_backward: bool = False,
    ) -> Any:
        """Before the first step, and before the first one of another mode."""

    @abstractmethod
    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        target: Any = None,
        received_grad_meta: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The same for the backwards."""

    def begin_training(self, grad_scale_factor: int) -> None:
        """Before the first forward of a training step.

        At its end all gradients are divided. So what they hold now is multiplied first.
        """
        self._scale_to_undo = grad_scale_factor
        if grad_scale_factor != 1:
            for parameter in self.submod.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(grad_scale_factor)
        self._runner.begin_step(self.submod)

    def end_training(self) -> None:
        """After a step: if nobody has divided the gradients, they are as they were."""
        self.scale_grads(self._scale_to_undo)

    def clear_runtime_states(self) -> None:
        """Let go of everything that a step has left."""
        for held in (self.fwd_cache, self.bwd_cache, self.dw_runner, self._output_metas):
            held.clear()
        if self.boundary is not None:
            self.args_recv_info.clear()
            self.grad_recv_info.clear()
        self.output_chunks.clear()
        self._runner.clear()

    @property
    def is_sharded(self) -> bool:
        """Whether parameters have to be gathered before the module runs."""
        return self._runner.is_sharded(self.submod)

    def unshard(self) -> None:
        """Start to gather the parameters."""
        self._runner.look_at(self.submod).unshard()

    def reshard(self) -> None:
        """Let go of gathered parameters."""
        self._runner.look_at(self.submod).reshard()

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, without a reduction of gradients in its backward."""
        return self._runner.call(self.submod, args, kwargs)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the module on a microbatch.

        `args` are the first stage's; the others take what they have received. `kwargs` are this
        stage's own.
        """
        received = () if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        arguments, named = (args, {}) if self.is_first else self._arrange(received)
        self._note("inputs", args if self.is_first else received)
        try:
            with self._runner.record(fwd_chunk_id, self.submod, self.has_backward):
                output = self.forward_maybe_with_nosync(*arguments, **named, **(kwargs or {}))
        except Exception as error:
            raise PipelineError(
                f"{self.log_prefix} failed to run forward for microbatch {fwd_chunk_id} (args: "
                f"{map_debug_info(tuple(arguments))}, kwargs: {map_debug_info(kwargs or {})}): "
                f"{type(error).__name__}: {error}"
            ) from error
        if self.is_last:
            if save_forward_output:
                _put(self.output_chunks, fwd_chunk_id, self._as_result(output))
            if self.has_backward:
                self.fwd_cache[fwd_chunk_id] = (), list(received)
        else:
            self._keep_output(fwd_chunk_id, as_tuple(output), received)
        return output

    def _arrange(
        self, received: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """What was received, as positional and as named arguments of the module."""
        return received, {}

    def _as_result(self, output: Any) -> Any:
        """An output for the user; one that a backward starts from must not hold its graph."""
        if not self.has_backward:
            return output
        if isinstance(output, torch.Tensor):
            return output.detach()
        return tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of a microbatch, or the first half of it.

        The second half, `backward_weight_one_chunk`, must follow then.
        """
        if not self.has_backward:
            return
        self._check_chunk_id(bwd_chunk_id)
        outputs, received = self.fwd_cache.pop(bwd_chunk_id)
        grads: tuple[torch.Tensor | None, ...] = ()
        if not self.is_last:
            grads = self._retrieve_recv_grads(bwd_chunk_id)
            self._note("output_grads", grads)
        self._output_metas.pop(bwd_chunk_id, None)
        values: dict[str, Any] = {
            "stage_output": loss if self.is_last else outputs,
            "output_grads": None if self.is_last else grads,
            "input_values": received,
            "microbatch": bwd_chunk_id,
        }
        is_whole = full_backward or self.dw_builder is not None
        found, calls = self.backward_maybe_with_nosync(
            "full" if is_whole else "input", values, last_backward
        )
        self._leave_weight_work(bwd_chunk_id, full_backward, calls)
        if loss is not None and not loss._is_view():
            # The caller keeps the loss; it must not hold what its backward has used.
            loss.detach_()
        if not self.is_first:
            self._note("input_grads", found)
            self.bwd_cache[bwd_chunk_id] = found

    def _leave_weight_work(
        self, microbatch: int, full_backward: bool, calls: list[DeferredWork] | None
    ) -> None:
        if self.dw_builder is not None:
            work: Callable[..., Any] = self.dw_builder()
        elif not full_backward:
            work = partial(
                self.backward_maybe_with_nosync, "weight", {"param_groups": calls or []}
            )
        else:
            return
        if full_backward:
            work()
        else:
            self.dw_runner[microbatch] = work

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second half of a backward: what is left of the weight gradients."""
        if not self.has_backward:
            return
        if bwd_chunk_id not in self.dw_runner:
            raise StageUseError(
                f"{self.log_prefix} has no weight work for microbatch {bwd_chunk_id}; call "
                "backward_one_chunk(full_backward=False) first"
            )
        self.dw_runner.pop(bwd_chunk_id)()
        if last_backward:
            self._runner.end_backward(self.submod)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[DeferredWork] | None]:
        """One backward ("full"), or a half of it ("input", "weight"); gradients are only added up.

        After the last one of a step, copies of the stage under DDP average theirs.
        """
        found: tuple[torch.Tensor | None, ...] = ()
        left: list[DeferredWork] | None = None
        match backward_type:
            case "full":
                found, calls = self._propagate(bwd_kwargs)
                add_weight_gradients(calls)
            case "input":
                self._runner.expect_halves()
                found, left = self._propagate(bwd_kwargs)
            case "weight":
                add_weight_gradients(bwd_kwargs["param_groups"])
            case _:
                raise PipelineError(f"a backward is full, input or weight (got {backward_type!r})")
        if last_backward:
            self._runner.end_backward(self.submod)
        return found, left

    def _propagate(
        self, values: dict[str, Any]
    ) -> tuple[tuple[torch.Tensor | None, ...], list[DeferredWork]]:
        received: list[torch.Tensor] = values["input_values"]
        roots = self._find_roots(values["stage_output"], values["output_grads"])
        leaves = [value for value in received if value.requires_grad]
        grads, calls = self._runner.propagate(values["microbatch"], roots, leaves)
        found = iter(grads)
        return tuple(next(found) if value.requires_grad else None for value in received), calls

    def _find_roots(self, output: Any, grads: Sequence[torch.Tensor | None] | None) -> list[Root]:
        """Where the backward starts: the loss, or the outputs with what came back for each."""
        if grads is None:
            is_loss = isinstance(output, torch.Tensor) and output.requires_grad
            return [(get_gradient_edge(output), torch.ones_like(output))] if is_loss else []
        edges = [find_edge(value) for value in output]
        pairs = zip((edges[number] for number, _ in self._slots()), grads, strict=True)
        return [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide all gradients of the stage."""
        self._scale_to_undo = 1
        if grad_scale_factor != 1:
            for parameter in self.submod.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """After the last backward: reduce gradients over data-parallel ranks, then divide them."""
        if self.has_backward:
            self._runner.reduce_gradients(self.submod)
            self.scale_grads(grad_scale_factor)


def _put(items: list[Any], index: int, item: Any) -> None:
    """Put an item in its place, whatever the order in which they come."""
    items.extend([None] * (index + 1 - len(items)))
    items[index] = item

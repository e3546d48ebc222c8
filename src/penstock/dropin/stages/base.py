"""A stage under torch's names: thin methods over a stage of the runtime.

The graph, the weight work that waits and data parallelism are the runtime stage's. A trainer may
put another module into a stage, or wrap it, at any time between steps; so the runtime stage is
made for the module that is there when it runs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from penstock.dropin._debug import map_debug_info
from penstock.dropin.stages.boundary import StageBoundary
from penstock.dropin.stages.replaced import is_backward_replaced, run_by_hand
from penstock.dropin.stages.values import (
    Gradients,
    Named,
    StageUseError,
    as_tuple,
    complete_gradient,
    find_edge,
    put_in_place,
)
from penstock.errors import PipelineError
from penstock.parallel.ddp import ReplicatedStage
from penstock.parallel.fsdp import ShardedStage
from penstock.parallel.replica import replica_of
from penstock.step.stage import Stage
from penstock.tensors.packet import Packet
from penstock.torch_private import tree_map_only

__all__ = ["_PipelineStageBase"]


class _PipelineStageBase(StageBoundary):
    """A stage of a pipeline on this rank; a stand-in may leave out `__init__`."""

    _stage: Stage | None = None
    _type: type | None = None
    _splits = False
    _is_reduced = True
    _scale_to_undo = 1
    _is_replaced = False

    @property
    def runtime(self) -> Stage:
        """The stage of the runtime that runs this one's module as it is now."""
        module, stage = self.submod, self._stage
        # `fully_shard` changes the type of a module.
        if stage is None or stage.module is not module or self._type is not type(module):
            replica = replica_of(module)
            stage = Stage(self.stage_index, module, replica, call=self._call_module)
            self._stage, self._type = stage, type(module)
            if self._splits:
                stage.prepare_split()
        return stage

    def expect_halves(self) -> None:
        """Let forwards keep what a backward in two halves needs."""
        if not self._splits:
            self._splits = True
            self.runtime.prepare_split()

    def _call_module(self, *values: Any, **kwargs: Any) -> Any:
        arguments, named = (values, {}) if self.is_first else self._arrange(values)
        return self.forward_maybe_with_nosync(*arguments, **named, **kwargs)

    def _arrange(self, received: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return received, {}

    def begin_training(self, grad_scale_factor: int) -> None:
        """Begin a training step; multiply what the gradients hold, which its end divides."""
        self._scale_to_undo = grad_scale_factor
        for gradient in self._gradients_to_scale(grad_scale_factor):
            gradient.mul_(grad_scale_factor)
        self.runtime.replica.begin_step()
        self._is_reduced = False
        self._is_replaced = is_backward_replaced()

    def end_training(self, *, has_failed: bool) -> None:
        """End a step, and undo the scaling of gradients that nobody has divided."""
        if has_failed:
            self.clear_runtime_states()
            self.runtime.clear()
        self.scale_grads(self._scale_to_undo)

    def clear_runtime_states(self) -> None:
        caches: list[dict[int, Any]] = [self.fwd_cache, self.bwd_cache, self.output_metas]
        for held in (*caches, self.dw_runner, self.args_recv_info, self.grad_recv_info):
            held.clear()
        self.output_chunks.clear()

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, without a reduction of gradients in its backward."""
        with self.runtime.replica.forward_context():
            return self.submod(*args, **kwargs)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Named = None, save_forward_output: bool = True
    ) -> Any:
        """Run the module on a microbatch: the first stage on `args`, others on what has come."""
        given = tuple(args) if self.is_first else ()
        received = () if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        self.note("inputs", given or received)
        try:
            output = self._run_forward(fwd_chunk_id, received, given, kwargs or {})
        except Exception as error:
            raise PipelineError(
                f"{self.log_prefix} failed to run forward for microbatch {fwd_chunk_id} (args: "
                f"{map_debug_info(given or received)}, kwargs: {map_debug_info(kwargs or {})}): "
                f"{type(error).__name__}: {error}"
            ) from error
        if not self.is_last:
            self.keep_output(fwd_chunk_id, as_tuple(output), received)
            return output
        if save_forward_output:
            # What a backward starts from must not hold its graph for the user's sake.
            detach = partial(tree_map_only, torch.Tensor, torch.Tensor.detach)
            kept = detach(output) if self._has_backward else output
            put_in_place(self.output_chunks, fwd_chunk_id, kept)
        if self._has_backward:
            self.fwd_cache[fwd_chunk_id] = (), list(received)
        return output

    def _run_forward(
        self, microbatch: int, received: Sequence[torch.Tensor], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        stage = self.runtime
        structure: Any = "T" if len(received) == 1 else ["t", ["T"] * len(received)]
        packets = [Packet(structure, list(received))] if received else []
        if not (self._has_backward or torch.is_grad_enabled()):
            return stage.evaluate(microbatch, packets, args, kwargs)
        output, losses = stage.forward(microbatch, packets, args, kwargs)
        if not self._has_backward:
            stage.release(microbatch)
        else:
            for loss in losses:
                stage.add_root(microbatch, loss, 1.0)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of a microbatch, or the first half of it."""
        if not self._has_backward:
            return
        self._check_chunk_id(bwd_chunk_id)
        outputs, received = self.fwd_cache.pop(bwd_chunk_id)
        kind = "full" if full_backward or self.dw_builder is not None else "input"
        start: Any = loss if kind == "full" else (loss,)
        values: dict[str, Any] = {"stage_output": start, "output_grads": None}
        if not self.is_last:
            grads = self._retrieve_recv_grads(bwd_chunk_id)
            self.note("output_grads", grads)
            values = {"stage_output": outputs, "output_grads": grads}
        values |= {"input_values": received, "microbatch": bwd_chunk_id}
        found, left = self.backward_maybe_with_nosync(kind, values, last_backward)
        self.output_metas.pop(bwd_chunk_id, None)
        self.runtime.release(bwd_chunk_id)
        self._leave_weight_work(bwd_chunk_id, full_backward, left)
        if loss is not None and not loss._is_view():
            # The caller keeps the loss; it must not hold what its backward has used.
            loss.detach_()
        if not self.is_first:
            self.note("input_grads", found)
            self.bwd_cache[bwd_chunk_id] = tuple(map(complete_gradient, found, received))

    def _leave_weight_work(self, microbatch: int, full_backward: bool, left: Any) -> None:
        if self.dw_builder is not None:
            work: Callable[..., Any] = self.dw_builder()
            if full_backward:
                work()
                return
        else:
            values = {"param_groups": left, "microbatch": microbatch}
            work = partial(self.backward_maybe_with_nosync, "weight", values)
        if not full_backward:
            self.dw_runner[microbatch] = work

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second half of a backward: what is left of the weight gradients."""
        if not self._has_backward:
            return
        if bwd_chunk_id not in self.dw_runner:
            raise StageUseError(
                f"{self.log_prefix} has no weight work for microbatch {bwd_chunk_id}; call "
                "backward_one_chunk(full_backward=False) first"
            )
        work = self.dw_runner.pop(bwd_chunk_id)
        if self.dw_builder is None:
            work(last_backward=last_backward)
        else:
            work()
            if last_backward:
                self._end_backward()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Gradients, Any]:
        """Run one backward ("full") or a half of it ("input", "weight"); gradients add up."""
        if backward_type not in ("full", "input", "weight"):
            raise PipelineError(f"a backward is full, input or weight (got {backward_type!r})")
        if self._is_replaced or "microbatch" not in bwd_kwargs:
            found: tuple[Any, Any] = run_by_hand(self.submod, backward_type, bwd_kwargs)
        elif backward_type == "weight":
            self.runtime.backward_weight(bwd_kwargs["microbatch"])
            found = (), None
        else:
            found = self._propagate(backward_type, bwd_kwargs), None
        if last_backward:
            self._end_backward()
        return found

    def _propagate(self, backward_type: str, values: dict[str, Any]) -> Gradients:
        stage, microbatch = self.runtime, values["microbatch"]
        for edge, gradient in self._find_roots(values["stage_output"], values["output_grads"]):
            stage.add_gradient(microbatch, edge, gradient)
        if backward_type == "full":
            answers = stage.backward(microbatch, ())
        else:
            answers = stage.backward_input(microbatch, ())
            self.expect_halves()
        found = (gradient for group in answers for gradient in group)
        return tuple(next(found) if v.requires_grad else None for v in values["input_values"])

    def _find_roots(
        self, output: Any, grads: Sequence[torch.Tensor | None] | None
    ) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Return where the backward starts: the loss, or outputs with what came back for each."""
        if grads is None:
            losses = [loss for loss in as_tuple(output) if isinstance(loss, torch.Tensor)]
            pairs = [(find_edge(loss), torch.ones_like(loss)) for loss in losses]
        else:
            edges = [find_edge(value) for value in output]
            slots = [edges[number] for number, _ in self.find_slots()]
            pairs = [p for p in zip(slots, grads, strict=True) if p[1] is not None]  # type: ignore[misc]  # no gradient is left out
        return [(edge, gradient) for edge, gradient in pairs if edge is not None]

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.runtime.replica, ShardedStage)

    def _gradients_to_scale(self, factor: int) -> list[torch.Tensor]:
        parameters = self.submod.parameters() if factor != 1 else ()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def scale_grads(self, grad_scale_factor: int) -> None:
        self._scale_to_undo = 1
        for gradient in self._gradients_to_scale(grad_scale_factor):
            gradient.div_(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce and divide gradients after the last backward; without backwards, only reshard."""
        if not self._has_backward:
            self.runtime.replica.reshard()
            return
        self._end_backward()
        if not self._is_reduced:
            self.runtime.replica.reduce_gradients()
            self.runtime.replica.reshard()
            self._is_reduced = True
        self.scale_grads(grad_scale_factor)

    def _end_backward(self) -> None:
        """Average the gradients of copies after the last backward of a step."""
        replica = self.runtime.replica
        if isinstance(replica, ReplicatedStage) and not self._is_reduced:
            replica.reduce_gradients()
            self._is_reduced = True

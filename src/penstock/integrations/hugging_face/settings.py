"""Settings of a Trainer that a pipeline would not honour, refused before any step."""

from collections.abc import Mapping
from typing import Any

from transformers import Trainer

from penstock.errors import ArgumentError

__all__ = ["require_supported"]

# Settings with the values that are fine.
_REFUSED: Mapping[str, Any] = {
    "deepspeed": None,
    "fp16": False,
    "fp16_full_eval": False,
    "bf16_full_eval": False,
    "label_smoothing_factor": 0,
    "torch_compile": False,
    "auto_find_batch_size": False,
    "use_liger_kernel": False,
    "push_to_hub": False,
}
# Optimizers that step inside of the backward, which a pipeline runs in pieces.
_INSIDE_OF_BACKWARD = ("lomo", "layerwise")


def require_supported(trainer: Trainer) -> None:
    """Raise for the first setting, loss or optimizer that a pipeline would not honour."""
    args: Any = trainer.args
    for name, fine in _REFUSED.items():
        value = getattr(args, name, fine)
        if value != fine and value:
            raise ArgumentError(
                f"{name} must be {fine!r} in a PipelineTrainer (got {value!r}); leave it out"
            )
    if trainer.compute_loss_func is not None or trainer.is_fsdp_enabled or args.n_gpu > 1:
        raise ArgumentError(
            "a PipelineTrainer takes the loss that the model computes, and one device per "
            "process; leave out compute_loss_func and fsdp, and start one process per device"
        )
    if type(trainer).compute_loss is not Trainer.compute_loss:
        raise ArgumentError(
            "a PipelineTrainer does not call compute_loss; let the model compute the loss"
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(word in optimizer for word in _INSIDE_OF_BACKWARD):
        raise ArgumentError(
            "optim must be an optimizer that steps after the backward in a PipelineTrainer (got "
            f"{optimizer!r}); use another one"
        )
    if args.train_sampling_strategy == "batch_rebalance" and args.world_size > 1:
        raise ArgumentError(
            "train_sampling_strategy='batch_rebalance' gives every process other rows, which a "
            f"PipelineTrainer of {args.world_size} processes cannot use; use 'group_by_length'"
        )

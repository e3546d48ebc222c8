"""Mixed precision with a gradient scaler: every rank skips a step, or none does."""

import torch
from torch.amp.grad_scaler import GradScaler

from penstock.ranks.control import Control

__all__ = ["unscale"]


def unscale(scaler: GradScaler, optimizer: torch.optim.Optimizer, control: Control) -> None:
    """Unscale this rank's gradients, and mark the step if any rank has one that is not finite."""
    if not scaler.is_enabled():
        return
    device = optimizer.param_groups[0]["params"][0].device
    # A scaler is initialized by the first value that it scales; here that is not a loss.
    scaler.scale(torch.zeros((), device=device))
    scaler.unscale_(optimizer)
    found = scaler._found_inf_per_device(optimizer)
    is_here = any(bool(flag.item()) for flag in found.values())
    is_anywhere = any(map(any, control.gather_bytes(bytes([is_here]))))
    # A rank without gradients finds nothing, but must do what the others do.
    flags = found or {device: torch.zeros((), device=device)}
    found.update({where: flag.fill_(is_anywhere) for where, flag in flags.items()})

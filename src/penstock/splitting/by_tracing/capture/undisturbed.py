"""Tracing that leaves no trace: neither in the model and random numbers, nor on the screen."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO

import torch
from torch import nn

from penstock.splitting.untouched import same_random_numbers

__all__ = ["quiet_export", "undisturbed"]

# They tell about a failure, at length, what the error says in the user's own terms.
_TALKATIVE = ("torch.fx.experimental.symbolic_shapes", "torch.export._trace")


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave the model and random numbers as they are, and let no mode of the caller in."""
    attributes = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    # Buffers, and hooks too: a model that installs some and notes so would else do it twice.
    tables = [
        (value, dict(value))
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, dict)
    ]
    with ExitStack() as stack:
        stack.enter_context(same_random_numbers())
        stack.enter_context(torch.enable_grad())
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        try:
            yield
        finally:
            for held, before in [*attributes, *tables]:
                held.clear()
                held.update(before)


@contextmanager
def quiet_export() -> Iterator[None]:
    """Keep back what export writes about a model that it cannot trace."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        for logger, is_disabled in zip(loggers, before, strict=True):
            logger.disabled = is_disabled

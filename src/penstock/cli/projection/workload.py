"""Options that say what a microbatch is, for tokens per second and MFU."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

import click

from penstock.cli.options import POSITIVE
from penstock.errors import ArgumentError
from penstock.sim.throughput import Throughput, Workload

__all__ = ["throughput_values", "with_workload"]

Command: TypeAlias = Callable[..., None]


def with_workload(command: Command) -> Command:
    """Add options for tokens, FLOPs and the peak of a device, as the argument `workload`.

    It is None without --tokens.
    """

    @click.option(
        "--tokens",
        type=POSITIVE,
        metavar="TOKENS",
        help="Tokens of a microbatch, such as 4096; adds tokens per second.",
    )
    @click.option(
        "--flops-per-token",
        type=click.FloatRange(0),
        metavar="FLOPS",
        default=0.0,
        help="FLOPs of a token, forward and backward; for dense transformers 6 x parameters.",
    )
    @click.option(
        "--peak-flops",
        type=click.FloatRange(0),
        metavar="FLOP/S",
        default=0.0,
        help="Most FLOP/s that a device can do, such as 989e12, for MFU.",
    )
    @wraps(command)
    def wrapper(
        *args: Any,
        tokens: float | None,
        flops_per_token: float,
        peak_flops: float,
        **kwargs: Any,
    ) -> None:
        if tokens is None and (flops_per_token or peak_flops):
            raise ArgumentError("--flops-per-token and --peak-flops work with --tokens only")
        given = None if tokens is None else Workload(tokens, flops_per_token, peak_flops)
        command(*args, workload=given, **kwargs)

    return wrapper


def throughput_values(found: Throughput) -> dict[str, object]:
    """Return a throughput as plain values."""
    return {
        "tokens_per_second": found.tokens_per_second,
        "device_flops": found.device_flops,
        "mfu": found.mfu,
    }

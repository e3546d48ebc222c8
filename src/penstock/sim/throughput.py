"""Tokens per second, FLOP/s of a device and MFU, from the seconds of a step."""

from dataclasses import dataclass, fields

from penstock.errors import ArgumentError
from penstock.units import format_share
from penstock.untrusted import quote, to_quantity

__all__ = ["Throughput", "Workload"]


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a step achieves: tokens per second in all, and FLOP/s of each device.

    `mfu` (model FLOPs utilization) is the share of a device's peak that the model's own FLOPs
    take; forwards that are run again do not count. It is None if the peak is not known.
    """

    tokens_per_second: float
    device_flops: float
    mfu: float | None

    def __str__(self) -> str:
        parts = [f"{self.tokens_per_second:,.0f} tokens/s"]
        if self.device_flops:
            parts.append(f"{self.device_flops / 1e12:.4g} TFLOP/s per device")
        if self.mfu is not None:
            parts.append(f"MFU {format_share(self.mfu)}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Workload:
    """What one microbatch is: its tokens, the FLOPs of a token, and the devices that do it.

    `flops_per_token` counts forward and backward once, for dense transformers about six times the
    parameters. `peak_flops` is the FLOP/s that a device can do at most, 0 if it is not known.
    `devices_per_rank` is more than 1 if devices share the work of a rank (tensor parallelism),
    and `replicas` is the number of pipelines that train side by side (data parallelism).

    >>> work = Workload(tokens_per_microbatch=8192, flops_per_token=6 * 405e9, peak_flops=989e12,
    ...     devices_per_rank=8, replicas=128)
    >>> print(work.at(6.22, ranks=16, microbatches=16))
    2,697,302 tokens/s, 400.1 TFLOP/s per device, MFU 40.5 %
    """

    tokens_per_microbatch: float
    flops_per_token: float = 0.0
    peak_flops: float = 0.0
    devices_per_rank: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = to_quantity(value) is not None
            is_count = field.name in ("devices_per_rank", "replicas")
            if not is_number or (is_count and (type(value) is not int or value < 1)):
                what = "a whole number from 1" if is_count else "a number from 0"
                raise ArgumentError(f"{field.name} must be {what} (got {quote(value)})")

    def at(self, seconds: float, *, ranks: int, microbatches: int) -> Throughput:
        """Return what steps of these seconds achieve on pipelines of some ranks."""
        if not seconds > 0:
            raise ArgumentError(f"seconds of a step must be above 0 (got {quote(seconds)})")
        tokens = self.tokens_per_microbatch * microbatches * self.replicas / seconds
        devices = ranks * self.devices_per_rank * self.replicas
        flops = tokens * self.flops_per_token / devices
        is_known = self.peak_flops > 0 and self.flops_per_token > 0
        return Throughput(tokens, flops, flops / self.peak_flops if is_known else None)

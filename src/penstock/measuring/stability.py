"""Whether measured seconds can be trusted: their spread, and a warning if it is too large."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.ir.rows import Floats

__all__ = [
    "MeasurementWarning",
    "is_stable",
    "spread_of",
    "warn_if_links_vary",
    "warn_if_unstable",
]

# Seconds are measured again until half of the samples are within this share of their median, and
# cannot be trusted if they are not within the second one.
_STABLE = 0.1
_TRUSTED = 0.5


class MeasurementWarning(UserWarning):
    """Measured seconds that vary too much to plan with."""


def spread_of(samples: Floats) -> float:
    """Return the interquartile range of samples as a share of their median.

    >>> spread_of(np.array([1.0, 2.0, 3.0]))
    0.5
    """
    low, middle, high = np.quantile(samples, [0.25, 0.5, 0.75])
    return float((high - low) / middle) if middle else 0.0


def is_stable(samples: Mapping[str, Sequence[Floats]]) -> bool:
    """Return whether the seconds of all kinds and stages vary little."""
    return all(spread_of(each) <= _STABLE for found in samples.values() for each in found)


def warn_if_unstable(spread: Mapping[str, Sequence[float]]) -> None:
    """Warn once, with the worst of the seconds, if they vary too much to be trusted."""
    worst = {name: max(range(len(found)), key=found.__getitem__) for name, found in spread.items()}
    name = max(worst, key=lambda name: spread[name][worst[name]])
    stage = worst[name]
    if spread[name][stage] > _TRUSTED:
        warnings.warn(
            f"the measured seconds cannot be trusted: {name} of stage {stage} varied by "
            f"{spread[name][stage]:.0%} of its median; measure again while the machine is idle, "
            "with a larger microbatch or more repeats",
            MeasurementWarning,
            stacklevel=3,
        )


def warn_if_links_vary(spread: Mapping[tuple[int, int], float]) -> None:
    """Warn once, with the worst link, if messages between ranks vary too much to be trusted."""
    if not spread:
        return
    one, other = worst = max(spread, key=lambda pair: spread[pair])
    if spread[worst] > _TRUSTED:
        warnings.warn(
            f"the measured links cannot be trusted: messages between ranks {one} and {other} "
            f"varied by {spread[worst]:.0%} of their median; measure again while the machines are "
            "idle, or with more repeats",
            MeasurementWarning,
            stacklevel=3,
        )

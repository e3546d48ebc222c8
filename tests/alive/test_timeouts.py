"""The values that timeouts may have."""

import math
from typing import Any

import pytest

from penstock.alive.timeouts import Timeouts
from penstock.errors import ArgumentError


@pytest.mark.parametrize(
    "name", ["silence_seconds", "stop_seconds", "stall_seconds", "join_seconds"]
)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_timeouts_must_be_positive(name: str, value: float) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ArgumentError) as caught:
        Timeouts(**settings)
    assert str(caught.value) == f"{name} must be a positive number of seconds (got {value})"


def test_silence_seconds_below_one_is_rejected() -> None:
    with pytest.raises(ArgumentError) as caught:
        Timeouts(silence_seconds=0.5)
    assert str(caught.value) == (
        "silence_seconds must be at least 1.0, since a busy rank may be silent too (got 0.5); "
        "use a larger value"
    )


def test_timeouts_may_be_infinite_for_a_debugger() -> None:
    assert Timeouts(silence_seconds=math.inf).silence_seconds == math.inf

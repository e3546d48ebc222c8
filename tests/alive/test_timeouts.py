"""The values that timeouts may have."""

import math
from typing import Any

import pytest

from penstock.alive.timeouts import Timeouts, patience_seconds
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


# With 2,000 ranks the last one knew half a second after the limit.
@pytest.mark.parametrize("limit", [1.0, 2.0, 5.0, 30.0, 600.0])
def test_silent_rank_is_given_up_early_enough_to_be_named_in_time(limit: float) -> None:
    patience = patience_seconds(Timeouts(silence_seconds=limit))
    # A rank looks twice a second, or as often as it beats.
    latest_look = min(0.5, limit / 8)
    assert limit / 2 < patience <= limit - 2 * latest_look
    assert patience_seconds(Timeouts(silence_seconds=math.inf)) == math.inf

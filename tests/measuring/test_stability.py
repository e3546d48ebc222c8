"""Measured seconds that vary too much are said to, once and with a way out."""

import warnings

import numpy as np
import pytest

from penstock.measuring.stability import (
    MeasurementWarning,
    is_stable,
    warn_if_links_vary,
    warn_if_unstable,
)


def test_seconds_are_stable_if_the_middle_half_is_within_a_tenth() -> None:
    assert is_stable({"forward": [np.array([1.0, 1.02, 1.04, 9.0])]}) is False
    assert is_stable({"forward": [np.array([1.0, 1.0, 1.0, 1.0, 9.0])]}) is True


def test_a_warning_names_the_worst_seconds_and_a_way_out() -> None:
    spread = {"forward": (0.1, 0.2), "full_backward": (0.3, 0.75)}
    with pytest.warns(MeasurementWarning) as caught:
        warn_if_unstable(spread)
    assert [str(warning.message) for warning in caught] == [
        "the measured seconds cannot be trusted: full_backward of stage 1 varied by 75% of its "
        "median; measure again while the machine is idle, with a larger microbatch or more repeats"
    ]


def test_seconds_that_vary_little_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_unstable({"forward": (0.1, 0.5)})


def test_links_that_vary_are_named() -> None:
    with pytest.warns(MeasurementWarning, match=r"between ranks 1 and 2 varied by 157% of their"):
        warn_if_links_vary({(0, 1): 0.2, (1, 2): 1.57})
    # Half of a median is still trusted, and one rank has no links.
    warn_if_links_vary({(0, 1): 0.5})
    warn_if_links_vary({})

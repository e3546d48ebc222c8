"""Clocks of recorded steps."""

from itertools import pairwise

import pytest
import torch

from penstock.step.clocks import CudaClock, HostClock, clock_for


def test_host_clock_counts_seconds_from_its_start() -> None:
    clock = HostClock()
    marks = [clock.mark() for _ in range(3)]
    seconds = [clock.seconds(mark) for mark in marks]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0.0
    assert [b - a for a, b in pairwise(seconds)] == pytest.approx(
        [b - a for a, b in pairwise(marks)], abs=1e-9
    )
    assert clock.held_bytes() == 0.0


def test_processor_has_the_clock_of_the_host() -> None:
    assert type(clock_for(torch.device("cpu"))) is HostClock


@pytest.mark.gpu
def test_device_has_a_clock_of_events_and_counts_its_bytes() -> None:
    device = torch.device("cuda")
    clock = clock_for(device)
    assert type(clock) is CudaClock
    before = clock.mark()
    held = clock.held_bytes()
    tensor = torch.ones(1 << 20, device=device)
    after = clock.mark()
    assert 0.0 <= clock.seconds(before) <= clock.seconds(after)
    assert clock.held_bytes() - held == tensor.nbytes

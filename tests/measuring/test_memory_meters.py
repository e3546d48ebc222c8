"""What a piece of work does to the memory, to the byte."""

import pytest
import torch

from penstock.measuring.memory_meters import Reading, meter_for

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# The allocator of CUDA deals in pieces of 512 bytes.
UNIT = 512


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_kept_and_what_was_needed_are_told_apart(device: str) -> None:
    kept: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(3):
            temporary = torch.zeros(UNIT * 4, dtype=torch.uint8, device=device)
            kept.append(temporary[:UNIT].clone())

    meter = meter_for(torch.device(device))
    first, second = meter.measure(work), meter.measure(work)
    assert first.left == second.left == 3 * UNIT
    # The third round begins while the second one's temporary is still there.
    assert first.workspace == second.workspace == 7 * UNIT
    let_go = meter.measure(kept.clear)
    assert (let_go.left, let_go.workspace) == (-6 * UNIT, 0)


def test_a_reading_knows_what_was_needed_on_top() -> None:
    assert Reading(before=10, after=30, peak=35).workspace == 5
    assert Reading(before=30, after=10, peak=35).workspace == 5
    assert Reading(before=30, after=10, peak=30).workspace == 0

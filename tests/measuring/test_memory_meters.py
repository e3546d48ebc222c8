"""What a piece of work does to the memory, exact to the byte."""

import pytest
import torch

from penstock.measuring.memory_meters import MemoryReading, meter_for

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# CUDA's allocator rounds to multiples of 512 bytes.
UNIT = 512


@pytest.mark.parametrize("device", DEVICES)
def test_kept_bytes_and_workspace_are_measured_separately(device: str) -> None:
    kept: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(3):
            temporary = torch.zeros(UNIT * 4, dtype=torch.uint8, device=device)
            kept.append(temporary[:UNIT].clone())

    meter = meter_for(torch.device(device))
    first, second = meter.measure(work), meter.measure(work)
    assert first.left == second.left == 3 * UNIT
    # The third round begins while the second round's temporary is still alive.
    assert first.workspace == second.workspace == 7 * UNIT
    freed = meter.measure(kept.clear)
    assert (freed.left, freed.workspace) == (-6 * UNIT, 0)


def test_workspace_is_the_peak_above_what_was_in_use() -> None:
    assert MemoryReading(before=10, after=30, peak=35).workspace == 5
    assert MemoryReading(before=30, after=10, peak=35).workspace == 5
    assert MemoryReading(before=30, after=10, peak=30).workspace == 0

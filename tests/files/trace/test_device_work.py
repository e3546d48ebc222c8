"""Kernels belong to the range in which they were launched, however they lie on the device."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.files.trace.device_work import DeviceWork, find_stretches
from penstock.files.trace.events import Event

MOMENT = st.integers(0, 60).map(float)
KERNEL = st.tuples(MOMENT, MOMENT, MOMENT)


def work_of(kernels: list[tuple[float, float, float]]) -> DeviceWork:
    """Kernels by launch, start and length; each has a link of its own, in no order."""
    work = DeviceWork()
    for number, (launched, start, length) in enumerate(kernels):
        arguments = {"correlation": number * 7 % 101}
        call = {"cat": "cuda_runtime", "ts": launched, "args": arguments}
        kernel = {"cat": "kernel", "ts": start, "dur": length, "args": arguments}
        work.add(Event(0, kernel))
        work.add(Event(1, call))
        work.add(Event(2, {**kernel, "cat": "cpu_op"}))
        work.add(Event(3, {**kernel, "args": {}}))
    return work


@given(st.lists(KERNEL, max_size=20), st.lists(MOMENT, min_size=2, max_size=12, unique=True))
def test_a_range_lasts_from_its_first_kernel_to_its_last(
    kernels: list[tuple[float, float, float]], moments: list[float]
) -> None:
    # Ranges between every other pair of moments; no launch falls on the edge of one.
    edges = np.sort(np.array(moments[: len(moments) // 2 * 2])) + 0.5
    starts, ends = edges[0::2], edges[1::2]
    found = find_stretches(work_of(kernels), starts, ends)
    for start, end, first, last in zip(starts, ends, found.start, found.end, strict=True):
        mine = [(s, s + length) for launched, s, length in kernels if start < launched < end]
        assert first == min((s for s, _ in mine), default=np.inf)
        assert last == max((e for _, e in mine), default=-np.inf)


def test_work_is_counted_by_launches_and_kernels() -> None:
    assert len(work_of([])) == 0
    assert len(work_of([(1.0, 2.0, 3.0)])) == 2

"""What a process holds, and whether that grows."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import torch

from penstock.tools.soak.leaks import (
    Footprint,
    Ledger,
    ignoring_existing_objects,
    measure_footprint,
)

MEGABYTE = 2**20
FLAT = Footprint(10, 80, 5, 20, 2, 200 * MEGABYTE)


def test_footprint_counts_what_is_held() -> None:
    with ignoring_existing_objects():
        before = measure_footprint()
        held = [torch.zeros(4, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)]
        view = held[0][:2]
        file = os.open(os.devnull, os.O_RDONLY)
        release = threading.Event()
        thread = threading.Thread(target=release.wait)
        thread.start()
        native = Path("/proc/self/task", str(thread.native_id))
        during = measure_footprint()
        release.set()
        thread.join()
        # Python's thread ends a moment before the system's.
        while native.exists():
            thread.join(0.001)
        os.close(file)
        del held, view
        after = measure_footprint()
    assert during.tensors == before.tensors + 3
    assert during.tensor_bytes == before.tensor_bytes + 48
    assert during.files == before.files + 1
    assert during.threads == before.threads + 1
    assert after.counts == before.counts


def test_constant_footprints_are_not_a_leak() -> None:
    ledger = Ledger([FLAT] * 100)
    assert ledger.find_leaks() == []


def test_growth_in_the_first_cases_is_not_a_leak() -> None:
    ledger = Ledger([replace(FLAT, tensors=number) for number in range(6)] + [FLAT])
    ledger.footprints[-1] = replace(FLAT, tensors=5)
    assert ledger.find_leaks() == []


def test_every_count_that_grows_is_a_leak() -> None:
    grown = Footprint(11, 88, 6, 21, 3, FLAT.resident_bytes)
    assert Ledger([*[FLAT] * 6, grown]).find_leaks() == [
        "live tensors: 10 after 6 cases, 11 now",
        "bytes in tensors: 80 after 6 cases, 88 now",
        "threads: 5 after 6 cases, 6 now",
        "open files: 20 after 6 cases, 21 now",
        "child processes: 2 after 6 cases, 3 now",
    ]


def with_memory(*megabytes: float) -> Ledger:
    start = [FLAT] * 6
    return Ledger(start + [replace(FLAT, resident_bytes=int(m * MEGABYTE)) for m in megabytes])


def test_memory_that_grows_case_by_case_is_a_leak() -> None:
    growing = with_memory(*(200 + 2 * number for number in range(60)))
    assert growing.find_leaks() == ["resident memory: 219 MiB, 299 MiB now"]


def test_memory_of_a_few_large_cases_is_not_a_leak() -> None:
    assert with_memory(*([200] * 30 + [400] * 9 + [201] * 11)).find_leaks() == []
    assert with_memory(*([200] * 20 + [240] * 20)).find_leaks() == []


def test_ledger_waits_for_what_is_freed_in_a_moment() -> None:
    with ignoring_existing_objects():
        ledger = Ledger()
        for _ in range(6):
            ledger.settle()
        timer = threading.Timer(0.05, lambda: None)
        timer.start()
        ledger.settle()
        timer.join()
    assert ledger.find_leaks() == []

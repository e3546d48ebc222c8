"""A search counts its own work, and not that of its neighbours."""

from threading import Thread
from time import perf_counter

from penstock.planner.effort_clock import EffortClock


def keep_busy(seconds: float) -> None:
    """Use the processor for some seconds."""
    begin = perf_counter()
    while perf_counter() - begin < seconds:
        sum(range(1000))


def test_time_in_which_others_use_the_processor_counts_a_sixth() -> None:
    # The time of a search was that on the wall, so that a busy machine turned plans into
    # fallbacks: with 4 ranks and 16 microbatches a gap of 5.3 % instead of none.
    clock, begin = EffortClock(), perf_counter()
    neighbour = Thread(target=keep_busy, args=(0.1,))
    neighbour.start()
    neighbour.join()
    assert clock.seconds < 0.5 * (perf_counter() - begin)
    assert clock.seconds > 0.1 / 6 * 0.99


def test_own_work_counts_in_full() -> None:
    clock, begin = EffortClock(), perf_counter()
    keep_busy(0.05)
    elapsed = perf_counter() - begin
    # Not more than the time on the wall, and never less than a sixth of it.
    assert elapsed / 6 <= clock.seconds <= 1.05 * (perf_counter() - begin)

"""The control plane of thousands of ranks on one machine: opening, agreement, steps, a lost rank.

    python benchmarks/control_plane.py                   2,000 ranks: about two minutes
    python benchmarks/control_plane.py --ranks 200       fewer

Every rank is a heartbeat and a place in the control tree, with the protocol and the sockets that
a pipeline uses, but no model (`simulated_ranks.py`). Rank 0 has a process of its own, whose
processor time is counted. A step is the two exchanges that a step with known shapes has. One rank
then goes silent, and all others must name it.
Prints a table in Markdown and writes it to benchmarks/results/control_plane.md.
"""

import argparse
import multiprocessing
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TypeAlias

from penstock.ranks.tree.shape import children_of
from penstock.torch_private import TCPStore
from result_files import write_result
from simulated_ranks import HOST, LIMIT_SECONDS, STEPS, TIMEOUTS, Inner, Learned, Leaves

# Processes of ranks with others below them, beside that of rank 0, and of those without.
INNER_PROCESSES, LEAF_PROCESSES = 3, 4
# How often the exchange of an agreement is repeated; the median counts.
AGREEMENTS = 5

Member: TypeAlias = Inner | Leaves


def do_on_all(members: list[Member], work: Callable[[Member], object]) -> list[str]:
    """Let each of them do its work in a thread; return the errors."""
    errors = []

    def run(member: Member) -> None:
        try:
            work(member)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def host_ranks(numbers: list[int], size: int, pipe: Connection) -> None:
    """Be a process with some of the ranks: do what the pipe says, and answer when it is done."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    store = TCPStore(HOST, pipe.recv(), is_master=False, timeout=timedelta(seconds=LIMIT_SECONDS))
    inner = [number for number in numbers if children_of(number, size) or number == 0]
    leaves = [number for number in numbers if number not in inner]
    members: list[Member] = [Inner(number, size, store) for number in inner]
    if leaves:
        members.append(Leaves(leaves, size, store))
    learned: list[Learned] = []

    def lose(member: Member) -> None:
        learned.extend(member.lose(victim_of(size)))

    work: dict[str, Callable[[Member], object]] = {
        "start": lambda _: None,
        "open": lambda member: member.open(),
        "link": lambda member: member.link(),
        "agree": lambda member: member.agree(),
        "step": lambda member: member.step(),
        "lose": lose,
        "close": lambda member: member.close(),
    }
    while (what := pipe.recv()) != "end":
        begin = time.process_time()
        errors = do_on_all(members, work[what])
        pipe.send((time.process_time() - begin, errors, learned))


def victim_of(size: int) -> int:
    """Return the rank that goes silent, which has nobody below it."""
    return size * 2 // 3


@dataclass(frozen=True)
class Phase:
    """How long something took on the clock, and the processor time of rank 0 and of all."""

    seconds: float
    root_seconds: float
    all_seconds: float
    learned: list[Learned]


@contextmanager
def open_processes(size: int) -> Iterator[Callable[[str], Phase]]:
    """Start the processes; yield a function that lets all ranks do something."""
    inner = [rank for rank in range(1, size) if children_of(rank, size)]
    leaves = [rank for rank in range(1, size) if not children_of(rank, size)]
    shares = [
        [0],
        *(inner[part::INNER_PROCESSES] for part in range(INNER_PROCESSES)),
        *(leaves[part::LEAF_PROCESSES] for part in range(LEAF_PROCESSES)),
    ]
    # Forked before anything has a thread, because each would load torch for itself.
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for numbers in filter(None, shares):
        ours, theirs = context.Pipe()
        process = context.Process(target=host_ranks, args=(numbers, size, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    store = TCPStore(
        HOST, 0, is_master=True, timeout=timedelta(seconds=LIMIT_SECONDS), wait_for_workers=False
    )
    for pipe in pipes:
        pipe.send(store.port)

    def do(what: str) -> Phase:
        begin = time.monotonic()
        for pipe in pipes:
            pipe.send(what)
        answers = [pipe.recv() for pipe in pipes]
        seconds = time.monotonic() - begin
        errors = [error for _, found, _ in answers for error in found]
        if errors:
            raise SystemExit("\n".join([f"{what} failed:", *errors[:5]]))
        learned = [one for _, _, found in answers for one in found]
        print(f"{what}: {seconds:.2f} s", flush=True)
        return Phase(seconds, answers[0][0], sum(used for used, _, _ in answers), learned)

    try:
        yield do
    finally:
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join(60)
            if process.is_alive():
                process.kill()


def measure(size: int) -> list[tuple[str, ...]]:
    """Run all phases; return a table of what, on the clock, and processor time."""
    with open_processes(size) as do:
        do("start")
        opening, linking = do("open"), do("link")
        agreements = sorted((do("agree") for _ in range(AGREEMENTS)), key=lambda one: one.seconds)
        steps, loss = do("step"), do("lose")
        do("close")
    named = {one.named for one in loss.learned}
    if named != {victim_of(size)}:
        raise SystemExit(f"ranks name {named} instead of {victim_of(size)}")
    last = max(one.seconds for one in loss.learned)
    step = Phase(steps.seconds / STEPS, steps.root_seconds / STEPS, steps.all_seconds / STEPS, [])
    agreement = agreements[AGREEMENTS // 2]
    limit = f"a silent rank is named by all (limit {TIMEOUTS.silence_seconds:g} s)"
    return [
        (f"opening the heartbeat of {size:,} ranks", *_times(opening)),
        ("opening their connections for exchanges", *_times(linking)),
        (f"agreement of all ranks (the median of {AGREEMENTS})", *_times(agreement)),
        (f"exchanges of a step (the mean of {STEPS})", *_times(step)),
        (limit, f"{last:.1f} s", *_times(loss)[1:]),
    ]


def _times(phase: Phase) -> list[str]:
    return [
        f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
        for value in (phase.seconds, phase.root_seconds, phase.all_seconds)
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2000)
    size = parser.parse_args().ranks
    lines = [
        "| what | on the clock | processor time of rank 0 | processor time of all ranks |",
        "|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in measure(size)]
    heading = "Two thousand ranks" if size == 2000 else f"{size:,} ranks"
    text = "\n".join([f"## {heading}", "", *lines])
    print(write_result("control_plane", "The control plane", [text], spread="one run"))


if __name__ == "__main__":
    main()

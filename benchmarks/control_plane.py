"""The control plane of thousands of ranks on one machine: opening, agreement, steps, a lost rank.

    python benchmarks/control_plane.py                   2,000 ranks: about two minutes
    python benchmarks/control_plane.py --ranks 200       fewer

Every rank is a heartbeat and a place in the control tree, with the protocol and the sockets that
a pipeline uses, but no model: hundreds of them share a process, each with its two threads. Rank 0
has a process of its own, whose processor time is counted. A step is the two exchanges that a step
with known shapes has. One rank then goes silent, or ends, and all others must name it.
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
from typing import Any

from penstock.alive.guard_opening import open_heartbeat
from penstock.alive.heartbeat import Heartbeat
from penstock.alive.timeouts import Timeouts
from penstock.alive.tree.member import Member
from penstock.ranks.tree.links import TreeLinks, open_links
from penstock.ranks.tree.meeting import Meeting
from penstock.torch_private import PrefixStore, TCPStore
from result_files import write_result

HOST = "127.0.0.1"
PROCESSES = 8
STEPS = 20
TIMEOUTS = Timeouts(silence_seconds=30.0, stop_seconds=60.0, join_seconds=600.0)
LIMIT_SECONDS = 600.0
# What ranks exchange before and after a step: a digest with two flags, and the outcome.
BEFORE, AFTER = bytes(17), bytes(40)


@dataclass
class Rank:
    """One simulated rank; its thread does one piece of work after the other."""

    number: int
    size: int
    heartbeat: Heartbeat | None = None
    links: TreeLinks | None = None
    seconds_to_learn: float = 0.0
    named: int | None = None
    error: str = ""

    def open(self, store: Any) -> None:
        """Connect, as the building of a pipeline does first."""
        name = f"process {self.number}"
        self.heartbeat, _ = open_heartbeat(
            Meeting(PrefixStore("heartbeat", store), self.number),
            Member(self.number, name),
            range(self.size),
            TIMEOUTS,
            address=HOST,
        )
        self.links = open_links(
            Meeting(PrefixStore("links", store), self.number),
            self.number,
            self.size,
            address=HOST,
            seconds=LIMIT_SECONDS,
        )

    def agree(self) -> None:
        """Compare digests, as the ranks of a pipeline do when it is built."""
        assert self.links is not None
        if len(set(self.links.gather(bytes(16)))) != 1:
            self.error = "the digests differ"

    def step(self) -> None:
        """Exchange what ranks exchange in some steps."""
        assert self.links is not None
        for _ in range(STEPS):
            self.links.gather(BEFORE)
            self.links.gather(AFTER)

    def fall_silent(self, victim: int) -> None:
        """Send no beat any more, if this is the victim; the others wait until they know."""
        assert self.heartbeat is not None
        begin = time.monotonic()
        if self.number == victim:
            node: Any = self.heartbeat._node
            node.beat = lambda _status: None
        self._learn(begin)

    def _learn(self, begin: float) -> None:
        assert self.heartbeat is not None
        lost = self.heartbeat.find_lost(LIMIT_SECONDS)
        self.seconds_to_learn = time.monotonic() - begin
        self.named = None if lost is None else lost.rank

    def close(self) -> None:
        """Leave."""
        if self.heartbeat is not None:
            self.heartbeat.close()


def run_ranks(ranks: list[Rank], work: Callable[[Rank], None]) -> float:
    """Let every rank do its work in a thread; return the processor time of this process."""

    def run(rank: Rank) -> None:
        try:
            work(rank)
        except Exception as error:
            rank.error = f"{type(error).__name__}: {error}"

    begin = time.process_time()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.process_time() - begin


def host_ranks(numbers: list[int], size: int, port: int, pipe: Connection) -> None:
    """Be a process with some of the ranks: do what the pipe says, and answer when it is done."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    threading.stack_size(512 * 1024)
    store = TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=LIMIT_SECONDS))
    ranks = [Rank(number, size) for number in numbers]
    work: dict[str, Callable[[Rank], None]] = {
        "start": lambda _: None,
        "open": lambda rank: rank.open(store),
        "agree": Rank.agree,
        "step": Rank.step,
        "silent": lambda rank: rank.fall_silent(size * 2 // 3),
        "close": Rank.close,
    }
    while (what := pipe.recv()) != "end":
        seconds = run_ranks(ranks, work[what])
        errors = [f"rank {rank.number}: {rank.error}" for rank in ranks if rank.error]
        learned = [(rank.named, rank.seconds_to_learn) for rank in ranks]
        pipe.send((seconds, errors, learned))


@dataclass(frozen=True)
class Phase:
    """How long something took on the clock, and the processor time of rank 0."""

    seconds: float
    processor_seconds: float
    learned: list[tuple[int | None, float]]


@contextmanager
def open_processes(size: int) -> Iterator[Callable[[str], Phase]]:
    """Start the processes; yield a function that lets all ranks do something."""
    store = TCPStore(
        HOST, 0, is_master=True, timeout=timedelta(seconds=LIMIT_SECONDS), wait_for_workers=False
    )
    shares = [[0], *(list(range(1 + part, size, PROCESSES - 1)) for part in range(PROCESSES - 1))]
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for numbers in shares:
        ours, theirs = context.Pipe()
        process = context.Process(target=host_ranks, args=(numbers, size, store.port, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)

    def do(what: str) -> Phase:
        begin = time.monotonic()
        for pipe in pipes:
            pipe.send(what)
        answers = [pipe.recv() for pipe in pipes]
        errors = [error for _, found, _ in answers for error in found]
        if errors:
            raise SystemExit("\n".join([f"{what} failed:", *errors[:5]]))
        learned = [one for _, _, found in answers for one in found]
        return Phase(time.monotonic() - begin, answers[0][0], learned)

    try:
        yield do
    finally:
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join(60)
            if process.is_alive():
                process.kill()


def measure(size: int) -> list[tuple[str, str, str]]:
    """Run all phases; return a table of what, on the clock, and processor time of rank 0."""
    with open_processes(size) as do:
        do("start")
        opening, agreement, steps, loss = map(do, ("open", "agree", "step", "silent"))
        do("close")
    named = {rank for rank, _ in loss.learned}
    if named != {size * 2 // 3}:
        raise SystemExit(f"ranks name {named} instead of {size * 2 // 3}")
    last = max(seconds for _, seconds in loss.learned)
    return [
        (f"opening of {size:,} ranks", f"{opening.seconds:.2f} s", _cpu(opening)),
        ("agreement of all ranks", f"{agreement.seconds:.2f} s", _cpu(agreement)),
        (
            "exchanges of a step",
            f"{steps.seconds / STEPS * 1e3:.0f} ms",
            f"{steps.processor_seconds / STEPS * 1e3:.1f} ms",
        ),
        (
            f"a silent rank is named by all (limit {TIMEOUTS.silence_seconds:g} s)",
            f"{last:.1f} s",
            _cpu(loss),
        ),
    ]


def _cpu(phase: Phase) -> str:
    return f"{phase.processor_seconds * 1e3:.0f} ms"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2000)
    size = parser.parse_args().ranks
    lines = ["| what | on the clock | processor time of rank 0 |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in measure(size)]
    title = f"The control plane of {size:,} ranks"
    print(write_result("control_plane", title, ["\n".join(lines)], spread="one run"))


if __name__ == "__main__":
    main()

"""Which process holds something, and whether it still runs: known on its own machine only."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "is_alive", "this_process"]


@dataclass(frozen=True, slots=True)
class Process:
    """A process: `machine` differs between boots and containers, `start` between uses of a number.

    Both are empty where the system does not say.
    """

    machine: str
    number: int
    start: str


def this_process() -> Process:
    """Return the process that calls."""
    return Process(_machine(), os.getpid(), _start(os.getpid()) or "")


def is_alive(process: Process) -> bool | None:
    """Return whether a process runs, or None if that cannot be seen from here."""
    if not process.machine or not process.start or process.machine != _machine():
        return None
    return _start(process.number) == process.start


def _machine() -> str:
    """Return what differs from machine to machine, boot to boot and container to container."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _start(number: int) -> str | None:
    """Return when a process was started, or None if it does not run."""
    with suppress(OSError, IndexError):
        # The name of the program, in parentheses, may hold anything.
        text = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
        facts = text.rpartition(")")[2].split()
        state, start = facts[0], facts[19]
        return None if state in "ZX" else start
    return None

"""The matrix of faults: which rank fails, how and when, and what the others say of it."""

import os
import signal
import sys
from dataclasses import dataclass

__all__ = [
    "EXIT_CODES",
    "KINDS",
    "MICROBATCHES_OF_FAILURE",
    "MISTAKE",
    "RAISING",
    "WHAT",
    "Case",
    "fail_as",
]

MICROBATCHES_OF_FAILURE = (0, 3, 7)
RAISING = ("raise in F", "raise in B")
KINDS = (*RAISING, "SIGKILL", "SIGSTOP", "sys.exit", "os._exit")
MISTAKE = "a mistake"
# What the other ranks say of a lost one, and with what its process ends.
WHAT = {
    "SIGKILL": "ended (its connection broke)",
    "SIGSTOP": "has not answered for 7 s",
    "sys.exit": "has left (SystemExit in the middle of a step)",
    "os._exit": "ended (its connection broke)",
}
EXIT_CODES = {"SIGKILL": -signal.SIGKILL, "SIGSTOP": 1, "sys.exit": 3, "os._exit": 4}


@dataclass(frozen=True)
class Case:
    """Which rank fails, how, and at which microbatch of which step."""

    schedule: str
    kind: str
    victim: int
    microbatch: int

    @property
    def step(self) -> int:
        """Half of the cases happen while shapes are being learned."""
        return self.microbatch % 2

    @property
    def silence_seconds(self) -> float:
        """Only a rank that is stopped should be given up because it does not answer."""
        return 7.0 if self.kind == "SIGSTOP" else 60.0

    @property
    def resume(self) -> int | None:
        """The rank to continue once the others have ended, if it stops."""
        return self.victim if self.kind == "SIGSTOP" else None

    @property
    def letters(self) -> str:
        """The kinds of action that may fail; a backward may be for inputs only."""
        return "BI" if self.kind == "raise in B" else "F"

    def __str__(self) -> str:
        return f"{self.schedule}-{self.kind}-rank{self.victim}-{self.microbatch}"


def fail_as(kind: str) -> None:
    """Let this process fail in the given way."""
    match kind:
        case "raise in F" | "raise in B":
            raise ValueError(MISTAKE)
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(4)
        case _:
            raise AssertionError(kind)

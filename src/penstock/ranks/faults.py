"""Errors of a step, and how a rank describes its own to the others."""

from dataclasses import dataclass
from time import time
from traceback import format_exception

from penstock.errors import PipelineError

__all__ = [
    "EXIT_CODE",
    "NAN_BYTE",
    "Fault",
    "LinkLostError",
    "PeerFailedError",
    "StepFailedError",
]

# What a device reads where a message was cut off: a floating-point number of any size is NaN if
# all its bytes are this one, and nothing that is computed from it can be taken for a result.
NAN_BYTE = 0xFF
# The exit code of a process that was ended because it, or its device, did not stop after a loss.
EXIT_CODE = 83


class LinkLostError(PipelineError):
    """The connection to another rank broke, or a wait on it took longer than its group allows."""


class PeerFailedError(PipelineError):
    """Another rank failed, so that its message will not come."""


class StepFailedError(PipelineError):
    """This rank's part of a step failed; the time shows which rank failed first."""

    def __init__(self, where: str, cause: Exception) -> None:
        super().__init__(f"{where}: {type(cause).__name__}: {cause}")
        self.time = time()
        self.follows_another = isinstance(cause, PeerFailedError)


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """A failure as plain values; of several, the smallest is the one that came first."""

    follows_another: bool
    time: float
    message: str
    trace: str

    @classmethod
    def of(cls, error: StepFailedError) -> "Fault":
        """Return the fault of an error, with its traceback."""
        trace = "".join(format_exception(error.__cause__ or error))
        return cls(error.follows_another, error.time, str(error), trace)

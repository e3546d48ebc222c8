"""What a rank tells the others when its part of a step has failed."""

from dataclasses import dataclass
from time import time
from traceback import format_exception

from penstock.errors import PipelineError

__all__ = ["Fault", "LinkLostError", "PeerFailedError", "StepFailedError"]


class LinkLostError(PipelineError):
    """The connection to another rank broke, or a wait on it took longer than its group allows."""


class PeerFailedError(PipelineError):
    """Another rank failed, so that what it should have sent does not come."""


class StepFailedError(PipelineError):
    """This rank's part of a step failed, at a time that tells who failed first."""

    def __init__(self, place: str, cause: Exception) -> None:
        super().__init__(f"{place}: {type(cause).__name__}: {cause}")
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
        """What to tell of an error, with its traceback."""
        trace = "".join(format_exception(error.__cause__ or error))
        return cls(error.follows_another, error.time, str(error), trace)

"""The exceptions that Penstock raises, in one tree."""

__all__ = [
    "ArgumentError",
    "BatchError",
    "BoundaryError",
    "CheckpointError",
    "CostsError",
    "DeadlockError",
    "MemoryLimitError",
    "MissingDependencyError",
    "ModelError",
    "ParseError",
    "PeerLostError",
    "PenstockError",
    "PipelineError",
    "PlanError",
    "ScheduleError",
    "ScheduleNameError",
    "SizeError",
]


class PenstockError(Exception):
    """Base of everything that Penstock raises on purpose."""


class ScheduleError(PenstockError, ValueError):
    """A schedule breaks a rule; the message names rank, position, action and rule."""


class DeadlockError(ScheduleError):
    """A schedule can never finish; the message names the cycle of waits."""


class ParseError(ScheduleError):
    """A piece of schedule text cannot be read; the message names the cell."""


class SizeError(PenstockError, ValueError):
    """A schedule family does not exist for these sizes; the message says which sizes work."""


class ScheduleNameError(PenstockError, ValueError):
    """No schedule family has this name, or the name is taken; the message lists the families."""


class CostsError(PenstockError, ValueError):
    """A cost model is malformed or does not fit the schedule."""


class MemoryLimitError(PenstockError, ValueError):
    """A memory limit that no schedule can keep."""


class PlanError(PenstockError, ValueError):
    """A file is not a valid plan; the message names the file and the field."""


class MissingDependencyError(PenstockError, ImportError):
    """An optional dependency is not installed; the message says how to install it."""


class ArgumentError(PenstockError, ValueError):
    """An argument has an invalid value; the message says which values are valid."""


class BatchError(PenstockError, ValueError):
    """A batch cannot be split as asked, or its parts do not fit together."""


class BoundaryError(PenstockError, TypeError):
    """A value cannot cross from one stage to the next."""


class CheckpointError(PenstockError, RuntimeError):
    """A checkpoint cannot be saved or loaded; the message names the file or the parameter."""


class ModelError(PenstockError, ValueError):
    """A model does not meet a requirement; the message names it."""


class PipelineError(PenstockError, RuntimeError):
    """A step failed; the message names rank, stage, microbatch and action, and the cause."""


class PeerLostError(PipelineError):
    """A rank died, stopped answering, left or lost its link; the message names its last action.

    All other ranks of the pipeline raise this, with the same message. `rank` is the lost rank.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type["PeerLostError"], tuple[str, int]]:
        return type(self), (str(self), self.rank)

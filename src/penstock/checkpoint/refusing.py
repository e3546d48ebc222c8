"""How a failure of one process at saving or loading is raised by all of them."""

from penstock.errors import CheckpointError
from penstock.ranks.control import Control, RankFailure, Refusal

__all__ = ["refuse_save"]


def refuse_save(control: Control) -> Refusal:
    """Return a refusal that raises the same `CheckpointError` on every process."""

    def refuse(failure: RankFailure) -> CheckpointError:
        prefix = f"rank {failure.rank}: " if control.size > 1 else ""
        return CheckpointError(f"{prefix}{failure.message}")

    return refuse

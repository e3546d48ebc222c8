"""Cases over several gloo processes, each of which checks the parts that it holds."""

from collections.abc import Sequence

import torch.distributed as dist

from tests.differential.case import Case
from tests.differential.checking import Failure, check_case
from tests.processes import JobFailedError, Processes

__all__ = ["check_over_processes"]

# What a case may take; a rank that waits for ever ends the whole job.
_SECONDS_PER_CASE = 30.0


def check_over_processes(processes: Processes, cases: Sequence[Case]) -> list[Failure | None]:
    """What is wrong with each case, on any of its ranks.

    A job that does not end is run again case by case, to find out which did not.
    """
    seconds = 60 + _SECONDS_PER_CASE * len(cases) ** 0.5
    try:
        return list(processes.run(_check_all, list(cases), seconds=seconds)[0])
    except JobFailedError as error:
        if len(cases) == 1:
            return [Failure("job failed", str(error))]
    return [check_over_processes(processes, [case])[0] for case in cases]


def _check_all(rank: int, cases: Sequence[Case]) -> list[Failure | None]:  # noqa: ARG001  # a job's form
    group = dist.group.WORLD
    assert group is not None, "a job runs in a group"
    return [_agree(check_case(case, group), dist.get_world_size()) for case in cases]


def _agree(own: Failure | None, ranks: int) -> Failure | None:
    """What is wrong on any rank; an error must be the same on all of them."""
    everyone: list[Failure | None] = [None] * ranks
    dist.all_gather_object(everyone, own)
    failures = [failure for failure in everyone if failure is not None]
    if not failures:
        return None
    raised = {failure for failure in failures if failure.kind != "wrong numbers"}
    if raised and (len(raised) > 1 or len(failures) < ranks):
        texts = [f"rank {i}: {f.text if f else 'ended well'}" for i, f in enumerate(everyone)]
        return Failure("ranks disagree", "\n".join(texts))
    return Failure(failures[0].kind, "\n".join(dict.fromkeys(f.text for f in failures)))

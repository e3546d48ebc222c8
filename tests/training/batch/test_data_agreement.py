"""Ranks that were given different data for the same argument refuse the step together."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import BatchError, PenstockError
from tests.processes import Processes

ADVICE = (
    "; give all ranks of a pipeline the same batch (a distributed sampler, and loaders prepared "
    "by accelerate or the Trainer, give each its own), leave out what a rank does not need, or "
    "give RunOptions(compare_data=False)"
)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result if scale is None else result * scale


def make_pipeline(**settings: Any) -> ps.Pipeline:
    torch.manual_seed(0)
    stages = [Scaled() for _ in range(dist.get_world_size())]
    group = dist.group.WORLD
    return ps.Pipeline(stages, "1F1B", microbatches=2, loss=nn.MSELoss(), group=group, **settings)


def rows(seed: int, count: int = 4) -> torch.Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))


@dataclass
class Tries:
    """What the steps of a pipeline have said, one after the other."""

    pipeline: ps.Pipeline
    said: list[str] = field(default_factory=list)

    def attempt(self, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(self.pipeline, method)(*args, **kwargs)
            self.said.append("done")
        except PenstockError as error:
            self.said.append(f"{type(error).__name__}: {error}")


def train_on_other_batches(rank: int) -> list[str]:
    """Batches of one form that are each rank's own: in the first step, later, and again."""
    tries = Tries(make_pipeline())
    mine = 10 + rank
    tries.attempt("step", rows(mine), target=rows(1))
    tries.attempt("step", rows(1), target=rows(mine))
    tries.attempt("step", rows(1), target=rows(1), scale=ps.Shared(rows(mine, 1)))
    tries.attempt("evaluate", rows(mine), target=rows(1))
    for _ in range(3):
        tries.attempt("step", rows(1), target=rows(1))
    # Nothing is compared any more in a form that is known, which costs steady steps nothing.
    tries.attempt("step", rows(1) if rank == 0 else rows(2), target=rows(1))
    # A new form is.
    tries.attempt("step", rows(mine, 6), target=rows(1, 6))
    tries.attempt("evaluate", rows(mine), target=rows(1))
    tries.attempt("evaluate", rows(1), target=rows(1))
    return tries.said


# Nothing compared what ranks hold: with the loader of a data-parallel run the first stage trained
# on one batch and the loss on the labels of another.
def test_other_data_of_the_same_form_is_refused_by_all_ranks_in_the_first_steps(
    two_processes: Processes,
) -> None:
    first, second = two_processes.run(train_on_other_batches)
    assert first == second
    names = [one.partition(":")[2].partition(":")[0] for one in first if one != "done"]
    different = " the ranks were given different data for "
    assert names == [
        f"{different}'argument 0'",
        f"{different}'target'",
        f"{different}'scale'",
        f"{different}'argument 0'",
        f"{different}'argument 0'",
        f"{different}'argument 0'",
    ]
    assert [one == "done" for one in first] == [
        *[False] * 4, *[True] * 4, False, False, True,
    ]  # fmt: skip
    assert all(one.endswith(ADVICE) for one in first if one != "done")


def report_differences(rank: int) -> list[str]:
    tries = Tries(make_pipeline())
    odd = rank == 2
    tries.attempt("step", rows(1), target=rows(2 if odd else 1))
    tries.attempt("step", rows(1), target=rows(1).double() if odd else rows(1))
    tries.attempt("step", rows(rank), target=rows(rank), scale=ps.Shared(torch.tensor(1.0)))
    return tries.said


@pytest.mark.slow
def test_the_error_names_the_argument_and_the_ranks(four_processes: Processes) -> None:
    everyone = four_processes.run(report_differences)
    assert everyone == [everyone[0]] * 4
    values, form, several = everyone[0]
    start = "BatchError: the ranks were given different data for "
    assert values.startswith(f"{start}'target': rank 2 has values with the digest ")
    assert ", ranks 0, 1, 3 have " in values
    assert form == (
        f"{start}'target': rank 2 has (4, 2) torch.float64, ranks 0, 1, 3 have (4, 2) "
        f"torch.float32{ADVICE}"
    )
    assert several.startswith(f"{start}'argument 0': rank 0 has values with the digest ")
    assert several.endswith(f"(and for 'target'){ADVICE}")


def leave_out(rank: int) -> list[str]:
    """Give every rank what it needs, or None, with the same data on all."""
    tries = Tries(make_pipeline())
    for _ in range(2):
        if rank == 0:
            tries.attempt("step", rows(1))
            tries.attempt("step", rows(1), target=None)
        else:
            tries.attempt("step", target=rows(1))
            tries.attempt("step", None, target=rows(1))
    return tries.said


def test_ranks_may_leave_arguments_out(two_processes: Processes) -> None:
    assert two_processes.run(leave_out) == [["done"] * 4] * 2


def switch_off(rank: int) -> list[str]:
    tries = Tries(make_pipeline(options=ps.RunOptions(compare_data=False)))
    tries.attempt("step", rows(10 + rank), target=rows(10 + rank))
    tries.attempt("evaluate", rows(10 + rank), target=rows(10 + rank))
    with pytest.raises(PenstockError) as caught:
        make_pipeline(options=ps.RunOptions(compare_data=rank == 0))
    return [*tries.said, str(caught.value)]


def test_the_comparison_can_be_switched_off_by_all_ranks_together(
    two_processes: Processes,
) -> None:
    differ = (
        "the ranks do not agree: rank 0 has compare_data true, rank 1 has false; give all ranks "
        "the same"
    )
    assert two_processes.run(switch_off) == [["done", "done", differ]] * 2


class Unreadable(torch.Tensor):
    """A tensor that cannot be looked at."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:
            raise RuntimeError("no looking")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # untyped upstream


def give_something_unreadable(rank: int) -> str:
    x = rows(1).as_subclass(Unreadable) if rank == 0 else None
    with pytest.raises(BatchError) as caught:
        make_pipeline().step(x, target=rows(1))
    return str(caught.value)


def test_rank_that_cannot_read_its_batch_fails_the_step_on_all_ranks(
    two_processes: Processes,
) -> None:
    assert (
        two_processes.run(give_something_unreadable)
        == [
            "rank 0 cannot compare its batch with that of others: RuntimeError: no looking; give "
            "RunOptions(compare_data=False) to skip the comparison"
        ]
        * 2
    )

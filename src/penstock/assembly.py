"""Build a checked schedule from the name of its family, and lower it for a runtime."""

import inspect
from typing import Literal

from penstock.checks.report import check
from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.ir.schedule import Schedule, require_schedule
from penstock.passes.reduce_grad import add_reduce_grad
from penstock.passes.send_recv import add_send_recv, add_send_recv_by_cost, delay_receives
from penstock.passes.shard import add_unshard_reshard
from penstock.schedules.registry import Family, Generator, find_family
from penstock.schedules.sizes import require_size

__all__ = ["build", "generate", "lower"]


def build(
    family: str | Generator,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
) -> Schedule:
    """Build and check a schedule, given the name of its family or a function that makes one.

    Names are matched in any case, and torch's class names work too; `penstock list` shows them.

    >>> print(build("1F1B", ranks=2, microbatches=2))
       rank 0  rank 1
    0  0F0     1F0
    1  0F1     1B0
    2  0B0     1F1
    3  0B1     1B1
    """
    schedule = generate(
        family, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
    )
    check(schedule)
    return schedule


def generate(
    family: str | Generator,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
) -> Schedule:
    """Build a schedule like `build`, but leave checking to the caller."""
    if not isinstance(family, str) and not callable(family):
        raise ArgumentError(
            "family must be a name or a function that returns a Schedule (got "
            f"{type(family).__name__})"
        )
    known = find_family(family) if isinstance(family, str) else Family("", family, 1)
    per_rank = known.stages_per_rank if stages_per_rank is None else stages_per_rank
    require_size(ranks, microbatches, per_rank)
    return _call(known.generate, ranks, microbatches, per_rank)


def _call(function: Generator, *sizes: int) -> Schedule:
    """Call a schedule function, and refuse one that has another form than it must."""
    name = getattr(function, "__name__", type(function).__name__)
    form = inspect.signature(function)
    try:
        form.bind(*sizes)
    except TypeError as error:
        raise ArgumentError(
            "a schedule function must take ranks, microbatches and stages_per_rank by position "
            f"(got {name}{form}); define it as {name}(ranks, microbatches, stages_per_rank)"
        ) from error
    schedule = function(*sizes)
    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"a schedule function must return a Schedule ({name} returned "
            f"{type(schedule).__name__}); end it with return Schedule.from_orders(...)"
        )
    return schedule


def lower(
    schedule: Schedule,
    *,
    receives: Literal["early", "late"] | Costs = "early",
    whole_stages: int | None = None,
) -> Schedule:
    """Add what a runtime needs: messages, gathered parameters, gradient reduction.

    `receives` says where receives go: as early as torch puts them, late (right before their
    use where that is safe), or where these costs say that the message arrives. At most
    `whole_stages` sharded stages of a rank are gathered at once, by default three or as many as an
    overlap uses.

    >>> print(lower(build("1F1B", ranks=2, microbatches=1)))
       rank 0        rank 1
    0  0UNSHARD      1UNSHARD
    1  0F0           1RECV_F0
    2  0SEND_F0      1F0
    3  0RECV_B0      1B0
    4  0B0           1SEND_B0
    5  0REDUCE_GRAD  1REDUCE_GRAD
    6  0RESHARD      1RESHARD
    """
    require_schedule(schedule)
    schedule = add_unshard_reshard(schedule, whole_stages=whole_stages)
    schedule = add_reduce_grad(schedule)
    match receives:
        case Costs():
            return add_send_recv_by_cost(schedule, receives)
        case "early":
            return add_send_recv(schedule)
        case "late":
            return delay_receives(add_send_recv(schedule))
        case _:
            raise ArgumentError(f"receives must be 'early', 'late' or Costs (got {receives!r})")

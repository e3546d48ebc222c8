"""Schedules: every rank's order of work. Planning makes them, running follows them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.atomic_files import write_atomically
from penstock.errors import ArgumentError, ScheduleError
from penstock.ir.actions import Kind, Work
from penstock.ir.dataflow import Dataflow
from penstock.ir.placement import Placement
from penstock.ir.rows import Rows
from penstock.ir.text import format_csv, format_table, parse_csv, parse_work
from penstock.ir.wording import WORDING
from penstock.untrusted import clean_name, read_text

__all__ = ["Schedule", "require_schedule"]

# A schedule may lack this many forwards before it is refused unread: checks make a table of them.
_FEW_FORWARDS = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Every rank's order of work, with its placement and dataflow.

    Schedules are equal if all but their names is.

    >>> schedule = Schedule.from_orders([["0F0", "0B0"], ["1F0", "1B0"]])
    >>> schedule.num_ranks, schedule.num_stages, schedule.microbatches
    (2, 2, 1)
    >>> print(schedule)
       rank 0  rank 1
    0  0F0     1F0
    1  0B0     1B0
    """

    rows: Rows
    placement: Placement
    dataflow: Dataflow
    microbatches: int
    name: str = "custom"

    def __post_init__(self) -> None:
        stages, ranks = self.dataflow.num_stages, self.rows.num_ranks
        if self.placement.num_stages != stages or self.placement.num_ranks != ranks:
            raise ScheduleError(
                f"orders, placement and dataflow differ in size (ranks: {ranks} and "
                f"{self.placement.num_ranks}, stages: {stages} and {self.placement.num_stages})"
            )

    @classmethod
    def from_orders(
        cls,
        orders: Iterable[Iterable[Work | str]],
        *,
        name: str = "custom",
        dataflow: Dataflow | None = None,
    ) -> "Schedule":
        """Return a schedule from every rank's list of actions, given as values or as text.

        Placement and number of microbatches are read off the lists; the dataflow is a chain
        unless given. Nothing else is checked here: `penstock.check` does that.
        """
        works = [
            [parse_work(work) if isinstance(work, str) else work for work in order]
            for order in orders
        ]
        rows = Rows.from_works(works)
        placement = _read_placement(rows)
        microbatches = int(rows.microbatch[rows.is_compute].max()) + 1
        if microbatches > len(rows):
            raise ScheduleError(
                WORDING["microbatch gap"].format(microbatch=microbatches - 1, actions=len(rows))
            )
        flow = Dataflow.chain(placement.num_stages) if dataflow is None else dataflow
        if flow.num_parts * microbatches > max(_FEW_FORWARDS, 4 * len(rows)):
            raise ScheduleError(
                f"{flow.num_parts} stages and {microbatches} microbatches are named, but there "
                f"are only {len(rows)} actions; number both from 0 without gaps"
            )
        return cls(rows, placement, flow, microbatches, name)

    @classmethod
    def from_csv(cls, path: Path | str) -> "Schedule":
        """Read a schedule from a CSV file with one row per rank; see `to_csv`."""
        file = Path(path)
        try:
            orders, dataflow = parse_csv(read_text(file))
            return cls.from_orders(orders, name=clean_name(file.stem), dataflow=dataflow)
        except ScheduleError as error:
            raise type(error)(f"{file}: {error}") from error

    def to_csv(self, path: Path | str) -> None:
        """Write one row per rank and one cell per action, as `torch.distributed.pipelining` does.

        A dataflow other than a chain goes into a first line that begins with `#`.
        """
        text = format_csv((self.order(rank) for rank in range(self.num_ranks)), self.dataflow)
        write_atomically(path, text)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.rows.num_ranks

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.dataflow.num_stages

    @property
    def has_communication(self) -> bool:
        """Whether the order has sends and receives; otherwise they are implied."""
        return self.rows.has_kind(Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)

    @property
    def is_forward_only(self) -> bool:
        """Whether no rank runs a backward."""
        return not self.rows.has_kind(
            Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
        )

    def order(self, rank: int) -> tuple[Work, ...]:
        """Return what one rank does, first to last."""
        return tuple(self.rows.works(rank))

    @property
    def orders(self) -> tuple[tuple[Work, ...], ...]:
        """What every rank does, first to last."""
        return tuple(self.order(rank) for rank in range(self.num_ranks))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        mine, theirs = self.rows, other.rows
        return (
            self.placement == other.placement
            and self.dataflow == other.dataflow
            and self.microbatches == other.microbatches
            and np.array_equal(mine.first, theirs.first)
            and all(map(np.array_equal, mine.columns, theirs.columns))
        )

    def __hash__(self) -> int:
        columns = (column.tobytes() for column in self.rows.columns)
        return hash((self.placement, self.dataflow, self.microbatches, *columns))

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {self.num_ranks} ranks, {self.num_stages} stages, "
            f"{self.microbatches} microbatches, {len(self.rows)} actions>"
        )

    def __str__(self) -> str:
        return format_table(self.orders)


def _read_placement(rows: Rows) -> Placement:
    """Return which rank holds each stage, according to the compute actions."""
    compute = rows.is_compute
    stage, rank = rows.stage[compute], rows.rank_of_row()[compute]
    if not len(stage):
        raise ScheduleError(WORDING["no compute"])
    num_stages = int(stage.max()) + 1
    if num_stages > len(rows):
        raise ScheduleError(WORDING["stage gap"].format(stage=num_stages - 1, actions=len(rows)))
    holder = np.full(num_stages, -1)
    holder[stage] = rank
    if (missing := np.flatnonzero(holder < 0)).size:
        raise ScheduleError(WORDING["stage missing"].format(stage=missing[0], last=num_stages - 1))
    if (wrong := np.flatnonzero(holder[stage] != rank)).size:
        row = int(np.flatnonzero(compute)[wrong[0]])
        at, position = rows.position(row)
        raise ScheduleError(
            WORDING["stage twice"].format(
                rank=at,
                position=position,
                action=rows.action(row),
                stage=rows.stage[row],
                other=holder[rows.stage[row]],
            )
        )
    if idle := set(range(rows.num_ranks)) - set(holder.tolist()):
        raise ScheduleError(WORDING["idle rank"].format(rank=min(idle)))
    return Placement(tuple(holder.tolist()))


def require_schedule(value: object) -> None:
    """Refuse anything but a schedule, and say where to get one."""
    if isinstance(value, Schedule):
        return
    has_one = isinstance(getattr(value, "schedule", None), Schedule)
    way = (
        "give its .schedule"
        if has_one
        else 'make one, as in build("1F1B", ranks=2, microbatches=4)'
    )
    raise ArgumentError(f"schedule must be a Schedule (got {type(value).__name__}); {way}")

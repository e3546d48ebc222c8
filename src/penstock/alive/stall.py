"""What every rank does in a step without progress, as a table."""

from collections.abc import Sequence

from penstock.alive.rank_status import RankStatus

__all__ = ["describe_stall", "is_waiting"]


def is_waiting(status: RankStatus) -> bool:
    """Return whether a rank waits for another one."""
    return status.waits_for is not None or status.is_meeting


def describe_stall(statuses: Sequence[RankStatus], seconds: float) -> str:
    """Return a table of what every rank does, below the rank that all others wait for."""
    busy = [rank for rank, status in enumerate(statuses) if not is_waiting(status)]
    match busy:
        case []:
            blame = "every rank is waiting for another"
        case [rank]:
            blame = f"all ranks are waiting for rank {rank}"
        case _:
            blame = f"ranks {', '.join(map(str, busy))} are not waiting for another"
    rows = [("rank", "in", "for", "waits for"), *map(_row, range(len(statuses)), statuses)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"no progress for {seconds:.0f} s; {blame}"]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(rank: int, status: RankStatus) -> tuple[str, str, str, str]:
    if not status.is_inside or status.doing is None:
        return str(rank), "no step", "", ""
    waits = "all ranks" if status.is_meeting else ""
    if status.waits_for is not None:
        message = "" if status.awaited is None else f", {status.awaited}"
        waits = f"rank {status.waits_for}{message}"
    return str(rank), status.doing, f"{status.seconds:.0f} s", waits

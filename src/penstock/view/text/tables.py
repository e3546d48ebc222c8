"""Tables of timelines for the terminal: several side by side, or one rank by rank."""

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from penstock.sim.period import DEFAULT_BOUNDARY, Boundary, name_seconds
from penstock.sim.throughput import Workload
from penstock.sim.timeline import Timeline
from penstock.units import format_bytes, format_number, format_share

__all__ = ["rank_table", "summary_table"]

# With more ranks a table is no longer read but searched.
_MOST_RANKS = 32


def summary_table(
    timelines: Mapping[str, Timeline],
    boundary: Boundary = DEFAULT_BOUNDARY,
    workload: Workload | None = None,
) -> Table:
    """Compare timelines by name: time, idle time, memory, and the ratio to the first.

    With a workload also tokens per second and MFU.
    """
    has_bytes = any(timeline.peak_bytes for timeline in timelines.values())
    steps = {name: timeline.repeat(boundary) for name, timeline in timelines.items()}
    seconds = f"{name_seconds(boundary)} s"
    table = _start_table("schedule", seconds, "ratio", "bubble", "peak microbatches")
    if has_bytes:
        table.add_column("peak bytes", justify="right")
    if workload is not None:
        table.add_column("tokens/s", justify="right")
        table.add_column("MFU", justify="right")
    first = next((step.seconds for step in steps.values()), 0.0)
    for name, timeline in timelines.items():
        cells = [
            format_number(steps[name].seconds),
            f"{steps[name].seconds / first:.3f}" if first else "",
            format_share(steps[name].bubble_rate),
            format_number(timeline.peak_microbatches),
        ]
        if has_bytes:
            cells.append(format_bytes(timeline.peak_bytes))
        if workload is not None:
            cells += _throughput_cells(timeline, steps[name].seconds, workload)
        table.add_row(Text(name), *cells)
    return table


def _throughput_cells(timeline: Timeline, seconds: float, workload: Workload) -> list[str]:
    schedule = timeline.schedule
    found = workload.at(seconds, ranks=schedule.num_ranks, microbatches=schedule.microbatches)
    mfu = "" if found.mfu is None else format_share(found.mfu)
    return [format_number(found.tokens_per_second), mfu]


def rank_table(timeline: Timeline, boundary: Boundary = DEFAULT_BOUNDARY) -> Table:
    """List the stages, the busy and idle time, and the peak memory of every rank.

    Of many ranks only the first and the last are listed.
    """
    has_bytes = bool(timeline.peak_bytes)
    table = _start_table("rank", "stages", "busy s", "idle s", "bubble", "peak activations")
    if has_bytes:
        table.add_column("peak bytes", justify="right")
    step = timeline.repeat(boundary)
    busy, idle, bubble = step.busy_seconds, step.idle_seconds, step.rank_bubble_rates
    ranks = timeline.schedule.num_ranks
    for rank in range(ranks):
        if ranks > _MOST_RANKS and _MOST_RANKS // 2 <= rank < ranks - _MOST_RANKS // 2:
            if rank == _MOST_RANKS // 2:
                table.add_row("...", f"{ranks - _MOST_RANKS} more")
            continue
        cells = [
            " ".join(map(str, timeline.schedule.placement.stages(rank))),
            format_number(busy[rank]),
            format_number(idle[rank]),
            format_share(bubble[rank]),
            str(timeline.rank_peak_activations[rank]),
        ]
        if has_bytes:
            cells.append(format_bytes(timeline.rank_peak_bytes[rank]))
        table.add_row(str(rank), *cells)
    return table


def _start_table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table

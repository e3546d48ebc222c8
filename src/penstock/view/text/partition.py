"""Partitions as a table for the terminal: one line per stage, and their balance below.

stage  rank  pieces                    F  I  W  of slowest
    0     0  embedding .. layers.1  3  3  3  3  ██████████ 100.0 %
    1     1  layers.2 .. head       2  2  2  2  ███████     66.7 %
balance 83.3 %: slowest stage 9 (stage 0), slowest rank 9
"""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from penstock.ir.actions import Kind
from penstock.planner.partition.partition import Partition
from penstock.planner.partition.pieces import Piece
from penstock.units import format_bytes, format_number, format_share
from penstock.view.palette import LOOKS

__all__ = ["balance_table"]

_BAR_WIDTH = 10
_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def balance_table(partition: Partition) -> Table:
    """List the pieces, seconds and bytes of each stage, with the balance as a caption."""
    has_bytes = any(partition.stage_bytes)
    table = Table(box=None, pad_edge=False, caption=_caption(partition), caption_justify="left")
    for title in ("stage", "rank"):
        table.add_column(title, justify="right")
    table.add_column("pieces")
    for title in ("", *(LOOKS[kind].letter for kind in _KINDS)):
        table.add_column(title, justify="right")
    table.add_column("of slowest")
    for title in ("resident", "activations", "rank memory") if has_bytes else ():
        table.add_column(title, justify="right")
    for stage in range(partition.placement.num_stages):
        cells = _work_cells(partition, stage)
        table.add_row(*cells, *(_byte_cells(partition, stage) if has_bytes else ()))
    return table


def _work_cells(partition: Partition, stage: int) -> list[str | Text]:
    held = partition.stages[stage]
    seconds = _seconds(held)
    return [
        str(stage),
        str(partition.placement.rank_of_stage[stage]),
        partition.describe_stage(stage),
        str(len(held)),
        *map(format_number, seconds),
        _bar(seconds, max(partition.stage_seconds)),
    ]


def _byte_cells(partition: Partition, stage: int) -> list[str]:
    rank, held = partition.placement.rank_of_stage[stage], partition.stages[stage]
    memory = format_bytes(partition.rank_bytes[rank])
    if partition.memory is not None:
        memory += f" of {format_bytes(partition.memory[rank])}"
    return [
        format_bytes(sum(piece.resident_bytes for piece in held)),
        f"{partition.in_flight[stage]} x "
        + format_bytes(sum(piece.activation_bytes for piece in held)),
        memory,
    ]


def _seconds(held: Sequence[Piece]) -> tuple[float, ...]:
    return (
        sum(piece.forward for piece in held),
        sum(piece.backward_input for piece in held),
        sum(piece.backward_weight for piece in held),
    )


def _bar(seconds: tuple[float, ...], slowest: float) -> Text:
    """Return a bar as long as the stage takes, in the colours of forward and backward."""
    bar, total, columns = Text(), 0.0, 0
    for kind, part in zip(_KINDS, seconds, strict=True):
        total += part
        end = round(_BAR_WIDTH * total / slowest) if slowest else 0
        bar.append("█" * (end - columns), LOOKS[kind].colour)
        columns = end
    share = format_share(total / slowest) if slowest else ""
    return bar.append(" " * (_BAR_WIDTH - columns) + share.rjust(8))


def _caption(partition: Partition) -> str:
    return (
        f"balance {format_share(partition.balance)}: "
        f"slowest stage {format_number(max(partition.stage_seconds))} "
        f"(stage {partition.slowest_stage}), "
        f"slowest rank {format_number(max(partition.rank_seconds))}"
        + ("" if partition.is_best else " (not proven to be the fastest)")
    )

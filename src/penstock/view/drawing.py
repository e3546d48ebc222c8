"""Pictures and tables that print as text: plain with `print`, in colour with `rich.print`."""

from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from shutil import get_terminal_size

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from penstock.sim.period import DEFAULT_BOUNDARY, Boundary
from penstock.sim.throughput import Workload
from penstock.sim.timeline import Timeline
from penstock.view.text.tables import summary_table

__all__ = ["Comparison", "Drawing"]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Drawing:
    """A picture for the terminal, `width` characters wide, or as wide as the terminal."""

    content: RenderableType
    width: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = self.width or options.max_width
        yield from console.render(self.content, options.update(width=width))

    def __str__(self) -> str:
        return _plain_text(self.content, self.width)

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Timelines by name, side by side; it prints as a table, and every view accepts it.

    `boundary` is what happens between two steps; it decides which seconds the table shows. With a
    `workload` the table has tokens per second and MFU.
    """

    timelines: Mapping[str, Timeline]
    boundary: Boundary = DEFAULT_BOUNDARY
    workload: Workload | None = None

    def __rich__(self) -> RenderableType:
        return summary_table(self.timelines, self.boundary, self.workload)

    def __str__(self) -> str:
        return _plain_text(summary_table(self.timelines, self.boundary, self.workload), None)

    def __repr__(self) -> str:
        return str(self)


def _plain_text(content: RenderableType, width: int | None) -> str:
    """Render without colours, and without spaces at the ends of lines."""
    stream = StringIO()
    columns = width or get_terminal_size().columns
    # In a notebook Rich would display the text below the cell, and write nothing to the stream.
    console = Console(
        file=stream, width=columns, color_system=None, highlight=False, force_jupyter=False
    )
    console.print(content)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip("\n").split("\n"))

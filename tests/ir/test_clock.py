"""The loop that runs every rank's list in order: on lists, compiled, and when it gets stuck."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.assembly import build, lower
from penstock.ir.clock import Run, find_cycle, run_in_order
from penstock.ir.graph import Graph, build_graph
from penstock.ir.rows import Floats, Rows
from penstock.ir.schedule import Schedule
from tests.tables import read_schedule

# More rows than any size at which the compiled loop takes over.
MANY_ROWS = 150_000


@dataclass(frozen=True, slots=True)
class Priced:
    """What the loop takes in."""

    rows: Rows
    graph: Graph
    duration: Floats
    busy: Floats
    lag: Floats

    def run(self) -> Run:
        return run_in_order(
            self.rows, self.graph, duration=self.duration, busy=self.busy, lag=self.lag
        )


def price(schedule: Schedule, *, lag: float = 0.5) -> Priced:
    """Durations that differ from row to row, and one lag for whatever crosses ranks."""
    graph = build_graph(schedule)
    opens = schedule.rows.opening_row()
    duration = 1.0 + opens % 7 / 8
    lags = np.where(graph.link >= 0, lag, 0.0)
    return Priced(schedule.rows, graph, duration, duration + opens % 2 / 4, lags)


def copies(priced: Priced, count: int) -> Priced:
    """Repeat the same ranks `count` times, each copy with its own rows and needs."""
    rows, graph = priced.rows, priced.graph
    shift = np.arange(count)
    bounds = (rows.first[:-1] + shift[:, None] * len(rows)).ravel()
    slots = (graph.first[:-1] + shift[:, None] * len(graph.need)).ravel()
    return Priced(
        Rows(
            np.append(bounds, count * len(rows)),
            np.tile(rows.kind, count),
            np.tile(rows.stage, count),
            np.tile(rows.microbatch, count),
            np.tile(rows.peer, count),
            np.tile(rows.joined, count),
        ),
        Graph(
            np.append(slots, count * len(graph.need)),
            (graph.need + shift[:, None] * len(rows)).ravel().astype(np.int32),
            np.tile(graph.link, count),
        ),
        np.tile(priced.duration, count),
        np.tile(priced.busy, count),
        np.tile(priced.lag, count),
    )


def test_row_starts_when_its_rank_is_free_and_its_inputs_are_there() -> None:
    schedule = read_schedule("""
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """)
    run = price(schedule, lag=10).run()
    assert run.is_finished
    # Durations 1, 1 1/8, ...; every second row keeps its rank a quarter longer.
    assert run.start.tolist() == [0, 1, 24.125, 27.125, 11, 12.5, 14.375, 16.125]
    assert run.stuck_at.tolist() == run.waits_for.tolist() == [-1, -1]


def test_overlap_starts_when_the_inputs_of_all_its_members_are_there() -> None:
    schedule = read_schedule("""
        0F0 (0F1;0B0)OVERLAP_F_B 0B1
        1F0 1B0 1F1 1B1
    """)
    graph = build_graph(schedule)
    ones = np.ones(len(schedule.rows))
    run = run_in_order(
        schedule.rows, graph, duration=ones, busy=ones, lag=np.zeros(len(graph.need))
    )
    assert run.start.tolist() == [0, 3, 3, 6, 1, 2, 4, 5]


def test_compiled_loop_gives_what_the_plain_loop_gives() -> None:
    # In a process of its own: once the compiled loop is loaded, it serves small runs too.
    code = "from tests.ir.test_clock import compare_loops; compare_loops()"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def compare_loops() -> None:
    """Run schedules one by one on the plain loop, then all many times over on the compiled one."""
    stuck = read_schedule("""
        0F0 0F1 0B0 0B1
        1F0 1B1 1B0 1F1
    """)
    families = [build(name, ranks=4, microbatches=10) for name in ("1F1B", "ZBV", "DualPipe")]
    pieces = [price(piece) for piece in (stuck, *families, *map(lower, families))]
    for piece, few in [(piece, piece.run()) for piece in pieces]:
        count = 1 + MANY_ROWS // len(piece.rows)
        many = copies(piece, count).run()
        assert many.is_finished == few.is_finished
        assert np.array_equal(many.start, np.tile(few.start, count), equal_nan=True)
        shift = np.repeat(np.arange(count) * len(piece.rows), piece.rows.num_ranks)
        for mine, theirs in ((many.stuck_at, few.stuck_at), (many.waits_for, few.waits_for)):
            expected = np.tile(theirs, count)
            assert np.array_equal(mine, np.where(expected < 0, expected, expected + shift))


def test_rank_that_waits_for_itself_is_stuck_there() -> None:
    run = price(read_schedule("0F0 0B1 0F1 0B0")).run()
    assert run.start.tolist()[0] == 0
    assert np.isnan(run.start[1:]).all()
    assert (run.stuck_at.tolist(), run.waits_for.tolist()) == ([1], [2])
    assert find_cycle(read_schedule("0F0 0B1 0F1 0B0").rows, run) == [0]


def test_cycle_leaves_out_the_ranks_that_merely_wait_for_it() -> None:
    first_two = read_schedule("""
        0F0 0B0 0F1 0B1
        1F0 1F1 1B0 1B1
        2F0 2B0 2F1 2B1
    """)
    last_two = read_schedule("""
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
        2F0 2F1 2B0 2B1
    """)
    assert sorted(find_cycle(first_two.rows, price(first_two).run())) == [0, 1]
    assert sorted(find_cycle(last_two.rows, price(last_two).run())) == [1, 2]

import numpy as np

from penstock.ir.actions import Kind
from penstock.ir.placement import Placement
from penstock.schedules.moves import (
    Moves,
    alternate,
    assemble,
    count_microbatches,
    join,
    phases,
    sweep,
)
from tests.schedules.tables import read_table


def texts(moves: Moves) -> str:
    """Return moves as action text; a + precedes a move that is joined to the one before it."""
    cells = zip(
        moves.kind.tolist(),
        moves.stage.tolist(),
        moves.microbatch.tolist(),
        moves.joined.tolist(),
        strict=True,
    )
    return " ".join(
        f"{'+' if joined else ''}{stage}{Kind(kind).text}{microbatch}"
        for kind, stage, microbatch, joined in cells
    )


def test_sweep_runs_one_stage_for_each_microbatch() -> None:
    assert texts(sweep(Kind.FORWARD, 2, range(1, 4))) == "2F1 2F2 2F3"
    assert texts(sweep(Kind.FULL_BACKWARD, 0, range(2, -1, -1))) == "0B2 0B1 0B0"


def test_join_puts_one_stretch_after_the_other() -> None:
    parts = [sweep(Kind.FORWARD, stage, range(2)) for stage in (0, 3)]
    assert texts(join(parts)) == "0F0 0F1 3F0 3F1"


def test_part_of_a_stretch_is_a_stretch() -> None:
    assert texts(sweep(Kind.FORWARD, 0, range(4))[1:3]) == "0F1 0F2"


def test_alternate_takes_turns_and_lets_short_sequences_stop() -> None:
    sequences = [
        sweep(Kind.FORWARD, 0, range(3)),
        sweep(Kind.BACKWARD_INPUT, 0, range(2)),
        sweep(Kind.BACKWARD_WEIGHT, 0, range(1)),
    ]
    assert texts(alternate(*sequences)) == "0F0 0I0 0W0 0F1 0I1 0F2"


def test_phases_repeat_patterns_and_count_microbatches() -> None:
    moves = phases([4, 7], [(2, "F0"), (2, "F0 F1"), (1, "(F1 B0) I1 W1")], range(8))
    assert texts(moves) == "4F0 4F1 4F2 7F0 4F3 7F1 7F2 +4B0 7I0 7W0"


def test_phase_that_is_repeated_less_than_never_is_left_out() -> None:
    assert texts(phases([0], [(-2, "F0"), (1, "F0")], range(8))) == "0F0"


def test_moves_beyond_a_share_are_left_out_and_their_partners_run_alone() -> None:
    moves = phases([0, 1], [(3, "(F0 F1)")], range(2, 4), range(5, 8))
    assert texts(moves) == "0F2 +1F5 0F3 +1F6 1F7"


def test_full_backward_counts_as_both_of_its_halves() -> None:
    kinds = [Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD]
    count = count_microbatches(np.array(kinds), np.zeros(4, np.int64), 1)
    assert count.tolist() == [0, 1, 1, 2]


def test_assemble_gives_every_rank_its_moves() -> None:
    orders = [phases([rank], [(2, "F0"), (2, "B0")], range(2)) for rank in range(2)]
    schedule = assemble("two by two", orders, Placement.loop(2), 2)
    assert schedule == read_table(
        "0F0 0F1             0B0     0B1",
        "    1F0 1F1 1B0     1B1",
    )
    assert schedule.name == "two by two"

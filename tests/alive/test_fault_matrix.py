"""The fault matrix: whatever happens to a rank, wherever it happens, all others name it.

Half-open links and processes that hold Python's lock are real: the kernel drops what comes in on
the heartbeat's connection, and native code sleeps without giving the lock back.
"""

from itertools import product
from pathlib import Path

import pytest

import penstock as ps
from tests.alive.fault_ranks import Fate, run_ranks
from tests.alive.matrix_jobs import MISTAKE, SILENCE_SECONDS, MatrixCase, fail_in_phase

KINDS = ("raise", "SIGKILL", "SIGSTOP", "exit", "half-open link", "GIL held")
PHASES = ("before", "build", "first step", "step", "evaluate", "clip", "save", "load", "measure")
LAYOUTS = ("pipeline", "replicas", "drop-in")
# torch's classes have no such calls.
NOT_IN_DROPIN = ("before", "clip", "save", "load", "measure")
WHAT = {
    "SIGKILL": "ended (its connection broke)",
    "exit": "ended (its connection broke)",
    "SIGSTOP": f"has not answered for {SILENCE_SECONDS:g} s",
    "GIL held": f"has not answered for {SILENCE_SECONDS:g} s",
    "half-open link": f"has not answered for {SILENCE_SECONDS:g} s",
}
ALL_CASES = [
    MatrixCase(*values)
    for values in product(KINDS, PHASES, LAYOUTS)
    if not (values[2] == "drop-in" and values[1] in NOT_IN_DROPIN)
]
FEW = [
    MatrixCase("SIGKILL", "before", "pipeline"),
    MatrixCase("SIGKILL", "build", "pipeline"),
    MatrixCase("exit", "evaluate", "replicas"),
    MatrixCase("raise", "clip", "pipeline"),
    MatrixCase("SIGKILL", "measure", "pipeline"),
    MatrixCase("exit", "build", "drop-in"),
]


def check_case(case: MatrixCase, folder: Path) -> None:
    stops = case.kind == "SIGSTOP"
    fates = run_ranks(
        fail_in_phase, case.ranks, folder, case, folder, resume=case.victim if stops else None
    )
    # A process that had to be killed at the end of the test has none.
    assert None not in [fate.exit_code for fate in fates], fates
    others = [fate for rank, fate in enumerate(fates) if rank != case.victim]
    if case.kind == "raise":
        check_raised(case, fates)
    else:
        for rank, fate in enumerate(others):
            check_named(case, rank, fate)


def check_named(case: MatrixCase, rank: int, fate: Fate) -> None:
    """Check that a rank has named the lost one, in its error or as its process was ended."""
    number = 1 if case.layout != "replicas" else case.victim
    said = str(fate.reported) if fate.exit_code == 1 else fate.stderr
    if (case.phase, case.layout, rank) == ("measure", "replicas", case.victim - 1):
        # It may hear of it first from the ranks with which it measures, and has their numbers.
        number = number if f"rank {number} (" in said else 1
    # A collective of DDP cannot be aborted: a process that is still in it is ended.
    assert fate.exit_code == 1 or (case.layout, fate.exit_code) == ("replicas", 83), fate
    if fate.exit_code == 1:
        assert isinstance(fate.reported, ps.errors.PeerLostError), fate
        assert fate.reported.rank == number, fate
    assert f"rank {number} (" in said, fate
    assert WHAT[case.kind] in said, fate


def check_raised(case: MatrixCase, fates: list[Fate]) -> None:
    """Check that every rank of the pipeline has the error of the one that raised."""
    # All processes watch, save and load together, also those of the other replica.
    is_of_all = case.phase in ("before", "save", "load")
    for fate in fates if is_of_all else fates[case.victim - 1 :]:
        assert fate.exit_code == 1, fate
        assert MISTAKE in str(fate.reported), fate
    number = case.victim if is_of_all else 1
    assert f"rank {number}" in str(fates[case.victim - 1].reported)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_others_name_the_rank(case: MatrixCase, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL_CASES if case not in FEW], ids=str)
def test_others_name_the_rank_in_every_case(case: MatrixCase, tmp_path: Path) -> None:
    check_case(case, tmp_path)

"""The fault matrix: whatever happens to a rank, wherever it happens, all others name it.

Half-open links and processes that hold Python's lock are real: the kernel drops what comes in on
the heartbeat's connection, and native code sleeps without giving the lock back. A rank that raises
then lets go of its pipeline, and fails if a thread, a socket or another open file is left.
"""

from itertools import product
from pathlib import Path

import pytest

import penstock as ps
from tests.alive.fault_ranks import Fate, run_ranks
from tests.alive.matrix_jobs import (
    MISTAKE,
    SILENCE_SECONDS,
    TEMPORARY,
    MatrixCase,
    fail_in_phase,
)

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
# How a process fails that is there again, or still, once the others have given it up.
STAYS = ("SIGSTOP", "half-open link", "GIL held")
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
    (folder / TEMPORARY).mkdir()
    stops = case.kind == "SIGSTOP"
    fates = run_ranks(
        fail_in_phase, case.ranks, folder, case, folder, resume=case.victim if stops else None
    )
    # A process that had to be killed at the end of the test has none.
    assert None not in [fate.exit_code for fate in fates], fates
    assert not any(isinstance(fate.reported, AssertionError) for fate in fates), fates
    others = [fate for rank, fate in enumerate(fates) if rank != case.victim]
    if case.kind == "raise":
        check_raised(case, fates)
    else:
        for rank, fate in enumerate(others):
            check_named(case, rank, fate)
    if case.kind in STAYS:
        check_victim(case, fates[case.victim])
    check_files(folder, is_ended={fate.exit_code for fate in fates} & {83} != set())


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


def check_victim(case: MatrixCase, fate: Fate) -> None:
    """Check that a process that was given up and is still there names itself."""
    number = 1 if case.layout != "replicas" else case.victim
    # What holds it up may last longer than the time in which it has to leave its call.
    assert fate.exit_code in (1, 83), fate
    said = str(fate.reported) if fate.exit_code == 1 else fate.stderr
    if (case.phase, case.layout) == ("measure", "replicas"):
        # It watches with all ranks and measures with two. Either may find out first that nobody
        # hears it, and each has a number of its own for it; only one of them was accepted.
        number = number if f"rank {number} (" in said else 1
    assert f"rank {number} (" in said, fate


def check_raised(case: MatrixCase, fates: list[Fate]) -> None:
    """Check that every rank has the error of the one that raised."""
    # All processes watch, save and load together, also those of the other replica. Otherwise this
    # learns of it once it waits for the one that raised, and may be in a collective of DDP then.
    is_of_all = case.phase in ("before", "save", "load")
    own = fates if is_of_all else fates[case.victim - 1 :]
    for fate in fates:
        assert fate.exit_code == 1 or (fate not in own and fate.exit_code == 83), fate
        assert MISTAKE in (str(fate.reported) if fate.exit_code == 1 else fate.stderr), fate
    number = case.victim if is_of_all else 1
    assert f"rank {number}" in str(fates[case.victim - 1].reported)


def check_files(folder: Path, *, is_ended: bool) -> None:
    """Check that only flight records and complete checkpoints are left, in their places."""
    files = {file.relative_to(folder) for file in folder.rglob("*") if not file.is_dir()}
    ours = {file for file in files if not file.name.startswith("stderr")}
    records = {file for file in ours if file.match("penstock-*/rank*.flight")}
    saved = {file for file in ours if file.match("saved/step-00000001/*")}
    # A process that is ended gives nothing back; the next job takes over at once.
    lease = {Path("saved/.penstock/lease.json")} if is_ended else set()
    assert ours - records - saved - lease == set()
    assert not saved or Path("saved/step-00000001/penstock.json") in saved


@pytest.mark.parametrize("case", FEW, ids=str)
def test_others_name_the_rank(case: MatrixCase, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL_CASES if case not in FEW], ids=str)
def test_others_name_the_rank_in_every_case(case: MatrixCase, tmp_path: Path) -> None:
    check_case(case, tmp_path)

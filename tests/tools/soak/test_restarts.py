"""The elastic cases of a soak: drawn by chance, and really trained through all of their starts."""

from pathlib import Path
from typing import get_args

import pytest
import torch.distributed as dist

from penstock.tools.soak.elastic_steps import run_start
from penstock.tools.soak.leaks import Footprint
from penstock.tools.soak.outcomes import problem_of_start
from penstock.tools.soak.restarts import (
    ElasticCase,
    ElasticFault,
    ElasticFaultKind,
    Start,
    draw_elastic_case,
)
from penstock.tools.soak.soak import SoakRequest, soak
from penstock.tools.soak.steps import SoakFindings
from penstock.tools.soak.world import WorkerAnswer
from tests.processes import Processes

CASE = ElasticCase(
    number=0,
    seed=5,
    layers=4,
    microbatches=2,
    steps=3,
    save_every=1,
    starts=(Start(2, None),),
)


@pytest.fixture(scope="module")
def cases() -> list[ElasticCase]:
    drawn = [draw_elastic_case(1, number, ranks=4, has_faults=True) for number in range(2000)]
    return [case for case in drawn if case is not None]


def test_cases_are_of_every_kind(cases: list[ElasticCase]) -> None:
    assert 50 < len(cases) < 200
    faults = [start.fault for case in cases for start in case.starts if start.fault is not None]
    assert {fault.kind for fault in faults} == set(get_args(ElasticFaultKind))
    assert {fault.place for fault in faults} == {"start", "build", "step"}
    assert {len(case.starts) for case in cases} == {2, 3, 4}
    assert {start.ranks for case in cases for start in case.starts} == {1, 2, 3, 4}


def test_every_case_can_be_trained_to_its_end(cases: list[ElasticCase]) -> None:
    for case in cases:
        assert case.starts[-1].fault is None
        assert all(start.ranks <= case.layers for start in case.starts)
        for start in case.starts[:-1]:
            assert start.fault is not None
            assert start.fault.rank < start.ranks
            assert start.fault.step < case.steps


def test_faults_can_be_left_out_of_the_same_cases(cases: list[ElasticCase]) -> None:
    number = cases[0].number
    without = draw_elastic_case(1, number, ranks=4, has_faults=False)
    assert without is not None
    assert [start.ranks for start in without.starts] == [s.ranks for s in cases[0].starts]
    assert {start.fault for start in without.starts} == {None}
    assert draw_elastic_case(1, number, ranks=1, has_faults=True) is None


def train(_: int, folder: Path) -> SoakFindings:
    return run_start(CASE, 0, dist.group.WORLD, folder)


def test_start_has_the_losses_of_plain_torch(tmp_path: Path, two_processes: Processes) -> None:
    for found in two_processes.run(train, tmp_path):
        assert found.steps == CASE.steps
        assert found.worst.error <= 1e-12, found.worst


def test_survivors_that_name_nobody_or_another_are_found() -> None:
    start = Start(3, ElasticFault("kill", 2, "step", 1))

    def answer(error: str) -> WorkerAnswer:
        return WorkerAnswer(None, error, Footprint(0, 0, 0, 0, 0, 0), ())

    right = answer("PeerLostError: rank 2 (process 7) ended")
    assert problem_of_start(start, [right, right, -9]) == ""
    wrong = answer("PeerLostError: rank 0 (process 7) ended")
    assert problem_of_start(start, [right, wrong, -9]) == (
        "rank 1: it does not name rank 2: PeerLostError: rank 0 (process 7) ended"
    )
    assert problem_of_start(start, [None, right, -9]) == "rank 0: no answer in time"


# The numbers of cases with a rank that is killed in a step, stopped before the ranks have met, and
# lost three times, while all build as well.
@pytest.mark.slow
@pytest.mark.parametrize("number", [31, 56, 80])
def test_training_goes_through_all_of_its_starts(number: int) -> None:
    summary = soak(SoakRequest(seed=0, case=number))
    assert summary.problem == ""
    assert summary.progress.restarts == summary.progress.faults > 0

"""The cases of a soak: the same for the same seed, and of every kind."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import get_args

import pytest
import torch

from penstock.assembly import lower
from penstock.checks.report import find_problems
from penstock.tools.soak.cases import FaultKind, SoakCase, draw_case
from penstock.tools.soak.models import SoakBatch, count_tokens, draw_model, make_case
from penstock.tools.soak.schedules import draw_schedule
from penstock.tools.soak.steps import run_case
from penstock.tools.verify.reference import run_unsplit
from tests.strategies import FAMILY_NAMES


@pytest.fixture(scope="module")
def cases() -> list[SoakCase]:
    return [draw_case(1, number, ranks=4, has_faults=True) for number in range(150)]


def test_case_depends_on_seed_and_number_alone(cases: list[SoakCase]) -> None:
    for number in (140, 3):
        assert draw_case(1, number, ranks=4, has_faults=True) == cases[number]
    assert draw_case(2, 3, ranks=4, has_faults=True) != cases[3]


def test_faults_can_be_left_out_of_the_same_cases(cases: list[SoakCase]) -> None:
    for case in [case for case in cases if case.fault is None][:10]:
        assert draw_case(1, case.number, ranks=4, has_faults=False) == case


def test_cases_are_of_every_kind(cases: list[SoakCase]) -> None:
    assert {case.schedule.name for case in cases} >= {*FAMILY_NAMES, "random"}
    assert {case.schedule.num_ranks for case in cases} == {1, 2, 3, 4}
    assert {case.schedule.microbatches for case in cases} == set(range(1, 17))
    assert {case.uses_processes for case in cases} == {True, False}
    assert {case.replicas for case in cases} == {1, 2}
    assert {case.fault.kind for case in cases if case.fault} == set(get_args(FaultKind))
    models = [case.model for case in cases]
    assert {model.weighing for model in models} == {"rows", "sum", "tokens"}
    assert {model.is_tied for model in models} == {True, False}
    for parts in ("frozen", "pairs", "adding_loss"):
        assert {bool(getattr(model, parts)) for model in models} == {True, False}
    flows = [case.schedule.dataflow for case in cases]
    assert any(len(flow.edges) >= flow.num_stages for flow in flows), "some have skips"


def test_faults_happen_at_actions_that_their_rank_runs(cases: list[SoakCase]) -> None:
    for case in cases:
        if case.fault is not None:
            holder = case.schedule.placement.rank_of_stage
            assert holder[case.fault.action.stage] == case.fault.rank
            assert case.uses_processes
            fewest = min(batch.rows for batch in case.batches)
            assert case.fault.action.microbatch is not None
            assert case.fault.action.microbatch < fewest


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_schedule_is_valid_with_and_without_communication(ranks: int) -> None:
    for seed in range(20):
        schedule = draw_schedule(Random(seed), ranks)
        assert schedule.num_ranks <= ranks
        assert find_problems(schedule) == ()
        assert find_problems(lower(schedule)) == ()


def test_model_and_batch_are_the_same_at_every_call() -> None:
    model = draw_model(Random(5), 4)
    losses = []
    for seed in (1, 1, 2):
        case = make_case(model, SoakBatch(seed, rows=3, length=4))
        losses.append(run_unsplit(case, draw_schedule(Random(0), 1).dataflow.chain(4)).item())
    assert losses[0] == losses[1] != losses[2]


def test_drawing_does_not_change_global_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    make_case(draw_model(Random(5), 2), SoakBatch(0, rows=3, length=4))
    assert torch.equal(torch.rand(1), expected)


def test_ignored_tokens_are_not_counted() -> None:
    assert count_tokens(torch.tensor([[3, -100], [-100, 0]])) == 2.0


@pytest.mark.parametrize("number", range(6))
def test_steps_of_a_case_have_the_gradients_of_the_unsplit_model(
    number: int, tmp_path: Path
) -> None:
    case = draw_case(7, number, ranks=3, has_faults=False)
    # Here all ranks are in one process, where messages have names.
    named = replace(case.fault_injection, by_order=False)
    findings = run_case(replace(case, fault_injection=named), None, None, tmp_path)
    assert findings.steps == len(case.batches)
    assert findings.worst.error <= 1e-12, findings.worst.name


def test_messages_go_by_order_between_processes_only(cases: list[SoakCase]) -> None:
    # A case with one rank was given messages by order, which it refused.
    by_order = [case for case in cases if case.fault_injection.by_order]
    assert by_order
    assert all(case.uses_processes and case.schedule.num_ranks > 1 for case in by_order)
    assert all("messages by order" in str(case) for case in by_order)


def test_case_says_what_happens_in_it(cases: list[SoakCase]) -> None:
    faulty = {case.fault.kind: case for case in cases if case.fault is not None}
    drop = faulty["drop"].fault_injection.drop
    assert drop is not None
    assert str(faulty["drop"]).endswith(f", drop on rank {drop.rank} after {drop.after} messages")
    fault = faulty["kill"].fault
    assert fault is not None
    assert str(faulty["kill"]).endswith(
        f", kill on rank {fault.rank} in step {fault.step} at {fault.action}"
    )

"""The soak in real processes: it passes correct code and finds planted mistakes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from penstock.errors import ArgumentError
from penstock.ir.actions import Action, Kind
from penstock.tools.soak.cases import SoakCase
from penstock.tools.soak.soak import AnyCase, SoakRequest, Summary, soak

# A few seconds on an idle machine, with several faults; a slow test runs for ten minutes.
STEPS = 25


def run(request: SoakRequest) -> tuple[Summary, list[AnyCase]]:
    cases: list[AnyCase] = []
    summary = soak(request, lambda case, _: cases.append(case))
    return summary, cases


def test_steps_under_bad_conditions_are_exact_and_nothing_leaks() -> None:
    summary, cases = run(SoakRequest(seed=23, steps=STEPS))
    assert (summary.problem, summary.command) == ("", "")
    assert summary.progress.steps >= STEPS
    assert summary.progress.cases == len(cases)
    whole = [case for case in cases if isinstance(case, SoakCase)]
    assert summary.progress.faults == sum(case.fault is not None for case in whole) > 0
    assert summary.progress.restored > 0
    assert 0.0 < summary.progress.worst.error <= 1e-10


@pytest.mark.slow
def test_ten_minutes_under_bad_conditions_are_exact_and_nothing_leaks() -> None:
    summary, _ = run(SoakRequest(seed=12, seconds=600.0))
    assert (summary.problem, summary.command) == ("", "")


def skip_weights(action: Action, call: Callable[[], None]) -> None:
    """Skip the last microbatch's part of a weight gradient, by mistake."""
    if action.microbatch != 1:
        call()


def test_wrong_gradient_is_found_and_the_command_repeats_it() -> None:
    request = SoakRequest(seed=3, ranks=2, has_faults=False, steps=1000)
    planted = {Kind.BACKWARD_WEIGHT: skip_weights}
    found = soak(request, around=planted)
    number = int(found.command.rpartition(" ")[2])
    assert found.command == f"penstock soak --seed 3 --ranks 2 --no-faults --case {number}"
    assert found.problem.startswith(f"case {number}: ")
    assert " is off by " in found.problem
    again = soak(replace(request, steps=None, case=number), around=planted)
    assert (again.problem, again.command) == (found.problem, found.command)
    assert soak(replace(request, steps=None, case=number)).problem == ""


HELD: list[torch.Tensor] = []


def hold_on(action: Action, call: Callable[[], None]) -> None:
    """Keep some tensors for ever, by mistake."""
    call()
    if action.microbatch == 0:
        HELD.append(torch.zeros(4))


def test_leaked_tensors_are_found() -> None:
    request = SoakRequest(seed=4, ranks=1, has_faults=False, steps=1000)
    found = soak(request, around={Kind.FORWARD: hold_on})
    assert "the process of rank 0 leaks live tensors: " in found.problem
    assert found.command == (
        f"penstock soak --seed 4 --ranks 1 --no-faults --steps {found.progress.steps}"
    )


@pytest.mark.parametrize(
    ("request_", "command"),
    [
        (SoakRequest(steps=7), "penstock soak --seed 0 --ranks 4 --faults --steps 7"),
        (
            SoakRequest(seed=5, ranks=2, has_faults=False, seconds=90.0),
            "penstock soak --seed 5 --ranks 2 --no-faults --minutes 1.5",
        ),
    ],
)
def test_request_prints_its_command(request_: SoakRequest, command: str) -> None:
    assert request_.command == command


def test_request_needs_exactly_one_length() -> None:
    with pytest.raises(ArgumentError) as caught:
        SoakRequest(steps=3, case=2)
    assert str(caught.value) == (
        "exactly one of steps, seconds and case must be given "
        "(got steps: 3, seconds: None, case: 2)"
    )

"""Faults: how a rank describes its failure."""

import json
from dataclasses import astuple

from penstock.errors import PipelineError
from penstock.ranks.faults import Fault, PeerFailedError, StepFailedError


def fail(cause: Exception) -> StepFailedError:
    """Return the error of a step, raised as the executor raises it."""
    try:
        try:
            raise cause
        except Exception as error:
            raise StepFailedError("rank 1, stage 2, microbatch 3, 2F3", error) from error
    except StepFailedError as error:
        return error


def test_failure_says_where_it_happened_and_what() -> None:
    error = fail(ValueError("no such row"))
    assert str(error) == "rank 1, stage 2, microbatch 3, 2F3: ValueError: no such row"
    assert isinstance(error, PipelineError)
    assert not error.follows_another


def test_fault_is_plain_data_with_the_traceback_of_its_cause() -> None:
    fault = Fault.of(fail(ValueError("no such row")))
    assert fault.trace.startswith("Traceback (most recent call last):\n")
    assert fault.trace.endswith("    raise cause\nValueError: no such row\n")
    assert Fault(*json.loads(json.dumps(astuple(fault)))) == fault


def test_first_fault_is_the_earliest_one_that_does_not_follow_another() -> None:
    follower = Fault.of(fail(PeerFailedError("rank 0 failed before it could send")))
    first, second = Fault.of(fail(ValueError("one"))), Fault.of(fail(ValueError("two")))
    assert min(second, follower, first) == first
    assert follower.follows_another

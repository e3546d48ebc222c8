"""Choices are checked when they are made and when they are read."""

import pytest

from penstock.errors import PlanError
from penstock.planner.search.choices import Choices


def test_choices_survive_being_written_as_plain_values() -> None:
    choices = Choices((3, 4), (1,), 2)
    values = {
        name: list(v) if isinstance(v, tuple) else v for name, v in choices.to_mapping().items()
    }
    assert Choices.from_mapping(values) == choices


def test_choices_say_what_to_do() -> None:
    assert str(Choices((3, 4))) == (
        "layers per stage: 3 4; checkpointed stages: none; microbatches of 1"
    )
    assert str(Choices((3,), (0,), 8)) == (
        "layers per stage: 3; checkpointed stages: 0; microbatches of 8"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": []}, "every stage must have at least one layer (sizes: ())"),
        ({"sizes": [1, 0]}, "every stage must have at least one layer (sizes: (1, 0))"),
        ({"sizes": [1.5]}, "sizes must be whole numbers (got [1.5])"),
        ({"sizes": "12"}, "sizes must be whole numbers (got '12')"),
        (
            {"checkpointed": [2]},
            "checkpointed stages must be from 0 to 1 (checkpointed: (2,))",
        ),
        ({"microbatch_size": True}, "microbatch_size must be whole numbers (got [True])"),
        ({"microbatch_size": 0}, "microbatch_size must be at least 1 (got 0)"),
    ],
)
def test_bad_choices_are_refused(changes: dict[str, object], message: str) -> None:
    values: dict[str, object] = {
        "sizes": [1, 2],
        "checkpointed": [],
        "microbatch_size": 1,
    }
    with pytest.raises(PlanError) as caught:
        Choices.from_mapping(values | changes)
    assert str(caught.value) == message


def test_missing_and_unknown_choices_are_refused() -> None:
    with pytest.raises(PlanError) as caught:
        Choices.from_mapping({"sizes": [1]})
    assert str(caught.value) == (
        "choices must be sizes, checkpointed, microbatch_size, replicas, reduction_seconds "
        "(got ['sizes'])"
    )

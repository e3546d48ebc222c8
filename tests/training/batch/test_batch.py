"""What a rank says of its batch, and how keywords are shared out."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.training.batch.batch import (
    Accepted,
    BatchFacts,
    accepted_arguments,
    deal_keywords,
    describe_batch,
    try_split,
)
from penstock.training.batch.rows import RowClaims, SplitRows, settle_rows


def describe(
    *args: object, target: object = None, microbatches: int = 4, **kwargs: object
) -> BatchFacts:
    return describe_batch(args, kwargs, target, microbatches=microbatches, is_training=True)


def test_facts_of_a_batch_name_all_that_shapes_depend_on() -> None:
    facts = describe(torch.ones(10, 2), target=torch.ones(10).long(), mask=None, scale=0.5)
    assert facts == BatchFacts(
        is_training=True,
        claims=RowClaims(4, (SplitRows("argument 0", 10), SplitRows("target", 10)), ()),
        shapes=[
            "argument 0: (10, 2) torch.float32",
            "mask: None",
            "scale: 0.5",
            "target: (10,) torch.int64",
        ],
        keywords=["mask", "scale"],
        has_inputs=True,
        has_target=True,
    )


def test_rank_without_a_batch_knows_no_rows() -> None:
    assert describe() == BatchFacts(True, RowClaims(4, (), ()), [], [], False, False)


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        (torch.ones(8, 2), [2, 2, 2, 2]),
        (torch.ones(10, 2), [3, 3, 2, 2]),
        (torch.ones(3, 2), [1, 1, 1]),
        (torch.ones(1, 2), [1]),
        (ps.Along(torch.ones(2, 10), 1), [3, 3, 2, 2]),
        (ps.Along(torch.ones(2, 10), -1), [3, 3, 2, 2]),
        (ps.Shared(torch.ones(8, 2)), None),
        (ps.Ready([torch.ones(5, 2), torch.ones(2, 2)]), [5, 2]),
        (ps.Ready([torch.tensor(1.0), 3, "text"]), [1, 1, 1]),
        ({"a": [torch.ones(4)], "b": 3}, [1, 1, 1, 1]),
        ("no tensor", None),
        (torch.tensor(1.0), None),
    ],
)
def test_rows_of_the_microbatches_follow_from_the_value(
    value: object, rows: list[int] | None
) -> None:
    settled = settle_rows(describe(value).claims)
    assert (settled and settled.rows) == rows


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(4), torch.ones(4).double()),
        (torch.ones(4), torch.ones(4, 1)),
        (torch.ones(4), ps.Shared(torch.ones(4))),
        (torch.ones(4), ps.Ready([torch.ones(1)] * 4)),
        (ps.Along(torch.ones(4, 4), 0), ps.Along(torch.ones(4, 4), 1)),
        ([torch.ones(4)], {"a": torch.ones(4)}),
        (3, 4),
        (True, False),
        ("a", None),
        # Whether a batch takes a gradient decides whether the first stage's outputs do.
        (torch.ones(4, 2), torch.ones(4, 2, requires_grad=True)),
    ],
)
def test_batches_whose_shapes_may_differ_have_different_facts(one: object, other: object) -> None:
    assert describe(one) != describe(other)


def test_values_with_different_rows_are_an_error() -> None:
    facts = describe(torch.ones(8, 2), target=torch.ones(4))
    assert facts.error == (
        "all arguments that are split must have the same number of rows (argument 0 has 8, target "
        "has 4); wrap what is not split by rows in Shared, Along or Ready"
    )


def test_batch_without_rows_is_an_error() -> None:
    assert describe(torch.ones(0, 2)).error == "argument 0 must have at least one row (got 0)"


def test_value_that_cannot_be_split_is_an_error() -> None:
    value = {"a": torch.ones(8), "b": torch.ones(7)}
    facts = describe(value)
    assert facts.error is None
    assert try_split(facts, [value]).error == (
        "tensors of shapes (8,) and (7,) would be split together, but have 8 and 7 rows; wrap "
        "what is not split by rows in Shared or Along"
    )


def test_batch_that_can_be_split_keeps_its_facts() -> None:
    for value in (torch.ones(8), ps.Shared(1), None):
        assert try_split(describe(value), [value]) == describe(value)


class Both(nn.Module):
    """Takes an argument of every sort."""

    def forward(self, value: object, /, mask: object, *rest: object, scale: object = 1) -> None:
        """Do nothing."""


class Everything(nn.Module):
    """Takes any keyword."""

    def forward(self, value: object, **keywords: object) -> None:
        """Do nothing."""


def test_arguments_that_a_module_takes_are_read_from_its_forward() -> None:
    assert accepted_arguments(Both()) == Accepted(frozenset({"mask", "scale"}), False)
    assert accepted_arguments(Everything()) == Accepted(frozenset({"value"}), True, 1)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on import
def test_keywords_are_seen_through_a_compiled_module() -> None:
    compiled = torch.compile(Both())
    assert isinstance(compiled, nn.Module)
    assert accepted_arguments(compiled) == Accepted(frozenset({"mask", "scale"}), False)


def test_each_stage_gets_the_keywords_that_it_takes_for_each_microbatch() -> None:
    accepted = {0: Accepted(frozenset({"n"}), False), 2: Accepted(frozenset(), True)}
    split = deal_keywords({"n": [3, 3], "items": ["a", "b"]}, accepted, 2)
    assert split == {
        0: [{"n": 3}, {"n": 3}],
        2: [{"n": 3, "items": "a"}, {"n": 3, "items": "b"}],
    }

"""Small cases that the fuzzer has found, each with its cause, so that none comes back."""

import pytest

from tests.differential.case import Block, Case, Edit, Order, Part, Step
from tests.differential.checking import check_case
from tests.differential.fleet import check_over_processes
from tests.processes import Processes

ONE_ROW = (Step(1, 0),)
SPLIT = Order("ZB-H1")
SPLIT_TWICE = Order("ZB-H1", microbatches=2)


def with_block(kind: str, *traits: str) -> tuple[Part, ...]:
    return (Part((Block(kind, traits),)),)


FOUND = {
    # A view of a weight that is made without a graph has no node to note.
    "custom function that transposes its weight": Case(
        0, with_block("custom_function"), SPLIT, steps=ONE_ROW
    ),
    # The same in the forward of a reentrant checkpoint, which runs under no_grad.
    "reentrant checkpoint around a slice of a weight": Case(
        0, with_block("weight_slice", "reentrant"), SPLIT, steps=ONE_ROW
    ),
    # The force's pass ends at the output of a layer that waits, whose hook took that gradient for
    # a second derivative of the layer itself.
    "force with respect to the output of a layer": Case(
        0, with_block("inner_gradient"), SPLIT_TWICE, steps=(Step(2, 0),)
    ),
    # A layer whose weight is made from something else has no parameter of that name.
    "weight norm between steps": Case(
        0, (Part(),), SPLIT, steps=(Step(1, 0), Step(1, 0, edits=(Edit("reweigh"),)))
    ),
    # Copies of stages that get no microbatch were left out of what the passes insert.
    "one direction without microbatches": Case(
        0,
        (Part(), Part(), Part(), Part()),
        Order("DualPipe", 4, 2, 3),
        steps=(Step(2, 0),),
        skips=((0, 3),),
    ),
    # Only tensors that required a gradient were watched for writes.
    "thawed part before one that writes": Case(
        0,
        (Part(traits=("frozen",)), Part(traits=("writes",))),
        Order("GPipe", 2),
        steps=(Step(1, 0), Step(1, 0, edits=(Edit("thaw"),))),
    ),
    # What the loss's own backward leaves in a received tensor is sent back with the rest, as the
    # plain model leaves it in all of its parameters.
    "whole backward inside of the loss": Case(
        0, (Part(), Part()), Order("GPipe", 2, 1, 2), "retained_whole", (Step(2, 0),)
    ),
    # A layer that is called several times, and a loss that takes a gradient through it.
    "gradient through a repeated layer": Case(
        0, with_block("repeated"), SPLIT, "adaptive", ONE_ROW
    ),
    # Hooks of the module change the gradients of the loss's own passes too.
    "gradients through a tensor with a hook": Case(
        0, with_block("linear", "tensor_hook"), SPLIT, "balanced", ONE_ROW
    ),
    # What a stage holds is signed by its shapes, which a lazy layer does not have yet.
    "lazy layer in a model that is cut by layers": Case(
        0, with_block("lazy"), steps=ONE_ROW, door="layers"
    ),
    # The hook is on another stage than the gradient that would call it, and was left out.
    "gradient with respect to a tensor that has a hook in another stage": Case(
        20261116018216,
        (
            *with_block("linear", "tensor_hook"),
            *with_block("inner_gradient"),
            *with_block("linear"),
        ),
        Order("GPipe", 3),
        steps=ONE_ROW,
        door="layers",
    ),
    # Two steps of a single microbatch counted as comparisons of the loss, so that the third,
    # which had two, was not compared.
    "loss that is compared before there is anything to compare": Case(
        20261116006394,
        (Part(),),
        Order("GPipe", microbatches=2),
        "found_root",
        (Step(1, 1), Step(1, 1), Step(2, 1)),
    ),
    # What was sent on was searched for shared memory, which a sparse tensor does not have.
    "recomputed stage that returns what cannot be sent": Case(
        0,
        (Part(sends="sparse"), Part()),
        Order("GPipe", 2, recomputed=((0, 0),)),
        steps=ONE_ROW,
    ),
    # The loss puts gradients away, takes its own through an exchange, and puts them back; the
    # backward that ran meanwhile had added to what was thrown away.
    "backward beside a loss that puts gradients away": Case(
        911002019,
        (Part(), Part((Block("linear"), Block("linear", ("exchange",))))),
        Order("GPipe", 2, 1, 5, joined=(15,)),
        "retained",
        (Step(5, 0), Step(5, 0)),
    ),
    # At most three stages of a rank were gathered at once, and an overlap has any number.
    "overlap of four stages": Case(
        911002729,
        (Part(), Part(), Part(), Part()),
        Order(
            "random",
            microbatches=4,
            actions=(
                "0F0 1F0 2F0 0F1 1F1 0F2 3F0 2F1 1F2 0F3 3B0 2B0 1B0 0B0 3F1 3B1 2B1 1B1 "
                "0B1 2F2 3F2 3B2 2B2 1B2 0B2 1F3 2F3 3F3 3B3 2B3 1B3 0B3",
            ),
            joined=(7, 8, 9),
        ),
        steps=ONE_ROW,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_case_that_was_found_is_right_now(name: str) -> None:
    assert check_case(FOUND[name]) is None


FOUND_OVER_PROCESSES = {
    # Both directions hold a stage, and a rank that replaces its parameter no longer shares it.
    "parameter of both directions that is replaced": Case(
        71000240,
        (Part(), Part()),
        Order("DualPipe", 2, 2, 2),
        steps=(Step(1, 0, edits=(Edit("reweigh"),)),),
    ),
    # Parameters that were declared to be shared were not asked for their shapes.
    "lazy layer of both directions, by stage": Case(
        5000243,
        (Part(), *with_block("lazy")),
        Order("DualPipe", 2, 2, 2),
        steps=(Step(2, 0),),
        door="mapping",
    ),
    # Each direction saw one microbatch, and one of them took the labels for those of the loss
    # before they were shifted: the weights of the two losses did not add up to one.
    "shifted labels that look like others to one rank": Case(
        912000349, (Part(), Part()), Order("DualPipe", 2, 2, 2), "found_shifted"
    ),
}


@pytest.mark.parametrize("name", FOUND_OVER_PROCESSES)
def test_case_that_was_found_over_processes_is_right_now(
    name: str, two_processes: Processes
) -> None:
    assert check_over_processes(two_processes, [FOUND_OVER_PROCESSES[name]]) == [None]

"""A stage with what comes in, what goes out, and what it holds in between."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import BoundaryError
from penstock.ir.dataflow import Routed
from penstock.loss.added import add_loss
from penstock.parallel.replica import replica_of
from penstock.step.stage import Stage
from penstock.tensors.packet import Packet
from penstock.tensors.tree import flatten, unflatten

ROWS, WIDTH = 5, 3


class Function(nn.Module):
    """A stage of one layer and some function of it and of what comes in."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.function = function

    def forward(self, *values: Any, **keywords: Any) -> Any:
        return self.function(self.layer, *values, **keywords)


def make(function: Callable[..., Any]) -> Stage:
    module = Function(function)
    return Stage(0, module, replica_of(module))


def values() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64)


def packet(tree: Any) -> Packet:
    structure, tensors = flatten(tree)
    return Packet(structure, tensors)


def send(
    stage: Stage, microbatch: int, trees: Sequence[Any], *, copies: int = 1, **kwargs: Any
) -> list[Packet]:
    output, _ = stage.forward(microbatch, [packet(tree) for tree in trees], (), kwargs)
    return stage.depart(microbatch, output, range(copies))


def test_a_mixed_tree_crosses_and_only_some_of_it_gets_gradients() -> None:
    stage = make(lambda layer, x: {**x, "h": layer(x["h"])})
    tree = {
        "h": values().requires_grad_(),
        "mask": torch.ones(ROWS, dtype=torch.bool),
        "pos": torch.arange(ROWS),
        "rope": torch.ones(2, dtype=torch.complex64),
        "cache": None,
        "n": 3,
    }
    (sent,) = send(stage, 0, [tree])
    out = unflatten(sent.structure, sent.tensors)
    assert {k: getattr(v, "requires_grad", v) for k, v in out.items()} == {
        "h": True,
        "mask": False,
        "pos": False,
        "rope": False,
        "cache": None,
        "n": 3,
    }
    gradient = values()
    expected = gradient @ stage.module.get_parameter("layer.weight")
    torch.testing.assert_close(stage.backward(0, [[gradient]]), [[expected]])


def test_a_tuple_from_a_producer_is_several_arguments_and_anything_else_is_one() -> None:
    seen: list[Any] = []

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return layer(args[0])

    stage = make(forward)
    x = values()
    stage.forward(0, [packet((x, 1)), packet([2, 3])], (4,), {"name": 5})
    (((_, *rest), kwargs),) = seen
    assert (rest, kwargs) == ([1, [2, 3], 4], {"name": 5})


def test_gradients_from_several_consumers_are_added() -> None:
    stage = make(lambda layer, x: layer(x))
    x, first, second = values().requires_grad_(), values(), values()
    packets = send(stage, 0, [x], copies=2)
    assert len(packets) == 2
    answer = stage.backward(0, [[first], [second]])
    weight = stage.module.get_parameter("layer.weight")
    torch.testing.assert_close(answer, [[(first + second) @ weight]])


def test_each_producer_gets_its_own_gradients() -> None:
    stage = make(lambda layer, a, b, c: layer(a + 2 * c) + b)
    a, b, c = (values().requires_grad_() for _ in range(3))
    send(stage, 0, [(a, b), c])
    gradient = values()
    through = gradient @ stage.module.get_parameter("layer.weight")
    answer = stage.backward(0, [[gradient]])
    torch.testing.assert_close(answer, [[through, gradient], [2 * through]])


def test_an_input_that_is_not_used_gets_zeros() -> None:
    stage = make(lambda layer, a, _: layer(a))
    a, b = values().requires_grad_(), values().requires_grad_()
    send(stage, 0, [a, b])
    assert torch.equal(stage.backward(0, [[values()]])[1][0], torch.zeros_like(b))


def test_a_frozen_stage_without_inputs_that_need_gradients_asks_for_none() -> None:
    stage = make(lambda layer, x: layer(x))
    stage.module.requires_grad_(False)
    (sent,) = send(stage, 0, [values()])
    assert not sent.tensors[0].requires_grad
    assert stage.backward(0, [[]]) == [[]]


@pytest.mark.parametrize("is_split", [False, True])
def test_a_received_activation_may_be_changed_in_place(is_split: bool) -> None:
    stage = make(lambda layer, x: layer(x.mul_(2)))
    if is_split:
        assert stage.prepare_split()
    weight = stage.module.get_parameter("layer.weight")
    for microbatch in range(2):
        gradient = values()
        send(stage, microbatch, [values().requires_grad_()])
        answer = stage.backward(microbatch, [[gradient]])
        torch.testing.assert_close(answer, [[2 * gradient @ weight]])


@pytest.mark.parametrize(
    "function",
    [
        lambda layer, x: layer(x)[1:],
        lambda layer, x: layer(x).mT,
        lambda layer, x: (layer(x).unbind(0)[1], x),
        lambda layer, _: layer.weight,
    ],
    ids=["slice", "transposed", "unbound_and_input", "parameter"],
)
def test_views_and_leaves_may_be_outputs(function: Callable[..., Any]) -> None:
    stage = make(function)
    reference = copy.deepcopy(stage.module)
    x = values().requires_grad_()
    (sent,) = send(stage, 0, [x])
    gradients = [torch.randn_like(tensor) for tensor in sent.tensors]
    answer = stage.backward(0, [gradients])
    leaf = x.detach().requires_grad_()
    torch.autograd.backward(flatten(reference(leaf))[1], gradients)
    expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    torch.testing.assert_close(answer, [[expected]])
    for found, wanted in zip(stage.module.parameters(), reference.parameters(), strict=True):
        assert (found.grad is None) == (wanted.grad is None)
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad)


def test_losses_inside_the_stage_and_at_its_end_are_roots_with_weights() -> None:
    def forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layer(x)
        add_loss(y.square().mean())
        return y

    stage = make(forward)
    x = values().requires_grad_()
    output, (added,) = stage.forward(0, [packet(x)], (), {})
    stage.add_root(0, added, 0.5)
    stage.add_root(0, output.sum(), 3.0)
    (answer,) = stage.backward(0, [])
    leaf = x.detach().requires_grad_()
    y = stage.module.get_submodule("layer")(leaf)
    expected = torch.autograd.grad(0.5 * y.square().mean() + 3 * y.sum(), leaf)
    torch.testing.assert_close(answer, list(expected))


def test_a_loss_of_weight_zero_leaves_no_trace() -> None:
    # The mean over a microbatch without a single valid token is NaN, and so is 0 times it.
    stage = make(lambda layer, x: layer(x))
    x = values().requires_grad_()
    output, _ = stage.forward(0, [packet(x)], (), {})
    stage.add_root(0, output[:0].mean(), 0.0)
    assert torch.equal(stage.backward(0, [])[0][0], torch.zeros_like(x))
    assert all(parameter.grad is None for parameter in stage.module.parameters())


def test_an_output_that_cannot_cross_is_named() -> None:
    stage = make(lambda layer, x: {layer(x)})
    with pytest.raises(BoundaryError, match="type set cannot cross"):
        send(stage, 0, [values()])


def test_activations_are_held_from_forward_to_input_backward_and_stashes_until_weight() -> None:
    stage = make(lambda layer, x: layer(x))
    stage.prepare_split()
    actions: list[Callable[[], object]] = [
        lambda: send(stage, 0, [values().requires_grad_()]),
        lambda: send(stage, 1, [values().requires_grad_()]),
        lambda: send(stage, 2, [values().requires_grad_()]),
        lambda: stage.backward_input(0, [[values()]]),
        lambda: stage.backward(1, [[values()]]),
        lambda: stage.backward_input(2, [[values()]]),
        lambda: stage.backward_weight(2),
        lambda: stage.backward_weight(0),
    ]
    held = []
    for act in actions:
        act()
        held.append((stage.num_flights, stage.num_waiting))
    assert held == [(1, 0), (2, 0), (3, 0), (2, 1), (1, 1), (0, 2), (0, 1), (0, 0)]
    assert stage.peak_flights == 3


def test_mixed_whole_and_split_backwards_give_the_same_gradients() -> None:
    stage = make(lambda layer, x: layer(torch.tanh(layer(x))))
    stage.prepare_split()
    reference = copy.deepcopy(stage.module)
    gradients = [values() for _ in range(4)]
    inputs = [values().requires_grad_() for _ in range(4)]
    answers: list[list[list[torch.Tensor]]] = []
    for number in (0, 1):
        send(stage, number, [inputs[number]])
        answers.append(stage.backward_input(number, [[gradients[number]]]))
    for number in (2, 3):
        send(stage, number, [inputs[number]])
    answers.append(stage.backward(2, [[gradients[2]]]))
    answers.append(stage.backward_input(3, [[gradients[3]]]))
    for number in (3, 0, 1):
        stage.backward_weight(number)
    for number in range(4):
        leaf = inputs[number].detach().requires_grad_()
        reference(leaf).backward(gradients[number])
        torch.testing.assert_close(answers[number], [[leaf.grad]])
    for found, wanted in zip(stage.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-12)


def test_nothing_is_alive_after_the_backward() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(layer(x))
        alive.append(weakref.ref(y))
        return y

    gc.disable()
    try:
        stage = make(forward)
        for microbatch in range(2):
            send(stage, microbatch, [values().requires_grad_()])
            stage.backward(microbatch, [[values()]])
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()


def test_after_a_failure_everything_is_let_go_of() -> None:
    def forward(layer: nn.Module, x: torch.Tensor) -> Any:
        if x.isnan().any():
            raise RuntimeError("no number")
        return layer(x)

    stage = make(forward)
    stage.prepare_split()
    send(stage, 0, [values().requires_grad_()])
    send(stage, 1, [values().requires_grad_()])
    stage.backward_input(0, [[values()]])
    with pytest.raises(RuntimeError, match="no number"):
        send(stage, 2, [values() * float("nan")])
    stage.clear()
    assert (stage.num_flights, stage.num_waiting) == (0, 0)
    send(stage, 0, [values().requires_grad_()])
    assert stage.num_flights == 1


def test_evaluation_keeps_no_graph_and_holds_nothing() -> None:
    stage = make(lambda layer, x: layer(x))
    output = stage.evaluate(0, [packet(values().requires_grad_())], (), {})
    (sent,) = stage.depart(0, output, [1])
    assert (output.requires_grad, sent.tensors[0].requires_grad) == (False, False)
    assert stage.num_flights == 0


def test_what_is_made_for_each_consumer_goes_to_that_one_only() -> None:
    stage = make(lambda layer, x: Routed({2: {"y": layer(x), "n": 1}, 5: (layer(x) * 2, x)}))
    received = values().requires_grad_()
    output, _ = stage.forward(0, [packet(received)], (), {})
    near, far = stage.depart(0, output, [2, 5])
    assert unflatten(near.structure, near.tensors).keys() == {"y", "n"}
    assert len(unflatten(far.structure, far.tensors)) == 2
    gradients = [values(), values(), values()]
    ((found,),) = stage.backward(0, [gradients[:1], gradients[1:]])
    weight = stage.module.get_parameter("layer.weight")
    expected = (gradients[0] + 2 * gradients[1]) @ weight.detach() + gradients[2]
    torch.testing.assert_close(found, expected)


def test_a_tensor_that_goes_to_several_consumers_is_copied_for_each() -> None:
    stage = make(lambda layer, x: (lambda y: Routed({1: y, 2: y}))(layer(x)))
    output, _ = stage.forward(0, [packet(values().requires_grad_())], (), {})
    first, second = stage.depart(0, output, [1, 2])
    assert torch.equal(first.tensors[0], second.tensors[0])
    assert first.tensors[0].data_ptr() != second.tensors[0].data_ptr()


def test_only_the_last_use_of_a_tensor_has_its_memory() -> None:
    stage = make(lambda layer, x: layer(x))
    output, _ = stage.forward(0, [packet(values())], (), {})
    first, second, last = stage.depart(0, output, range(3))
    memory = [sent.tensors[0].untyped_storage().data_ptr() for sent in (first, second, last)]
    assert memory[2] == output.untyped_storage().data_ptr()
    assert len(set(memory)) == 3


def test_a_checkpointed_stage_hands_its_input_on_as_a_copy() -> None:
    # The next stage of the rank may write to what it gets, and the second run would start from
    # what it has written.
    stage = make(lambda layer, x: (x, layer(x)))
    stage.checkpoint()
    given = values().requires_grad_()
    for microbatch in range(2):
        (sent,) = send(stage, microbatch, [given])
        with torch.no_grad():
            sent.tensors[0].zero_()
        ones = [torch.ones_like(tensor) for tensor in sent.tensors]
        stage.module.zero_grad()
        stage.backward(microbatch, [ones])
        (weight, _) = stage.module.parameters()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, given.detach().sum(0).expand(WIDTH, WIDTH))


def test_values_for_other_parts_than_the_stage_feeds_are_refused() -> None:
    stage = make(lambda layer, x: Routed({1: layer(x)}))
    output, _ = stage.forward(0, [packet(values())], (), {})
    with pytest.raises(BoundaryError) as caught:
        stage.depart(0, output, [1, 3])
    assert str(caught.value) == (
        "a stage must make values for the parts [1, 3] that it feeds (got values for [1]); use "
        "the dataflow and the stages of the same split"
    )

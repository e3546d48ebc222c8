"""Models are captured as one graph with the sizes that they take, or refused with the reason."""

from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import BatchError, ModelError
from penstock.splitting.by_tracing.capture.capture import Capture, capture
from penstock.splitting.by_tracing.capture.entry import TracedInput
from tests.splitting.traced_models import SIZE, Counting, Layers, Tree

X = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0))


class Wrapped(nn.Module):
    """Any function as a model of two layers, the second of which has it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(SIZE, SIZE), Inner(function)])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layers[1](self.layers[0](args[0]), *args[1:], **kwargs)


class Inner(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def trace(function: Any, *args: Any, dynamic: bool = True, **kwargs: Any) -> Capture:
    return capture(Wrapped(function), args, kwargs, dynamic=dynamic)


def branch_on_value(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def branch_on_rows(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 3 else x


class LosesConstants(nn.Module):
    """Fails as torch does for Gemma 3n."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))

    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "We found a fake tensor in the exported program constant's list. Please"
        )


def test_a_constant_that_torch_loses_is_explained() -> None:
    # The message was torch's own, with a request to report it to torch.
    with pytest.raises(ModelError) as refusal:
        capture(LosesConstants(), (torch.ones(2, SIZE),), {}, dynamic=True)
    message = str(refusal.value)
    assert message.startswith(
        "the model cannot be traced: torch.export loses the value of a constant that it makes in "
        "its forward, in LosesConstants at "
    )
    assert message.endswith('; split it by layers: split(model, layers="layers", stages=2)')


def test_a_path_that_depends_on_values_is_refused_with_its_line_and_advice(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ModelError) as refusal:
        trace(branch_on_value, X)
    line = branch_on_value.__code__.co_firstlineno + 1
    assert str(refusal.value) == (
        "the model cannot be traced: its path depends on the values of a tensor, in 'layers.1' "
        f"(Inner) at test_capture.py:{line} `return x * 2 if x.sum() > 0 else x`; split it by "
        'layers: split(model, layers="layers", stages=2)'
    )
    assert capfd.readouterr() == ("", "")


@torch.library.custom_op("penstock_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: opaque(x), "opaque"),
        (lambda x: x[x > 0].view(int((x > 0).sum()), 1) * 2, "depends on the values"),
        (lambda x: x @ x, "RuntimeError: "),
    ],
)
def test_what_cannot_be_traced_names_the_module(function: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as refusal:
        trace(function, X[:3])
    assert "in 'layers.1' (Inner) at test_capture.py:" in str(refusal.value)


def test_a_model_that_returns_something_else_is_refused() -> None:
    with pytest.raises(ModelError, match=r"the model returns a object at output\['a'\]\[0\]"):
        trace(lambda x: {"a": (object(), x)}, X)


def test_an_example_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match=r"the example does not fit forward\(x"):
        capture(Layers(2), (X, X), {}, dynamic=True)


def test_a_buffer_may_be_assigned_but_keeps_its_shape() -> None:
    class Growing(nn.Module):
        kept: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = torch.cat([self.kept, self.kept])
            return x * 2

    with pytest.raises(ModelError, match="the model replaces its buffer kept"):
        capture(Growing(), (X,), {}, dynamic=True)


def test_inputs_are_described_by_name_and_size() -> None:
    args = ({"x": X, "pair": [X, X]},)
    entry = capture(Tree(), args, {"scale": 2.0, "mask": X}, dynamic=True).entry
    assert [(one.name, one.example) for one in entry.inputs] == [
        ("batch['x']", (4, SIZE)),
        ("batch['pair'][0]", (4, SIZE)),
        ("batch['pair'][1]", (4, SIZE)),
        ("scale", 2.0),
        ("mask", (4, SIZE)),
    ]


def test_sizes_that_the_model_fixes_are_numbers_and_others_may_vary() -> None:
    free = trace(lambda x: x * 2, X).entry.inputs[0].sizes
    assert free is not None
    assert isinstance(free[0], str)
    assert free[1] == SIZE
    fixed = trace(lambda x: x * 2, X, dynamic=False).entry
    assert fixed.inputs == (TracedInput("args[0]", (4, SIZE), (4, SIZE)),)
    with pytest.raises(BatchError, match=r"args\[0\] has size 5 in dimension 0, .* takes 4 "):
        fixed.take((X[[0, 1, 2, 3, 0]],), {})


def test_a_size_that_would_take_another_path_is_refused() -> None:
    entry = trace(branch_on_rows, X).entry
    assert entry.take((X.repeat(3, 1),), {})[0].shape == (12, SIZE)
    with pytest.raises(BatchError) as refusal:
        entry.take((X[:2],), {})
    line = branch_on_rows.__code__.co_firstlineno + 1
    assert str(refusal.value) == (
        f"the model was traced where args[0].shape[0] > 3 (test_capture.py:{line}), but "
        "args[0].shape[0] = 2; trace with an example of this size"
    )


def branch_on_roots(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] ** 0.5 < 3 else x


def test_a_rule_with_roots_of_sizes_is_checked() -> None:
    # Torch prints these with `math` and `torch`, which once were unknown names.
    entry = trace(branch_on_roots, X).entry
    assert len(entry.take((X[:3],), {})) == 1
    with pytest.raises(
        BatchError, match=r"the model was traced where .* but args\[0\].shape\[0\]"
    ):
        entry.take((X.repeat(3, 1),), {})


def test_a_model_that_takes_only_numbers_as_sizes_is_traced_with_those_of_the_example() -> None:
    # Segformer was refused because torch could not solve a condition on its sizes.
    entry = trace(lambda x: x * {4: 2.0}[len(x)], X).entry
    assert entry.inputs == (TracedInput("args[0]", (4, SIZE), (4, SIZE)),)


def test_sizes_that_must_agree_are_checked() -> None:
    entry = trace(lambda x, y: x + y, X, X.clone()).entry
    assert len(entry.take((X[:3], X[:3]), {})) == 2
    with pytest.raises(BatchError, match="follows from another argument's size"):
        entry.take((X[:3], X[:2]), {})


def test_one_tensor_given_twice_is_two_inputs() -> None:
    module = trace(lambda x, y: x * 2 + y, X, X).module
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    assert [len(node.users) > 0 for node in inputs] == [True, True]


def test_modes_of_the_caller_do_not_affect_the_graph() -> None:
    def no_grad_inside(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x * 2

    plain = trace(no_grad_inside, X).module.code
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert trace(no_grad_inside, X).module.code == plain


def test_assigned_buffers_become_written_ones() -> None:
    module = capture(Counting(), (X,), {}, dynamic=True).module
    written = [
        node.args[0].target
        for node in module.graph.nodes
        if node.target is torch.ops.aten.copy_.default
    ]
    assert written == ["inner.total"]


class Rounded(torch.autograd.Function):
    """Rounds, and lets gradients pass."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(_context: Any, *gradients: Any) -> Any:
        return gradients[0]


def test_a_function_with_a_backward_of_its_own_is_refused() -> None:
    # The graph had only its forward, and trained with gradients of zero.
    with pytest.raises(ModelError) as caught:
        trace(lambda x: Rounded.apply(x) * 2, X)  # type: ignore[no-untyped-call]  # untyped upstream
    assert str(caught.value) == (
        "the model cannot be traced: Rounded has a backward of its own, which is not in a traced "
        'graph; split it by layers: split(model, layers="layers", stages=2)'
    )

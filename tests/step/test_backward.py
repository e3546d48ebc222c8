"""I then W against plain autograd, for what people put into a stage."""

import copy
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from penstock.deferred.linear import DeferredLinear, LayerCall
from penstock.errors import PipelineError
from penstock.step.backward import LayerRecorder
from tests.deferred.halves import (
    MICROBATCHES,
    Apply,
    Gradients,
    Split,
    assert_same,
    check,
    prepared,
    random_values,
    run_plain,
    run_split,
    waiting_weights,
)

# torch.compile looks at `.grad` of what it is given, whatever that is.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

ROWS, WIDTH = 6, 4


# ---------------------------------------------------------------- what a stage may be made of


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.pow(3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.mul(gradient, 3 * x.square())


def _cube(x: torch.Tensor) -> Any:
    return Cube.apply(x)  # type: ignore[no-untyped-call]  # untyped upstream


def _compiled(module: nn.Module, backend: str) -> nn.Module:
    return cast("nn.Module", torch.compile(module, backend=backend))


def _linear(**settings: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **settings)


def _gated(m: Any, x: torch.Tensor) -> Any:
    a, b = m.both(x).chunk(2, dim=-1)
    return m.out(a * torch.sigmoid(b))


def _self_attention(m: Any, x: torch.Tensor) -> Any:
    h = m.before(x)
    return m.after(m.attention(h, h, h, need_weights=False)[0])


def _two_modules_one_weight() -> nn.Module:
    module = nn.Sequential(_linear(), nn.Tanh(), _linear())
    module[2].weight = module[0].weight
    return module


def _tied_embedding() -> nn.Module:
    module = Apply(
        lambda m, x: F.linear(m.middle(m.words(x)), m.words.weight),
        words=nn.Embedding(WIDTH, WIDTH),
        middle=_linear(),
    )
    module.get_submodule("middle").weight = module.get_submodule("words").weight
    return module


def _lora() -> nn.Module:
    module = Apply(
        lambda m, x: m.base(x) + m.up(m.down(x)),
        base=_linear().requires_grad_(False),
        down=nn.Linear(WIDTH, 2, bias=False),
        up=nn.Linear(2, WIDTH, bias=False),
    )
    return nn.Sequential(module, nn.GELU(), _linear().requires_grad_(False))


def _checkpointed(use_reentrant: bool) -> nn.Module:
    return Apply(
        lambda m, x: m.after(
            checkpoint(
                m.block,
                x if x.requires_grad else x.requires_grad_(),
                use_reentrant=use_reentrant,
            )
        ),
        block=nn.Sequential(_linear(), nn.Dropout(0.5), nn.GELU(), _linear()),
        after=_linear(),
    )


def _in_place(m: Any, x: torch.Tensor) -> Any:
    x.mul_(2)
    y = m.first(x.clone())
    y.relu_()
    return m.second(y).add_(1)


def _double_backward(m: Any, x: torch.Tensor) -> Any:
    energy = m.second(torch.tanh(m.first(x))).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return m.third(force)


def _detached_inner_gradient(m: Any, x: torch.Tensor) -> Any:
    inner = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.first(inner).sum(), inner)
    return m.second(x * slope)


def _mapped(m: Any, x: torch.Tensor) -> Any:
    return m.second(torch.vmap(m.first)(x))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": _linear,
    "linear_without_bias": lambda: _linear(bias=False),
    "perceptron": lambda: nn.Sequential(_linear(), nn.GELU(), _linear(bias=False)),
    "layer_norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), _linear(), nn.LayerNorm(WIDTH)),
    "rms_norm": lambda: nn.Sequential(_linear(), nn.RMSNorm(WIDTH)),
    "gated": lambda: Apply(_gated, both=nn.Linear(WIDTH, 2 * WIDTH), out=_linear()),
    "keyword_argument": lambda: Apply(lambda m, x: m.layer(input=x), layer=_linear()),
    "module_called_twice": lambda: Apply(lambda m, x: m.f(torch.tanh(m.f(x))), f=_linear()),
    "two_modules_one_weight": _two_modules_one_weight,
    "weight_also_used_directly": lambda: Apply(
        lambda m, x: m.f(x) + F.linear(x, m.f.weight), f=_linear()
    ),
    "weight_decay_in_the_graph": lambda: Apply(
        lambda m, x: (m.f(x), m.f.weight.square().sum()), f=_linear()
    ),
    "parametrized": lambda: nn.Sequential(weight_norm(_linear()), _linear()),
    "custom_function": lambda: Apply(lambda m, x: m.g(_cube(m.f(x))), f=_linear(), g=_linear()),
    "multi_output_nodes": lambda: Apply(
        lambda m, x: torch.cat([part.tanh() for part in m.f(x).unbind(-1)]), f=_linear()
    ),
    "lora": _lora,
    "unused_parameters": lambda: Apply(lambda m, x: m.f(x), f=_linear(), unused=_linear()),
    "unused_call": lambda: Apply(lambda m, x: (m.g(x), m.f(x))[1], f=_linear(), g=_linear()),
    "unused_input": lambda: Apply(lambda m, x: m.f(torch.ones_like(x)), f=_linear()),
    "frozen": lambda: nn.Sequential(_linear(), nn.Tanh()).requires_grad_(False),
    "nothing_but_a_weight": lambda: Apply(lambda m, x: m.f(x.detach()), f=_linear(bias=False)),
    "in_place": lambda: Apply(_in_place, first=_linear(), second=_linear()),
    "in_place_without_bias": lambda: Apply(
        _in_place, first=_linear(bias=False), second=_linear(bias=False)
    ),
    "views_as_outputs": lambda: Apply(
        lambda m, x: (m.f(x)[..., :2], m.f(x).mT, m.g(x)[0]), f=_linear(), g=_linear()
    ),
    "same_output_twice": lambda: Apply(lambda m, x: [m.f(x)] * 2, f=_linear()),
    "sum_of_input_and_bias": lambda: nn.Sequential(
        Apply(lambda m, x: x + m.norm.bias, norm=nn.LayerNorm(WIDTH)), _linear()
    ),
    "checkpoint": lambda: _checkpointed(use_reentrant=False),
    "reentrant_checkpoint": lambda: _checkpointed(use_reentrant=True),
    "double_backward": lambda: Apply(
        _double_backward, first=_linear(), second=_linear(), third=_linear()
    ),
    "detached_inner_gradient": lambda: Apply(
        _detached_inner_gradient, first=_linear(), second=_linear()
    ),
    "vmap": lambda: Apply(_mapped, first=_linear(), second=_linear()),
    "saved_tensors_elsewhere": lambda: Apply(_offloaded, first=_linear(), second=_linear()),
    "no_grad_inside": lambda: Apply(_without_grad, first=_linear(), second=_linear()),
    "compiled_stage": lambda: _compiled(nn.Sequential(_linear(), nn.Tanh()), "eager"),
    "compiled_block": lambda: nn.Sequential(
        _linear(),
        _compiled(nn.Sequential(nn.Tanh(), _linear(), nn.Tanh()), "aot_eager"),
        _linear(),
    ),
}


def _offloaded(m: Any, x: torch.Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        y = m.first(x)
    return m.second(y.tanh())


def _without_grad(m: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        scale = m.first(x)
    return m.second(x * scale)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (3, ROWS, WIDTH)], ids=["2d", "3d"])
def test_two_halves_equal_the_whole(name: str, shape: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    check(MODULES[name], random_values(*shape))


OTHER_SHAPES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one_dimension": (lambda: nn.Sequential(_linear(), _linear(bias=False)), (WIDTH,)),
    "no_rows": (lambda: nn.Sequential(_linear(), _linear(bias=False)), (0, WIDTH)),
    "transposed_input": (
        lambda: Apply(lambda m, x: m.f(x.transpose(0, 1)), f=_linear()),
        (2, 3, WIDTH),
    ),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), (2, 2, 8)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, groups=2), (2, 2, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 1, 3, 3, 3)),
    "transposed_conv": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 2, 3, 3)),
    "batch_norm": (lambda: nn.Sequential(_linear(), nn.BatchNorm1d(WIDTH)), (ROWS, WIDTH)),
    "lstm": (
        lambda: Apply(
            lambda m, x: m.after(m.lstm(x)[0]), lstm=nn.LSTM(WIDTH, WIDTH), after=_linear()
        ),
        (3, 2, WIDTH),
    ),
    "attention": (
        lambda: Apply(
            _self_attention,
            before=_linear(),
            attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
            after=_linear(),
        ),
        (2, 5, WIDTH),
    ),
    "transformer_block": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.2, batch_first=True),
        (2, 5, WIDTH),
    ),
}


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_two_halves_equal_the_whole_for_inputs_of_other_shapes(name: str) -> None:
    build, shape = OTHER_SHAPES[name]
    torch.manual_seed(1)
    check(build, random_values(*shape))


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Embedding(WIDTH, WIDTH), _linear()),
        lambda: nn.Sequential(nn.Embedding(WIDTH, WIDTH, sparse=True), _linear(bias=False)),
        _tied_embedding,
    ],
    ids=["embedding", "sparse_embedding", "tied_embedding"],
)
def test_two_halves_equal_the_whole_for_words(build: Callable[[], nn.Module]) -> None:
    values = [torch.arange(number, number + ROWS) % WIDTH for number in range(MICROBATCHES)]
    check(build, values)


def test_two_halves_equal_the_whole_for_complex_weights() -> None:
    module = nn.Sequential(_linear(dtype=torch.complex128), _linear(dtype=torch.complex128))
    reference = copy.deepcopy(module)
    values = [torch.randn(ROWS, WIDTH, dtype=torch.complex128) for _ in range(MICROBATCHES)]

    def run(stage: nn.Module, runner: Callable[..., Gradients]) -> Gradients:
        into_complex = Apply(lambda m, x: m.stage(torch.view_as_complex(x)), stage=stage)
        return runner(into_complex, [torch.view_as_real(value) for value in values])

    assert_same(run(module, run_split), run(reference, run_plain))


def test_under_autocast_the_parameters_stay_in_their_own_dtype() -> None:
    def autocast(m: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.second(torch.tanh(m.first(x)))

    torch.manual_seed(0)
    module = Apply(autocast, first=_linear(), second=_linear(bias=False))
    reference = copy.deepcopy(module)
    values = [torch.randn(ROWS, WIDTH) for _ in range(MICROBATCHES)]
    assert_same(run_split(module, values), run_plain(reference, values), rtol=1e-6, atol=1e-6)
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.float32}


def test_under_autocast_what_waits_has_the_dtype_of_the_product() -> None:
    def autocast(m: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.f(x)

    split = Split(Apply(autocast, f=_linear()))
    for number in range(2):
        split.forward(number, torch.randn(ROWS, WIDTH))
        split.backward_input(number)
    (call,) = split.waiting[1]
    assert isinstance(call, LayerCall)
    assert (call.value.dtype, call.gradient.dtype) == (torch.bfloat16, torch.bfloat16)


# ---------------------------------------------------------------- what waits, and what is alive


def test_weights_wait_for_the_second_half_and_all_else_does_not() -> None:
    split = prepared(nn.Sequential(_linear(), nn.LayerNorm(WIDTH), _linear()), ROWS, WIDTH)
    split.forward(0, torch.randn(ROWS, WIDTH, dtype=torch.float64))
    split.backward_input(0)
    done = {name for name, p in split.module.named_parameters() if p.grad is not None}
    assert done == {"0.bias", "1.weight", "1.bias", "2.bias"}
    split.backward_weight(0)
    assert all(p.grad is not None for p in split.module.parameters())


def _judged(module: nn.Module) -> set[str]:
    return waiting_weights(module.double(), torch.randn(ROWS, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "waiting"),
    [
        ("perceptron", {"0.weight", "2.weight"}),
        ("module_called_twice", {"f.weight"}),
        ("two_modules_one_weight", {"0.weight"}),
        ("nothing_but_a_weight", {"f.weight"}),
        ("lora", {"0.down.weight", "0.up.weight"}),
        ("checkpoint", {"after.weight"}),
        ("reentrant_checkpoint", {"after.weight"}),
        ("in_place", {"first.weight", "second.weight"}),
        ("weight_also_used_directly", {"f.weight"}),
        ("weight_decay_in_the_graph", {"f.weight"}),
        ("double_backward", {"first.weight", "third.weight"}),
        ("saved_tensors_elsewhere", {"second.weight"}),
        ("no_grad_inside", {"second.weight"}),
        ("vmap", {"second.weight"}),
        ("parametrized", {"1.weight"}),
        ("compiled_stage", set()),
        ("compiled_block", {"0.weight", "1._orig_mod.1.weight", "2.weight"}),
        ("frozen", set()),
    ],
)
def test_every_plain_call_of_a_weight_waits(name: str, waiting: set[str]) -> None:
    torch._dynamo.reset()
    assert _judged(MODULES[name]()) == waiting


def test_a_stage_says_whether_it_can_be_split() -> None:
    assert Split(nn.Sequential(nn.Tanh(), _linear())).is_splittable
    assert Split(nn.Conv1d(1, 1, 1)).is_splittable
    assert not Split(nn.LSTM(1, 1)).is_splittable
    assert not Split(nn.LayerNorm(2)).is_splittable
    assert not Split(_linear().requires_grad_(False)).is_splittable
    assert not Split(MODULES["compiled_stage"]()).is_splittable


def _live_widths(rows: int) -> Counter[int]:
    """Count the live tensors with `rows` rows, by their width."""
    gc.collect()
    found = [o.shape for o in gc.get_objects() if type(o) is torch.Tensor]
    return Counter(shape[1] for shape in found if len(shape) == 2 and shape[0] == rows)


class Probe(torch.autograd.Function):
    """An identity whose saved tensor reports when it is freed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: list[weakref.ref[Any]]) -> torch.Tensor:
        ctx.token = torch.empty(0)
        keep.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004  # autograd's form
        return gradient, None


def _probe(x: torch.Tensor, keep: list[weakref.ref[Any]]) -> Any:
    return Probe.apply(x, keep)  # type: ignore[no-untyped-call]  # untyped upstream


def test_after_the_first_half_only_inputs_and_output_gradients_of_layers_are_alive() -> None:
    tokens: list[weakref.ref[Any]] = []
    module = Apply(
        lambda m, x: m.g(_probe(torch.tanh(m.f(_probe(x, tokens))), tokens)),
        f=nn.Linear(3, 5),
        g=nn.Linear(5, 7),
    )
    split = prepared(module, 11, 3)
    split.inputs.clear()
    tokens.clear()
    before = _live_widths(11)
    split.forward(0, torch.randn(11, 3, dtype=torch.float64))
    assert [token() is None for token in tokens] == [False, False]
    split.backward_input(0)
    split.inputs.clear()
    assert [token() is None for token in tokens] == [True, True]
    # The inputs of both layers (3 and 5 wide) and the gradients of their outputs (5 and 7 wide).
    assert _live_widths(11) - before == Counter({3: 1, 5: 2, 7: 1})
    split.backward_weight(0)
    assert _live_widths(11) == before


def test_the_graph_is_let_go_of_by_the_first_half() -> None:
    split = prepared(nn.Sequential(_linear(), nn.Tanh(), _linear()), ROWS, WIDTH)
    split.forward(0, torch.randn(ROWS, WIDTH, dtype=torch.float64))

    # A hook lives exactly as long as the node that it is on.
    class Token:
        def __call__(self, _: Any) -> None:
            pass

    token = Token()
    node = split.flights[0][0][0][0].node
    node.register_prehook(token)
    alive = weakref.ref(token)
    del token, node
    gc.disable()
    try:
        assert alive() is not None
        split.backward_input(0)
        assert alive() is None
    finally:
        gc.enable()


class CountForwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_block_is_recomputed_once_per_microbatch(use_reentrant: bool) -> None:
    counts = [CountForwards() for _ in range(3)]
    blocks = [nn.Sequential(c, _linear(), nn.GELU(), _linear()) for c in counts]

    def forward(m: Any, x: torch.Tensor) -> Any:
        x = m.before(x)
        for block in m.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return m.after(x)

    module = Apply(forward, before=_linear(), blocks=nn.ModuleList(blocks), after=_linear())
    run_split(module.double(), random_values(ROWS, WIDTH))
    assert [c.calls for c in counts] == [2 * MICROBATCHES] * 3


def test_grad_keeps_what_it_held() -> None:
    module = nn.Sequential(_linear(), nn.Tanh(), _linear()).double()
    held = {}
    for name, parameter in module.named_parameters():
        parameter.grad = torch.randn_like(parameter)
        held[name] = parameter.grad.clone()
    reference = copy.deepcopy(module)
    for parameter in reference.parameters():
        parameter.grad = None
    values = random_values(ROWS, WIDTH)
    expected = run_plain(reference, values)
    found = run_split(module, values)
    for name, gradient in expected.parameters.items():
        assert gradient is not None
        torch.testing.assert_close(found.parameters[name], held[name] + gradient)


def test_a_gradient_shared_by_two_places_is_not_added_to_in_place() -> None:
    # The gradient of `x + bias` is one tensor for both: adding to `.grad` must leave the other.
    module = Apply(lambda m, x: x + m.norm.bias, norm=nn.LayerNorm(WIDTH)).double()
    split = Split(module)
    gradient = torch.randn(WIDTH, dtype=torch.float64)
    for number in range(2):
        split.forward(number, torch.randn(WIDTH, dtype=torch.float64))
        ((edge, _),) = split.flights[number][0]
        split.flights[number] = [(edge, gradient)], *split.flights[number][1:]
        split.backward_input(number)
        split.backward_weight(number)
    torch.testing.assert_close(split.inputs, {0: gradient, 1: gradient})
    torch.testing.assert_close(module.get_parameter("norm.bias").grad, 2 * gradient)


# ---------------------------------------------------------------- hooks


def _hooked(
    stage: nn.Module, runner: Callable[..., Gradients]
) -> tuple[dict[str, int], Gradients]:
    """Count the calls of hooks of every kind on everything, and return the gradients."""
    fired: dict[str, int] = {}

    def count(name: str) -> None:
        fired[name] = fired.get(name, 0) + 1

    for name, parameter in stage.named_parameters():

        def double(gradient: torch.Tensor, name: str = f"tensor {name}") -> torch.Tensor:
            count(name)
            return 2 * gradient

        def note(_: torch.Tensor, name: str = f"accumulated {name}") -> None:
            count(name)

        if not name.startswith("1."):
            parameter.register_hook(double)  # type: ignore[no-untyped-call]  # upstream
        if not name.startswith("2."):
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]  # upstream
    for name, module in stage.named_modules():

        def before(*_: Any, name: str = f"before {name}") -> None:
            count(name)

        def after(*_: Any, name: str = f"after {name}") -> None:
            count(name)

        module.register_full_backward_pre_hook(before)
        module.register_full_backward_hook(after)
    return fired, runner(stage, random_values(ROWS, WIDTH))


def test_hooks_fire_as_often_as_in_plain_autograd_and_mean_the_same() -> None:
    module = nn.Sequential(_linear(), _linear(), _linear(), _linear()).double()
    reference = copy.deepcopy(module)
    torch.manual_seed(2)
    expected_fired, expected = _hooked(reference, run_plain)
    torch.manual_seed(2)
    fired, found = _hooked(module, run_split)
    assert fired == expected_fired
    assert set(fired.values()) == {MICROBATCHES}
    assert_same(found, expected)


def test_a_hook_on_a_layers_output_changes_its_weight_gradient_too() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.f(x)
        y.register_hook(lambda gradient: 3 * gradient)
        return m.g(y)

    check(lambda: Apply(forward, f=_linear(), g=_linear()), random_values(ROWS, WIDTH))
    assert _judged(Apply(forward, f=_linear(), g=_linear())) == {"f.weight", "g.weight"}


def test_a_stages_own_pass_inside_a_hook_of_anothers_leaves_each_its_own_work() -> None:
    # The inner pass used to end the deferring of the outer one, which then did all the rest in I.
    inner = Split(_linear().double())
    inner.forward(0, torch.randn(ROWS, WIDTH, dtype=torch.float64))

    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.f(x)
        y.register_hook(lambda _: inner.backward_input(0))
        return m.g(y)

    outer = Split(Apply(forward, f=_linear(), g=_linear()).double())
    outer.forward(0, torch.randn(ROWS, WIDTH, dtype=torch.float64))
    outer.backward_input(0)
    waiting = [[call.weight for call in s.waiting[0]] for s in (outer, inner)]  # type: ignore[attr-defined]  # calls of layers
    find = outer.module.get_parameter
    expected = [
        [find("g.weight"), find("f.weight")],
        [inner.module.get_parameter("weight")],
    ]
    assert [[id(w) for w in group] for group in waiting] == [
        [id(w) for w in group] for group in expected
    ]


def test_forward_hooks_that_change_inputs_and_outputs_are_respected() -> None:
    def build() -> nn.Module:
        layer = _linear()
        layer.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        layer.register_forward_hook(lambda _, args, output: output * args[0])
        return nn.Sequential(layer, _linear())

    check(build, random_values(ROWS, WIDTH))
    assert _judged(build()) == {"0.weight", "1.weight"}


# ---------------------------------------------------------------- control flow that changes


class Changing(nn.Module):
    """Does something else from the second microbatch on."""

    def __init__(self, later: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.other = _linear(), _linear()
        self.later = later
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        y = torch.tanh(self.layer(x))
        return y if self.calls == 1 else self.later(self, y)


def _differentiate_twice(m: Any, y: torch.Tensor) -> Any:
    x = torch.ones_like(y).requires_grad_()
    return y + torch.autograd.grad(m.layer(x).square().sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    "later",
    [
        lambda m, y: y + F.linear(y, m.layer.weight),
        lambda m, y: y + m.layer.weight.sum(),
        lambda m, y: m.layer(m.other(y)),
        lambda m, y: m.other(y) + F.linear(y, m.other.weight),
        lambda m, y: m.other(y),
        lambda m, y: checkpoint(m.layer, y, use_reentrant=False),
        lambda m, y: checkpoint(m.layer, y, use_reentrant=True),
        _differentiate_twice,
    ],
    ids=[
        "second_use", "penalty", "second_call", "new_layer_used_twice", "new_layer",
        "checkpointed_call", "reentrant_checkpointed_call", "second_derivative",
    ],
)  # fmt: skip
def test_a_use_that_comes_up_in_a_later_microbatch_is_not_lost(
    later: Callable[[Any, torch.Tensor], Any],
) -> None:
    torch.manual_seed(3)
    check(lambda: Changing(later), random_values(ROWS, WIDTH))


def test_an_input_that_is_changed_in_place_is_refused_as_in_plain_autograd() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.f(x)
        x.mul_(2)
        return y

    split = Split(Apply(forward, f=_linear()).double())
    split.forward(0, torch.randn(ROWS, WIDTH, dtype=torch.float64))
    with pytest.raises(PipelineError, match=r"input of a layer \(shape \(6, 4\)\) was changed"):
        split.backward_input(0)


def test_an_input_that_is_changed_between_the_halves_is_refused() -> None:
    split = Split(_linear().double())
    value = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    split.forward(0, value)
    split.backward_input(0)
    (call,) = split.waiting[0]
    assert isinstance(call, LayerCall)
    call.value.mul_(2)
    with pytest.raises(PipelineError, match=r"input of a layer \(shape \(6, 4\)\) was changed"):
        split.backward_weight(0)


def test_a_weight_that_is_changed_in_place_before_i_is_refused_as_in_plain_autograd() -> None:
    split = Split(_linear().double())
    split.forward(0, torch.randn(ROWS, WIDTH, dtype=torch.float64))
    with torch.no_grad():
        split.module.weight.mul_(2)  # type: ignore[operator]  # a linear layer's weight
    with pytest.raises(PipelineError, match=r"weight of a layer \(shape \(4, 4\)\) was changed"):
        split.backward_input(0)


# ---------------------------------------------------------------- cost


def _count_calls(work: Callable[[], object]) -> Counter[str]:
    """Count the calls of each function, of Python or C, that are made inside."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            calls[argument.__name__] += 1

    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_work_grows_linearly_with_the_layers() -> None:
    def count(layers: int) -> list[int]:
        split = Split(nn.Sequential(*(_linear() for _ in range(layers))).double())
        value = torch.randn(ROWS, WIDTH, dtype=torch.float64)

        def step() -> None:
            split.forward(0, value)
            split.backward_input(0)
            split.backward_weight(0)

        return [_count_calls(step).total() for _ in range(3)]

    few, more, many = (count(layers) for layers in (10, 20, 40))
    growth = [b - a for a, b in zip(few, more, strict=True)]
    assert [c - b for b, c in zip(more, many, strict=True)] == [2 * calls for calls in growth]


# ---------------------------------------------------------------- the user's modules


def test_observing_changes_nothing_outside_a_step() -> None:
    module = nn.Sequential(_linear(), nn.Tanh())
    state = copy.deepcopy(module.state_dict())
    x = torch.randn(ROWS, WIDTH)
    expected = module(x)
    LayerRecorder().observe(module)
    assert isinstance(module[0], nn.Linear)
    torch.testing.assert_close(dict(module.state_dict()), dict(state), rtol=0, atol=0)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=0)


def test_an_observed_module_may_be_compiled_afterwards() -> None:
    torch._dynamo.reset()
    module = nn.Sequential(_linear(), nn.Tanh(), _linear()).double()
    reference = copy.deepcopy(module)
    split = Split(module)
    module.compile(backend="aot_eager", fullgraph=True)
    values = random_values(ROWS, WIDTH)
    for number, value in enumerate(values):
        split.forward(number, value)
        split.backward_input(number)
        split.backward_weight(number)
    assert_same(split.gradients(), run_plain(reference, values))


def test_two_recorders_of_one_module_do_not_disturb_each_other() -> None:
    module = nn.Sequential(_linear(), nn.Tanh(), _linear()).double()
    reference = copy.deepcopy(module)
    values = random_values(ROWS, WIDTH)
    expected = [run_plain(reference, values), run_plain(reference, values)][1]
    run_split(module, values)
    assert_same(run_split(module, values), expected)


def test_a_copy_of_an_observed_module_has_its_own_weights() -> None:
    module = nn.Sequential(_linear())
    split = Split(module)
    other = copy.deepcopy(module)
    with torch.no_grad():
        module.get_parameter("0.weight").zero_()
        module.get_parameter("0.bias").zero_()
    assert isinstance(other[0], DeferredLinear)
    assert not torch.equal(other(torch.ones(1, WIDTH)), split.module(torch.ones(1, WIDTH)))

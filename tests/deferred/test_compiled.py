"""Compiled stages: their backward is cut in two, and gives the gradients of the whole one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import penstock as ps
from penstock.parallel.replica import replica_of
from penstock.step.stage import Stage
from penstock.tensors.packet import Packet
from penstock.training.build.compiled_stages import refuse_compiled_graphs

# torch.compile reads `.grad` of all inputs, including tensors that are not leaves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

ROWS, WIDTH = 6, 8


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12, bias=False)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]  # a tensor


WEIGHTS = {"up.weight", "gate.weight", "down.weight"}


def _whole(module: nn.Module, backend: str) -> nn.Module:
    return torch.compile(module, backend=backend)  # type: ignore[return-value]  # a module stays one


def _in_place(module: nn.Module, backend: str) -> nn.Module:
    module.compile(backend=backend)
    return module


def _with_head(module: nn.Module, backend: str) -> nn.Module:
    return nn.Sequential(_whole(module, backend), nn.Tanh())


class Trial:
    """A compiled stage, and the same module without stage or compiler."""

    def __init__(
        self,
        module: nn.Module,
        compile_module: Callable[[nn.Module, str], nn.Module] = _whole,
        backend: str = "aot_eager",
    ) -> None:
        self.module = module.double()
        self.plain = copy.deepcopy(self.module)
        compiled = compile_module(self.module, backend)
        self.is_outside = compile_module is _with_head
        self.stage = Stage(0, compiled, replica_of(compiled))
        self.is_splittable = self.stage.prepare_split()

    def waiting(self) -> set[str]:
        """Run W, and return the parameters that had no gradient before."""
        before = {name for name, p in self.module.named_parameters() if p.grad is None}
        self.stage.backward_weight(0)
        return before & {n for n, p in self.module.named_parameters() if p.grad is not None}

    def forward(self, number: int, value: torch.Tensor) -> None:
        leaf = value.clone()
        if value.is_floating_point():
            leaf.requires_grad_()
        output, _ = self.stage.forward(number, [Packet("T", [leaf])], (), {})
        self.stage.depart(number, output, [1])

    def backward_input(self, number: int, value: torch.Tensor) -> None:
        """Run I, and compare the gradient of the input with that of the plain module."""
        leaf = value.clone().requires_grad_(value.is_floating_point())
        expected = self.plain(leaf)
        expected = torch.tanh(expected) if self.is_outside else expected
        gradient = torch.cos(expected.detach())
        expected.backward(gradient)
        (found,) = self.stage.backward_input(number, [[gradient]])
        if leaf.grad is not None:
            torch.testing.assert_close(found, [leaf.grad], rtol=1e-12, atol=1e-12)

    def check(self) -> None:
        found = {name: p.grad for name, p in self.module.named_parameters()}
        expected = {name: p.grad for name, p in self.plain.named_parameters()}
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def _values(count: int = 3, *shape: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(count, *(shape or (ROWS, WIDTH)), dtype=torch.float64))


def _run(trial: Trial, values: list[torch.Tensor]) -> set[str]:
    """Run all forwards, all I, all W; return the weights that were deferred."""
    for number, value in enumerate(values):
        trial.forward(number, value)
    for number, value in enumerate(values):
        trial.backward_input(number, value)
    waiting = trial.waiting()
    for number in range(1, len(values)):
        trial.stage.backward_weight(number)
    trial.check()
    return waiting


@pytest.mark.parametrize("compile_module", [_whole, _in_place, _with_head])
def test_two_halves_equal_the_whole_and_weights_are_deferred(
    compile_module: Callable[[nn.Module, str], nn.Module],
) -> None:
    trial = Trial(Block(), compile_module)
    assert trial.is_splittable
    assert _run(trial, _values()) == WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("compile_module", [_whole, _in_place])
def test_two_halves_equal_the_whole_with_inductor(
    compile_module: Callable[[nn.Module, str], nn.Module],
) -> None:
    assert _run(Trial(Block(), compile_module, "inductor"), _values()) == WEIGHTS


class Experts(nn.Module):
    """A batched product, as in mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.expand(3, *x.shape), self.weight).sum(0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))  # type: ignore[no-any-return]  # a tensor


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x)  # type: ignore[no-any-return]  # a tensor


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y.relu())  # type: ignore[no-any-return]  # a tensor


@pytest.mark.parametrize(
    ("build", "shape", "waiting"),
    [
        (lambda: nn.Linear(WIDTH, 3), (ROWS, WIDTH), {"weight"}),
        (lambda: nn.Linear(WIDTH, 3), (2, ROWS, WIDTH), {"weight"}),
        (lambda: nn.Conv1d(WIDTH, 4, 3), (2, WIDTH, ROWS), {"weight"}),
        (lambda: nn.Conv2d(2, 4, 3, groups=2, padding=1), (2, 2, 5, 5), {"weight"}),
        (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2), (2, 2, 5, 5), {"weight"}),
        (Experts, (ROWS, WIDTH), {"weight"}),
        (Tied, (ROWS, WIDTH), {"layer.weight"}),
        (Branch, (ROWS, WIDTH), {"first.weight", "second.weight"}),
        (lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh()), (ROWS, WIDTH), {"0.weight"}),
        (lambda: nn.LayerNorm(WIDTH), (ROWS, WIDTH), set()),
        (lambda: nn.GRU(WIDTH, WIDTH), (ROWS, 2, WIDTH), None),
    ],
    ids=[
        "linear", "linear of three dimensions", "conv1d", "conv2d in groups", "transposed conv",
        "experts", "tied", "graph break", "perceptron", "norm", "recurrent",
    ],
)  # fmt: skip
def test_each_kind_of_product_is_deferred_and_exact(
    build: Callable[[], nn.Module], shape: tuple[int, ...], waiting: set[str] | None
) -> None:
    torch.manual_seed(0)
    module = build()
    if isinstance(module, nn.GRU):
        module = _FirstOutput(module)
    trial = Trial(module)
    found = _run(trial, _values(3, *shape))
    assert waiting is None or found == waiting


class _FirstOutput(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)[0]


def test_under_autocast_gradients_have_the_dtype_of_their_weights() -> None:
    trial = Trial(Autocast())
    trial.module.float()
    value = torch.randn(ROWS, WIDTH)
    for number in range(2):
        trial.forward(number, value)
        trial.stage.backward_input(number, [[torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)]])
        trial.stage.backward_weight(number)
    (weight,) = trial.module.parameters()
    assert weight.grad is not None
    expected = 2 * torch.ones(WIDTH, ROWS) @ value.bfloat16().float()
    torch.testing.assert_close(weight.grad, expected, rtol=2e-2, atol=2e-2)
    assert weight.grad.dtype == torch.float32


def test_weights_with_hooks_get_their_gradients_in_the_first_half() -> None:
    trial = Trial(Block())
    fired: list[str] = []
    for name in ("up", "gate"):
        weight = trial.module.get_parameter(f"{name}.weight")
        weight.register_hook(lambda _, name=name: fired.append(name))  # type: ignore[no-untyped-call]  # upstream
    assert _run(trial, _values()) == {"down.weight"}
    assert sorted(fired) == ["gate"] * 3 + ["up"] * 3


def test_outside_a_step_the_backward_is_whole() -> None:
    trial = Trial(Block())
    _run(trial, _values())
    for module, value in ((trial.stage.module, _values()[0]), (trial.plain, _values()[0])):
        module.zero_grad()
        module(value).sum().backward()
    trial.check()


def test_known_shapes_are_not_compiled_again() -> None:
    trial = Trial(Block())
    _run(trial, _values())
    counters.clear()
    for _ in range(3):
        _run(trial, _values())
    assert counters["stats"]["unique_graphs"] == 0


def test_batch_sizes_may_change() -> None:
    trial = Trial(Block())
    for rows in (6, 3, 11, 6):
        assert _run(trial, _values(3, rows, WIDTH)) <= WEIGHTS
        for module in (trial.module, trial.plain):
            module.zero_grad()


def test_an_unsupported_backend_is_not_split() -> None:
    trial = Trial(Block(), backend="eager")
    assert not trial.is_splittable
    assert _run(trial, _values()) == set()


def test_a_frozen_module_is_not_split() -> None:
    assert not Trial(Block().requires_grad_(False)).is_splittable


@pytest.mark.parametrize("schedule", ["ZBV", "InterleavedZeroBubble", "1F1B"])
def test_a_pipeline_of_compiled_stages_trains_like_the_model(schedule: str) -> None:
    torch.manual_seed(0)
    blocks = [Block().double() for _ in range(4)]
    plain = nn.Sequential(*copy.deepcopy(blocks))
    for block in blocks:
        block.compile(backend="aot_eager")
    stages = (
        blocks if schedule != "1F1B" else [nn.Sequential(*blocks[:2]), nn.Sequential(*blocks[2:])]
    )
    pipeline = ps.Pipeline(stages, schedule, microbatches=4, loss=nn.functional.mse_loss, ranks=2)
    x, target = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    for _ in range(2):
        pipeline.step(x, target=target)
        torch.autograd.backward(nn.functional.mse_loss(plain(x), target))
    found = [p.grad for block in blocks for p in block.parameters()]
    torch.testing.assert_close(found, [p.grad for p in plain.parameters()], rtol=1e-12, atol=1e-12)


# Its CUDA graphs write every output into the same memory, while a message may wait to be copied.
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_stages_with_the_compilers_own_graphs_are_refused_on_devices(is_wrapped: bool) -> None:
    def stage_of(mode: str | None) -> Stage:
        module: nn.Module = nn.Linear(2, 2)
        if is_wrapped:
            module = torch.compile(module, mode=mode)  # type: ignore[assignment]  # a module again
        else:
            module.compile(mode=mode)
        return Stage(0, module, replica_of(module))

    cuda, with_graphs = torch.device("cuda"), stage_of("reduce-overhead")
    refuse_compiled_graphs({0: stage_of(None)}, cuda)
    refuse_compiled_graphs({0: with_graphs}, torch.device("cpu"))
    with pytest.raises(ps.errors.ArgumentError, match="stage 3 must not be compiled with mode="):
        refuse_compiled_graphs({3: with_graphs}, cuda)
    # The split backward compiles again, without graphs.
    with_graphs.prepare_split()
    refuse_compiled_graphs({0: with_graphs}, cuda)


def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return halve(x)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = torch.compile(torch.neg, mode="max-autotune")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


# Only modules were looked at, and only their own settings.
def test_graphs_of_functions_backends_and_global_settings_are_refused_on_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(module: nn.Module) -> None:
        refuse_compiled_graphs({0: Stage(0, module, replica_of(module))}, torch.device("cuda"))

    refuse(Halves())
    monkeypatch.setitem(globals(), "halve", torch.compile(halve, mode="reduce-overhead"))
    for module in (Halves(), Holds(), nn.Sequential(nn.Linear(2, 2), Halves())):
        with pytest.raises(ps.errors.ArgumentError, match="stage 0 must not be compiled with"):
            refuse(module)
    other = nn.Linear(2, 2)
    other.compile(backend="cudagraphs")
    with pytest.raises(ps.errors.ArgumentError, match="backend='cudagraphs'"):
        refuse(other)
    plain = nn.Linear(2, 2)
    plain.compile()
    refuse(plain)
    with (
        torch._inductor.config.patch({"triton.cudagraphs": True}),
        pytest.raises(ps.errors.ArgumentError, match="stage 0 must not be compiled with"),
    ):
        refuse(plain)


# Its class has no `forward` that could be looked at.
def test_modules_of_torchscript_are_not_refused() -> None:
    traced = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))  # type: ignore[no-untyped-call]  # untyped upstream
    stage = Stage(0, nn.Sequential(traced), replica_of(nn.Sequential()))
    refuse_compiled_graphs({0: stage}, torch.device("cuda"))

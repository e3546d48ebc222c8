"""Stages as CUDA graphs, beside the same stages without them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock.ir.dataflow import Routed
from penstock.loss.added import add_loss
from penstock.parallel.replica import replica_of
from penstock.step.stage import Stage
from penstock.tensors.packet import Packet

pytestmark = pytest.mark.gpu

WIDTH, ROWS = 16, 8


def _blocks() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, WIDTH, bias=False)
    )


class Runner:
    """A stage, run as a schedule would: several microbatches in flight, W later than I."""

    def __init__(self, module: nn.Module, *, is_split: bool = True) -> None:
        self.module = module
        self.is_split = is_split
        self.stage = Stage(0, module, replica_of(module))
        if is_split:
            self.stage.prepare_split()
        self.replays = 0

    def step(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run all forwards, all I, all W; return the gradients of the inputs."""
        found = []
        for number, value in enumerate(values):
            leaf = value.clone().requires_grad_()
            output, _ = self.stage.forward(number, [Packet("T", [leaf])], (), {})
            self.replays += self.stage._flights[number].is_replayed
            self.stage.depart(number, output, [1])
            del output
        for number, value in enumerate(values):
            gradient = torch.cos(value)
            if self.is_split:
                found.append(self.stage.backward_input(number, [[gradient]])[0][0])
            else:
                found.append(self.stage.backward(number, [[gradient]])[0][0])
        for number in range(len(values)) if self.is_split else ():
            self.stage.backward_weight(number)
        return found

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {
            name: None if p.grad is None else p.grad.clone()
            for name, p in self.module.named_parameters()
        }


def _values(seed: int, count: int = 3, rows: int = ROWS) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (count, rows, WIDTH)
    return list(torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64))


def _pair(build: Callable[[], nn.Module], **options: Any) -> tuple[Runner, Runner]:
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(build().to("cuda", torch.float64))
    plain, captured = (Runner(module, **options) for module in modules)
    captured.stage.capture_graphs()
    return plain, captured


def _assert_same(plain: Runner, captured: Runner, values: list[torch.Tensor]) -> None:
    expected, found = plain.step(values), captured.step(values)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(captured.gradients(), plain.gradients(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("sets_to_none", [True, False])
def test_replayed_steps_equal_plain_ones(is_split: bool, sets_to_none: bool) -> None:
    plain, captured = _pair(_blocks, is_split=is_split)
    for step in range(5):
        _assert_same(plain, captured, _values(step))
        for runner in (plain, captured):
            with torch.no_grad():
                for parameter in runner.module.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)
            runner.module.zero_grad(set_to_none=sets_to_none)
    # The first step runs without graphs; all others are replayed.
    assert captured.replays == 4 * 3


def test_gradients_keep_what_they_held() -> None:
    plain, captured = _pair(_blocks)
    for step in range(4):
        _assert_same(plain, captured, _values(step))
    for runner in (plain, captured):
        for parameter in runner.module.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
    _assert_same(plain, captured, _values(9))


def test_other_shapes_run_as_they_are_and_are_captured_when_they_stay() -> None:
    plain, captured = _pair(_blocks)
    for step, rows in enumerate([8, 8, 4, 4, 8]):
        _assert_same(plain, captured, _values(step, rows=rows))
    assert captured.replays == 2 * 3


def test_more_microbatches_than_before_run_without_graphs() -> None:
    plain, captured = _pair(_blocks)
    for step, count in enumerate([2, 2, 5, 5]):
        _assert_same(plain, captured, _values(step, count=count))
    assert captured.replays == 2 + 2 + 5


def test_a_weight_in_other_memory_is_captured_again() -> None:
    plain, captured = _pair(_blocks)
    for step in range(2):
        _assert_same(plain, captured, _values(step))
    for runner in (plain, captured):
        weight = runner.module[0].weight  # type: ignore[index]  # a sequence
        weight.data = weight.data * 2
    for step in range(2, 4):
        _assert_same(plain, captured, _values(step))
    assert captured.replays == 3 + 3


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(torch.tanh(self.used(x)))  # type: ignore[no-any-return]  # upstream


def test_weights_that_get_no_gradient_have_none() -> None:
    plain, captured = _pair(Frozen)
    for step in range(3):
        _assert_same(plain, captured, _values(step))
    assert captured.gradients()["unused.weight"] is None
    assert captured.gradients()["frozen.weight"] is None


def test_running_statistics_count_every_microbatch_once() -> None:
    plain, captured = _pair(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    for step in range(3):
        _assert_same(plain, captured, _values(step))
    for expected, found in zip(plain.module.buffers(), captured.module.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Routed:
        y = self.layer(x)
        return Routed({1: {"y": y, "n": 3}})


def _pass_routed(runner: Runner, number: int, value: torch.Tensor) -> bool:
    """Run one microbatch there and back; return whether it was replayed."""
    packet = Packet("T", [value.clone().requires_grad_()])
    output, _ = runner.stage.forward(number, [packet], (), {})
    is_replayed = runner.stage._flights[number].is_replayed
    assert isinstance(output, Routed)
    assert output.values[1]["n"] == 3
    (sent,) = runner.stage.depart(number, output, [1])
    torch.testing.assert_close(sent.tensors, [runner.module(value).values[1]["y"].detach()])
    runner.stage.backward_input(number, [[torch.ones_like(sent.tensors[0])]])
    runner.stage.backward_weight(number)
    return is_replayed


def test_outputs_keep_their_structure() -> None:
    # An output of an earlier microbatch that is still held has the gradients of its weights added
    # in another stream, which cannot be captured: each is let go of before the next one comes.
    _, captured = _pair(TwoOutputs)
    values = [value for step in range(2) for value in _values(step, count=2)]
    replayed = [_pass_routed(captured, number, value) for number, value in enumerate(values)]
    assert replayed == [False, True, True, True]


class Halving(nn.Module):
    """Makes a new buffer in every forward, as a module with a running mean of its own may."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = self.scale / 2
        result: torch.Tensor = self.layer(x) * self.scale
        return result


class Shifting(nn.Module):
    """Has a number in host memory, which goes into kernels as it is at the time."""

    shift: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shift is None:
            self.shift = torch.zeros((), dtype=x.dtype)
        self.shift.add_(1)
        result: torch.Tensor = self.layer(x) + self.shift
        return result


def _hooked() -> nn.Module:
    module = _blocks()
    seen: list[int] = []

    def scale(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return gradient * len(seen)

    next(module.parameters()).register_hook(scale)  # type: ignore[no-untyped-call]  # upstream
    return module


@pytest.mark.parametrize("build", [Halving, Shifting, _hooked])
def test_what_a_graph_would_repeat_wrongly_is_not_captured(
    build: Callable[[], nn.Module],
) -> None:
    # Graphs read memory by its address and call no Python: a new buffer, a number on the host or
    # a hook would count as they were in the capture, without a word.
    plain, captured = _pair(build)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            _assert_same(plain, captured, _values(step))
    assert captured.replays == 0


def test_a_weight_in_the_same_memory_but_laid_out_otherwise_is_captured_again() -> None:
    # Only addresses were compared, and kernels of a graph know strides for good.
    plain, captured = _pair(_blocks, is_split=False)
    for step in range(2):
        _assert_same(plain, captured, _values(step))
    for runner in (plain, captured):
        weight = runner.module[0].weight  # type: ignore[index]  # a sequence
        weight.data = weight.data.view(WIDTH, 32).t()
        weight.grad = None
    for step in range(2, 5):
        _assert_same(plain, captured, _values(step))
    assert captured.replays == 3 + 2 * 3


@pytest.mark.parametrize("is_split", [True, False])
def test_autocast_casts_the_weights_of_every_step(is_split: bool) -> None:
    # Autocast keeps what it has cast until the step ends. A graph that had found such a copy read
    # the weights of the step in which it was captured, in memory that had gone to others.
    plain, captured = _pair(_blocks, is_split=is_split)
    for runner in (plain, captured):
        runner.module.float()
    for step in range(5):
        values = [value.float() for value in _values(step)]
        for runner in (plain, captured):
            with torch.autocast("cuda", torch.bfloat16):
                runner.step(values)
        expected, found = (_flat(runner.gradients()) for runner in (plain, captured))
        assert float((found - expected).norm() / expected.norm()) < 1e-2
        for runner in (plain, captured):
            with torch.no_grad():
                for parameter in runner.module.parameters():
                    parameter.mul_(1.5)
            runner.module.zero_grad()
    assert captured.replays == 4 * 3


def _flat(gradients: dict[str, torch.Tensor | None]) -> torch.Tensor:
    return torch.cat(
        [gradient.flatten() for gradient in gradients.values() if gradient is not None]
    )


def test_a_weight_that_two_stages_share_gets_what_both_add() -> None:
    # Each stage keeps gradients in memory of its own. The W of one came after the I of the other
    # had taken the weight's gradient along, and added to what nobody looked at any more.
    plain, captured = _sharing_pair(), _sharing_pair()
    for runner in captured:
        runner.stage.capture_graphs()
    for step in range(4):
        for runners in (plain, captured):
            _interleave(runners, _values(step)[0])
        for expected, found in zip(plain, captured, strict=True):
            torch.testing.assert_close(found.gradients(), expected.gradients())
    assert [runner.replays for runner in captured] == [3, 3]


def _sharing_pair() -> list[Runner]:
    """Two stages whose first layers have one weight."""
    torch.manual_seed(0)
    first, second = (_blocks().to("cuda", torch.float64) for _ in range(2))
    second[0].weight = first[0].weight  # type: ignore[index]  # sequences
    return [Runner(first), Runner(second)]


def _interleave(runners: list[Runner], value: torch.Tensor) -> None:
    """F of all, I of all, W of all."""
    for runner in runners:
        packet = Packet("T", [value.clone().requires_grad_()])
        output, _ = runner.stage.forward(0, [packet], (), {})
        runner.replays += runner.stage._flights[0].is_replayed
        runner.stage.depart(0, output, [1])
        del output
    for runner in runners:
        runner.stage.backward_input(0, [[torch.cos(value)]])
    for runner in runners:
        runner.stage.backward_weight(0)


def test_random_numbers_continue_where_a_stage_could_not_be_captured() -> None:
    plain, captured = _pair(lambda: nn.Sequential(Syncing(), nn.Dropout(0.5)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            for runner in (plain, captured):
                torch.manual_seed(step)
                runner.step(_values(step))
            torch.testing.assert_close(captured.gradients(), plain.gradients())


class Syncing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y if y.sum().item() > 0 else 2 * y


class AddsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        add_loss(y.mean())
        return y


@pytest.mark.parametrize("build", [Syncing, AddsLoss])
def test_what_cannot_be_captured_runs_without_graphs_and_warns_once(
    build: Callable[[], nn.Module],
) -> None:
    plain, captured = _pair(build)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(4):
            _assert_same(plain, captured, _values(step))
    texts = [str(w.message) for w in told if "cannot run as CUDA graphs" in str(w.message)]
    assert len(texts) == 1
    assert captured.replays == 0


def test_compiled_blocks_are_captured() -> None:
    torch._dynamo.reset()

    def build() -> nn.Module:
        block = _blocks()
        block.compile()
        return nn.Sequential(block, nn.Linear(WIDTH, WIDTH))

    plain, captured = _pair(build)
    for step in range(4):
        _assert_same(plain, captured, _values(step))
    assert captured.replays == 3 * 3


def test_after_a_failed_step_all_slots_are_free_again() -> None:
    plain, captured = _pair(_blocks)
    for step in range(2):
        _assert_same(plain, captured, _values(step))
    value = _values(5)[0].requires_grad_()
    captured.stage.forward(0, [Packet("T", [value])], (), {})
    captured.stage.clear()
    captured.replays = 0
    _assert_same(plain, captured, _values(6))
    assert captured.replays == 3

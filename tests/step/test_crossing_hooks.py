"""Hooks on tensors that cross: called as in the unsplit model, or the step is refused.

The cause of what is tested here: a gradient that a stage takes in its forward with respect to what
it received did not call the hook that the stage before has on it, and gave other numbers.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.step.crossing_hooks import find_hooked
from tests.processes import Processes

WIDTH, ROWS, MICROBATCHES = 4, 6, 2
REFUSED = (
    r"BoundaryError: stage 1 takes a gradient in its forward or loss with respect to a tensor "
    r"from an earlier stage, which has registered a hook on it; .* into one stage, or use "
    r"register_full_backward_hook"
)
ELSEWHERE = "which has registered a hook on it"
UNKNOWN = "hooks on tensors that cross stages must be there from the first step"


class Hooked(nn.Module):
    """A layer that registers a hook on its output, as long as it is to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.is_hooking = True
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x).tanh()
        if self.is_hooking and made.requires_grad:
            made.register_hook(self._clamp)  # type: ignore[no-untyped-call]  # untyped upstream
        return made

    def _clamp(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return gradient.clamp(-0.01, 0.01)


class Force(nn.Module):
    """A layer that goes along the gradient of an energy, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        energy = self.layer(h).square().sum()
        if not h.requires_grad:
            return h
        (force,) = torch.autograd.grad(energy, h, create_graph=True)
        return h - 0.1 * force


def make_stages(last: Callable[[], nn.Module] = Force) -> tuple[Hooked, nn.Module]:
    torch.manual_seed(0)
    return Hooked(), last()


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def make_pipeline(
    stages: tuple[nn.Module, ...],
    family: str = "GPipe",
    function: Callable[..., torch.Tensor] = loss,
    group: dist.ProcessGroup | None = None,
) -> ps.Pipeline:
    return ps.Pipeline(
        list(stages),
        family,
        microbatches=MICROBATCHES,
        loss=function,
        reduction="sum",
        group=group,
    )


def clear(pipeline: ps.Pipeline) -> None:
    for parameter in pipeline.parameters():
        parameter.grad = None


def train_unsplit(stages: tuple[nn.Module, ...]) -> list[torch.Tensor | None]:
    """Return the gradients of the same model in one piece, microbatch by microbatch."""
    whole = nn.Sequential(*stages)
    for x, y in zip(*(tensor.chunk(MICROBATCHES) for tensor in make_batch()), strict=True):
        torch.autograd.backward(loss(whole(x), y))
    return [parameter.grad for parameter in whole.parameters()]


@pytest.mark.parametrize("family", ["GPipe", "ZB-H1"])
def test_gradient_with_respect_to_a_tensor_that_has_a_hook_elsewhere_is_refused(
    family: str,
) -> None:
    x, y = make_batch()
    pipeline = make_pipeline(make_stages(), family)
    for _ in range(2):
        with pytest.raises(ps.errors.PipelineError, match=REFUSED):
            pipeline.step(x, target=y)


@pytest.mark.parametrize("family", ["GPipe", "ZB-H1"])
def test_gradient_with_respect_to_a_tensor_without_hooks_is_that_of_the_unsplit_model(
    family: str,
) -> None:
    (stages, plain), (x, y) = (make_stages(), make_stages()), make_batch()
    stages[0].is_hooking = plain[0].is_hooking = False
    pipeline = make_pipeline(stages, family)
    expected = train_unsplit(plain)
    for _ in range(3):
        clear(pipeline)
        pipeline.step(x, target=y)
        torch.testing.assert_close([p.grad for p in pipeline.parameters()], expected)


def make_linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("family", ["GPipe", "ZB-H1"])
def test_hook_on_a_tensor_that_crosses_is_called_once_per_microbatch(family: str) -> None:
    (stages, plain), (x, y) = (make_stages(make_linear), make_stages(make_linear)), make_batch()
    pipeline = make_pipeline(stages, family)
    expected = train_unsplit(plain)
    for step in range(3):
        clear(pipeline)
        pipeline.step(x, target=y)
        assert stages[0].calls == MICROBATCHES * (step + 1)
        torch.testing.assert_close([p.grad for p in pipeline.parameters()], expected)


def test_whole_backward_of_a_loss_past_a_hook_is_refused() -> None:
    # It leaves a gradient in what was received, for which a hook that clamps is called only once.
    def backward_first(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = loss(output, target)
        torch.autograd.backward(found, retain_graph=True)
        return found

    x, y = make_batch()
    pipeline = make_pipeline(make_stages(make_linear), function=backward_first)
    with pytest.raises(ps.errors.PipelineError, match=REFUSED):
        pipeline.step(x, target=y)


def test_hooks_of_torchs_own_parallelism_are_left_out() -> None:
    def gather_weights(gradient: torch.Tensor) -> None:
        """Do as FSDP does on the outputs of its modules."""

    def scale(gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient

    gather_weights.__module__ = "torch.distributed.fsdp._fully_shard"
    tensors = [make_batch()[0].requires_grad_() * 2 for _ in range(3)]
    tensors[0].register_hook(gather_weights)  # type: ignore[no-untyped-call]  # untyped upstream
    tensors[2].register_hook(scale)  # type: ignore[no-untyped-call]  # untyped upstream
    assert find_hooked(tensors) == (2,)


def step_by_step(
    rank: int,  # noqa: ARG001  # a job's form
    last: Callable[[], nn.Module],
    hooking: list[bool],
) -> tuple[list[str], int]:
    """Return the loss or error of each step, and how often the hook was called."""
    stages, (x, y) = make_stages(last), make_batch()
    pipeline = make_pipeline(stages, group=dist.group.WORLD)
    told = []
    for is_hooking in hooking:
        stages[0].is_hooking = is_hooking
        try:
            told.append(f"{pipeline.step(x, target=y).loss:.6f}")
        except ps.errors.PipelineError as error:
            told.append(str(error))
    return told, stages[0].calls


def test_all_ranks_refuse_the_gradient_together(two_processes: Processes) -> None:
    for told, _ in two_processes.run(step_by_step, Force, [True, True]):
        assert [ELSEWHERE in words for words in told] == [True, True]


def test_hook_that_comes_later_is_refused_too(two_processes: Processes) -> None:
    for told, _ in two_processes.run(step_by_step, Force, [False, False, False, True, True]):
        assert len(set(told[:3])) == 1
        # The receiver learns of hooks together with shapes, and these were known.
        assert UNKNOWN in told[3]
        assert ELSEWHERE in told[4]


def test_hook_that_comes_and_goes_works_where_no_gradient_passes_it(
    two_processes: Processes,
) -> None:
    hooking = [False, False, True, True, False, True]
    found = two_processes.run(step_by_step, make_linear, hooking)
    assert all(len(set(told)) == 1 for told, _ in found)
    assert [calls for _, calls in found] == [MICROBATCHES * sum(hooking), 0]

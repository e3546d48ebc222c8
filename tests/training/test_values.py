"""Between real processes a boundary is crossed by values, and by nothing else.

What a tensor lazily means arrives as numbers; what cannot cross, or cannot be made ready, is an
error of the step on every rank, and the next step works.
"""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

import penstock as ps
from penstock.dropin.schedules import ScheduleGPipe
from penstock.dropin.stage import PipelineStage
from penstock.ranks.fault_injection import FaultInjection
from tests.covering import all_but_slow
from tests.models import differences, gradients_of
from tests.processes import Processes

WIDTH = 4
Make = Callable[[torch.Tensor], Any]
Losses = list[float | None]


def same(z: torch.Tensor) -> Any:
    return z


def conjugate(z: torch.Tensor) -> Any:
    return z.conj()


def negative(z: torch.Tensor) -> Any:
    return torch._neg_view(z)


def imaginary(z: torch.Tensor) -> Any:
    return z.conj().imag, z.real


def transposed(z: torch.Tensor) -> Any:
    return z.conj().unsqueeze(0).expand(3, *z.shape).transpose(0, 2)


def channels_last(z: torch.Tensor) -> Any:
    return z.reshape(-1, 2, 2, 1).to(memory_format=torch.channels_last)


def sizes(z: torch.Tensor) -> Any:
    """Return nothing, one number, a mask, whole numbers."""
    return {"z": z, "none": z[:0], "sum": z.sum(), "mask": z.real > 0, "n": torch.tensor(3)}


# What the second half does with each, as one complex tensor.
READ: dict[Make, Callable[[Any], torch.Tensor]] = {
    conjugate: lambda z: z,
    negative: lambda z: z,
    imaginary: lambda pair: torch.complex(pair[1], pair[0]),
    transposed: lambda z: z.sum(2).T,
    channels_last: lambda z: z.reshape(-1, WIDTH),
    sizes: lambda tree: tree["z"] * tree["mask"] * tree["n"] + tree["none"].sum() + tree["sum"],
}


class First(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(
            torch.randn(WIDTH, WIDTH, dtype=torch.complex128, generator=generator)
        )
        self.make = make

    def forward(self, z: torch.Tensor) -> Any:
        return self.make(z @ self.weight)


class Second(nn.Module):
    """Reads what comes, and takes it lazily conjugated, so that its gradient is lazy too."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(
            torch.randn(WIDTH, WIDTH, dtype=torch.complex128, generator=generator)
        )
        self.make = make

    def forward(self, *values: Any) -> torch.Tensor:
        value = READ[self.make](values[0] if len(values) == 1 else values)
        return (value.conj() @ self.weight).conj()


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().square().mean()


def make_complex_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    both = torch.randn(2, 6, WIDTH, dtype=torch.complex128, generator=generator)
    return both[0].clone(), both[1].clone()


def cross(rank: int, by_order: bool) -> dict[str, Any]:
    """Return where gradients differ from those of the unsplit model, in any of three steps."""
    del rank
    wrong: dict[str, Any] = {}
    batch, target = make_complex_batch()
    for make in READ:
        model = nn.Sequential(First(make), Second(make))
        pipeline = ps.Pipeline(
            list(model),
            "1F1B",
            # One microbatch: the sum over all rows is part of one of the values.
            microbatches=1,
            loss=distance,
            group=dist.group.WORLD,
            options=ps.RunOptions(fault_injection=FaultInjection(by_order=by_order)),
        )
        twin = deepcopy(model)
        middle = twin[0](batch)
        torch.autograd.backward(distance(twin[1](middle), target))
        expected = gradients_of(twin.named_parameters())
        for step in range(3):
            model.zero_grad()
            pipeline.step(batch, target=target)
            found = gradients_of(model.named_parameters())
            far = differences(found, {name: expected[name] for name in found})
            wrong.update({f"{make.__name__} {step} {name}": value for name, value in far.items()})
    return wrong


# `.contiguous()` keeps the bits for conjugate and negative, and memory was sent unresolved: the
# receiver got the number without the recipe.
@pytest.mark.parametrize("by_order", [False, True])
def test_lazy_and_odd_tensors_cross_as_the_numbers_that_they_mean(
    by_order: bool, two_processes: Processes
) -> None:
    assert two_processes.run(cross, by_order) == [{}, {}]


class LookUp(nn.Module):
    """Takes rows of what it receives, for which autograd makes a sparse gradient."""

    def forward(self, table: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(torch.tensor([2, 0, 2, 1]), table, sparse=True)


def look_up(rank: int) -> Any:
    del rank
    first = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.eye_(first.weight)
    group = dist.group.WORLD if dist.is_initialized() else None
    pipeline = ps.Pipeline([first, LookUp()], "1F1B", microbatches=1, loss=square, group=group)
    batch = torch.arange(4.0 * WIDTH).reshape(4, WIDTH)
    pipeline.step(batch, target=torch.zeros(4, WIDTH))
    return None if first.weight.grad is None else first.weight.grad.tolist()


def test_sparse_gradient_comes_back_as_the_numbers_that_it_means(
    two_processes: Processes,
) -> None:
    # The sparse gradient was given to the backend, which takes dense memory only.
    weight = torch.eye(WIDTH, requires_grad=True)
    batch = torch.arange(4.0 * WIDTH).reshape(4, WIDTH)
    torch.autograd.backward(square((batch @ weight.T)[[2, 0, 2, 1]], torch.zeros(4, WIDTH)))
    assert weight.grad is not None
    assert two_processes.run(look_up) == [weight.grad.tolist(), None]
    assert look_up(0) == weight.grad.tolist()


# ---- what is refused, and what cannot be made ready


class Switch(nn.Module):
    """A layer whose output is made into something else while `make` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.make: Make | None = None

    def forward(self, value: torch.Tensor) -> Any:
        output = self.layer(value)
        return output if self.make is None else self.make(output)


def sparse(value: torch.Tensor) -> Any:
    return value.to_sparse()


def huge(value: torch.Tensor) -> Any:
    """More than any machine has memory for, once it is in one piece."""
    return value[:1, :1].expand(2**22, 2**22)


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def fail_once(rank: int, make: Make, steps_before: int, by_order: bool) -> tuple[str, Losses]:
    """Return the error of a step in which stage 1 hands on something else, and a loss after it."""
    del rank
    stages = [Switch() for _ in range(4)]
    pipeline = ps.Pipeline(
        stages,
        "ZBV",
        microbatches=2,
        loss=square,
        group=dist.group.WORLD,
        options=ps.RunOptions(fault_injection=FaultInjection(by_order=by_order)),
    )
    batch = torch.ones(4, WIDTH, dtype=torch.float64)

    def step() -> float | None:
        return pipeline.step(batch, target=torch.zeros_like(batch)).loss

    for _ in range(steps_before):
        step()
    stages[0].make = make
    with pytest.raises(ps.errors.PipelineError) as caught:
        step()
    stages[0].make = None
    return str(caught.value).splitlines()[0], [step(), step()]


# A header went out before the tensor was found to be none that can be sent. The receiver waited
# for the rest, was given up after ten seconds, and nothing worked after that.
@pytest.mark.parametrize("by_order", [False, True])
@pytest.mark.parametrize(
    ("make", "steps_before", "message"),
    [
        (
            sparse,
            steps_before,
            "0F0: BoundaryError: stage 0 must give part 1 dense tensors (got the layout "
            "torch.sparse_coo); return .to_dense()",
        )
        for steps_before in (0, 2)
    ]
    + [
        (huge, 0, "0SEND_F0: RuntimeError: "),
        (huge, 2, "0SEND_F0: BoundaryError: what edge 0 carries has changed its form"),
    ],
)
def test_value_that_cannot_be_sent_fails_one_step_on_every_rank(
    make: Make, steps_before: int, message: str, by_order: bool, two_processes: Processes
) -> None:
    found = two_processes.run(fail_once, make, steps_before, by_order)
    for error, losses in found:
        assert error.startswith(f"rank 0, stage 0, microbatch 0, {message}")
        assert losses == [pytest.approx(1.0)] * 2


class Alarm:
    """Raises after, or before, the second piece of work that it is put around."""

    def __init__(self, *, is_after: bool) -> None:
        self.is_after = is_after
        self.calls = 0

    def __call__(self, action: ps.Action, run: Callable[[], None]) -> None:
        self.calls += 1
        if self.calls == 2 and not self.is_after:
            raise ValueError(f"alarm at {action}")
        run()
        if self.calls == 2:
            raise ValueError(f"alarm at {action}")


def raise_alarm(rank: int, kind: str, is_after: bool, by_order: bool) -> tuple[str, bool]:
    """Return the error of a step with an alarm on rank 1, and whether the next step is right."""
    stages = [Switch() for _ in range(4)]
    alarm = {ps.Kind[kind]: Alarm(is_after=is_after)} if rank == 1 else {}
    pipeline = ps.Pipeline(
        stages,
        "ZBV",
        microbatches=3,
        loss=square,
        group=dist.group.WORLD,
        options=ps.RunOptions(around=alarm, fault_injection=FaultInjection(by_order=by_order)),
    )
    batch = torch.arange(6.0 * WIDTH, dtype=torch.float64).reshape(6, WIDTH)
    with pytest.raises(ps.errors.PipelineError) as caught:
        pipeline.step(batch, target=torch.zeros_like(batch))
    losses = [pipeline.step(batch, target=torch.zeros_like(batch)).loss for _ in range(3)]
    expected = square(nn.Sequential(*stages)(batch), torch.zeros_like(batch)).item()
    return str(caught.value).splitlines()[0], losses == [pytest.approx(expected)] * 3


# A message that had been sent, or a receive that had been posted, was there twice when the work
# around it failed; what was left over met the messages of the next step.
@pytest.mark.parametrize("by_order", [False, True])
@pytest.mark.parametrize("is_after", all_but_slow([False, True], [True]))
@pytest.mark.parametrize(
    ("kind", "action"), [("SEND_F", "2SEND_F1"), ("RECV_F", "1RECV_F1"), ("RECV_B", "2RECV_B1")]
)
def test_failure_beside_a_message_leaves_no_message_behind(
    kind: str, action: str, is_after: bool, by_order: bool, two_processes: Processes
) -> None:
    for error, works_again in two_processes.run(raise_alarm, kind, is_after, by_order):
        assert error.startswith("rank 1, stage ")
        assert error.endswith(f"{action}: ValueError: alarm at {action}")
        assert works_again


class Collected(nn.Module):
    """Gives a value to a collective that is still at it when this returns."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = all_reduce(value, "sum", self.group)
        assert type(summed) is AsyncCollectiveTensor
        return summed


def send_what_is_under_way(rank: int) -> Any:
    alone = [dist.new_group([number]) for number in range(2)][rank]
    assert isinstance(alone, dist.ProcessGroup)
    pipeline = ps.Pipeline(
        [Collected(alone), nn.Identity()], "1F1B", microbatches=1, group=dist.group.WORLD
    )
    outputs = pipeline.evaluate(torch.arange(4.0)).outputs
    return None if outputs is None else (type(outputs).__name__, outputs.tolist())


def test_result_of_a_collective_is_waited_for_before_it_is_sent(two_processes: Processes) -> None:
    found = two_processes.run(send_what_is_under_way)
    assert found == [None, ("Tensor", [0.0, 1.0, 2.0, 3.0])]


# ---- other places where memory goes from rank to rank


class TiedFirst(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z * self.weight.conj()


class TiedSecond(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z * self.weight


def train_tied(rank: int) -> list[complex]:
    del rank
    weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))
    pipeline = ps.Pipeline(
        [TiedFirst(weight), TiedSecond(weight)],
        "1F1B",
        microbatches=1,
        loss=distance,
        group=dist.group.WORLD,
    )
    batch = torch.tensor([[1 - 1j, 2 + 0.5j]], dtype=torch.complex128)
    pipeline.step(batch, target=torch.zeros_like(batch))
    assert weight.grad is not None
    found: list[complex] = weight.grad.tolist()
    return found


def test_tied_weight_sums_gradients_of_which_one_is_lazily_conjugated(
    two_processes: Processes,
) -> None:
    # The memory of gradients is summed over ranks; one that was still to be conjugated was
    # summed unresolved.
    weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))
    batch = torch.tensor([[1 - 1j, 2 + 0.5j]], dtype=torch.complex128)
    torch.autograd.backward(distance(batch * weight.conj() * weight, torch.zeros_like(batch)))
    assert weight.grad is not None
    expected = [pytest.approx(number) for number in weight.grad.tolist()]
    assert two_processes.run(train_tied) == [expected, expected]


def test_checkpoint_saves_what_a_lazily_conjugated_parameter_means(tmp_path: Path) -> None:
    layer = TiedSecond(nn.Parameter(torch.tensor([1 + 2j]).conj()))
    pipeline = ps.Pipeline([layer], "1F1B", microbatches=1, loss=distance)
    ps.Checkpoints(tmp_path).save(1, pipeline, wait=True)
    with torch.no_grad():
        layer.weight.zero_()
    ps.Checkpoints(tmp_path).load(pipeline)
    assert layer.weight.tolist() == [1 - 2j]


def run_dropin(rank: int) -> dict[str, float]:
    model = nn.Sequential(First(conjugate), Second(conjugate))
    batch, target = make_complex_batch()
    twin = deepcopy(model)
    torch.autograd.backward(distance(twin(batch), target))
    stage = PipelineStage(model[rank], rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=distance)
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=target)
    found = gradients_of(model.named_parameters())
    expected = gradients_of(twin.named_parameters())
    return differences(found, {name: expected[name] for name in found})


def test_dropin_sends_what_a_lazily_conjugated_tensor_means(two_processes: Processes) -> None:
    assert two_processes.run(run_dropin) == [{}, {}]

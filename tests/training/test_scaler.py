"""A gradient scaler: all ranks take a step, or none does."""

from math import inf

import pytest
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

import penstock as ps
from tests.models import cut, differences, gradients_of, make_batch, make_blocks, mean_loss
from tests.processes import Processes
from tests.training.composition import reference_gradients

SCALE = 1024.0


def train_with_scaler(
    rank: int, bad_rank: int | None, is_frozen: bool
) -> tuple[float, bool, bool]:
    """Return the scale afterwards, whether parameters moved, and whether gradients were exact."""
    stages = cut(make_blocks(), 2)
    if is_frozen:
        stages[0].requires_grad_(False)
    batch, target = make_batch()
    reference = reference_gradients(stages, batch, target)
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=4, loss=mean_loss, group=dist.group.WORLD)
    before = [parameter.detach().clone() for parameter in pipeline.parameters()]
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=SCALE)
    pipeline.step(batch, target=target, gradient_scale=scaler.get_scale())
    if rank == bad_rank:
        first = next(pipeline.parameters())
        assert first.grad is not None
        first.grad[0] = inf
    pipeline.unscale_(scaler, optimizer)
    found = gradients_of(pipeline.named_parameters())
    is_exact = differences(found, {name: reference[name] for name in found}) == {}
    scaler.step(optimizer)
    scaler.update()
    moved = [not torch.equal(a, b) for a, b in zip(before, pipeline.parameters(), strict=True)]
    assert all(moved) or not any(moved)
    return scaler.get_scale(), any(moved), is_exact


def test_scaled_gradients_are_exact_once_unscaled(
    two_processes: Processes,
) -> None:
    assert two_processes.run(train_with_scaler, None, False) == [(SCALE, True, True)] * 2


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_every_rank_skips_the_step_if_one_found_an_infinite_gradient(
    bad_rank: int, two_processes: Processes
) -> None:
    expected = [(SCALE / 2, False, rank != bad_rank) for rank in range(2)]
    assert two_processes.run(train_with_scaler, bad_rank, False) == expected


def test_rank_without_gradients_does_what_the_others_do(two_processes: Processes) -> None:
    assert two_processes.run(train_with_scaler, None, True) == [
        (SCALE, False, True),
        (SCALE, True, True),
    ]
    assert two_processes.run(train_with_scaler, 1, True) == [
        (SCALE / 2, False, True),
        (SCALE / 2, False, False),
    ]


def test_a_scaler_that_is_off_changes_nothing() -> None:
    stages = cut(make_blocks(), 2)
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=4, loss=mean_loss)
    batch, target = make_batch()
    reference = reference_gradients(stages, batch, target)
    pipeline.step(batch, target=target)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    pipeline.unscale_(GradScaler("cpu", enabled=False), optimizer)
    assert differences(gradients_of(pipeline.named_parameters()), reference) == {}

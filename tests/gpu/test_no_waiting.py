"""Steps that do not wait for the device: losses, weights and clocks stay there until read.

In the first three steps ranks compare their data, learn shapes and find out what the loss is.
After that nothing may wait, except that with reduction="auto" steps 4, 8 and so on look again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.loss.reduction import Reduction
from tests.gpu.problems import EQUAL, Twin, make_batch, make_blocks, widths_of
from tests.models import make_stages
from tests.processes import Processes

pytestmark = pytest.mark.gpu

FAMILIES = ("1F1B", "ZB-H1", "ZBV")
STEPS = 7
# By reduction: the steps, counted from 1, in which nothing may wait.
STEADY: dict[Reduction, range] = {"mean": range(4, 8), "auto": range(5, 8)}
RATE = 0.05
# These products take seconds, which is longer than the host needs to queue a step.
PRODUCTS, SIDE = 60, 8192


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Let torch raise an error where the host waits for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_twin(device: torch.device) -> tuple[list[nn.Module], Twin]:
    blocks = make_blocks(widths_of(8, are_equal=True), device)
    return blocks, Twin.of(nn.Sequential(*blocks))


def descend(parameters: Iterator[nn.Parameter]) -> None:
    """Train by a step of plain gradient descent."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=RATE)
                parameter.grad = None


def train(
    family: str, reduction: Reduction, device: torch.device, group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Train without waiting; return by how much each loss, read at the end, is wrong."""
    blocks, twin = make_twin(device)
    settings: dict[str, Any] = {"ranks": 2} if group is None else {"group": group}
    pipeline = ps.Pipeline(
        make_stages(family, 2, blocks),
        family,
        microbatches=4,
        loss=nn.functional.mse_loss,
        reduction=reduction,
        device=device,
        **settings,
    )
    batches = [make_batch((12, EQUAL), number, device) for number in range(STEPS)]
    results, evaluated = {}, {}
    for number, (batch, target) in enumerate(batches, start=1):
        is_steady = number in STEADY[reduction]
        with no_waiting(device if is_steady else torch.device("cpu")):
            results[f"step {number}"] = pipeline.step(batch, target=target)
            descend(pipeline.parameters())
            # A loss without a graph is looked at in every evaluation, unless it is known.
            if reduction == "mean":
                evaluated[f"evaluation {number}"] = pipeline.evaluate(
                    batch, target=target, return_outputs=False
                )
    expected = {}
    for number, (batch, target) in enumerate(batches, start=1):
        loss = nn.functional.mse_loss(twin.copy(batch), target)
        expected[f"step {number}"] = loss.item()
        torch.autograd.backward(loss)
        descend(twin.copy.parameters())
        with torch.no_grad():
            loss = nn.functional.mse_loss(twin.copy(batch), target)
        expected[f"evaluation {number}"] = loss.item()
    # The last ones first, because losses may be read in any order.
    far = {
        name: abs((result.loss or 0.0) - expected[name])
        for name, result in reversed((results | evaluated).items())
    }
    if group is not None:
        dist.barrier()
    pipeline.close()
    return {name: difference for name, difference in far.items() if not difference < 1e-12}


def train_on_ranks(
    rank: int, reduction: Reduction, device: torch.device
) -> dict[str, dict[str, float]]:
    del rank
    return {family: train(family, reduction, device, dist.group.WORLD) for family in FAMILIES}


@pytest.mark.parametrize("reduction", STEADY)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_one_process_waits_for_nothing_on_the_device(
    accelerator: torch.device, family: str, reduction: Reduction
) -> None:
    # The loss was fetched at the end of every step, so that the device ran dry before the next.
    assert train(family, reduction, accelerator, None) == {}


@pytest.mark.parametrize("reduction", STEADY)
def test_a_step_of_two_ranks_waits_for_nothing_on_the_device(
    two_ranks: Processes, accelerator: torch.device, reduction: Reduction
) -> None:
    # The loss was fetched before the outcome was exchanged, so that every rank waited for it.
    expected: list[dict[str, dict[str, float]]] = [{family: {} for family in FAMILIES}] * 2
    assert two_ranks.run(train_on_ranks, reduction, accelerator, seconds=150.0) == expected


# ---- the host is ahead of the device


def queue_much(device: torch.device) -> None:
    if device.type == "cuda":
        value = torch.ones(SIDE, SIDE, device=device)
        for _ in range(PRODUCTS):
            value = value @ value


def run_ahead(rank: int, device: torch.device) -> dict[str, Any]:
    """Queue much work and then a step: is the device done with it when the step returns?"""
    del rank
    found: dict[str, Any] = {}
    for family in FAMILIES:
        blocks, _ = make_twin(device)
        pipeline = ps.Pipeline(
            make_stages(family, 2, blocks),
            family,
            microbatches=4,
            loss=nn.functional.mse_loss,
            reduction="mean",
            device=device,
            group=dist.group.WORLD,
        )
        batch, target = make_batch((12, EQUAL), 0, device)
        expected = [pipeline.step(batch, target=target).loss for _ in range(3)][-1]
        if device.type == "cuda":
            queue_much(device)
            torch.cuda.synchronize(device)
        queue_much(device)
        result = pipeline.step(batch, target=target)
        is_ahead = True
        if device.type == "cuda":
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped upstream
            end.record()
            is_ahead = not end.query()  # type: ignore[no-untyped-call]  # untyped upstream
        found[family] = is_ahead, result.loss == pytest.approx(expected, rel=1e-12)
        dist.barrier()
        pipeline.close()
    return found


def test_a_step_returns_while_the_device_still_works(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    expected = dict.fromkeys(FAMILIES, (True, True))
    assert two_ranks.run(run_ahead, accelerator, seconds=150.0) == [expected] * 2


def test_waiting_would_be_noticed(accelerator: torch.device) -> None:
    if accelerator.type != "cuda":
        pytest.skip("nothing waits for a processor")
    values = torch.ones(3, device=accelerator)
    with pytest.raises(RuntimeError, match="synchronizing"), no_waiting(accelerator):
        values.sum().item()

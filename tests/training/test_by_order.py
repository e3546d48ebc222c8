"""The exactness matrix where messages have no names and meet by order alone, as on NCCL.

Over gloo, with a group of two per direction and the same tag for everything: whatever changes
places is taken for something else. Gradients are compared after every step.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.runtime.disturbed import Disturbance
from tests.models import (
    copy_blocks,
    differences,
    gradients_of,
    make_batch,
    make_stages,
    mean_loss,
    run_reference,
)
from tests.processes import Processes
from tests.strategies import FAMILY_NAMES
from tests.tables import read_schedule

TRAINING_FAMILIES = [name for name in FAMILY_NAMES if name != "ForwardOnly"]
WITHOUT_COPIES = [name for name in TRAINING_FAMILIES if name != "DualPipe"]
BY_ORDER = Disturbance(by_order=True)

EQUAL = [6] * 9
DIFFERENT = [6, 3, 8, 5, 7, 4, 9, 2, 6]

# Rows of the batch, and how the step is to fail, if it is. Every form comes first where nothing is
# known of it, then once where it is known but not proven, and again after other forms and failures.
STEPS = [
    (8, None),
    (8, None),
    (8, None),
    (12, None),
    (8, None),
    (12, None),
    (8, "forward"),
    (12, None),
    (8, None),
    (8, "backward"),
    (8, None),
    (10, "forward"),
    (10, "backward"),
    (10, None),
    (10, None),
]


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        raise ValueError("broken on purpose")


class Fragile(nn.Module):
    """A layer that can be made to fail in its second microbatch."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layer = nn.Linear(inputs, outputs, dtype=torch.float64)
        for parameter in self.layer.parameters():
            nn.init.uniform_(parameter, -1, 1, generator=generator)
        self.fails_in: str | None = None
        self.calls = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output = torch.tanh(self.layer(value))
        if self.calls == 2 and self.fails_in == "forward":
            raise ValueError("broken on purpose")
        if self.calls == 2 and self.fails_in == "backward":
            output = _FailInBackward.apply(output)  # type: ignore[no-untyped-call]  # untyped upstream
        return output

    def begin(self, fails_in: str | None) -> None:
        self.fails_in, self.calls = fails_in, 0


def make_layers(widths: Sequence[int]) -> list[nn.Module]:
    pairs = zip(widths[:-1], widths[1:], strict=True)
    return [Fragile(inputs, outputs, seed) for seed, (inputs, outputs) in enumerate(pairs)]


def run_steps(family: str, widths: Sequence[int]) -> list[str]:
    """What was wrong in any step, on this rank."""
    layers = make_layers(widths)
    model = nn.Sequential(*layers)
    group = dist.group.WORLD
    assert group is not None
    pipeline = ps.Pipeline(
        make_stages(family, group.size(), layers),
        family,
        microbatches=4,
        loss=mean_loss,
        group=group,
        disturbance=BY_ORDER,
    )
    wrong = []
    for number, (rows, fails_in) in enumerate(STEPS):
        place = f"step {number} of {family} ({rows} rows)"
        batch, target = make_batch(rows, width=widths[0])
        expected = run_reference(copy_blocks(layers), batch, target)
        model.zero_grad()
        for layer in layers:
            assert isinstance(layer, Fragile)
            layer.begin(fails_in if layer is layers[3] else None)
        if fails_in is not None:
            with pytest.raises(ps.PipelineError, match="ValueError: broken on purpose"):
                pipeline.step(batch, target=target)
            continue
        loss = pipeline.step(batch, target=target).loss
        if loss != pytest.approx(expected.loss, abs=1e-12):
            wrong.append(f"{place}: loss {loss} instead of {expected.loss}")
        found = gradients_of(model.named_parameters())
        own = {name: expected.gradients[name] for name in found}
        wrong += [f"{place}: {name} off by {d}" for name, d in differences(found, own).items()]
        wrong += [f"{place}: no gradients"] * (not found)
        if pipeline.eval(batch, target=target).loss != pytest.approx(expected.loss, abs=1e-12):
            wrong.append(f"{place}: loss in evaluation")
    return wrong


def run_families(_: int, families: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [problem for family in families for problem in run_steps(family, widths)]


def assert_exact(processes: Processes, families: Sequence[str], widths: Sequence[int]) -> None:
    found = processes.run(run_families, families, widths, seconds=200)
    assert found == [[]] * processes.num_ranks


# Activations and gradients on one channel changed places while shapes were learned: gradient
# receives were started at once, activation receives when somebody waited. Equal sizes gave wrong
# numbers, other sizes a crash.
@pytest.mark.parametrize("family", WITHOUT_COPIES)
@pytest.mark.parametrize("widths", [EQUAL, DIFFERENT], ids=["equal", "different"])
def test_every_step_is_exact_on_two_ranks(
    family: str, widths: Sequence[int], two_processes: Processes
) -> None:
    assert_exact(two_processes, [family], widths)


@pytest.mark.parametrize("family", TRAINING_FAMILIES)
@pytest.mark.parametrize("widths", [EQUAL, DIFFERENT], ids=["equal", "different"])
def test_every_step_is_exact_on_four_ranks(
    family: str, widths: Sequence[int], four_processes: Processes
) -> None:
    assert_exact(four_processes, [family], widths)

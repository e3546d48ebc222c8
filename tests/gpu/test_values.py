"""Values of all kinds over NCCL: complex, lazily conjugated, small integers, mixed precision."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from tests.gpu.problems import EQUAL, Twin, closing, make_batch, make_blocks, widths_of
from tests.models import make_stages, mean_loss
from tests.processes import Processes

pytestmark = pytest.mark.gpu


class Spin(nn.Module):
    """Gives a value that torch conjugates, and one that it negates, when they are next read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(EQUAL, 2 * EQUAL, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = torch.view_as_complex(self.layer(x).unflatten(-1, (EQUAL, 2))).conj()
        assert value.is_conj()
        assert value.imag.is_neg()
        return value, value.imag


class Unspin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(EQUAL, generator=torch.Generator().manual_seed(2))
        self.factor = nn.Parameter(torch.complex(values, values.flip(0)).to(torch.complex128))
        self.layer = nn.Linear(EQUAL, EQUAL, dtype=torch.float64)

    def forward(self, value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(part * value.real)
        return (value * self.factor).imag + made


class Widen(nn.Module):
    """Gives values of many types, some of which have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(EQUAL, EQUAL, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {
            "exact": y,
            "half": y.to(torch.float16),
            "brain": y.to(torch.bfloat16),
            "single": y.float(),
            "mask": y > 0,
            "small": (100 * y.detach()).to(torch.int16),
            "bytes": (8 * y.detach()).abs().to(torch.uint8),
            "index": torch.argsort(y.detach(), dim=-1),
            "nothing": y[:, :0],
            "transposed": y.unflatten(-1, (4, 4)).mT,
            "number": 3,
        }


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(EQUAL, EQUAL, dtype=torch.float64)

    def forward(self, given: dict[str, Any]) -> torch.Tensor:
        assert given["number"] == 3
        y: torch.Tensor = self.layer(given["exact"])
        for name in ("half", "brain", "single", "small", "bytes"):
            y = y + given[name].double() / 128
        y = torch.where(given["mask"], y, 2 * y).gather(-1, given["index"])
        joined: torch.Tensor = y + given["transposed"].flatten(1) + given["nothing"].sum()
        return joined


def train_pairs(rank: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Each pair of stages on two ranks, and in a V with two more layers."""
    del rank
    wrong = {}
    for name, kinds in {"complex": (Spin, Unspin), "mixed": (Widen, Narrow)}.items():
        for family in ("1F1B", "ZBV"):
            torch.manual_seed(4)
            stages: list[nn.Module] = [kind() for kind in kinds]
            if family == "ZBV":
                ends = [nn.Linear(EQUAL, EQUAL, dtype=torch.float64) for _ in range(2)]
                stages = [*stages, *ends]
            twin = Twin.of(_Chain(stages).to(device))
            pipeline = ps.Pipeline(
                stages,
                family,
                microbatches=4,
                loss=mean_loss,
                group=dist.group.WORLD,
                device=device,
            )
            with closing(pipeline):
                for number, rows in enumerate([8, 8, 16, 8]):
                    batch = make_batch((rows, EQUAL), number, device)
                    if far := twin.step(pipeline, *batch):
                        wrong[f"{name}, {family}, step {number}"] = far
    return wrong


class _Chain(nn.Module):
    """Stages one after the other, as the unsplit model; a tuple is several arguments."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor) -> Any:
        value: Any = x
        for stage in self.stages:
            value = stage(*value) if isinstance(value, tuple) else stage(value)
        return value


def test_complex_and_mixed_values_arrive_as_they_were(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    # Lazily conjugated values went over as memory without their bit, and the library for messages
    # between GPUs knows neither complex numbers nor short integers.
    assert two_ranks.run(train_pairs, accelerator, seconds=120.0) == [{}] * 2


def train_cast(rank: int, device: torch.device) -> dict[str, float]:
    """Under autocast, single precision: how far gradients are from the unsplit model's."""
    del rank
    far = {}
    for family in ("1F1B", "ZBV"):
        blocks = [block.float() for block in make_blocks(widths_of(8, are_equal=True), device)]
        twin = Twin.of(nn.Sequential(*blocks))
        pipeline = ps.Pipeline(
            make_stages(family, 2, blocks),
            family,
            microbatches=4,
            loss=mean_loss,
            group=dist.group.WORLD,
            device=device,
        )
        with closing(pipeline):
            for number, is_cast in enumerate([False, True, True, False]):
                batch, target = (t.float() for t in make_batch((16, EQUAL), number, device))
                twin.model.zero_grad(set_to_none=True)
                twin.copy.zero_grad(set_to_none=True)
                with torch.autocast(device.type, torch.bfloat16, enabled=is_cast):
                    pipeline.step(batch, target=target)
                    loss = mean_loss(twin.copy(batch), target)
                torch.autograd.backward(loss)
                far[f"{family}, step {number}"] = _distance(twin)
    return far


def _distance(twin: Twin) -> float:
    """The norm of all differences between this rank's gradients and the copy's, to theirs."""
    pairs = zip(twin.model.parameters(), twin.copy.parameters(), strict=True)
    both = [(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None]
    found, expected = (torch.cat([g.flatten() for g in one]) for one in zip(*both, strict=True))
    return float((found - expected).norm() / expected.norm())


def test_autocast_goes_on_and_off_between_steps(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    for far in two_ranks.run(train_cast, accelerator, seconds=120.0):
        assert len(far) == 8
        for name, distance in far.items():
            # Microbatches may take other kernels than the batch, which round in other places.
            assert distance < (2e-2 if name[-1] in "12" else 1e-5), far

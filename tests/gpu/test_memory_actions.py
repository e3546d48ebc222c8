"""Recomputing, offloading and reloading on a GPU: gradients, and the bytes that are held."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.passes import add_offload, add_recompute
from tests.gpu.problems import EQUAL, Twin, closing, make_batch, make_blocks, widths_of
from tests.models import make_stages, mean_loss
from tests.processes import Processes

pytestmark = pytest.mark.gpu

FAMILIES = ("1F1B", "ZB-H1", "ZBV", "Interleaved1F1B")


def half_and_half(family: str, *, ahead: int) -> ps.Schedule:
    """Half of all forwards recomputed, and the others offloaded where there is time."""
    plain = ps.build(family, ranks=2, microbatches=4)
    pairs = [(stage, m) for stage in range(plain.num_stages) for m in range(4)]
    return add_offload(add_recompute(plain, pairs[::2]), pairs[1::2], behind=0, ahead=ahead)


def train(rank: int, device: torch.device) -> dict[str, dict[str, float]]:
    del rank
    wrong = {}
    for family in FAMILIES:
        for ahead in (0, 1):
            blocks = make_blocks(widths_of(8, are_equal=False), device)
            twin = Twin.of(nn.Sequential(*blocks))
            pipeline = ps.Pipeline(
                make_stages(family, 2, blocks),
                half_and_half(family, ahead=ahead),
                loss=mean_loss,
                group=dist.group.WORLD,
                device=device,
            )
            with closing(pipeline):
                for number, rows in enumerate([8, 8, 16, 16, 8]):
                    far = twin.step(pipeline, *make_batch((rows, EQUAL), number, device))
                    if far:
                        wrong[f"{family}, ahead {ahead}, step {number}"] = far
    return wrong


def test_gradients_on_two_ranks_are_exact_in_every_step(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    assert two_ranks.run(train, accelerator, seconds=240.0) == [{}] * 2


WIDTH, ROWS, LAYERS = 2048, 4096, 6


def peak_of(schedule: ps.Schedule, device: torch.device) -> tuple[int, list[torch.Tensor]]:
    """Return the most bytes above what is there all the time, and the gradients."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(device)
    pipeline = ps.Pipeline([model], schedule, loss=mean_loss, device=device)
    batch = torch.randn(ROWS * schedule.microbatches, WIDTH, device=device)
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        pipeline.step(batch, target=batch)
        torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    pipeline.close()
    return peak, gradients


def test_peak_bytes_are_those_predicted() -> None:
    device = torch.device("cuda", 0)
    plain = ps.build("GPipe", ranks=1, microbatches=6)
    one, _ = peak_of(ps.build("GPipe", ranks=1, microbatches=1), device)
    most, expected = peak_of(plain, device)
    activation = (most - one) / 5
    costs = ps.Costs(activation_bytes=activation, input_bytes=0, workspace_bytes=one - activation)
    orders = {
        "recomputed": add_recompute(plain, [(0, m) for m in range(0, 6, 2)]),
        "offloaded": add_offload(plain, [(0, m) for m in range(3)], behind=1, ahead=0),
    }
    for name, schedule in orders.items():
        peak, found = peak_of(schedule, device)
        assert peak == pytest.approx(ps.simulate(schedule, costs).peak_bytes, rel=0.03), name
        assert peak < 0.9 * most, name
        for gradient, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-5)

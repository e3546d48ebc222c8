"""Training on a CUDA device; without one, the same suite runs on the processor elsewhere."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.schedules.registry import FAMILIES
from tests.processes import Processes

pytestmark = pytest.mark.gpu

ROWS, WIDTH, BLOCKS = 12, 16, 8
TOLERANCE = 1e-10


def make_problem() -> tuple[list[nn.Module], torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).double().cuda() for _ in range(BLOCKS)
    ]
    batch = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, device="cuda")
    return blocks, batch[0], batch[1]


def cut(blocks: list[nn.Module], stages: int) -> list[nn.Module]:
    size = len(blocks) // stages
    return [nn.Sequential(*blocks[size * i : size * (i + 1)]) for i in range(stages)]


def reference_gradients() -> list[torch.Tensor]:
    blocks, x, y = make_problem()
    model = nn.Sequential(*blocks)
    torch.autograd.backward(nn.functional.mse_loss(model(x), y))
    return [p.grad for p in model.parameters() if p.grad is not None]


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a.to(b.device) - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "ForwardOnly"])
def test_gradients_equal_the_unsplit_model_on_a_device(name: str) -> None:
    blocks, x, y = make_problem()
    copies = 2 if name == "DualPipe" else 1
    stages = cut(blocks, 2 * FAMILIES[name].stages_per_rank // copies)
    pipe = ps.Pipeline(
        stages * copies, name, microbatches=5, loss=nn.functional.mse_loss, device="cuda"
    )
    expected = reference_gradients()
    for _ in range(3):
        for block in blocks:
            block.zero_grad()
        pipe.step(x, target=y)
        found = [p.grad for block in blocks for p in block.parameters() if p.grad is not None]
        assert largest_difference(found, expected) < TOLERANCE


def test_recorded_timeline_has_device_times_and_memory() -> None:
    blocks, x, y = make_problem()
    pipe = ps.Pipeline(
        cut(blocks, 2), "1F1B", microbatches=4, loss=nn.functional.mse_loss, device="cuda"
    )
    timeline = pipe.step(x, target=y, record=True).timeline
    assert timeline is not None
    compute = timeline.schedule.rows.is_compute
    assert (timeline.end[compute] > timeline.start[compute]).all()
    assert timeline.peak_bytes > 0


def test_compiled_stage_works_with_a_split_backward() -> None:
    blocks, x, y = make_problem()
    stages = cut(blocks, 4)
    for stage in stages:
        stage.compile()
    # Once every stage with compiled code was warned of; now its backward is cut in two as well.
    pipe = ps.Pipeline(stages, "ZBV", microbatches=4, loss=nn.functional.mse_loss, device="cuda")
    for _ in range(3):
        for block in blocks:
            block.zero_grad()
        pipe.step(x, target=y)
        found = [p.grad for block in blocks for p in block.parameters() if p.grad is not None]
        assert largest_difference(found, reference_gradients()) < TOLERANCE


def train_on_shared_device(rank: int) -> list[torch.Tensor]:
    del rank
    blocks, x, y = make_problem()
    pipe = ps.Pipeline(
        cut(blocks, 4),
        "ZBV",
        microbatches=4,
        loss=nn.functional.mse_loss,
        group=dist.group.WORLD,
        device="cuda",
    )
    for _ in range(2):
        for parameter in pipe.parameters():
            parameter.grad = None
        pipe.step(x, target=y)
    return [p.grad.cpu() for p in pipe.parameters() if p.grad is not None]


def test_gloo_ranks_send_device_tensors_through_the_host() -> None:
    with Processes(2) as processes:
        first, second = processes.run(train_on_shared_device)
    expected = reference_gradients()
    quarter = len(expected) // 4
    # In a V, rank 0 holds the first and the last stage, rank 1 those between.
    assert largest_difference(first, expected[:quarter] + expected[3 * quarter :]) < TOLERANCE
    assert largest_difference(second, expected[quarter : 3 * quarter]) < TOLERANCE

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ArgumentError
from penstock.splitting.by_layers.layers import split_layers
from penstock.splitting.pipe import Pipe
from penstock.training.measuring import measure

ROWS, WIDTH = 3, 16


class Counting(nn.Module):
    """Layers of growing width, a counter and noise: whatever a run could leave behind."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(WIDTH * number) for number in (1, 2, 4)])
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(nn.functional.dropout(self.up(x).relu(), 0.5))
        return result


def make_pipe() -> tuple[nn.Module, Pipe, torch.Tensor]:
    torch.manual_seed(0)
    model = Counting()
    return model, split_layers(model, ["layers"], 3), torch.randn(ROWS, WIDTH)


def test_every_stage_has_seconds_and_bytes() -> None:
    _, pipe, x = make_pipe()
    costs = measure(pipe, (x,), loss=nn.functional.mse_loss, target=torch.zeros_like(x))
    for name in ("forward", "backward_input", "backward_weight"):
        assert (costs.per_stage(name, 3) > 0).all()
    sizes = [
        4 * sum(WIDTH * hidden + hidden + hidden * WIDTH + WIDTH for hidden in [WIDTH * number])
        for number in (1, 2, 4)
    ]
    assert costs.parameter_bytes == tuple(map(float, sizes))


def test_activations_grow_with_the_width_and_shrink_after_i() -> None:
    _, pipe, x = make_pipe()
    costs = measure(pipe, (x,), loss=nn.functional.mse_loss, target=torch.zeros_like(x))
    activations = costs.per_stage("activation_bytes", 3)
    stash = costs.per_stage("weight_stash_bytes", 3)
    # The middle stage keeps at least what enters and leaves its two layers.
    assert activations[1] >= 4 * ROWS * (WIDTH + 2 * WIDTH)
    assert activations[0] < activations[1] < activations[2]
    assert (stash[:2] > 0).all()


def test_nothing_is_left_behind() -> None:
    model, pipe, x = make_pipe()
    model(x).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    copies = [gradient.clone() for gradient in gradients if gradient is not None]
    state = torch.get_rng_state()
    measure(pipe, (x,), loss=nn.functional.mse_loss, target=torch.zeros_like(x))
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert [parameter.grad for parameter in model.parameters()] == gradients
    torch.testing.assert_close(gradients, copies, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_measured_costs_price_a_schedule() -> None:
    _, pipe, x = make_pipe()
    costs = measure(pipe, (x,), loss=nn.functional.mse_loss, target=torch.zeros_like(x))
    timeline = ps.simulate(ps.build("1F1B", ranks=3, microbatches=4), costs)
    assert timeline.makespan > 0


def test_a_model_with_its_own_loss_needs_no_target() -> None:
    _, pipe, x = make_pipe()
    costs = measure(pipe, (x,), loss=lambda output: output.square().mean(), microbatches=1)
    assert (costs.per_stage("forward", 3) > 0).all()


def test_no_microbatch_is_refused() -> None:
    _, pipe, x = make_pipe()
    with pytest.raises(ArgumentError, match=r"at least 1 \(microbatches: 0\)"):
        measure(pipe, (x,), loss=nn.functional.mse_loss, target=x, microbatches=0)

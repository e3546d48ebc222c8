import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ArgumentError
from penstock.measuring.stages import Measurement, measure, measure_closely
from penstock.splitting.by_layers.layers import split_layers
from penstock.splitting.pipe import Pipe

# The machine of the tests may be busy.
pytestmark = pytest.mark.filterwarnings("ignore::penstock.measuring.MeasurementWarning")

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
    costs = measure(pipe, example=(x,), loss=nn.functional.mse_loss, target=torch.zeros_like(x))
    for name in ("forward", "backward_input", "backward_weight"):
        assert (costs.per_stage(name, 3) > 0).all()
    sizes = [
        4 * sum(WIDTH * hidden + hidden + hidden * WIDTH + WIDTH for hidden in [WIDTH * number])
        for number in (1, 2, 4)
    ]
    assert costs.parameter_bytes == tuple(map(float, sizes))


def make_plain(stages: int) -> tuple[list[nn.Module], torch.Tensor]:
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]
    return [*modules], torch.randn(ROWS, WIDTH)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_bytes_of_plain_layers_are_exact(stages: int) -> None:
    modules, x = make_plain(stages)
    costs = measure(modules, example=(x,), loss=nn.functional.mse_loss, target=torch.zeros_like(x))
    one = 4 * ROWS * WIDTH
    inputs = [0, *[one] * (stages - 1)]
    # The layer keeps what it takes in, which the first stage has from the batch, and Tanh what it
    # gives; after I there is the gradient of the layer's output in place of that.
    held = [one + given for given in inputs]
    assert costs.activation_bytes == tuple(held)
    assert costs.weight_stash_bytes == tuple(held)
    assert costs.message_bytes == tuple(inputs)
    assert (costs.per_stage("workspace_bytes", stages) > 0).all()


@pytest.mark.gpu
def test_bytes_and_seconds_on_a_device_are_measured_there() -> None:
    modules, _ = make_plain(3)
    for module in modules:
        module.cuda()
    x = torch.randn(512, WIDTH, device="cuda")
    costs = measure(
        modules,
        example=(x,),
        loss=nn.functional.mse_loss,
        target=torch.zeros_like(x),
        device="cuda",
    )
    one = x.nbytes
    assert costs.message_bytes == (0, one, one)
    expected = torch.tensor([one, 2 * one, 2 * one])
    for found in (costs.activation_bytes, costs.weight_stash_bytes):
        # The allocator deals in pieces of 512 bytes, of which small numbers take one each.
        extra = torch.tensor(found) - expected
        assert ((extra >= 0) & (extra <= 4 * 512)).all(), extra
    for name in ("forward", "backward_input", "backward_weight", "full_backward"):
        assert (costs.per_stage(name, 3) > 0).all()
    # Slower than any memory of a device, faster than any network: a plan may offload.
    assert costs.host_link is not None
    assert 1e8 < costs.host_link < 1e12


def test_a_processor_has_no_link_to_its_host() -> None:
    # A copy there takes the time of compute, so that plans from these costs do not offload.
    _, pipe, x = make_pipe()
    costs = measure(pipe, example=(x,), loss=nn.functional.mse_loss, target=torch.zeros_like(x))
    assert costs.host_link is None


def test_activations_grow_with_the_width_and_shrink_after_i() -> None:
    _, pipe, x = make_pipe()
    costs = measure(pipe, example=(x,), loss=nn.functional.mse_loss, target=torch.zeros_like(x))
    activations = costs.per_stage("activation_bytes", 3)
    stash = costs.per_stage("weight_stash_bytes", 3)
    # The middle stage keeps at least what enters and leaves its two layers.
    assert activations[1] >= 4 * ROWS * (WIDTH + 2 * WIDTH)
    assert activations[0] < activations[1] < activations[2]
    assert (stash[:2] > 0).all()


def test_only_trained_parameters_have_gradients_and_optimizer_state() -> None:
    modules, x = make_plain(2)
    modules[0].requires_grad_(False)
    costs = measure(
        modules, example=(x,), loss=nn.functional.mse_loss, target=x, optimizer=torch.optim.Adam
    )
    weights = 4 * (WIDTH * WIDTH + WIDTH)
    assert costs.parameter_bytes == (weights, weights)
    assert costs.gradient_bytes == (0, weights)
    # Two averages, and for each of two parameters the number of its steps.
    assert costs.optimizer_bytes == (0, 2 * weights + 2 * 4)


def test_optimizer_bytes_are_zero_without_an_optimizer() -> None:
    modules, x = make_plain(2)
    costs = measure(modules, example=(x,), loss=nn.functional.mse_loss, target=x)
    assert costs.optimizer_bytes == (0, 0)


def test_stage_with_two_producers_receives_both_messages() -> None:
    class Skip(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    modules, x = make_plain(2)
    flow = ps.Dataflow(3, [(0, 1), (0, 2), (1, 2)])
    pipe = Pipe((*modules, Skip()), flow)
    costs = measure(pipe, example=(x,), loss=nn.functional.mse_loss, target=x)
    one = 4 * ROWS * WIDTH
    assert costs.message_bytes == (0, one, 2 * one)


def test_measurement_has_the_spread_of_every_kind_and_stage() -> None:
    modules, x = make_plain(3)
    found = measure_closely(modules, example=(x,), loss=nn.functional.mse_loss, target=x)
    assert list(found.spread) == ["forward", "backward_input", "backward_weight", "full_backward"]
    for name, spread in found.spread.items():
        assert len(spread) == 3
        assert min(spread) >= 0
        assert (found.costs.per_stage(name, 3) > 0).all()


def test_measurement_prints_as_a_table() -> None:
    costs = ps.Costs(
        forward=[1e-3, 2e-3], backward_input=3e-3, backward_weight=4e-3, full_backward=1.25
    )
    names = ("forward", "backward_input", "backward_weight", "full_backward")
    found = Measurement(costs, dict.fromkeys(names, (0.05, 1.5)))
    assert str(found) == (
        "stage           F ms           I ms           W ms           B ms\n"
        "    0    1.000 ±  5%    3.000 ±  5%    4.000 ±  5% 1250.000 ±  5%\n"
        "    1    2.000 ±150%    3.000 ±150%    4.000 ±150% 1250.000 ±150%"
    )


def test_measuring_leaves_the_model_unchanged() -> None:
    model, pipe, x = make_pipe()
    model(x).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    copies = [gradient.clone() for gradient in gradients if gradient is not None]
    state = torch.get_rng_state()
    measure(
        pipe,
        example=(x,),
        loss=nn.functional.mse_loss,
        target=torch.zeros_like(x),
        optimizer=torch.optim.SGD,
    )
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert [parameter.grad for parameter in model.parameters()] == gradients
    torch.testing.assert_close(gradients, copies, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_measured_costs_price_a_schedule() -> None:
    _, pipe, x = make_pipe()
    costs = measure(pipe, example=(x,), loss=nn.functional.mse_loss, target=torch.zeros_like(x))
    timeline = ps.simulate(ps.build("1F1B", ranks=3, microbatches=4), costs)
    assert timeline.end_time > 0


def test_model_with_its_own_loss_needs_no_target() -> None:
    _, pipe, x = make_pipe()
    costs = measure(pipe, example=(x,), loss=lambda output: output.square().mean(), repeats=1)
    assert (costs.per_stage("forward", 3) > 0).all()


def test_zero_microbatches_are_refused() -> None:
    _, pipe, x = make_pipe()
    with pytest.raises(ArgumentError, match=r"at least 1 \(got 0\)"):
        measure(pipe, example=(x,), loss=nn.functional.mse_loss, target=x, repeats=0)

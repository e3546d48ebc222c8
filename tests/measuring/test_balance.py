import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ArgumentError, SizeError
from penstock.ir.placement import Placement
from penstock.measuring.balance import balance


class Uneven(nn.Module):
    """Small layers, then a head that is far larger than all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(7)])
        self.head = nn.Linear(64, 40_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        scores: torch.Tensor = self.head(x)
        return scores


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer that keeps one number for every parameter."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def test_weights_replace_the_measurement() -> None:
    found = balance(
        Uneven(), layers="layers", placement=Placement.loop(ranks=2), weights=[1, 1, 1, 1, 1, 1, 4]
    )
    assert found.sizes == (5, 2)
    assert found.balance == 1.0


def test_weights_are_balanced_on_a_v_placement() -> None:
    found = balance(
        Uneven(), layers="layers", placement=Placement.v(2), weights=[3, 1, 1, 1, 1, 1, 3]
    )
    assert found.stage_seconds == (3, 3, 2, 3)


def test_modules_after_the_layers_count_with_the_last_layer() -> None:
    model = Uneven()
    found = balance(
        model,
        layers="layers",
        placement=Placement.loop(ranks=2),
        example=[torch.randn(16, 64)],
        loss=square,
    )
    # The head alone takes longer than everything before it.
    assert found.sizes == (6, 1)
    pipe = ps.split(model, layers="layers", stages=found.sizes)
    assert [len(list(stage.parameters())) for stage in pipe.stages] == [12, 4]


def test_memory_limit_moves_the_cut() -> None:
    model = Uneven()
    example = [torch.randn(16, 64)]
    layer, head = 4 * 64 * 65, 4 * 65 * 40_000
    found = balance(
        model,
        layers="layers",
        placement=Placement.loop(ranks=2),
        example=example,
        loss=square,
        # Room for all layers but the last, with their gradients and momenta, on the first rank.
        memory=[3 * 6 * layer + 100_000, 3 * (layer + head) + 10_000_000],
        optimizer=momentum,
    )
    assert found.sizes == (6, 1)
    with pytest.raises(SizeError, match="rank 1"):
        balance(
            model,
            layers="layers",
            placement=Placement.loop(ranks=2),
            example=example,
            loss=square,
            memory=[10.0**9, 2 * (layer + head)],
            optimizer=momentum,
        )


def test_missing_loss_and_weights_are_named() -> None:
    placement = Placement.loop(ranks=2)
    with pytest.raises(ArgumentError, match=r"one value per layer \(got 2 for 7 layers\)"):
        balance(Uneven(), layers="layers", placement=placement, weights=[1, 2])
    with pytest.raises(ArgumentError, match="needs a loss to measure the layers, or weights"):
        balance(Uneven(), layers="layers", placement=placement)


def test_traced_model_is_balanced_by_the_pieces_of_its_graph() -> None:
    model, x = Uneven(), torch.randn(16, 64)
    found = balance(model, placement=Placement.loop(ranks=2), example=[x], loss=square)
    # The head alone takes longer than everything before it.
    assert found.sizes[1] == 1
    pipe = ps.split(model, stages=found.sizes, example=[x])
    assert [name for name in pipe.stages[1].state_dict() if "head" in name]
    torch.testing.assert_close(pipe(x), model(x), rtol=0, atol=0)
    with pytest.raises(SizeError, match=r"\(got .*, sum 3\)"):
        ps.split(model, stages=[1, 2], example=[x])


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.filterwarnings("ignore::penstock.measuring.MeasurementWarning")
def test_measuring_leaves_no_hooks_on_the_layers() -> None:
    # Stages observe the layers that they share with the model; their hooks outlived them.
    model, example = Uneven(), (torch.randn(2, 64),)
    balance(
        model,
        layers="layers",
        placement=Placement.loop(2),
        example=example,
        loss=square,
    )
    pieces = ps.measure_layers(model, layers="layers", example=example, loss=square)
    # The host needs as long for every stage.
    assert len({piece.host_action for piece in pieces}) == 1
    assert pieces[0].host_action > 0
    assert count_hooks(model) == 0
    pipe = ps.split(model, layers="layers", stages=2, example=example)
    ps.measure(pipe, example=example, loss=square, repeats=1)
    assert count_hooks(model) == 0
    torch.testing.assert_close(pipe(*example), model(*example))

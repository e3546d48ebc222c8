"""Ready-made microbatches of any kind, from end to end."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from tests.models import gradients_of
from tests.processes import Processes


class Mixed(nn.Module):
    """A first stage for text with pictures here and there; sends the pictures on if there are."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(4, 4, dtype=torch.float64)
        self.pictures = nn.Linear(3, 4, dtype=torch.float64)

    def forward(
        self, x: torch.Tensor, pictures: torch.Tensor | None, scale: float, name: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        seen = None if pictures is None else self.pictures(pictures)
        return self.text(x) * scale + len(name), seen


class Join(nn.Module):
    """A last stage that uses the pictures if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(
        self, x: torch.Tensor, seen: torch.Tensor | None, lengths: dict[str, Any]
    ) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) + lengths["ends"].sum() * lengths["weight"]
        return result if seen is None else result + seen.mean(0)


def make_values() -> dict[str, Any]:
    """Return what each of three microbatches is given, of 3, 2 and 2 rows."""
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, 7, 4, generator=generator, dtype=torch.float64)
    return {
        "x": list(x.split([3, 2, 2])),
        "target": list(target.split([3, 2, 2])),
        "pictures": [None, torch.ones(5, 3, dtype=torch.float64), None],
        "scale": [1, 2.0, torch.tensor(0.5, dtype=torch.float64)],
        "name": ["a", "two", ""],
        "ends": [torch.tensor([0, 3]), torch.tensor([0, 1, 2]), torch.tensor([])],
        "weight": [0.1, 0.2, 0.3],
    }


def run_unsplit(stages: list[nn.Module]) -> tuple[float, dict[str, torch.Tensor]]:
    first, last = deepcopy(stages)
    values = make_values()
    total = torch.zeros((), dtype=torch.float64)
    for n in range(3):
        both = first(*(values[name][n] for name in ("x", "pictures", "scale", "name")))
        output = last(*both, {"ends": values["ends"][n], "weight": values["weight"][n]})
        total = total + nn.functional.mse_loss(output, values["target"][n]) * len(output) / 7
    torch.autograd.backward(total)
    return total.item(), gradients_of(nn.Sequential(first, last).named_parameters())


def make_stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Mixed(), Join()]


def give(is_split: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the values as arguments of a step, with x and target ready-made or to be split."""
    values = make_values()
    x, target = (
        torch.cat(values[name]) if is_split else ps.Ready(values[name]) for name in ("x", "target")
    )
    return (x, ps.Ready(values["pictures"])), {
        "scale": ps.Ready([ps.Shared(scale) for scale in values["scale"]]),
        "name": ps.Ready(values["name"]),
        "lengths": {"ends": ps.Ready(values["ends"]), "weight": ps.Ready(values["weight"])},
        "target": target,
    }


# All ready-made items had to have as many rows as everything else in their microbatch.
@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("family", ["1F1B", "ZB-H1"])
def test_ready_made_items_may_be_anything(family: str, is_split: bool) -> None:
    stages = make_stages()
    expected, gradients = run_unsplit(stages)
    pipeline = ps.Pipeline(stages, family, microbatches=3, loss=nn.MSELoss())
    args, kwargs = give(is_split)
    for _ in range(3):
        nn.Sequential(*stages).zero_grad()
        assert pipeline.step(*args, **kwargs).loss == pytest.approx(expected, rel=1e-12)
        found = gradients_of(nn.Sequential(*stages).named_parameters())
        torch.testing.assert_close(found, gradients, rtol=1e-12, atol=1e-14)


def train_on_mixed_items(
    rank: int, is_split: bool
) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    """Losses of three steps, and the gradients of the last."""
    stages = make_stages()
    model = nn.Sequential(*stages)
    pipeline = ps.Pipeline(
        stages, "1F1B", microbatches=3, loss=nn.MSELoss(), group=dist.group.WORLD
    )
    args, kwargs = give(is_split)
    target = {"target": kwargs.pop("target")} if rank == 1 else {}
    losses = []
    for _ in range(3):
        model.zero_grad()
        losses.append(pipeline.step(*args if rank == 0 else (), **kwargs, **target).loss)
    return losses, gradients_of(model.named_parameters())


@pytest.mark.parametrize("is_split", [True, False])
def test_what_only_some_microbatches_have_goes_between_processes(
    two_processes: Processes, is_split: bool
) -> None:
    expected, gradients = run_unsplit(make_stages())
    everyone = two_processes.run(train_on_mixed_items, is_split)
    for losses, found in everyone:
        assert losses == [pytest.approx(expected, rel=1e-12)] * 3
        known = {name: gradients[name] for name in found}
        torch.testing.assert_close(found, known, rtol=1e-12, atol=1e-14)


def double(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.sum(0) - target.sum(0)).square().mean()


def test_rows_that_are_ambiguous_are_refused_where_they_matter() -> None:
    stages: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=2, loss=double)
    x, target = torch.ones(4, 4), ps.Ready([torch.ones(3, 4), torch.ones(1, 4)])
    with pytest.raises(ps.errors.PipelineError) as caught:
        pipeline.step(x, target=target)
    assert "(the batch has [2, 2] rows, the target [3, 1]); say what it is" in str(caught.value)
    meant = ps.Pipeline(stages, "1F1B", microbatches=2, loss=double, reduction="mean")
    assert meant.step(x, target=target).loss is not None

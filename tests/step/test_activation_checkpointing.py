"""A module that runs again in the backward."""

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.step.activation_checkpointing import CheckpointedModule


class Normalize(nn.Module):
    """Writes to what it is given, if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.writes = True

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        x = x.sub_(0.5).div_(2) if self.writes else (x - 0.5) / 2
        result: torch.Tensor = self.layer(x) * scale
        return result


def make_inputs(requires_grad: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    leaf.requires_grad_(requires_grad)
    return leaf, leaf.clone(), torch.full((3,), 2.0, dtype=torch.float64)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_module_that_writes_to_its_input_has_the_gradients_of_one_run(
    requires_grad: bool,
) -> None:
    # The second run started from what the first had written: x was normalized twice.
    module = Normalize()
    checkpointed = CheckpointedModule(module)
    for _ in range(2):
        leaf, x, scale = make_inputs(requires_grad)
        expected = torch.autograd.grad(
            module(x, scale=scale).square().sum(), [*module.parameters(), *[leaf] * requires_grad]
        )
        again, y, scale = make_inputs(requires_grad)
        output = checkpointed.run((y,), {"scale": scale})
        found = torch.autograd.grad(
            output.square().sum(), [*module.parameters(), *[again] * requires_grad]
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        if not requires_grad:
            assert torch.equal(y, x)


def test_a_module_that_begins_to_write_later_is_taken_care_of_from_the_next_step_on() -> None:
    module = Normalize()
    checkpointed = CheckpointedModule(module)
    _, x, scale = make_inputs(False)
    module.writes = False
    checkpointed.run((x,), {"scale": scale})
    module.writes = True
    with pytest.raises(PipelineError, match="from its first microbatch on, or never"):
        checkpointed.run((x,), {"scale": scale})
    checkpointed.run((x,), {"scale": scale})

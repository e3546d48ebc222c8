"""The bytes of optimizers, compared with their state after a real step."""

from functools import partial

import pytest
import torch
from torch import nn

from penstock.measuring.optimizer_state import MakeOptimizer, count_optimizer_bytes

MAKERS: dict[str, MakeOptimizer] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AMSGrad": partial(torch.optim.Adam, amsgrad=True),
    "Adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("name", MAKERS)
def test_bytes_equal_those_of_an_optimizer_after_a_step(name: str) -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 5))
    module[1].requires_grad_(False)
    module[3].to(torch.bfloat16)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    counted = count_optimizer_bytes(module, MAKERS[name])
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert [parameter.grad for parameter in trained] == [None] * len(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = MAKERS[name](trained)
    optimizer.step()
    state = [value for kept in optimizer.state.values() for value in kept.values()]
    assert counted == sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
    assert (counted > 0) == (name != "SGD")

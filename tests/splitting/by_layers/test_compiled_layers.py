"""Compiled layers are split like others; a model that is compiled as a whole is refused."""

import pytest
import torch

from penstock.errors import ModelError
from penstock.modules.compiled import is_compiled
from penstock.splitting.by_layers.layers import split_layers
from tests.splitting.checking import assert_same_gradients
from tests.splitting.small import Chain, numbers

# Torch's own, while it compiles and when its compiler is loaded.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
X = numbers(8, 3)


@pytest.mark.parametrize("has_example", [True, False])
def test_compiled_layers_are_split_and_stay_compiled(has_example: bool) -> None:
    plain, model = Chain(), Chain()
    model.load_state_dict(plain.state_dict())
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    for layer in model.layers:
        layer.compile(backend=backend)
    pipe = split_layers(model, ["layers"], 2, (X,) if has_example else None)
    assert graphs == []
    for _ in range(2):
        torch.testing.assert_close(pipe(X), plain(X), rtol=1e-13, atol=1e-13)
    assert graphs
    assert_same_gradients(model, pipe, (X,), schedules=("1F1B",))


def test_stages_of_a_model_compiled_in_place_run_uncompiled() -> None:
    model = Chain()
    expected = model(X)
    model.compile(backend="eager")
    assert is_compiled(model)
    assert torch.equal(split_layers(model, ["layers"], 2)(X), expected)


def test_a_model_compiled_as_a_whole_is_refused() -> None:
    with pytest.raises(ModelError, match="split the model itself, and compile its layers"):
        split_layers(torch.compile(Chain(), backend="eager"), ["layers"], 2)  # type: ignore[arg-type]  # it is a module

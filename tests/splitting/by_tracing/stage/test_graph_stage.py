"""A traced stage as a module: printed, copied, pickled, moved, materialised."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_tracing.stage.graph_stage import GraphStage
from penstock.splitting.by_tracing.traced import split_traced
from penstock.splitting.marks import SplitPoint
from penstock.splitting.pipe import Pipe
from tests.splitting.traced_models import SIZE, Made, Regions, SkipAndShared, Tied, Tree

X = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0))


def split_made() -> tuple[Made, Pipe]:
    torch.manual_seed(0)
    model = Made()
    return model, split_traced(model, (X,))


def first_of(pipe: Pipe) -> GraphStage:
    stage = pipe.stages[0]
    assert isinstance(stage, GraphStage)
    return stage


@pytest.mark.parametrize("kind", [SkipAndShared, Made, Regions])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copied_and_pickled_stages_run_alike(kind: type[nn.Module], again: Any) -> None:
    args = (X, X) if kind is SkipAndShared else (X,)
    pipe = split_traced(kind(), args)
    other = again(pipe)
    torch.testing.assert_close(other(*args), pipe(*args), rtol=0, atol=0)
    assert other.dataflow == pipe.dataflow
    assert list(other.state_dict()) == list(pipe.state_dict())
    assert not {id(p) for p in other.parameters()} & {id(p) for p in pipe.parameters()}


def test_a_pickled_stage_still_checks_what_it_gets() -> None:
    batch = {"x": X, "pair": [X, X]}
    pipe = pickle.loads(pickle.dumps(split_traced(Tree(), (batch,), {"scale": 2.0})))
    torch.testing.assert_close(pipe(batch, 2.0)["more"][1], X)
    with pytest.raises(ValueError, match=r"scale was 2\.0 when the model was traced, but is 3\.0"):
        pipe(batch, scale=3.0)


def test_code_can_be_read() -> None:
    text = first_of(split_made()[1]).print_readable(print_output=False)
    assert "x: " in text
    assert "self.a(x)" in text
    assert "traced_models.py" in text


def test_the_first_stage_is_called_as_the_model_and_others_take_no_keywords() -> None:
    pipe = split_traced(Tree(), ({"x": X, "pair": [X, X]},))
    keywords = list(inspect.signature(pipe.stages[0].forward).parameters)
    assert keywords == ["batch", "scale", "mask"]
    later = inspect.signature(pipe.stages[1].forward).parameters.values()
    assert [parameter.kind for parameter in later] == [inspect.Parameter.VAR_POSITIONAL]


def devices_in(stage: GraphStage) -> set[torch.device]:
    values = [v for n in stage.graph.nodes for v in (*n.args, *n.kwargs.values())]
    return {value for value in values if isinstance(value, torch.device)}


def test_tensors_that_a_stage_makes_are_on_its_device() -> None:
    _, pipe = split_made()
    stage = pipe.stages[1]
    assert isinstance(stage, GraphStage)
    assert devices_in(stage) == {torch.device("cpu")}
    stage.to("meta")
    assert devices_in(stage) == {torch.device("meta")}
    assert stage(X.to("meta")).device == torch.device("meta")
    stage.to_empty(device="cpu")
    assert devices_in(stage) == {torch.device("cpu")}
    assert stage(X).shape == X.shape


def test_constants_move_but_are_not_state() -> None:
    model, pipe = split_made()
    assert set(pipe.state_dict()) == set(model.state_dict())
    pipe.stages[0].to("meta")
    assert pipe.stages[0](X.to("meta")).device == torch.device("meta")


def test_changing_the_type_keeps_the_device() -> None:
    _, pipe = split_made()
    stage = pipe.stages[1].to(torch.float64)
    assert stage(X.double()).dtype == torch.float64


@pytest.mark.parametrize("name", ["layers.2", "head"])
def test_a_model_without_memory_is_split_and_filled_stage_by_stage(name: str) -> None:
    torch.manual_seed(0)
    real = Tied()
    with torch.device("meta"):
        model = Tied()
    model.head.weight = model.embed.weight
    ids = torch.randint(8, (3, 5))
    pipe = split_traced(model, (ids,), at={name: SplitPoint.BEGINNING})
    assert all(parameter.is_meta for parameter in pipe.parameters())
    for stage in pipe.stages:
        stage.to_empty(device="cpu")
        state = real.state_dict()
        stage.load_state_dict({name: state[name] for name in stage.state_dict()})
        for buffer in stage.buffers():
            buffer.fill_(2.0)
    torch.testing.assert_close(pipe(ids), real(ids), rtol=0, atol=0)


def test_leaf_modules_can_be_initialised() -> None:
    with torch.device("meta"):
        model = SkipAndShared()
    pipe = split_traced(model, (X, X))
    filled = []

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
            filled.append(module)

    pipe.materialize([1, 3], "cpu", fill)
    assert filled == [model.middle, model.last]


def test_regions_are_closed_when_a_stage_fails() -> None:
    pipe = split_traced(Regions(), (X,))
    stage = pipe.stages[1]
    wrong = torch.zeros(4, SIZE - 1, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        stage(wrong, wrong)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_a_name_that_a_stage_uses_itself_is_refused() -> None:
    model = nn.Module()
    model.graph = nn.Linear(SIZE, SIZE)
    model.forward = lambda x: model.graph(x) * 2  # type: ignore[operator]  # a Linear
    with pytest.raises(ModelError, match="calls a part of itself graph"):
        split_traced(model, (X,), stages=1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_stage_compiles() -> None:
    _, pipe = split_made()
    compiled = [torch.compile(stage, backend="eager") for stage in pipe.stages]
    torch.testing.assert_close(compiled[1](compiled[0](X)), pipe(X))

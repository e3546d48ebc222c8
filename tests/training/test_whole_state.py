"""The whole model after training on several ranks: gathered, and never half of it by mistake."""

import copy
import gc
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock as ps
from penstock.errors import PipelineError
from tests.processes import Processes

STEPS, WORDS, WIDTH = 3, 11, 4
TOKENS = torch.arange(24).reshape(8, 3) % WORDS
REFUSED = (
    "this process has trained the stages {} of {}, so that the model's own state is that of a "
    "half-trained model; call pipeline.full_state_dict() on every rank and save what the first "
    "gets, as by model.save_pretrained(folder, state_dict=state) or torch.save(state, file), or "
    "save with penstock.Checkpoints"
)


class Tied(nn.Module):
    """Embedding and head are one parameter; layers have buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("unsaved", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.tanh(self.linear(x) * self.scale)
        return result


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = Tied()
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model


def train_unsplit() -> dict[str, Any]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        loss(model(TOKENS), TOKENS).backward()  # type: ignore[no-untyped-call]  # untyped upstream
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(pipeline: ps.Pipeline) -> None:
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
    for _ in range(STEPS):
        pipeline.step(TOKENS, target=TOKENS)
        optimizer.step()
        optimizer.zero_grad()


def make_pipeline(model: nn.Module, family: str, **settings: Any) -> ps.Pipeline:
    pipe = ps.split(model, layers="layers", stages=4 if family == "ZBV" else 2)
    return ps.Pipeline(pipe, family, microbatches=4, loss=loss, **settings)


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert (found[name].dtype, found[name].device.type) == (value.dtype, "cpu")
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
    assert found["head.weight"] is found["embedding.weight"]


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_one_process_has_the_whole_state_as_a_copy(family: str) -> None:
    model = make_model()
    pipeline = make_pipeline(model, family)
    train(pipeline)
    state = pipeline.full_state_dict()
    compare(state, train_unsplit())
    # One process trains all of the model, which can then be saved directly.
    compare({**model.state_dict(), "head.weight": state["head.weight"],
             "embedding.weight": state["embedding.weight"]}, state)  # fmt: skip
    before = state["layers.0.linear.weight"].clone()
    train(pipeline)
    assert torch.equal(state["layers.0.linear.weight"], before)


def gather(rank: int, family: str) -> int:
    pipeline = make_pipeline(make_model(), family, group=dist.group.WORLD)
    train(pipeline)
    state = pipeline.full_state_dict()
    if rank == 0:
        compare(state, train_unsplit())
        fresh = make_model()
        fresh.load_state_dict(state)
    # The pipeline is as usable as before.
    train(pipeline)
    return len(state)


# `save_pretrained` under torchrun wrote a model of which the other rank's half was untrained.
@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_the_first_rank_gets_what_the_unsplit_model_has_after_training(
    family: str, two_processes: Processes
) -> None:
    assert two_processes.run(gather, family) == [len(train_unsplit()), 0]


def ask_the_original(_: int) -> list[str]:
    """Return what a trained model says on one of two ranks, to everyone who wants all of it."""
    model = make_model()
    pipeline = make_pipeline(model, "1F1B", group=dist.group.WORLD)
    pipeline.evaluate(TOKENS)
    # Before the first step the model is what it was.
    copied = pickle.loads(pickle.dumps(model))
    assert set(copied.state_dict()) == set(model.state_dict())
    train(pipeline)
    said = []
    wrapped = nn.ModuleDict({"inner": model})
    for take in (
        model.state_dict,
        copy.deepcopy(model).state_dict,
        wrapped.state_dict,
        lambda: torch.save(model, io.BytesIO()),
    ):
        with pytest.raises(PipelineError) as caught:
            take()
        said.append(str(caught.value))
    # The copy that was made before the steps, the stages, and what this process holds are right.
    copied.state_dict()
    assert set(pipeline.state_dict()) == {
        name for stage in pipeline.modules.values() for name in stage.state_dict()
    }
    # The model may be split once more, by layers and by tracing.
    ps.split(model, layers="layers", stages=4)
    ps.split(model, stages=2, example=[TOKENS])
    with pytest.raises(PipelineError):
        model.state_dict()
    # With the pipeline the refusal goes.
    del pipeline, caught
    gc.collect()
    model.state_dict()
    return said


def test_the_original_refuses_to_be_saved_on_a_rank_that_trained_a_part(
    two_processes: Processes,
) -> None:
    assert two_processes.run(ask_the_original) == [
        [REFUSED.format([rank], 2)] * 4 for rank in range(2)
    ]


def save_checkpoint(_: int, folder: Path) -> int | None:
    model = make_model()
    pipeline = make_pipeline(model, "ZBV", group=dist.group.WORLD)
    train(pipeline)
    with ps.Checkpoints(folder) as checkpoints:
        checkpoints.save(STEPS, pipeline)
        checkpoints.finish()
        restored = checkpoints.load(pipeline)
    return None if restored is None else restored.step


def test_checkpoints_are_not_refused(tmp_path: Path, two_processes: Processes) -> None:
    assert two_processes.run(save_checkpoint, tmp_path) == [STEPS, STEPS]


def hold_everything(_: int) -> int:
    """DualPipe's two copies of the model give each of two ranks every part of it."""
    model = make_model()
    pipe = ps.split(model, layers="layers", stages=2)
    pipeline = ps.Pipeline(pipe, "DualPipe", microbatches=4, loss=loss, group=dist.group.WORLD)
    pipeline.step(TOKENS, target=TOKENS)
    return len(model.state_dict())


def test_a_rank_that_trains_every_part_may_save_the_model(two_processes: Processes) -> None:
    assert two_processes.run(hold_everything) == [len(train_unsplit())] * 2


class Extra(nn.Linear):
    """A layer with a state that it makes up."""

    def __init__(self, extra: object) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra


def gather_extra_state(extra: object) -> Any:
    stages = [nn.Linear(2, 2), Extra(extra)]
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=2, group=dist.group.WORLD)
    return pipeline.full_state_dict().get("1._extra_state")


def gather_odd_state(rank: int) -> str:
    assert gather_extra_state({"version": 2}) == (None if rank else {"version": 2})
    with pytest.raises(PipelineError) as caught:
        gather_extra_state(object())
    return str(caught.value)


def test_state_that_cannot_be_gathered_is_refused_by_all_ranks(two_processes: Processes) -> None:
    reason = (
        "'1._extra_state' must be a tensor or a JSON value to be gathered (got object); let "
        "get_extra_state return one of these"
    )
    first, second = two_processes.run(gather_odd_state)
    assert (first, second) == (
        f"rank 1 cannot give its part of the model: {reason}",
        reason,
    )


def gather_shards(_: int) -> int:
    """Two replicas of two stages, each stage sharded over its replicas."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    stages = {s: nn.Linear(2, 2, dtype=torch.float64) for s in range(2)}
    expected = nn.Sequential(*stages.values()).state_dict()
    expected = {name: value.clone() for name, value in expected.items()}
    own = mesh["pipeline"].get_local_rank()
    fully_shard(stages[own], mesh=mesh["data"])
    pipeline = ps.Pipeline(
        {own: stages[own]}, "1F1B", microbatches=2, loss=nn.MSELoss(), group=mesh["pipeline"]
    )
    state = pipeline.full_state_dict()
    if own == 0:
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    return len(state)


@pytest.mark.slow
def test_shards_are_gathered_as_whole_tensors(four_processes: Processes) -> None:
    assert four_processes.run(gather_shards) == [4, 4, 0, 0]

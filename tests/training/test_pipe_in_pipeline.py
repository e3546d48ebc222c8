"""A model split by layers in a pipeline, in one process and in real ones."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.splitting.by_layers.layers import split_layers
from penstock.splitting.pipe import Pipe
from tests.models import differences
from tests.processes import Processes
from tests.splitting.checking import gradients, squares
from tests.splitting.small import WIDTH, Block, numbers
from tests.strategies import FAMILY_NAMES
from tests.training.composition import whole_gradients

FAMILIES = [name for name in FAMILY_NAMES if name != "ForwardOnly"]
ROWS = 8
X = numbers(ROWS, WIDTH)
NOBODY = torch.zeros(ROWS)


class Model(nn.Module):
    """Has all that crosses stages in odd ways: a skip, a tied head, a parameter by itself."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.token = nn.Parameter(numbers(WIDTH, seed=1))
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(x) + self.token
        first = x
        for number, layer in enumerate(self.layers):
            x = layer(x, first if number == len(self.layers) - 1 else None)
            if number == 0:
                first = x
        x = x * self.token
        result: torch.Tensor = self.head(x if scale is None else x * scale)
        return result


def make(**settings: Any) -> Model:
    torch.manual_seed(0)
    return Model(**settings)


def split(model: nn.Module, stages: int) -> Pipe:
    return split_layers(model, ["layers"], stages, (X,), {})


def expected_gradients(batch: torch.Tensor = X, steps: int = 1) -> dict[str, torch.Tensor]:
    model = make()
    for _ in range(steps):
        torch.autograd.backward(squares(model(batch)))
    return gradients(model)


# ---- in one process


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("microbatches", [4, 5])
def test_every_family_gives_the_gradients_of_the_unsplit_model(
    family: str, microbatches: int
) -> None:
    model = make()
    pipe = split(model, 2 if family == "DualPipe" else 4)
    pipeline = ps.Pipeline(pipe, family, microbatches=microbatches, loss=squares)
    for _ in range(2):
        pipeline.step(X, target=NOBODY)
    assert differences(gradients(model), expected_gradients(steps=2)) == {}


def test_names_are_the_model_s_own() -> None:
    model = make()
    pipeline = ps.Pipeline(split(model, 4), "1F1B", microbatches=2, loss=squares)
    assert dict(pipeline.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert pipeline.state_dict().keys() == model.state_dict().keys()


def test_keywords_and_other_microbatch_counts_and_evaluation() -> None:
    model, scale = make(), numbers(ROWS, 1, seed=5)
    pipeline = ps.Pipeline(split(model, 4), "ZBV", microbatches=4, loss=squares)
    with torch.no_grad():
        expected = model(X, scale=scale)
    for microbatches in (1, 2, 3, 8):
        found = pipeline.evaluate(X, scale=scale, microbatches=microbatches)
        torch.testing.assert_close(found.outputs, expected, rtol=1e-13, atol=1e-13)
        assert not found.outputs.requires_grad
    pipeline.step(X, target=NOBODY)
    assert differences(gradients(model), expected_gradients()) == {}


def test_frozen_first_layers_get_no_gradients() -> None:
    model = make()
    model.requires_grad_(False)
    for layer in model.layers[6:]:
        layer.requires_grad_(True)
    expected = make()
    expected.load_state_dict(model.state_dict())
    torch.autograd.backward(squares(expected(X)))
    whole = {
        n: p for n, p in gradients(expected).items() if n.startswith(("layers.6", "layers.7"))
    }
    pipeline = ps.Pipeline(split(model, 4), "1F1B", microbatches=2, loss=squares)
    pipeline.step(X, target=NOBODY)
    assert differences(gradients(model), whole) == {}


class Checkpointed(nn.Module):
    """A layer that keeps its input only."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.block = Block()
        self.is_reentrant = is_reentrant

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.block, x, other, use_reentrant=self.is_reentrant)
        return result


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_checkpointed_layers(family: str, is_reentrant: bool) -> None:
    model = make()
    for number in range(8):
        layer = Checkpointed(is_reentrant=is_reentrant)
        layer.block = model.layers[number]  # type: ignore[assignment]  # a block it is
        model.layers[number] = layer
    pipeline = ps.Pipeline(split(model, 4), family, microbatches=4, loss=squares)
    pipeline.step(X, target=NOBODY)
    found = {name.replace(".block", ""): value for name, value in gradients(model).items()}
    assert differences(found, expected_gradients()) == {}


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_autocast(family: str) -> None:
    model, batch = make().float(), X.float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.backward(squares(model(batch)))
        expected = gradients(model)
        pipe = split_layers(model, ["layers"], 4, (batch,), {})
        ps.Pipeline(pipe, family, microbatches=1, loss=squares).step(batch, target=NOBODY)
    assert differences(gradients(model), expected, limit=1e-2) == {}


# ---- in real processes


def train(_rank: int, family: str, steps: int) -> dict[str, torch.Tensor]:
    """Build the model on every rank, and return the gradients of its own stages."""
    model = make()
    size = dist.get_world_size()
    stages = size if family in ("1F1B", "DualPipe") else 2 * size
    pipeline = ps.Pipeline(
        split(model, stages), family, microbatches=4, loss=squares, group=dist.group.WORLD
    )
    for _ in range(steps):
        pipeline.step(X, target=NOBODY)
    return {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}


def assert_all(everyone: Sequence[dict[str, torch.Tensor]], expected: dict[str, Any]) -> None:
    """Together the ranks have all gradients, and where two have one it is the same."""
    alias = {"head.weight": "embed.weight"}
    seen: dict[str, torch.Tensor] = {}
    for held in everyone:
        for name, gradient in held.items():
            known = alias.get(name, name)
            assert torch.equal(seen.setdefault(known, gradient), gradient), name
    assert differences(seen, expected) == {}


@pytest.mark.parametrize("family", ["1F1B", "Interleaved1F1B", "ZBV", "DualPipe"])
def test_two_processes(two_processes: Processes, family: str) -> None:
    assert_all(two_processes.run(train, family, 2), expected_gradients(steps=2))


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_four_processes(four_processes: Processes, family: str) -> None:
    assert_all(four_processes.run(train, family, 2), expected_gradients(steps=2))


def train_from_meta(rank: int, state: dict[str, torch.Tensor]) -> tuple[int, dict[str, Any]]:
    """Only the own stages ever have memory; weights come from a state dict of the whole model."""
    with torch.device("meta"):
        model = Model()
    pipe = split(model, 4)
    placement = ps.build("ZBV", ranks=2, microbatches=4).placement
    own = placement.stages(rank)
    pipe.materialize(own, "cpu", lambda _module: None)
    for index in own:
        stage = pipe.stages[index]
        stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    pipeline = ps.Pipeline(pipe, "ZBV", microbatches=4, loss=squares, group=dist.group.WORLD)
    pipeline.step(X, target=NOBODY)
    held = sum(not p.is_meta for stage in pipe.stages for p in stage.parameters())
    return held, {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}


def test_a_rank_holds_only_its_own_stages_from_the_meta_device_on(
    two_processes: Processes,
) -> None:
    state = make().state_dict()
    answers = two_processes.run(train_from_meta, state)
    # Embedding, head and token are tied between the first and the last stage, both on rank 0.
    assert [held for held, _ in answers] == [8 + 4, 8]
    assert_all([found for _, found in answers], expected_gradients())


def train_sharded(_rank: int, kind: str) -> dict[str, torch.Tensor]:
    """Two ranks of data parallelism, times two of the pipeline."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    model = make()
    pipe = split(model, 4)
    own = ps.build("ZBV", ranks=2, microbatches=2).placement.stages(
        mesh["pipeline"].get_local_rank()
    )
    wrapped: dict[int, nn.Module] = {}
    for index in own:
        if kind == "fsdp":
            for layer in pipe.stages[index].modules():
                if isinstance(layer, Block):
                    fully_shard(layer, mesh=mesh["data"])
            fully_shard(pipe.stages[index], mesh=mesh["data"])
        else:
            wrapped[index] = DistributedDataParallel(
                pipe.stages[index], process_group=mesh["data"].get_group()
            )
    batch = X.chunk(2)[mesh["data"].get_local_rank()]
    pipeline = ps.Pipeline(
        pipe.with_stages(wrapped), "ZBV", microbatches=2, loss=squares, group=mesh["pipeline"]
    )
    for _ in range(2):
        pipeline.step(batch, target=NOBODY[: len(batch)])
    return whole_gradients(pipeline.named_parameters())


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_data_parallel_stages(four_processes: Processes, kind: str) -> None:
    assert_all(four_processes.run(train_sharded, kind), expected_gradients(steps=2))

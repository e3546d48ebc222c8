"""What tests of checkpoints share: a model, its training in every layout, and jobs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.schedules.registry import find_family

__all__ = [
    "LAYERS",
    "MICROBATCHES",
    "TrainedModel",
    "Training",
    "continue_in_processes",
    "disagree_in_processes",
    "make_model",
    "make_optimizer",
    "save_in_processes",
    "train_alone",
    "train_plain",
    "whole_state",
]

LAYERS = 8
MICROBATCHES = 4
_WIDTH, _WORDS, _ROWS = 6, 7, 16


class Tied(nn.Module):
    """Words in, scores of words out; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("gain", torch.rand(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(self.norm(x)) * self.get_buffer("gain").sum()
        return result


MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]


def make_model(seed: int) -> nn.Module:
    """Return the model in float64; another seed gives other numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Tied().double()


def make_optimizer(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam with two groups: with and without weight decay."""
    decayed = [p for p in parameters.values() if p.dim() > 1]
    others = [p for p in parameters.values() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 2e-3}]
    return torch.optim.Adam([group for group in groups if group["params"]], lr=1e-3)


def make_tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    both = torch.randint(_WORDS, (2, _ROWS), generator=generator)
    return both[0].clone(), both[1].clone()


def whole_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a copy of a state dict with every tensor gathered from its shards."""
    return {
        name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone()
        for name, v in state.items()
    }


@dataclass(frozen=True)
class TrainedModel:
    """The unsplit model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def train_plain(steps: int, make: MakeOptimizer = make_optimizer) -> TrainedModel:
    """Train the unsplit model with plain torch."""
    model = make_model(0)
    optimizer = make(dict(model.named_parameters()))
    for step in range(steps):
        tokens, target = make_tokens(step)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(tokens), target))
        optimizer.step()
    return TrainedModel(model, optimizer)


@dataclass(frozen=True)
class Training:
    """A pipeline and its optimizer."""

    pipeline: ps.Pipeline
    optimizer: torch.optim.Optimizer
    # The part of the rows that this process trains on, and the number of parts.
    part: tuple[int, int] = (0, 1)

    def step(self, number: int) -> None:
        part, parts = self.part
        tokens, target = (value.chunk(parts)[part] for value in make_tokens(number))
        self.optimizer.zero_grad()
        self.pipeline.step(tokens, target=target)
        self.optimizer.step()


def num_stages(family: str, ranks: int) -> int:
    return ranks if family == "DualPipe" else ranks * find_family(family).stages_per_rank


def train_alone(
    family: str, ranks: int, *, seed: int = 0, make: MakeOptimizer = make_optimizer
) -> Training:
    """Return a training with every rank in this process."""
    pipe = ps.split(make_model(seed), layers="layers", stages=num_stages(family, ranks))
    pipeline = ps.Pipeline(
        pipe,
        family,
        microbatches=MICROBATCHES,
        loss=nn.functional.cross_entropy,
        ranks=ranks,
    )
    return Training(pipeline, make(dict(pipeline.named_parameters())))


def train_in_group(family: str, ranks: int, copying: str, seed: int) -> Training:
    """Return a training in which this process is one of `ranks`, in several copies."""
    copies = dist.get_world_size() // ranks
    mesh = init_device_mesh("cpu", (copies, ranks), mesh_dim_names=("data", "pipeline"))
    pipe = ps.split(make_model(seed), layers="layers", stages=num_stages(family, ranks))
    schedule = ps.build(family, ranks=ranks, microbatches=MICROBATCHES)
    wrapped: dict[int, nn.Module] = {}
    for stage in schedule.placement.stages(mesh["pipeline"].get_local_rank()):
        match copying:
            case "sharded":
                fully_shard(pipe.stages[stage], mesh=mesh["data"])
            case "replicated":
                group = mesh["data"].get_group()
                module = pipe.stages[stage]
                wrapped[stage] = DistributedDataParallel(module, process_group=group)
            case _:
                assert copies == 1
    pipeline = ps.Pipeline(
        pipe.with_stages(wrapped),
        schedule,
        loss=nn.functional.cross_entropy,
        group=mesh["pipeline"],
    )
    optimizer = make_optimizer(dict(pipeline.named_parameters()))
    return Training(pipeline, optimizer, (mesh["data"].get_local_rank(), copies))


def save_in_processes(
    rank: int, folder: Path, family: str, ranks: int, copying: str, steps: int
) -> tuple[int, ...]:
    """Train and save; return the steps that this rank then sees."""
    del rank
    training = train_in_group(family, ranks, copying, seed=0)
    with ps.Checkpoints(folder) as checkpoints:
        for step in range(steps):
            training.step(step)
        checkpoints.save(steps, training.pipeline, training.optimizer, data={"place": steps})
    return checkpoints.steps()


def continue_in_processes(
    rank: int, folder: Path, family: str, ranks: int, copying: str
) -> dict[str, torch.Tensor]:
    """Load and take one step; return the state of this rank's stages."""
    del rank
    training = train_in_group(family, ranks, copying, seed=5)
    restored = ps.Checkpoints(folder).load(training.pipeline, training.optimizer)
    assert restored is not None
    assert restored.data == {"place": restored.step}
    training.step(restored.step)
    return whole_state(training.pipeline.state_dict())


def disagree_in_processes(rank: int, folder: Path) -> list[str]:
    """Save and load what differs on one rank; return the errors of this rank."""
    training = train_in_group("1F1B", 2, "alone", seed=0)
    checkpoints = ps.Checkpoints(folder)
    errors = []
    attempts: list[Callable[[], object]] = [
        lambda: checkpoints.save(7 + rank, training.pipeline),
        lambda: checkpoints.save(7, training.pipeline, data={"place": rank}),
        lambda: checkpoints.save(7, training.pipeline, data={"place": {rank} if rank else 0}),
    ]
    for attempt in attempts:
        try:
            attempt()
        except ps.errors.CheckpointError as error:
            errors.append(str(error))
    checkpoints.save(7, training.pipeline, wait=True)
    if rank == 1:
        # On this rank only, the model differs from the one that was saved.
        training.pipeline.modules[1].get_submodule("norm").weight = nn.Parameter(torch.ones(2))
    for tensor in training.pipeline.state_dict().values():
        tensor.fill_(1)
    try:
        checkpoints.load(training.pipeline)
    except ps.errors.CheckpointError as error:
        errors.append(str(error))
    assert all(bool((v == 1).all()) for v in training.pipeline.state_dict().values())
    return errors
